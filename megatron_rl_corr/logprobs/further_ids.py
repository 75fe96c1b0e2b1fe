"""Log-probs of further ids beside the label's, from sharded logits: this rank's share, and the gradient at
their columns.

T tokens, N of them sampled, I further ids a token, V vocabulary columns (padded), tp tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.torch_backend import NEGLIGIBLE, LogitColumns


def id_logits(logits: Tensor, ids: Tensor, columns: LogitColumns, sampled: SampledRows | None) -> Tensor:
    """x = logits / temperature of each id, [I, N] float32; -inf where it is not one of this rank's columns.

    Args:
        logits: [T, V/tp] in any float type.
        ids: [T, I] global ids.
        columns: of this rank.
        sampled: the rows that are read; None: all.
    """
    rows = torch.arange(len(ids), device=ids.device) if sampled is None else sampled.rows
    local, mine = _local(ids[rows], columns)
    found = logits[rows[:, None], local].float() / columns.temperature
    return torch.where(mine, found, -torch.inf).t()


@dataclass(frozen=True)
class IdColumns:
    """The columns of the labels and of the further ids in the gradient of the logits."""

    labels: Tensor
    """[T] int64."""
    combined: Tensor
    """[K, T] float32, from `combine_stats`."""
    ids: Tensor
    """[T, I], distinct for a token."""
    id_logprobs: Tensor
    """[T, I] float32."""
    columns: LogitColumns
    sampled: SampledRows | None

    def write_gradient(
        self, grad_label: Tensor, grad_ids: Tensor, grad_entropy: Tensor | None, out: Tensor
    ) -> None:
        """Overwrite these columns of `out`, which has the gradient as if all of it were the label's.

        With g = grad_label + the sum of grad_ids a column v has (grad_label [v is the label] + grad_ids [v is
        that id] - g p_v - grad_entropy p_v (log p_v + entropy)) / temperature. Only the terms in brackets
        differ from what `logits_gradient` has made of g alone, and only at these columns. They are computed
        anew, not corrected, so that 16-bit gradients are rounded once.

        Args:
            grad_label: [T] float32, of the label's log-prob.
            grad_ids: [T, I] float32, 0 for constants.
            grad_entropy: [T] float32; None where nothing depends on the entropy.
            out: [T, V/tp] of the logits' type.
        """
        rows = torch.arange(len(self.ids), device=out.device) if self.sampled is None else self.sampled.rows
        if not len(rows):
            return
        ids, of_ids, of_label = self.ids[rows], grad_ids[rows], grad_label[rows]
        logprobs, entropy, label = (
            self.combined[0, rows],
            self.combined[1, rows, None],
            self.labels[rows, None],
        )
        of_label = of_label.masked_fill(logprobs == -torch.inf, 0.0)[:, None]
        # The label is one more column, last.
        every = torch.cat([ids, label], dim=1)
        log_p = torch.cat([self.id_logprobs[rows], logprobs[:, None]], dim=1)
        is_label = ids == label
        among = torch.where(is_label, of_ids, 0.0).sum(dim=1, keepdim=True)
        own = torch.cat([of_ids + torch.where(is_label, of_label, 0.0), of_label + among], dim=1)
        slope = of_label + of_ids.sum(dim=1, keepdim=True)
        used = slope != 0
        if grad_entropy is not None:
            of_entropy = grad_entropy[rows, None]
            slope = slope + of_entropy * (log_p.clamp(min=NEGLIGIBLE) + entropy)
            used = used | (of_entropy != 0)
        used = used | (own != 0).any(dim=1, keepdim=True)
        values = torch.where(used, (own - log_p.exp() * slope) / self.columns.temperature, 0.0)
        self._write(rows, every, values.to(out.dtype), out)

    def _write(self, rows: Tensor, ids: Tensor, values: Tensor, out: Tensor) -> None:
        """Write values [N, I + 1] at ids [N, I + 1] of the rows, where they are this rank's.

        An id of another rank writes what the row's first own id writes, or, without one, what is there: the
        shape does not depend on how many there are, so nobody waits for the device.
        """
        local, mine = _local(ids, self.columns)
        first = mine.int().argmax(dim=1, keepdim=True)
        place = local.gather(1, first)
        there = torch.where(mine.any(dim=1, keepdim=True), values.gather(1, first), out[rows[:, None], place])
        places, values = torch.where(mine, local, place), torch.where(mine, values, there)
        out[rows[:, None], places] = values


def _local(ids: Tensor, columns: LogitColumns) -> tuple[Tensor, Tensor]:
    """(column of each id, in [0, limit); whether this rank has it)."""
    local = ids.long() - columns.first
    mine = (local >= 0) & (local < columns.limit)
    return local.clamp(0, max(columns.limit - 1, 0)), mine
