"""The quickstart with tests/forked_torchrun.py for torchrun: all else is examples/quickstart/run.py's own."""

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

    command_of, usual = run.training_command, str(run.HERE / "pretrain_moe.py")

    def training_command(*given):
        return [str(pretrain_script or usual) if word == usual else word for word in forking(command_of(*given))]

    run.training_command = training_command
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
