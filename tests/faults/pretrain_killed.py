"""pretrain_any.py, of which SIGKILL ends all processes in the middle of a step: ranks, what they
started, and torchrun.

KILL_AT is MOMENT:N, N a step from 1, or "none:0". "collect": rank 0 has some of its groups, and asks
for the rest. "train": the batch is collected and saved, and its gradients are computed; the weights
have not moved. The seed of each request goes to the file SEEDS, a line for each: number of the group,
of the sample, tokens sampled before it, seed. Each request waits PAUSE_S seconds first: sampling is
slower than training then.
"""

import contextlib
import os
import runpy
import signal
import time
from pathlib import Path

import psutil
from megatron.training import get_args

from megatron_rl_corr.mcore import compat
from megatron_rl_corr.rollout import seeds
from megatron_rl_corr.rollout.queue import GroupStream

MOMENT, _, STEP = os.environ["KILL_AT"].partition(":")
ended, sampling_seed, asked_before_update = (
    GroupStream._ended,
    seeds.sampling_seed,
    compat.asked_before_update,
)


def reach(moment):
    if moment != MOMENT or get_args().curr_iteration + 1 != int(STEP) or os.environ["RANK"] != "0":
        return
    torchrun = psutil.Process().parent()
    for process in (*torchrun.children(recursive=True), torchrun):
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_when_a_group_has_ended(stream, task):
    ended(stream, task)
    if stream.ready:
        reach("collect")


def killed_before_the_update(optimizer, may_update):
    def asked():
        reach("train")
        return may_update()

    return asked_before_update(optimizer, asked)


def noted(run_seed, group, sample, turn, sampled_tokens):
    time.sleep(float(os.environ["PAUSE_S"]))
    seed = sampling_seed(run_seed, group, sample, turn, sampled_tokens)
    with Path(os.environ["SEEDS"]).open("a") as file:
        file.write(f"{group} {sample} {sampled_tokens} {seed}\n")
    return seed


GroupStream._ended, seeds.sampling_seed = killed_when_a_group_has_ended, noted
compat.asked_before_update = killed_before_the_update
runpy.run_path(str(Path(__file__).parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
