"""Microbatches of packed sequences: which share one, and what the model and the loss are given of it.

S sequences of this replica, T tokens of them on this context-parallel rank, cp such ranks, tp
tensor-parallel ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.mcore.microbatch import LossInputs, Microbatch
from megatron_rl_corr.mcore.packed_batch import PackedBatch, sequence_multiple
from megatron_rl_corr.mcore.packing import PackLimits, all_reduce_pack_count, balanced_packs, first_fit
from megatron_rl_corr.moe.padding import PackedShare
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Max, Mean, Metric


@dataclass(frozen=True)
class PackedMicrobatch(Microbatch):
    """One pack: as `Microbatch` with b = 1 and L the pack's tokens on this rank."""

    own_seq_ids: Tensor | None = None
    """[L] int64: the sequence of each token, from 0; the pack's padding counts to the last."""
    sequences: int = 1

    @property
    def num_sequences(self) -> int:
        return self.sequences

    @property
    def counted(self) -> int:
        """1 a pack and rank: their sum is known on every rank without asking the others for their tokens."""
        return 1

    @property
    def seq_ids(self) -> Tensor:
        return self.own_seq_ids


@dataclass(frozen=True)
class Packs:
    """The microbatches of a batch, or of one update's part of it."""

    batch: PackedBatch
    samples: tuple[tuple[int, ...], ...]
    """The samples of each pack, by their places in the batch."""
    multiple: int
    """Tokens of a pack, over all of cp, are a multiple of it."""

    @classmethod
    def all_reduce(cls, batch: PackedBatch, limits: PackLimits, layout: Layout) -> Packs:
        """Packs of a batch, the same number on every replica: one all-reduce over data-parallel ranks.

        Args:
            batch: this rank's tokens.
            limits: of a pack.
            layout: this rank's process groups.
        """
        lengths = np.diff(batch.cu_seqlens).tolist()
        needed = len(first_fit(lengths, limits.max_tokens))
        count = all_reduce_pack_count(needed, limits, layout.dp_cp_group)
        packs = balanced_packs(lengths, count, limits)
        cp, tp = batch.cp[1], layout.tp_group.size()
        return cls(batch, tuple(map(tuple, packs)), sequence_multiple(cp) * tp)

    @property
    def count(self) -> int:
        """Microbatches, on every rank alike."""
        return len(self.samples)

    def metrics(self) -> dict[str, Metric]:
        """What this rank's microbatches hold."""
        lengths = np.diff(self.batch.cu_seqlens)
        tokens = [-(-sum(lengths[i] for i in pack) // self.multiple) * self.multiple for pack in self.samples]
        values = [[self.batch.lengths.sum(), sum(tokens)], [self.count], [max(tokens)]]
        device = self.batch.tokens.device
        real, count, most = (
            torch.tensor(value, dtype=torch.float64).to(device, non_blocking=True) for value in values
        )
        made = {"real_fraction": Mean(real), "microbatches": Max(count), "tokens_max": Max(most)}
        return {f"packing/{name}": metric for name, metric in made.items()}

    def all_reduce_share(self, layout: Layout, *, known: int) -> PackedShare:
        """How routers' own losses weigh microbatches: by their real tokens. One all-reduce over
        data-parallel ranks.

        Args:
            layout: this rank's process groups.
            known: microbatches of this replica that Megatron's calculator knows.
        """
        total = torch.tensor(
            float(self.batch.lengths.sum()), dtype=torch.float64, device=self.batch.tokens.device
        )
        # Each context-parallel rank counts whole sequences.
        dist.all_reduce(total, group=layout.dp_cp_group)
        microbatches = self.count * layout.dp_size * layout.cp_size
        return PackedShare(total / microbatches, known / self.count, layout.cp_size)

    def microbatches(self, loss_inputs: LossInputs | None = None) -> Iterator[PackedMicrobatch]:
        """The packs in order, with the loss inputs of their tokens."""
        for index, samples in enumerate(self.samples):
            yield self._pack(index, samples, loss_inputs)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """A value a token of each pack -> [T], in the batch's order."""
        whole = parts[0].new_zeros(len(self.batch.tokens))
        for samples, part in zip(self.samples, parts, strict=True):
            places, _ = self.batch.places_of(samples)
            whole[places] = part[: len(places)]
        return whole

    def _pack(self, index: int, samples: Sequence[int], loss_inputs: LossInputs | None) -> PackedMicrobatch:
        part, host_places = self.batch.part(samples), self.batch.host_places_of(samples)
        places = torch.from_numpy(host_places).to(part.tokens.device, non_blocking=True)
        total = int(part.cu_seqlens[-1])
        padded = -(-total // self.multiple) * self.multiple
        rest, device = (padded - total) // self.batch.cp[1], part.tokens.device
        boundaries = part.cu_seqlens if padded == total else np.append(part.cu_seqlens, padded)
        cu_seqlens = torch.from_numpy(boundaries.astype(np.int32)).to(device, non_blocking=True)
        longest = int(np.diff(boundaries).max())

        def filled(values: Tensor, value: float = 0) -> Tensor:
            return torch.cat([values, values.new_full((rest,), value)])

        return PackedMicrobatch(
            index,
            filled(part.tokens)[None],
            filled(part.labels)[None],
            filled(part.positions)[None],
            None if loss_inputs is None else loss_inputs.at(places, rest),
            filled(part.padding, True)[None],
            None if part.sampling_masks is None else part.sampling_masks.padded(rest),
            SampledRows.of(np.append(self.batch.sampled[host_places], np.zeros(rest, dtype=bool)), device),
            filled(places, len(self.batch.tokens))[:, None],
            packed_seq_params=PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
            own_seq_ids=filled(part.seq_ids, len(samples) - 1),
            sequences=len(samples),
        )
