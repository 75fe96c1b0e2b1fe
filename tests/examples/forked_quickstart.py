"""The quickstart with its processes from tests/preloaded.py: all else is examples/quickstart/run.py's own.

torchrun is tests/forked_torchrun.py.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(pretrain_script=None):
    """The quickstart's exit status.

    Args:
        pretrain_script: trained with in place of the quickstart's own.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "examples/quickstart")]
    import run

    from tests.forked_torchrun import forking
    from tests.preloaded import PreloadedPopen

    subprocess.Popen = run.LocalServer.popen = PreloadedPopen

    command_of, usual = run.training_command, str(run.HERE / "pretrain_moe.py")

    def training_command(*given):
        return [str(pretrain_script or usual) if word == usual else word for word in forking(command_of(*given))]

    run.training_command = training_command
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
