"""Advantages of one batch in several layouts of ranks over gloo: python advantages_worker.py
FOLDER OWN.py:NAME.

Writes FOLDER/<rank>.pt: {(layout, way, kind, rejecting): (places of the samples,
advantages, collectives)}.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.advantages import KINDS
from megatron_rl_corr.mcore.batch_advantages import advantages_of_batch
from megatron_rl_corr.reduce.collectives import ParallelGroups
from tests.reduce.worker import Collectives

GROUP = 4
REWARDS = [1.0, 0.0, 0.5, 3.0, 0.1, 0.1, 0.1, 0.1, -2.0, 1.5, 1.5, 0.25, 7.0, -1.0, 0.0, 0.0]
LENGTHS = [3, 1, 8, 2, 5, 5, 4, 1, 6, 0, 7, 2, 9, 1, 3, 4]
KEPT = [True] * 2 + [False] + [True] * 6 + [False] + [True] * 3 + [False] + [True] * 2
DEALT = [5, 0, 12, 9, 3, 14, 6, 10, 2, 8, 1, 15, 13, 7, 4, 11]
"""The order of packed samples, dealt out over replicas: every group is parted."""
LAYOUTS = {"one": (1, 1), "dp2": (1, 2), "cp2": (2, 1), "cp2 dp2": (2, 2)}


def batch_of(places, parted, cp_rank, cp):
    """What this rank has of these samples: each one's tokens are cut over cp."""
    own = [range(LENGTHS[place])[cp_rank::cp] for place in places]
    seq_ids = torch.tensor([row for row, tokens in enumerate(own) for _ in tokens], dtype=torch.int64)
    numbers = torch.tensor([place // GROUP for place in places])
    return SimpleNamespace(
        rewards=torch.tensor([REWARDS[place] for place in places]),
        num_sequences=len(places),
        num_episodes=len(places),
        episode_ids=None,
        seq_ids=seq_ids,
        group_ids=numbers if parted else numbers - numbers.min(),
        parted_groups=len(REWARDS) // GROUP if parted else 0,
        loss_mask=torch.ones_like(seq_ids, dtype=torch.bool),
        flat=lambda values: values,
        in_loss=None,
    )


def main(rank: int, folder: str, own: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=timedelta(seconds=60)
    )
    alone, pairs = ([dist.new_group([r]) for r in range(4)], [dist.new_group([0, 1]), dist.new_group([2, 3])])
    made = {}
    for layout, (cp, dp) in LAYOUTS.items():
        if rank >= cp * dp:
            continue
        cp_group = pairs[rank // 2] if cp == 2 else alone[rank]
        dp_cp = {1: alone[rank], 2: pairs[0], 4: dist.group.WORLD}[cp * dp]
        groups = ParallelGroups(cp=cp_group, dp_cp=dp_cp)
        for way, order in (("rows", range(len(REWARDS))), ("packed", DEALT)):
            share = len(REWARDS) // dp
            places = list(order)[rank // cp * share : (rank // cp + 1) * share]
            batch = batch_of(places, way == "packed" and dp > 1, rank % cp, cp)
            kept = torch.tensor([KEPT[place] for place in places])
            lengths = torch.tensor([float(LENGTHS[place]) for place in places], dtype=torch.float64)
            correction = SimpleNamespace(kept_sequences=kept, valid_lengths=lengths)
            for kind in (*KINDS, own):
                config = RolloutCorrectionConfig(advantage=kind)
                for rejecting in (False, True):
                    with Collectives() as collectives:
                        advantages = advantages_of_batch(
                            batch,
                            config,
                            groups,
                            group_size=GROUP,
                            correction=correction if rejecting else None,
                        )
                    made[layout, way, kind, rejecting] = places, advantages, collectives.names
    torch.save(made, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(main, args=tuple(sys.argv[1:]), nprocs=4, start_method="fork")
