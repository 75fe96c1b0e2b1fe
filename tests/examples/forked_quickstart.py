"""An example with its processes from tests/preloaded.py: all else is its own run.py's, the
quickstart's or another's.

torchrun is tests/forked_torchrun.py; or torchrun itself, where the first word is --torchrun. Where the
first word is --arithmetic, --agent or --study, that example is run.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(pretrain_script=None):
    """The example's exit status.

    Args:
        pretrain_script: trained with in place of the quickstart's own.
    """
    example = "quickstart"
    if sys.argv[1:2] in (["--arithmetic"], ["--agent"], ["--study"]):
        example = sys.argv.pop(1).removeprefix("--")
    sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "examples" / example)]
    import local_run
    import run

    from tests.forked_torchrun import TORCHRUN, forking
    from tests.preloaded import PreloadedPopen

    new_interpreter, usual = subprocess.Popen, str(ROOT / "examples/quickstart/pretrain_moe.py")
    real = sys.argv[1:2] == ["--torchrun"]
    if real:
        del sys.argv[1]

    def popen(command, **options):
        if command[1:3] != TORCHRUN:
            return PreloadedPopen(command, **options)
        if real:
            return new_interpreter(command, **options)
        command = [str(pretrain_script or usual) if word == usual else word for word in forking(command)]
        return PreloadedPopen(command, **options)

    subprocess.Popen, local_run.LocalServer.popen = popen, staticmethod(popen)
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
