"""Four ranks over gloo, started once: runs every case of tests/reduce and saves inputs and
outputs per rank.

python worker.py FOLDER writes FOLDER/<rank>.pt. Tensor- or context-parallel pairs are ranks 0-1 and 2-3.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # what a backward pass imports: once, before the forks
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.reduce.collectives import (
    ParallelGroups,
    all_gather_stacked,
    all_reduce_metrics,
    gather_to,
    merge,
)
from megatron_rl_corr.reduce.failure import (
    PeerFailure,
    all_reduce_done,
    all_reduce_failure,
    all_reduce_results,
)

WORLD = 4
NAN = float("nan")


class Collectives(TorchDispatchMode):
    """Names of the collectives within, however they are called."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


# Correction and metrics

CORRECTION = RolloutCorrectionConfig(
    rollout_is="sequence",
    rollout_is_mode="clip",
    rollout_is_lower=0.5,
    rollout_is_upper=2.0,
    rollout_is_batch_normalize=True,
    rollout_rs=(
        RejectionRule("token", "ratio", 0.2, 5.0),
        RejectionRule("seq_mean", "ratio", 0.6, 1.6),
        RejectionRule("seq_sum", "k3", upper=2.5),
        RejectionRule("seq_max", "k2", upper=1.2),
    ),
)
LENGTHS = [7, 1, 0, 12, 5, 3, 9, 2]
"""Of the sequences of the global batch; each data-parallel replica has four. The third has
no token at all.
"""


def global_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    total = sum(LENGTHS)
    train = -torch.rand(total, generator=generator) * 3
    rollout = train + torch.randn(total, generator=generator) * 0.8
    mask = torch.rand(total, generator=generator) < 0.85
    rollout[[2, 20]] = NAN
    train[~mask] = NAN
    seq_ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return {"train": train, "rollout": rollout, "mask": mask, "seq_ids": seq_ids}


def my_positions(cut: str, dp_rank: int, cp_rank: int) -> torch.Tensor:
    """Positions in the global batch of this rank's tokens: replica by sequence, then a cut
    of each sequence.
    """
    seq_ids, parts = global_batch()["seq_ids"], []
    for sequence in range(4 * dp_rank, 4 * dp_rank + 4):
        positions = (seq_ids == sequence).nonzero()[:, 0]
        if cut == "zigzag":
            chunks = positions.tensor_split(4)
            parts += [chunks[cp_rank], chunks[3 - cp_rank]]
        else:
            parts.append(positions.tensor_split(2)[cp_rank])
    return torch.cat(parts)


def run_correction(cut: str, rank: int, groups: ParallelGroups) -> dict:
    dp_rank, cp_rank = divmod(rank, 2)
    mine, batch = my_positions(cut, dp_rank, cp_rank), global_batch()
    with Collectives() as collectives:
        correction = compute_correction(
            batch["train"][mine],
            batch["rollout"][mine],
            batch["mask"][mine],
            batch["seq_ids"][mine] - 4 * dp_rank,
            num_sequences=4,
            config=CORRECTION,
            groups=groups,
        )
    with Collectives() as reporting:
        numbers = all_reduce_metrics(correction.metrics, groups.dp_cp)
    return {
        "positions": mine,
        "weights": correction.weights,
        "mask": correction.mask,
        "valid": correction.valid,
        "kept_sequences": correction.kept_sequences,
        "valid_tokens": correction.valid_tokens,
        "kept_tokens": correction.kept_tokens,
        "metrics": numbers,
        "collectives": collectives.names,
        "reporting": reporting.names,
    }


DEALT = {0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 0), 4: (1, 1), 5: (3, 0), 6: (3, 2), 7: (1, 2)}
"""Sequence of the global batch: its rank and microbatch. Rank 2 has none, rank 3 an empty microbatch."""


def run_microbatches(rank: int) -> dict:
    """Data parallel 4, three microbatches of unlike size each."""
    batch, config = global_batch(), RolloutCorrectionConfig(rollout_is="geometric", rollout_is_upper=2.0)
    parts = []
    for micro in range(3):
        sequences = [sequence for sequence, where in DEALT.items() if where == (rank, micro)]
        mine = torch.isin(batch["seq_ids"], torch.tensor(sequences))
        parts.append(
            compute_correction(
                batch["train"][mine],
                batch["rollout"][mine],
                batch["mask"][mine],
                torch.zeros(int(mine.sum()), dtype=torch.int64),
                num_sequences=len(sequences),
                config=config,
            ).metrics
        )
    with Collectives() as collectives:
        numbers = all_reduce_metrics(merge(parts), dist.group.WORLD)
    return {"metrics": numbers, "collectives": collectives.names, "config": config}


# Failures


def run_failures(rank: int) -> list[str | bool]:
    outcomes = []
    for failing in ((), (2,), (1, 3)):
        try:
            all_reduce_failure(ValueError(f"rank {rank} has no disk") if rank in failing else None)
            outcomes.append("went on")
        except (ValueError, PeerFailure) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    # The third is slow: the others ask again with it.
    return outcomes + [all_reduce_done(rank != 2, None), all_reduce_done(True, None)]


class CountedTurns:
    """Rank 1 asks for two turns, as rank 0 of a run does whose servers change."""

    def __init__(self, rank: int):
        self.rank, self.taken = rank, 0

    def asks(self) -> bool:
        return self.rank == 1 and self.taken < 2

    def take(self) -> None:
        self.taken += 1
        dist.all_reduce(torch.zeros(1))  # every rank is here


def run_turns(rank: int) -> list:
    """Turns of ranks of which the first two wait for results, and rank 0 the longest."""
    turns, future = CountedTurns(rank), Future() if rank < 2 else None
    waits = iter([False, True] if rank == 1 else [False, False, False, True])

    def wait(future: Future) -> bool:
        if done := next(waits):
            future.set_result(10 * rank)
        return done

    used = all_reduce_results(future, lambda result: result + 1, wait, turns)
    without = all_reduce_results(None, lambda result: result)
    return [used, without, turns.taken]


# Gathers


def run_gather_to(rank: int) -> dict:
    """Of all four, of a few, of itself alone; rank 2 receives, and its own lies in a stride."""
    own = torch.tensor([[rank, 10 * rank], [0, 0]]).t()[:, :1]
    cases = {"all": (3, 0, 2, 1), "some": (1, 3), "own": (2,)}
    return {name: gather_to(own, dist.group.WORLD, 2, members) for name, members in cases.items()}


def init_gloo(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )


def main(rank: int, folder: str) -> None:
    init_gloo(rank, folder)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, world = pairs[rank // 2], dist.group.WORLD
    groups = ParallelGroups(cp=pair, dp_cp=world)
    results = {
        "correction": {cut: run_correction(cut, rank, groups) for cut in ("zigzag", "contiguous")},
        "microbatches": run_microbatches(rank),
        "failures": run_failures(rank),
        "turns": run_turns(rank),
        "gather": all_gather_stacked(torch.tensor([[rank, 10 * rank]]), pair),
        "gather to": run_gather_to(rank),
        "inputs": {"batch": global_batch()},
        "config": CORRECTION,
    }
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # fork: torch is imported once for all ranks; this process has run nothing of it.
    mp.start_processes(main, args=(sys.argv[1],), nprocs=WORLD, start_method="fork")
