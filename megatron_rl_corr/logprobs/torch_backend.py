"""One rank's share of the labels' log-probs, and the gradient with respect to its logits, in torch.

T tokens, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk; x = logits / temperature.

triton_backend.py has both functions as Triton kernels, with the same names, arguments and results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Whether the entropy is computed."""
    chunk_tokens: int
    """C, rows that are held in float32 at once."""


def label_stats(logits: Tensor, labels: Tensor, columns: LogitColumns) -> Tensor:
    """Statistics of each token over this rank's columns, from which `combine_stats` makes log-prob and entropy.

    Args:
        logits: [T, V/tp] in any float type.
        labels: [T] int64, global ids.
        columns: of this rank.

    Returns:
        [4, T] float32: max of x; sum of e = exp(x - max); x of the label, -inf if it is none of these columns; sum of
        e (x - max), 0 unless with_entropy. Without a finite x: -inf, 0, -inf, 0.
    """
    limit, temperature = columns.limit, columns.temperature
    out = logits.new_zeros(4, logits.shape[0], dtype=torch.float32)
    out[0], out[2] = -torch.inf, -torch.inf
    if limit == 0 or logits.shape[0] == 0:
        return out
    logits = logits[:, :limit]
    local, mine = _local(labels, columns.first, limit)
    out[2] = torch.where(mine, logits.gather(1, local)[:, 0].float() / temperature, -torch.inf)
    for rows, x, weights in _tiles(logits, columns):
        chunk = _in_float32(logits[rows], into=x)
        # Dividing keeps the order, so the largest x is that of the largest logit.
        out[0, rows] = chunk.amax(dim=1) / temperature
        # -inf less -inf is NaN.
        _distances(chunk, out[0, rows].clamp(min=SMALLEST), temperature, into=x)
        torch.exp(x, out=weights)
        out[1, rows] = weights.sum(dim=1)
        if columns.with_entropy:
            out[3, rows] = weights.mul_(x.clamp_(min=NEGLIGIBLE)).sum(dim=1)
    return out


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    top: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    columns: LogitColumns,
    *,
    out: Tensor,
) -> None:
    """Write d loss / d logits into `out`; 0 from column limit on.

    With p = exp(x - top - log_total): (grad_logprobs ([label] - p) - grad_entropy p (log p + entropy)) / temperature.
    A token whose upstream gradients are 0 gets 0, whatever its logits are.

    Args:
        logits, labels: as in `label_stats`.
        top: [T] float32, the largest x of the whole vocabulary.
        log_total: [T] float32, log of the sum of exp(x - top) over the whole vocabulary.
        entropy: [T] float32.
        grad_logprobs: [T] float32.
        grad_entropy: [T] float32, read only with_entropy.
        columns: of this rank.
        out: [T, V/tp] of the logits' type; may be their own storage.
    """
    limit, temperature, with_entropy = columns.limit, columns.temperature, columns.with_entropy
    if limit == 0 or logits.shape[0] == 0:
        out.zero_()
        return
    local, mine = _local(labels, columns.first, limit)
    hit = torch.where(mine, grad_logprobs / temperature, 0.0)[:, None]
    # Every column gets exp(x - top) (constant + slope (x - top)); the label's gets `hit` as well.
    scale = (-log_total).exp() / -temperature
    constant, used = grad_logprobs * scale, grad_logprobs != 0
    if with_entropy:
        used |= grad_entropy != 0
        constant = (grad_logprobs + grad_entropy * (entropy - log_total)) * scale
        slope = grad_entropy * scale
    bits = -used.int()[:, None]
    for rows, x, weights in _tiles(logits[:, :limit], columns):
        target = out[rows, :limit]
        _distances(_in_float32(logits[rows, :limit], into=x), top[rows], temperature, into=x)
        if out.dtype == torch.float32:
            weights = target
        torch.exp(x, out=weights)
        if with_entropy:
            x.clamp_(min=NEGLIGIBLE).mul_(slope[rows, None]).add_(constant[rows, None])
            weights.mul_(x)
        else:
            weights.mul_(constant[rows, None])
        weights.scatter_add_(1, local[rows], hit[rows])
        # Rows without upstream gradient become 0 (0 times NaN is NaN): masked_fill_, in a quarter of its time on a CPU.
        weights.view(torch.int32).bitwise_and_(bits[rows])
        target.copy_(weights)  # no copy if it is the same storage
    out[:, limit:] = 0


def _local(labels: Tensor, first: int, limit: int) -> tuple[Tensor, Tensor]:
    """(column of each label [T, 1], clamped to [0, limit); whether this rank has it [T] bool)."""
    local = labels - first
    return local.clamp(0, limit - 1)[:, None], (local >= 0) & (local < limit)


def _tiles(logits: Tensor, columns: LogitColumns) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, two float32 scratch tiles for them), which are the same tile without entropy.

    The tiles together have chunk_tokens rows, but at least one each.
    """
    (tokens, width), buffers = logits.shape, 2 if columns.with_entropy else 1
    height = min(max(columns.chunk_tokens // buffers, 1), tokens)
    if logits.device.type == "cpu":
        height = min(height, max(CACHED // width, 1))
    scratch = logits.new_empty(buffers, height, width, dtype=torch.float32)
    for start in range(0, tokens, height):
        count = min(height, tokens - start)
        yield slice(start, start + count), scratch[0, :count], scratch[-1, :count]


def _in_float32(logits: Tensor, *, into: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float32 else into.copy_(logits)


def _distances(logits: Tensor, top: Tensor, temperature: float, *, into: Tensor) -> None:
    """Write logits / temperature - top into `into`; the float32 logits are not changed."""
    if temperature != 1:
        logits = torch.div(logits, temperature, out=into)
    torch.sub(logits, top[:, None], out=into)
