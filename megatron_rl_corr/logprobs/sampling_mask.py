"""Log-prob of the label on the support that the server sampled from (top-p, top-k), from sharded logits.

T tokens, I ids of all their supports, V vocabulary columns (padded), tp tensor-parallel ranks; C tokens of a chunk,
whose supports have J ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs.torch_backend import NEGLIGIBLE, SMALLEST
from megatron_rl_corr.logprobs.vocab import check_inputs, combine_stats
from megatron_rl_corr.parallel.gather import all_gather_stacked

CHUNK_IDS = 1 << 19
"""Ids that are worked on at once: about 60 bytes each, so 31 MB, beside the logits and their gradient."""


@dataclass(frozen=True, eq=False)
class Supports:
    """The ids that each token's label was drawn from, one token after the other; a token may have none."""

    ids: Tensor
    """[I] int32, global ids, distinct within a token."""
    offsets: Tensor
    """[T + 1] int64 beside them: token t has ids[offsets[t] : offsets[t + 1]]."""
    host_offsets: np.ndarray
    """The same on the host, where chunks and microbatches are cut: no device is asked for a length."""

    @classmethod
    def of(cls, ids: Tensor, lengths: np.ndarray) -> Supports:
        """Of lengths [T], any integer type, how many of the ids [I] each token has."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] != len(ids):
            raise ValueError(f"lengths of supports that sum to {offsets[-1]} have {len(ids)} ids")
        return cls(ids, torch.from_numpy(offsets).to(ids.device), offsets)

    def __len__(self) -> int:
        """T."""
        return len(self.host_offsets) - 1

    def tokens(self, start: int, stop: int) -> Supports:
        """Those of tokens [start, stop)."""
        own = self.host_offsets[start : stop + 1]
        return Supports(self.ids[own[0] : own[-1]], self.offsets[start : stop + 1] - int(own[0]), own - own[0])

    def chunks(self, most_ids: int) -> Iterator[tuple[slice, slice]]:
        """Adjacent tokens, and their ids: at most `most_ids` of either, but one token at least."""
        start = 0
        while start < len(self):
            room = np.searchsorted(self.host_offsets, self.host_offsets[start] + most_ids, side="right") - 1
            stop = min(max(int(room), start + 1), start + most_ids)
            yield slice(start, stop), slice(int(self.host_offsets[start]), int(self.host_offsets[stop]))
            start = stop


def support_logprobs(
    logits: Tensor,
    labels: Tensor,
    supports: Supports,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_ids: int = CHUNK_IDS,
) -> tuple[Tensor, Tensor | None]:
    """log softmax of logits / temperature over each token's support, at the label; and its entropy, else None.

    As vocab_parallel_logprobs, over the ids that the label was drawn from. pi_train is then renormalised on the set
    that pi_rollout was: the two are probabilities of the same event. A token without any id, or whose label is not
    among them, gives -inf and no gradient. Only the supports' columns are read and get a gradient; beside that, what is
    made has a few numbers a token, and has at most chunk_ids elements (or those of one support, if it has more).

    Raises ValueError for unlike lengths, and for a temperature or chunk_ids that is not positive.
    """
    check_inputs(logits, labels, temperature, chunk_ids)
    if len(supports) != len(labels):
        raise ValueError(f"supports of {len(supports)} tokens are beside labels of {len(labels)}")
    logprobs, entropy = _SupportLogProbs.apply(
        logits, labels, supports, tp_group, temperature, with_entropy, chunk_ids
    )
    return logprobs, entropy if with_entropy else None


class _SupportLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, supports, tp_group, temperature, with_entropy, chunk_ids):
        first = 0 if tp_group is None else tp_group.rank() * logits.shape[1]
        stats = logits.new_zeros(4, logits.shape[0], dtype=torch.float32)
        stats[::2] = -torch.inf
        for rows, among in supports.chunks(chunk_ids):
            chunk = _Chunk(logits[rows], labels[rows], supports, rows, among, first, temperature)
            _add_stats(chunk, stats[:, rows], with_entropy)
        logprobs, entropy, top, log_total = combine_stats(all_gather_stacked(stats, tp_group), with_entropy)
        ctx.save_for_backward(logits, labels, top, log_total, entropy, logprobs)
        ctx.supports, ctx.settings = supports, (first, temperature, with_entropy, chunk_ids)
        ctx.mark_non_differentiable(*([] if with_entropy else [entropy]))
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, labels, top, log_total, entropy, logprobs = ctx.saved_tensors
        first, temperature, with_entropy, chunk_ids = ctx.settings
        # -inf is a constant, as over the whole vocabulary.
        grad_logprobs = grad_logprobs.masked_fill(logprobs == -torch.inf, 0.0)
        grad = logits.new_zeros(logits.shape)
        for rows, among in ctx.supports.chunks(chunk_ids):
            chunk = _Chunk(logits[rows], labels[rows], ctx.supports, rows, among, first, temperature)
            # One after the other: beside a large top the total would lose its digits.
            log_p = chunk.x - chunk.of_token(top[rows]) - chunk.of_token(log_total[rows])
            upstream = chunk.of_token(grad_logprobs[rows])
            slope = upstream
            if with_entropy:
                # dH/dx = -p (log p + H), as over the whole vocabulary.
                spread = log_p.clamp(min=NEGLIGIBLE) + chunk.of_token(entropy[rows])
                slope = upstream + chunk.of_token(grad_entropy[rows]) * spread
            share = torch.where(chunk.at_label, upstream, 0.0) - log_p.exp() * slope
            # The label's share belongs to the rank that has it.
            share = torch.where(chunk.mine, share / temperature, 0.0)
            grad[rows].view(-1).index_add_(0, chunk.places, share.to(grad.dtype))
        return grad, None, None, None, None, None, None


class _Chunk:
    """The supports of some tokens, id by id: [J] each."""

    def __init__(
        self, logits: Tensor, labels: Tensor, supports: Supports, rows: slice, among: slice, first: int,
        temperature: float,
    ):
        count, width = logits.shape
        lengths = supports.offsets[rows.start : rows.stop + 1].diff()
        # With its size known beforehand the host need not wait for the device.
        self.token = torch.arange(count, device=logits.device).repeat_interleave(
            lengths, output_size=among.stop - among.start
        )
        """The token of the chunk."""
        ids = supports.ids[among].long()
        local = ids - first
        self.mine = (local >= 0) & (local < width)
        """Whether the id is one of this rank's columns."""
        local = local.clamp(0, width - 1)
        self.places = self.token * width + local
        """Where it is in the chunk's logits, flat; some column where it is another rank's."""
        self.at_label = ids == self.of_token(labels)
        self.x = torch.where(self.mine, logits[self.token, local].float() / temperature, -torch.inf)
        """Its logit over temperature, float32; -inf where another rank has it."""

    def of_token(self, values: Tensor) -> Tensor:
        """values [C] of the chunk's tokens -> [J]."""
        return values.index_select(0, self.token)


def _add_stats(chunk: _Chunk, out: Tensor, with_entropy: bool) -> None:
    """As label_stats, into out [4, C], which holds what it is without an id: -inf, 0, -inf, 0.

    Sums are made in float64: on a GPU the order of additions is not fixed.
    """
    largest, total, target, product = out
    target.scatter_reduce_(0, chunk.token, torch.where(chunk.at_label, chunk.x, -torch.inf), "amax")
    largest.scatter_reduce_(0, chunk.token, chunk.x, "amax")
    x = chunk.x - chunk.of_token(largest.clamp(min=SMALLEST))
    weights = x.exp()
    total.copy_(_sums(weights, chunk.token, len(total)))
    if with_entropy:
        product.copy_(_sums(weights.mul_(x.clamp_(min=NEGLIGIBLE)), chunk.token, len(total)))


def _sums(values: Tensor, token: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, dtype=torch.float64).index_add_(0, token, values.double())
