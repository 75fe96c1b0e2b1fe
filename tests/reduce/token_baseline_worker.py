"""Advantages of one batch against the optimal token baseline, in several layouts of ranks over gloo.

python token_baseline_worker.py FOLDER writes FOLDER/<rank>.pt: {(layout, way): (samples, positions,
advantages, numbers, collectives)}.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rl_corr.core.token_baseline import total_power
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch, chunk_multiple, trained_tokens
from megatron_rl_corr.mcore.batch_advantages import token_advantages_of_batch
from megatron_rl_corr.reduce.collectives import ParallelGroups, all_reduce_metrics
from tests.reduce.worker import Collectives, init_gloo

GROUP, LENGTH = 4, 16
REAL = [9, 5, 16, 7, 12, 3, 8, 8, 4, 11, 16, 6, 10, 1, 14, 13]
"""Tokens of the samples; the first two are a prompt's."""
ONLY_BASELINE = 9
"""A sample that was cut, and is not in the loss."""
DEALT = [5, 0, 12, 9, 3, 14, 6, 10, 2, 8, 1, 15, 13, 7, 4, 11]
"""The order of packed samples, dealt out over replicas: every group is parted."""
LAYOUTS = {"one": (1, 1), "dp2": (1, 2), "cp2": (2, 1), "cp2 dp2": (2, 2), "cp4": (4, 1)}


def samples() -> dict[str, torch.Tensor]:
    """Of all samples: rewards [16], and [16, LENGTH] each what their tokens have."""
    generator = torch.Generator().manual_seed(11)
    at, real = torch.arange(LENGTH), torch.tensor(REAL)[:, None]
    sampled = (at >= 2) & (at < real)
    sampled[2, 6:9] = sampled[10, 4:5] = False  # what a tool said
    mask = sampled & (torch.rand(16, LENGTH, generator=generator) < 0.85)
    mask[6] = False  # a sequence that was rejected
    mask[ONLY_BASELINE] = False
    rewards = torch.randn(16, generator=generator)
    rewards[6] = torch.nan
    weights = torch.where(mask, torch.rand(16, LENGTH, generator=generator) + 0.5, 0.0)
    energies = torch.rand(16, LENGTH, generator=generator)
    energies[ONLY_BASELINE, 3] = torch.nan  # no log-prob there
    return {"rewards": rewards, "sampled": sampled, "mask": mask, "weights": weights, "energies": energies}


def rows_of(places: list[int], made: dict) -> RolloutBatch:
    batch = RolloutBatch.empty([REAL[place] for place in places], LENGTH)
    return replace(
        batch,
        loss_mask=made["sampled"][places].view(-1),
        rewards=made["rewards"][places],
        group_ids=torch.tensor([(place - places[0]) // GROUP for place in places]),
        in_loss=torch.tensor([place != ONLY_BASELINE for place in places]),
    )


def packed_of(places: list[int], made: dict, parted: bool, cp: int) -> RolloutBatch:
    batch = RolloutBatch.empty([REAL[place] for place in places], chunk_multiple(cp))
    own = torch.tensor(places)[batch.seq_ids]
    numbers = torch.tensor([place // GROUP for place in places])
    return replace(
        batch,
        loss_mask=made["sampled"][own, batch.positions] & (batch.positions < torch.tensor(REAL)[own]),
        rewards=made["rewards"][places],
        group_ids=numbers if parted else numbers - numbers.min(),
        parted_groups=len(REAL) // GROUP if parted else 0,
        in_loss=torch.tensor([place != ONLY_BASELINE for place in places]),
    )


def run(places: list[int], batch, made: dict, groups: ParallelGroups) -> tuple:
    own, at = torch.tensor(places)[batch.seq_ids], batch.positions
    sampled = batch.loss_mask
    of_tokens = {name: made[name][own, at] for name in ("mask", "weights", "energies")}
    mask = of_tokens["mask"] & sampled
    correction = SimpleNamespace(mask=mask, weights=torch.where(mask, of_tokens["weights"], 0.0))
    assert not (mask & ~trained_tokens(batch)).any()
    with Collectives() as collectives:
        advantages = token_advantages_of_batch(
            batch, correction, of_tokens["energies"], groups, group_size=GROUP, seq_length=LENGTH
        )
    present = torch.tensor([bool(made["mask"][place].any()) for place in places])
    power = total_power(
        of_tokens["energies"], advantages, correction.weights, mask, present, owner=groups.cp_rank == 0
    )
    return (
        own[sampled],
        at[sampled],
        advantages[sampled],
        all_reduce_metrics(power, groups.dp_cp),
        collectives.names,
    )


def main(rank: int, folder: str) -> None:
    init_gloo(rank, folder)
    alone, pairs = ([dist.new_group([r]) for r in range(4)], [dist.new_group([0, 1]), dist.new_group([2, 3])])
    made, found = samples(), {}
    for layout, (cp, dp) in LAYOUTS.items():
        if rank >= cp * dp:
            continue
        cp_group = {1: alone[rank], 2: pairs[rank // 2], 4: dist.group.WORLD}[cp]
        dp_cp = {1: alone[rank], 2: pairs[0], 4: dist.group.WORLD}[cp * dp]
        groups, share = ParallelGroups(cp=cp_group, dp_cp=dp_cp), len(REAL) // dp
        for way, order in (("rows", list(range(len(REAL)))), ("packed", DEALT)):
            places = order[rank // cp * share : (rank // cp + 1) * share]
            whole = rows_of(places, made) if way == "rows" else packed_of(places, made, dp > 1, cp)
            found[layout, way] = run(places, whole.context_slice(rank % cp, cp), made, groups)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(main, args=(sys.argv[1],), nprocs=4, start_method="fork")
