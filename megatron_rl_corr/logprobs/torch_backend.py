"""One rank's share of the labels' log-probs, and the gradient with respect to its logits, in torch.

T tokens, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk; x = logits / temperature.
K is 4, or 5 with the collision probability.

triton_backend.py has the four functions as Triton kernels, with the same names, arguments and results. N
rows are worked on: those of sampled tokens, or all T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.logprobs.sampled_rows import SampledRows

SMALLEST = torch.finfo(torch.float32).min
NEGLIGIBLE = -1e4
"""Stands for -inf where it is multiplied: its exp is 0 too, but 0 times it is 0 and not NaN."""
CACHED = 1 << 17
"""Elements of a tile on a CPU, so that it stays in the second-level cache while it is read several times."""


@dataclass(frozen=True)
class LogitColumns:
    """This rank's columns of the vocabulary, and how a backend reads logits: x = logits / temperature.

    Example: with 100 ids padded to 128 columns, rank 1 of 2 has first 64 and limit 36.
    """

    first: int
    """Global id of column 0."""
    limit: int
    """Only columns [:limit] belong to the vocabulary."""
    temperature: float
    """Temperature of the sampling."""
    with_entropy: bool
    """True if the entropy is computed."""
    chunk_tokens: int
    """C, rows that are held in float32 at once."""
    with_collision: bool = False
    """True if the collision probability is computed."""

    @property
    def num_stats(self) -> int:
        """K."""
        return 4 + self.with_collision


def label_stats(
    logits: Tensor, labels: Tensor, columns: LogitColumns, sampled: SampledRows | None = None
) -> Tensor:
    """Statistics of each token over this rank's columns, from which `combine_stats` makes
    log-prob and entropy.

    Args:
        logits: [T, V/tp] in any float type.
        labels: [T] int64, global ids.
        columns: of this rank.
        sampled: the rows that are read; None: all.

    Returns:
        [K, N] float32: max of x; sum of e = exp(x - max); x of the label, -inf if it is none of these
        columns; sum of e (x - max), 0 unless with_entropy; with_collision sum of e^2. Without a finite x:
        -inf, 0, -inf, 0, 0.
    """
    limit, temperature = columns.limit, columns.temperature
    labels = labels if sampled is None else labels.index_select(0, sampled.rows)
    out = logits.new_zeros(columns.num_stats, len(labels), dtype=torch.float32)
    out[0], out[2] = -torch.inf, -torch.inf
    if limit == 0 or len(labels) == 0:
        return out
    logits = logits[:, :limit]
    local, mine = _local(labels, columns.first, limit)
    rows = torch.arange(len(labels), device=labels.device) if sampled is None else sampled.rows
    out[2] = torch.where(mine, logits[rows, local[:, 0]].float() / temperature, -torch.inf)
    for rows, x, weights in _tiles(logits, columns, len(labels)):
        chunk = _in_float32(_read(logits, rows, sampled), into=x)
        # Dividing keeps the order, so the largest x is that of the largest logit.
        out[0, rows] = chunk.amax(dim=1) / temperature
        # -inf less -inf is NaN.
        _distances(chunk, out[0, rows].clamp(min=SMALLEST), temperature, into=x)
        torch.exp(x, out=weights)
        out[1, rows] = weights.sum(dim=1)
        if columns.with_collision:
            # A norm: squares of their own would take a tile more.
            out[4, rows] = torch.linalg.vector_norm(weights, dim=1).square()
        if columns.with_entropy:
            out[3, rows] = weights.mul_(x.clamp_(min=NEGLIGIBLE)).sum(dim=1)
    return out


def merge_stats(stats: Tensor) -> Tensor:
    """`label_stats` [K, N] of columns of which `stats` [P, K, N] has those of P parts."""
    maxima, sums, targets, products, *squares = stats.unbind(dim=1)
    top = maxima.amax(dim=0)
    drop = maxima - top.clamp(min=SMALLEST)
    scale = drop.exp()
    products = (products + sums * drop.clamp(min=NEGLIGIBLE)) * scale
    merged = [top, (sums * scale).sum(dim=0), targets.amax(dim=0), products.sum(dim=0)]
    return torch.stack(merged + [(one * scale.square()).sum(dim=0) for one in squares])


def combine_stats(stats: Tensor, with_entropy: bool, sampled: SampledRows | None = None) -> Tensor:
    """Combine every rank's `label_stats` [tp, K, N] over the whole vocabulary.

    Works with differences from the largest logit: of the logits themselves, a log-prob near 0 would
    lose its digits.

    Returns:
        [K, T] float32: log-prob of the label, entropy (anything unless with_entropy), top = largest x, log
        of the sum of exp(x - top), and the collision probability of K = 5. Where no rank has a finite x:
        -inf and 0s, which gives a gradient of 0; in rows that are not of `sampled`: 0.
    """
    maxima, sums, targets, products, *squares = stats.unbind(dim=1)
    top = maxima.amax(dim=0)
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0.0)
    # A rank whose columns are all padding has max -inf and sum 0: its scale, exp(-inf), is 0.
    drop = maxima - top
    scale = drop.exp()
    total = (sums * scale).sum(dim=0).masked_fill(empty, 1.0)
    log_total = total.log()
    logprobs = targets.amax(dim=0) - top - log_total
    entropy = torch.zeros_like(logprobs)
    if with_entropy:
        products = products + sums * drop.clamp(min=NEGLIGIBLE)
        entropy = log_total - (products * scale).sum(dim=0) / total
    collisions = [(one * scale.square()).sum(dim=0) / total.square() for one in squares]
    combined = torch.stack([logprobs, entropy, top, log_total, *collisions])
    return combined if sampled is None else sampled.spread(combined)


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    combined: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    columns: LogitColumns,
    *,
    out: Tensor,
    sampled: SampledRows | None = None,
) -> None:
    """Write d loss / d logits into `out`; 0 from column limit on, and in rows that are not of `sampled`.

    With p = exp(x - top - log_total): (grad_logprobs ([label] - p) - grad_entropy p (log p + entropy)) /
    temperature. A log-prob of -inf is a constant. A token whose upstream gradients are 0 gets 0,
    whatever its logits are.

    Args:
        logits, labels, sampled: as in `label_stats`.
        combined: [K, T] float32, from `combine_stats`; a collision probability has no gradient.
        grad_logprobs: [T] float32.
        grad_entropy: [T] float32; None where nothing depends on the entropy.
        columns: of this rank.
        out: [T, V/tp] of the logits' type; may be their own storage.
    """
    limit, temperature = columns.limit, columns.temperature
    if sampled is not None:
        out.index_fill_(0, sampled.others, 0)
        labels, grad_logprobs = labels[sampled.rows], grad_logprobs[sampled.rows]
        combined = combined[:, sampled.rows]
        grad_entropy = None if grad_entropy is None else grad_entropy[sampled.rows]
    if limit == 0 or len(labels) == 0:
        out.zero_()
        return
    logprobs, entropy, top, log_total = combined[:4]
    grad_logprobs = grad_logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    local, mine = _local(labels, columns.first, limit)
    hit = torch.where(mine, grad_logprobs / temperature, 0.0)[:, None]
    # Every column gets exp(x - top) (constant + slope (x - top)); the label's gets `hit` as well.
    scale = (-log_total).exp() / -temperature
    constant, used = grad_logprobs * scale, grad_logprobs != 0
    if grad_entropy is not None:
        used |= grad_entropy != 0
        constant = (grad_logprobs + grad_entropy * (entropy - log_total)) * scale
        slope = grad_entropy * scale
    bits = -used.int()[:, None]
    for rows, x, weights in _tiles(logits[:, :limit], columns, len(labels)):
        chunk = _read(logits[:, :limit], rows, sampled)
        _distances(_in_float32(chunk, into=x), top[rows], temperature, into=x)
        if sampled is None and out.dtype == torch.float32:
            weights = out[rows, :limit]
        torch.exp(x, out=weights)
        if grad_entropy is not None:
            x.clamp_(min=NEGLIGIBLE).mul_(slope[rows, None]).add_(constant[rows, None])
            weights.mul_(x)
        else:
            weights.mul_(constant[rows, None])
        weights.scatter_add_(1, local[rows], hit[rows])
        # Rows without upstream gradient become 0 (0 times NaN is NaN): masked_fill_, in a quarter of
        # its time on a CPU.
        weights.view(torch.int32).bitwise_and_(bits[rows])
        if sampled is None:
            out[rows, :limit].copy_(weights)  # no copy if it is the same storage
        else:
            out[:, :limit].index_copy_(0, sampled.rows[rows], weights.to(out.dtype))
    out[:, limit:] = 0


def _read(logits: Tensor, rows: slice, sampled: SampledRows | None) -> Tensor:
    """Rows of the logits: a view, or a copy of the sampled ones."""
    return logits[rows] if sampled is None else logits.index_select(0, sampled.rows[rows])


def _local(labels: Tensor, first: int, limit: int) -> tuple[Tensor, Tensor]:
    """(column of each label [T, 1], clamped to [0, limit); whether this rank has it [T] bool)."""
    local = labels - first
    return local.clamp(0, limit - 1)[:, None], (local >= 0) & (local < limit)


def _tiles(logits: Tensor, columns: LogitColumns, count: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(some of `count` rows, two float32 scratch tiles for them), which are the same tile without entropy.

    The tiles together have chunk_tokens rows, but at least one each.
    """
    width, buffers = logits.shape[1], 2 if columns.with_entropy else 1
    height = min(max(columns.chunk_tokens // buffers, 1), count)
    if logits.device.type == "cpu":
        height = min(height, max(CACHED // width, 1))
    scratch = logits.new_empty(buffers, height, width, dtype=torch.float32)
    for start in range(0, count, height):
        size = min(height, count - start)
        yield slice(start, start + size), scratch[0, :size], scratch[-1, :size]


def _in_float32(logits: Tensor, *, into: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float32 else into.copy_(logits)


def _distances(logits: Tensor, top: Tensor, temperature: float, *, into: Tensor) -> None:
    """Write logits / temperature - top into `into`; the float32 logits are not changed."""
    if temperature != 1:
        logits = torch.div(logits, temperature, out=into)
    torch.sub(logits, top[:, None], out=into)
