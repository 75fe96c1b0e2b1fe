"""pretrain_any.py, of which one rank is killed once: KILL is RANK:STEP, in the job's first attempt."""

import os
import runpy
import signal
from pathlib import Path

from megatron_rl_corr.mcore.step import CorrectedStep

RANK, STEP = os.environ["KILL"].split(":")
run = CorrectedStep.run


def killed(self, uncorrected, iteration, *arguments):
    """As the original, until the step begins in which this rank is killed: the others wait for it
    in a collective.
    """
    if (os.environ["RANK"], str(iteration + 1), os.environ["TORCHELASTIC_RESTART_COUNT"]) == (
        RANK,
        STEP,
        "0",
    ):
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, uncorrected, iteration, *arguments)


CorrectedStep.run = killed
runpy.run_path(str(Path(__file__).parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
