"""Log-prob of the label over the ids that the server sampled from (top-p, top-k), from sharded logits.

T tokens, I ids of all their sampling masks, V vocabulary columns (padded), tp tensor-parallel ranks; C
tokens of a chunk, whose masks have J ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs.torch_backend import NEGLIGIBLE, SMALLEST
from megatron_rl_corr.logprobs.vocab import backend, check_inputs
from megatron_rl_corr.reduce.collectives import all_gather_stacked

CHUNK_IDS = 1 << 19
"""Ids of one chunk: about 60 bytes each, so 31 MB, beside the logits and their gradient."""


@dataclass(frozen=True, eq=False)
class SamplingMasks:
    """The ids that each token's label was drawn from, one token after the other; a token may have none.

    Example: ids [4, 7, 1], offsets [0, 1, 1, 3]: token 0 was drawn from {4}, token 1 has none,
    token 2 from {7, 1}.
    """

    ids: Tensor
    """[I] int32, global ids, distinct within a token."""
    offsets: Tensor
    """[T + 1] int64, on the ids' device: token t has ids[offsets[t] : offsets[t + 1]]."""
    host_offsets: np.ndarray
    """The same on the host, where chunks and microbatches are cut without reading from the device."""

    @classmethod
    def of(cls, ids: Tensor, lengths: np.ndarray) -> SamplingMasks:
        """The masks of T tokens.

        Args:
            ids: [I] int32, the ids of one token after the other.
            lengths: [T] of any integer type, how many ids each token has.

        Raises:
            ValueError: the lengths do not sum to I.
        """
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] != len(ids):
            raise ValueError(f"lengths of sampling masks sum to {offsets[-1]}, but there are {len(ids)} ids")
        return cls(ids, torch.from_numpy(offsets).to(ids.device, non_blocking=True), offsets)

    def __len__(self) -> int:
        """T."""
        return len(self.host_offsets) - 1

    def at(self, tokens: np.ndarray) -> SamplingMasks:
        """The masks of these tokens, in this order. tokens: [T'] int64, on the host."""
        lengths = np.diff(self.host_offsets)[tokens]
        before = np.cumsum(lengths) - lengths
        places = np.repeat(self.host_offsets[tokens] - before, lengths) + np.arange(lengths.sum())
        return SamplingMasks.of(
            self.ids[torch.from_numpy(places).to(self.ids.device, non_blocking=True)], lengths
        )

    def padded(self, tokens: int) -> SamplingMasks:
        """These, and behind them so many tokens without any."""
        return SamplingMasks.of(
            self.ids, np.append(np.diff(self.host_offsets), np.zeros(tokens, dtype=np.int64))
        )

    def chunks(self, most_ids: int) -> Iterator[tuple[slice, slice]]:
        """Slices of adjacent tokens and of their ids: at most `most_ids` of either, but at
        least one token.
        """
        start = 0
        while start < len(self):
            room = np.searchsorted(self.host_offsets, self.host_offsets[start] + most_ids, side="right") - 1
            stop = min(max(int(room), start + 1), start + most_ids)
            yield slice(start, stop), slice(int(self.host_offsets[start]), int(self.host_offsets[stop]))
            start = stop


def sampling_mask_logprobs(
    logits: Tensor,
    labels: Tensor,
    sampling_masks: SamplingMasks,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_collision: bool = False,
    chunk_ids: int = CHUNK_IDS,
) -> tuple[Tensor | None, ...]:
    """Log-prob of each label over its sampling mask, and the mask's entropy: as
    vocab_parallel_logprobs over few ids.

    log softmax(x[ids])[label] with x = logits / temperature. pi_train is renormalised over the set that
    pi_rollout was renormalised over, so the two are probabilities of the same event. A token without ids, or
    whose label is not among them, gives -inf and no gradient. Only the masks' columns are read and get a
    gradient. Extra memory: a few numbers a token, and tensors of at most chunk_ids elements (or of one
    mask's, if it has more). One collective over tp_group in forward, none in backward.

    Args:
        logits: [T, V/tp] in any float type, this rank's columns.
        labels: [T] int64, global ids.
        sampling_masks: of the T tokens.
        tp_group: ranks that share the vocabulary; None: this rank alone.
        temperature: of the sampling.
        with_entropy: whether to compute the entropy.
        with_collision: whether to compute the probability that two draws are the same; it has no gradient.
        chunk_ids: ids that are worked on at once.

    Returns:
        (log-probs [T] float32, entropies [T] float32 or None), and with_collision the collisions [T] float32.

    Raises:
        ValueError: for different lengths, and for a temperature or chunk_ids that is not positive.
    """
    check_inputs(logits, labels, temperature, chunk_ids)
    if len(sampling_masks) != len(labels):
        raise ValueError(f"sampling masks of {len(sampling_masks)} tokens do not fit labels of {len(labels)}")
    logprobs, entropy, *collision = _SamplingMaskLogProbs.apply(
        logits, labels, sampling_masks, tp_group, temperature, with_entropy, with_collision, chunk_ids
    )
    return logprobs, entropy if with_entropy else None, *collision


class _SamplingMaskLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits, labels, sampling_masks, tp_group, temperature, with_entropy, with_collision, chunk_ids
    ):
        first = 0 if tp_group is None else tp_group.rank() * logits.shape[1]
        stats = logits.new_zeros(4 + with_collision, logits.shape[0], dtype=torch.float32)
        stats[0], stats[2] = -torch.inf, -torch.inf
        for rows, among in sampling_masks.chunks(chunk_ids):
            chunk = _Chunk(logits[rows], labels[rows], sampling_masks, rows, among, first, temperature)
            _add_stats(chunk, stats[:, rows], with_entropy)
        combined = backend(logits).combine_stats(all_gather_stacked(stats, tp_group), with_entropy)
        logprobs, entropy, *collision = combined[0], combined[1], *combined[4:]
        ctx.save_for_backward(logits, labels, combined)
        ctx.sampling_masks, ctx.settings = sampling_masks, (first, temperature, with_entropy, chunk_ids)
        ctx.mark_non_differentiable(*([] if with_entropy else [entropy]), *collision)
        return logprobs, entropy, *collision

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, *_):
        logits, labels, combined = ctx.saved_tensors
        logprobs, entropy, top, log_total = combined[:4]
        first, temperature, with_entropy, chunk_ids = ctx.settings
        # -inf is a constant, as over the whole vocabulary.
        grad_logprobs = grad_logprobs.masked_fill(logprobs == -torch.inf, 0.0)
        grad = logits.new_zeros(logits.shape)
        for rows, among in ctx.sampling_masks.chunks(chunk_ids):
            chunk = _Chunk(logits[rows], labels[rows], ctx.sampling_masks, rows, among, first, temperature)
            # Subtracted one after the other: added to a large top, log_total would lose its digits.
            log_p = chunk.x - chunk.of_token(top[rows]) - chunk.of_token(log_total[rows])
            upstream = chunk.of_token(grad_logprobs[rows])
            slope = upstream
            if with_entropy:
                # dH/dx = -p (log p + H), as over the whole vocabulary.
                spread = log_p.clamp(min=NEGLIGIBLE) + chunk.of_token(entropy[rows])
                slope = upstream + chunk.of_token(grad_entropy[rows]) * spread
            share = torch.where(chunk.at_label, upstream, 0.0) - log_p.exp() * slope
            # Each rank has the gradient of its own columns, the label's too.
            share = torch.where(chunk.mine, share / temperature, 0.0)
            grad[rows].view(-1).index_add_(0, chunk.places, share.to(grad.dtype))
        return grad, *[None] * 7


class _Chunk:
    """The sampling masks of adjacent tokens, id by id: tensors [J]."""

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        sampling_masks: SamplingMasks,
        rows: slice,
        among: slice,
        first: int,
        temperature: float,
    ):
        count, width = logits.shape
        lengths = sampling_masks.offsets[rows.start : rows.stop + 1].diff()
        # output_size is known on the host, so that repeat_interleave does not wait for the device.
        self.token = torch.arange(count, device=logits.device).repeat_interleave(
            lengths, output_size=among.stop - among.start
        )
        """Each id's token in the chunk."""
        ids = sampling_masks.ids[among].long()
        local = ids - first
        self.mine = (local >= 0) & (local < width)
        """Whether the id is one of this rank's columns."""
        local = local.clamp(0, width - 1)
        self.places = self.token * width + local
        """Each id's place in the chunk's flat logits; any place of its token for an id of another rank."""
        self.at_label = ids == self.of_token(labels)
        self.x = torch.where(self.mine, logits[self.token, local].float() / temperature, -torch.inf)
        """Each id's logit / temperature, float32; -inf for an id of another rank."""

    def of_token(self, values: Tensor) -> Tensor:
        """values [C] of the chunk's tokens -> [J], each id's token's."""
        return values.index_select(0, self.token)


def _add_stats(chunk: _Chunk, out: Tensor, with_entropy: bool) -> None:
    """Add the ids' statistics, as label_stats defines them, to out [K, C], which holds -inf, 0, -inf, 0, 0.

    Sums are made in float64: on a GPU the order of additions is not fixed.
    """
    largest, total, target, product, *squares = out
    target.scatter_reduce_(0, chunk.token, torch.where(chunk.at_label, chunk.x, -torch.inf), "amax")
    largest.scatter_reduce_(0, chunk.token, chunk.x, "amax")
    x = chunk.x - chunk.of_token(largest.clamp(min=SMALLEST))
    weights = x.exp()
    total.copy_(_sums(weights, chunk.token, len(total)))
    for one in squares:
        one.copy_(_sums(weights.square(), chunk.token, len(total)))
    if with_entropy:
        product.copy_(_sums(weights.mul_(x.clamp_(min=NEGLIGIBLE)), chunk.token, len(total)))


def _sums(values: Tensor, token: Tensor, count: int) -> Tensor:
    return values.new_zeros(count, dtype=torch.float64).index_add_(0, token, values.double())
