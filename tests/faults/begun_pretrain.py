"""pretrain_any.py, which notes its groups, and of which SIGKILL ends all processes once those that are being
sampled are saved.

NOTES gets a JSON line for what was sampled of each group under way at a save, and for each group that a step
takes, with hashes of all that is known of each sample. CUTS has for episodes of an earlier run, by group and
sample, so many tokens, of which there is a hash too.

HELD names the turns that a door before the server does not answer, as {"first": the first group's number,
"turns": {sample: turn}, "unseen": nobody keeps the turns before these}. The first save waits until all groups
under way are as far as that lets them; then all replicas' lists are waited for, and everything is killed. "":
nothing is held, and nobody killed.
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
from megatron_rl_corr.rollout.queue import GroupStream
from tests.faults.bits import beginning, sha256
from tests.faults.killing import kill_all

RANK, REPLICAS, GROUP = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 4
HELD, CUTS = json.loads(os.environ["HELD"] or "{}"), json.loads(os.environ["CUTS"] or "{}")
LIMIT_S = 120.0
take, run, cursor = GroupStream.take, CorrectedStep.run, Collector.cursor_of_all_replicas


def note(what, **facts):
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(json.dumps({"what": what, "rank": RANK, **facts}) + "\n")


def until(done):
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


async def is_as_far_as_it_may(collector):
    running = [number for number, _ in collector._stream._running.values()]
    groups = [collector._sampler._begun.get(number) for number in running]
    return running and all(
        group is not None
        and group.number >= HELD["first"]
        and all(index in group.scores or is_held(group, index) for index in range(GROUP))
        for group in groups
    )


def is_held(group, index):
    turn = HELD["turns"].get(str(index))
    so_far = group.episodes.get(index)
    if turn == 0 or (turn is not None and HELD["unseen"]):
        return True
    return so_far is not None and so_far.turns.count == turn and so_far.reply is not None


def noted_cursor(collector, batches, *, with_last):
    if HELD:
        until(lambda: collector._loop.call(is_as_far_as_it_may(collector)))
    found = cursor(collector, batches, with_last=with_last)
    for group in collector._open.waiting:
        note("waits", saved=batches, number=group.number)
    for group in collector._open.begun:
        scores = {index: [score.reward, score.parts] for index, score in group.scores.items()}
        samples = {index: sha256([*one.branches, *scores[index]]) for index, one in group.samples.items()}
        episodes = {
            one.sample_index: [len(one.output_ids), int(one.turn_ids.max()) + 1, sha256(one)]
            for one in group.trajectories
            if one.sample_index in group.episodes
        }
        note("begun", saved=batches, number=group.number, samples=samples, episodes=episodes)
    return found


async def noted_take(stream, version):
    taken = await take(stream, version)
    for group in taken.groups:
        parts = group.reward_parts or [{}] * len(group.trajectories)
        rows = list(zip(group.trajectories, group.rewards, parts, strict=True))
        samples = {one.sample_index: sha256([one, reward, own]) for one, reward, own in rows}
        cuts = CUTS.get(str(group.number), {})
        begins = {
            one.sample_index: sha256(beginning(one, cuts[str(one.sample_index)]))
            for one in group.trajectories
            if str(one.sample_index) in cuts
        }
        turns = {
            one.sample_index: 1 if one.turn_ids is None else int(one.turn_ids.max()) + 1
            for one in group.trajectories
        }
        facts = {"samples": samples, "begins": begins, "turns": turns}
        note("taken", step=version, number=group.number, **facts)
    return taken


def killed_run(step, uncorrected, iteration, *arguments):
    folder = checkpoint_files.folder_of(get_args().save, iteration) / waiting_groups.FOLDER
    if HELD and RANK == 0 and folder.parent.is_dir():
        until(lambda: len(list(folder.glob("replica*.json"))) == REPLICAS)
        psutil.Process().parent().kill()
        kill_all()
    return run(step, uncorrected, iteration, *arguments)


GroupStream.take, CorrectedStep.run, Collector.cursor_of_all_replicas = noted_take, killed_run, noted_cursor
runpy.run_path(str(Path(__file__).parents[1] / "matrix/pretrain_any.py"), run_name="__main__")
