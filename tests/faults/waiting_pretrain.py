"""pretrain_any.py, which notes its groups, and of which SIGKILL ends all processes once groups are saved.

NOTES gets a JSON line for each group that is asked for, that waits at a save, and that a step takes, with a
hash of all that is known of its samples. A save waits until all that may be sampled ahead is done.

KILL_AT is MOMENT:N, N a step from 1, or "none:0". "saved": all replicas' groups of the checkpoint before are
written, and step N begins. "writing": of the save after step N replica 1 has written two groups, the others
all of theirs.
"""

import json
import os
import runpy
import time
from pathlib import Path

import psutil
from megatron.training import get_args

from megatron_rl_corr.mcore import checkpoint_files
from megatron_rl_corr.mcore.batch.server_collector import Collector
from megatron_rl_corr.mcore.step import CorrectedStep
from megatron_rl_corr.rollout import waiting_groups
from megatron_rl_corr.rollout.group_sampler import GroupSampler
from megatron_rl_corr.rollout.queue import GroupStream
from tests.faults.bits import sha256
from tests.faults.killing import kill_all

MOMENT, _, STEP = os.environ["KILL_AT"].partition(":")
RANK, REPLICAS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIMIT_S = 120.0
sample, take, run = GroupSampler.sample, GroupStream.take, CorrectedStep.run
cursor, write = Collector.cursor_of_all_replicas, waiting_groups.write_trajectories
written = []


def note(what, **facts):
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(json.dumps({"what": what, "rank": RANK, **facts}) + "\n")


def sha256_of(group):
    """Of numbers, rewards and every field of the trajectories, whatever it is."""
    # what a step takes is numbered for its batch afterwards
    return sha256([group.number, group.rewards, group.reward_parts, group.trajectories])


def kill():
    torchrun = psutil.Process().parent()
    torchrun.kill()
    kill_all()


def until(done):
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def lists_of(iteration):
    folder = checkpoint_files.folder_of(get_args().save, iteration) / waiting_groups.FOLDER
    return len(list(folder.glob("replica*.json")))


async def noted_sample(sampler, number):
    note("sampled", number=number)
    return await sample(sampler, number)


async def noted_take(stream, version):
    taken = await take(stream, version)
    for group in taken.groups:
        note("taken", step=version, number=group.number, sha256=sha256_of(group))
    return taken


def waited_cursor(collector, batches, *, with_last):
    stream = collector._stream
    until(lambda: not stream.running)
    found = cursor(collector, batches, with_last=with_last)
    for place, group in enumerate(collector._open.waiting):
        note("waits", saved=batches, place=place, number=group.number, sha256=sha256_of(group))
    return found


def killed_run(step, uncorrected, iteration, *arguments):
    if MOMENT == "saved" and int(STEP) == iteration + 1 and RANK == 0:
        until(lambda: lists_of(iteration) == REPLICAS)
        kill()
    return run(step, uncorrected, iteration, *arguments)


def killed_write(path, *arguments, **how):
    write(path, *arguments, **how)
    written.append(path)
    if MOMENT == "writing" and RANK == 1 and f"{int(STEP):07d}" in str(path) and len(written) == 2:
        until(lambda: lists_of(int(STEP)) == REPLICAS - 1)
        kill()


GroupSampler.sample, GroupStream.take, CorrectedStep.run = noted_sample, noted_take, killed_run
Collector.cursor_of_all_replicas, waiting_groups.write_trajectories = waited_cursor, killed_write
runpy.run_path(str(Path(__file__).parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
