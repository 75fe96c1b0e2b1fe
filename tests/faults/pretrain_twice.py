"""pretrain_any.py, entered again in the same process after a step that failed, as by Megatron's
in-process restart.

What nvidia-resiliency-ext does around it (watching ranks, aborting collectives) is not done
here: it needs a GPU.
"""

import runpy
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import inprocess_restart

from megatron_rl_corr.mcore.step import CorrectedStep

SCRIPT = str(Path(__file__).parents[1] / "matrix/pretrain_any.py")
BROKEN_STEP = 6
run, failures = CorrectedStep.run, []


def broken_once(self, uncorrected, iteration, *arguments):
    if iteration + 1 == BROKEN_STEP and not failures:
        failures.append("the step is broken")
        raise RuntimeError(failures[0])
    return run(self, uncorrected, iteration, *arguments)


CorrectedStep.run = broken_once
try:
    runpy.run_path(SCRIPT, run_name="__main__")
except RuntimeError as error:
    assert str(error) == "the step is broken", error
    inprocess_restart.destroy_state()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    runpy.run_path(SCRIPT, run_name="__main__")
assert failures
