"""The microbatches of a batch: which sequences share one, and what the model and the loss are given of it.

A microbatch is a pack of sequences, one behind the other (b = 1), or b = --micro-batch-size padded rows. S
sequences of this replica, T tokens of them on this context-parallel rank, cp such ranks, tp tensor-parallel
ones.
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
from megatron_rl_corr.mcore.batch.microbatch import LossInputs, Microbatch
from megatron_rl_corr.mcore.batch.packing import balanced_packs, common_pack_count, first_fit
from megatron_rl_corr.mcore.batch.rollout_batch import BatchShape, RolloutBatch, chunk_multiple
from megatron_rl_corr.moe.padding import PackedShare
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Max, Mean, Metric


@dataclass(frozen=True)
class Packs:
    """The microbatches of a batch, or of one update's part of it.

    Example of 4 sequences of 3, 5, 2 and 6 tokens: packs of at most 8 are ((0, 1), (2, 3)), of 8 tokens
    each; rows by 2 are ((0, 1), (2, 3)) too, of [2, L] tokens each.
    """

    batch: RolloutBatch
    samples: tuple[tuple[int, ...], ...]
    """The sequences of each microbatch, by their places in the batch; none in one that another replica has
    more sequences for.
    """
    seq_length: int
    """Tokens of a whole row, over all of cp; of packs the longest that a sequence may be."""
    multiple: int
    """Tokens of a pack, over all of cp, are a multiple of it."""
    are_rows: bool = False

    @classmethod
    @collective
    def balanced(cls, batch: RolloutBatch, shape: BatchShape, layout: Layout) -> Packs:
        """The microbatches of a batch, the same number on every replica.

        Packs take one all-reduce over data-parallel ranks, rows none.

        Args:
            batch: this rank's tokens.
            shape: says how sequences are packed, or that they are rows.
            layout: this rank's process groups.
        """
        limits, cp = shape.packing, batch.cp[1]
        if limits is None:
            return cls.of_rows(batch, shape.micro_batch_size, shape.seq_length)
        lengths = np.diff(batch.cu_seqlens).tolist()
        needed = len(first_fit(lengths, limits.max_tokens))
        count = common_pack_count(needed, limits, layout.dp_cp_group)
        packs = balanced_packs(lengths, count, limits)
        return cls(
            batch, tuple(map(tuple, packs)), shape.seq_length, chunk_multiple(cp) * layout.tp_group.size()
        )

    @classmethod
    def of_rows(cls, batch: RolloutBatch, size: int, seq_length: int) -> Packs:
        """Rows in their order, `size` a microbatch; each sequence has seq_length tokens with its padding."""
        assert batch.num_sequences % size == 0, f"{batch.num_sequences} rows in microbatches of {size}"
        rows = np.arange(batch.num_sequences).reshape(-1, size).tolist()
        return cls(batch, tuple(map(tuple, rows)), seq_length, seq_length, are_rows=True)

    @property
    def height(self) -> int:
        """b, rows that the model gets at a time."""
        return len(self.samples[0]) if self.are_rows else 1

    @property
    def count(self) -> int:
        """Microbatches, on every rank alike."""
        return len(self.samples)

    def counted(self, layout: Layout) -> int:
        """The sum of `Microbatch.counted` over the global batch."""
        if self.are_rows:
            return self.batch.num_sequences * self.seq_length * layout.dp_size
        return self.count * layout.dp_cp_group.size()

    def metrics(self) -> dict[str, Metric]:
        """How well packs are filled on this rank; {} of rows."""
        if self.are_rows:
            return {}
        lengths = np.diff(self.batch.cu_seqlens)
        tokens = [self._tokens_of(sum(lengths[i] for i in pack)) for pack in self.samples]
        values = [[self.batch.lengths.sum(), sum(tokens)], [self.count], [max(tokens)]]
        device = self.batch.seq_ids.device
        real, count, most = (
            torch.tensor(value, dtype=torch.float64).to(device, non_blocking=True) for value in values
        )
        made = {"real_fraction": Mean(real), "microbatches": Max(count), "tokens_max": Max(most)}
        return {f"packing/{name}": metric for name, metric in made.items()}

    @collective
    def real_token_share(self, layout: Layout, *, known: int) -> PackedShare:
        """How routers' own losses weigh microbatches: by their real tokens. One all-reduce over
        data-parallel ranks.

        Args:
            layout: this rank's process groups.
            known: microbatches of this replica that Megatron's calculator knows.
        """
        total = torch.tensor(
            float(self.batch.lengths.sum()), dtype=torch.float64, device=self.batch.seq_ids.device
        )
        # Each context-parallel rank counts whole sequences.
        dist.all_reduce(total, group=layout.dp_cp_group)
        microbatches = self.count * layout.dp_size * layout.cp_size
        return PackedShare(total / microbatches, known / self.count, layout.cp_size)

    def microbatches(self, loss_inputs: LossInputs | None = None) -> Iterator[Microbatch]:
        """The microbatches in order, with the loss inputs of their tokens."""
        for index, samples in enumerate(self.samples):
            yield self._pack(index, samples, loss_inputs)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """A value a token of each pack -> [T], in the batch's order; or K values -> [T, K]."""
        whole = parts[0].new_zeros(self.batch.num_tokens, *parts[0].shape[1:])
        for samples, part in zip(self.samples, parts, strict=True):
            places, _ = self.batch.places_of(samples)
            whole[places] = part[: len(places)]
        return whole

    def _tokens_of(self, total: int) -> int:
        """Tokens of a pack whose sequences have so many, with its padding: some even without a sequence, as
        the model must be run as often as on other replicas.
        """
        return -(-max(total, 1) // self.multiple) * self.multiple

    def _pack(self, index: int, samples: Sequence[int], loss_inputs: LossInputs | None) -> Microbatch:
        part, host_places = self.batch.part(samples), self.batch.host_places_of(samples)
        device, total = part.seq_ids.device, int(part.cu_seqlens[-1])
        places = torch.from_numpy(host_places).to(device, non_blocking=True)
        padded = self._tokens_of(total)
        rest = (padded - total) // self.batch.cp[1]

        def filled(values: Tensor, value: float = 0) -> Tensor:
            return torch.cat([values, values.new_full((rest,), value)]) if rest else values

        def rows(values: Tensor) -> Tensor:
            return values.view(self.height, -1)

        sampled = None
        if self.batch.loss_mask is not None:
            mask = np.append(self.batch.sampled[host_places], np.zeros(rest, dtype=bool))
            sampled = SampledRows.of(mask, device)
        return Microbatch(
            index,
            None if part.tokens is None else rows(filled(part.tokens)),
            None if part.labels is None else rows(filled(part.labels)),
            rows(filled(part.positions)),
            filled(part.seq_ids, max(len(samples) - 1, 0)),
            max(len(samples), 1),
            len(places) + rest if self.are_rows else 1,
            rows(filled(part.padding, True)),
            sampled,
            rows(filled(places, self.batch.num_tokens)).t(),
            None if loss_inputs is None else loss_inputs.at(places, rest),
            None if part.sampling_masks is None else part.sampling_masks.padded(rest),
            None if self.are_rows else _packed_seq_params(part.cu_seqlens, padded, device),
        )


def _packed_seq_params(cu_seqlens: np.ndarray, padded: int, device: torch.device) -> PackedSeqParams:
    """Boundaries of a pack of `padded` tokens: what is behind its last sequence is one of its own."""
    boundaries = cu_seqlens if padded == cu_seqlens[-1] else np.append(cu_seqlens, padded)
    on_device = torch.from_numpy(boundaries.astype(np.int32)).to(device, non_blocking=True)
    longest = int(np.diff(boundaries).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
