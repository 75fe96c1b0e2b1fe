"""pretrain_any.py, of which SIGKILL ends ranks and torchrun in the middle of a step, but not what runs
agents.

KILL_AT is MOMENT:N, N a step from 1, or "none:0". "collect": rank 0 has some of its groups, and others are
under way. "train": the batch is collected and saved, and its gradients are computed.
"""

import contextlib
import os
import runpy
import signal
from pathlib import Path

import psutil
from megatron.training import get_args

from megatron_rl_corr.mcore import compat
from megatron_rl_corr.rollout.queue import GroupStream

MOMENT, _, STEP = os.environ["KILL_AT"].partition(":")
ended, asked_before_update = GroupStream._ended, compat.asked_before_update


def reach(moment):
    if moment != MOMENT or get_args().curr_iteration + 1 != int(STEP) or os.environ["RANK"] != "0":
        return
    torchrun = psutil.Process().parent()
    for process in (torchrun, *torchrun.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid != os.getpid() and not any("agents.starter" in word for word in process.cmdline()):
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_when_a_group_has_ended(stream, task):
    ended(stream, task)
    if stream.ready and stream.running:
        reach("collect")


def killed_before_the_update(optimizer, may_update):
    def asked():
        reach("train")
        return may_update()

    return asked_before_update(optimizer, asked)


GroupStream._ended, compat.asked_before_update = killed_when_a_group_has_ended, killed_before_the_update
runpy.run_path(str(Path(__file__).parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
