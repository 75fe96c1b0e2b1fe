"""The microbatches of the samples that the ledger takes of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.microbatch import LossInputs, Microbatch
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape, RolloutBatch
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.layout import Layout


@dataclass(frozen=True)
class SharePacks(Packs):
    """The microbatches of some of a batch's samples; their tokens' places are those in the whole batch."""

    places: Tensor | None = None
    """[T' + 1] int64: of the samples' tokens among the batch's T, and behind them T."""
    further_ids: Tensor | None = None
    """[T', K] int32: ids whose log-probs are wanted beside the labels'; None: none."""

    def microbatches(self, loss_inputs: LossInputs | None = None) -> Iterator[Microbatch]:
        for one in super().microbatches(loss_inputs):
            ids = self.further_ids
            if ids is not None:  # padding has the place T'
                ids = torch.cat([ids, ids.new_zeros(1, ids.shape[1])])[one.places.t().reshape(-1)]
            yield replace(one, places=self.places[one.places], further_ids=ids)


@collective
def share_packs(batch: RolloutBatch, samples: list[int], shape: BatchShape, layout: Layout) -> SharePacks:
    """The microbatches of these samples, as many on every replica; every rank calls it."""
    places = np.append(batch.host_places_of(samples), batch.num_tokens)
    packs = SharePacks.balanced(batch.part(samples), shape, layout)
    return replace(packs, places=torch.from_numpy(places).to(batch.seq_ids.device))


def unit_of(model: list, shape: BatchShape) -> int:
    """Samples that the schedule takes a multiple of: of packs any number makes enough of them."""
    return 1 if shape.packing is not None else shape.micro_batch_size * compat.smallest_schedule(model)


def third_of(batch: RolloutBatch) -> Tensor:
    """[T] int64 in [0, 3): in which third of its sequence a token stands."""
    lengths = torch.from_numpy(batch.lengths).to(batch.positions.device, non_blocking=True)
    return (3 * batch.positions // lengths[batch.seq_ids]).clamp(max=2)
