"""One rank's share of the labels' log-probs, and the gradient in its logits: the torch backend of vocab.py.

T tokens, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk; x = logits / temperature.

parallel/kernels/label_logprobs.py has both functions as Triton kernels, of the same names, arguments and results.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).min
NEGLIGIBLE = -1e4
"""exp of it is 0, as exp(-inf) is, but 0 times it is 0 and not NaN."""
CACHED = 1 << 17
"""Elements of a tile on a CPU: it is passed over several times, and then stays in the second cache."""


def label_stats(
    logits: Tensor, labels: Tensor, *, first: int, limit: int, temperature: float, with_entropy: bool, chunk_tokens: int
) -> Tensor:
    """[4, T] float32 over this rank's columns [:limit]; first is the global id of column 0.

    max of x; sum of e = exp(x - max); x of the label; sum of e (x - max), 0 unless with_entropy. Without a finite x:
    -inf, 0, -inf, 0. Where the label (int64, global) is none of these columns, its x is -inf.
    """
    out = logits.new_zeros(4, logits.shape[0], dtype=torch.float32)
    out[0], out[2] = -torch.inf, -torch.inf
    if limit == 0 or logits.shape[0] == 0:
        return out
    logits = logits[:, :limit]
    local, mine = _local(labels, first, limit)
    out[2] = torch.where(mine, logits.gather(1, local)[:, 0].float() / temperature, -torch.inf)
    for rows, x, weights in _tiles(logits, chunk_tokens, 2 if with_entropy else 1):
        chunk = _in_float32(logits[rows], into=x)
        # Dividing keeps the order, so the largest x is that of the largest logit.
        out[0, rows] = chunk.amax(dim=1) / temperature
        # -inf less -inf is NaN.
        _distances(chunk, out[0, rows].clamp(min=SMALLEST), temperature, into=x)
        torch.exp(x, out=weights)
        out[1, rows] = weights.sum(dim=1)
        if with_entropy:
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
    *,
    first: int,
    limit: int,
    temperature: float,
    with_entropy: bool,
    chunk_tokens: int,
    out: Tensor,
) -> None:
    """Writes d loss / d logits into out [T, V/tp], of the logits' type and maybe their own storage; 0 from limit on.

    With p = exp(x - top - log_total): (grad_logprobs ([label] - p) - grad_entropy p (log p + entropy)) / temperature;
    top, log_total, entropy and both gradients [T] float32, of the whole vocabulary; grad_entropy counts only
    with_entropy. A token whose upstream gradients are 0 gets 0, whatever its logits are.
    """
    if limit == 0 or logits.shape[0] == 0:
        out.zero_()
        return
    local, mine = _local(labels, first, limit)
    hit = torch.where(mine, grad_logprobs / temperature, 0.0)[:, None]
    # exp(x - top) times (constant + slope (x - top)) is the part of every column.
    scale = (-log_total).exp() / -temperature
    constant, used = grad_logprobs * scale, grad_logprobs != 0
    if with_entropy:
        used |= grad_entropy != 0
        constant = (grad_logprobs + grad_entropy * (entropy - log_total)) * scale
        slope = grad_entropy * scale
    bits = -used.int()[:, None]
    for rows, x, weights in _tiles(logits[:, :limit], chunk_tokens, 2 if with_entropy else 1):
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
        # 0 times a NaN is NaN. This is masked_fill_, in a quarter of its time on a CPU.
        weights.view(torch.int32).bitwise_and_(bits[rows])
        target.copy_(weights)  # does nothing onto itself
    out[:, limit:] = 0


def _local(labels: Tensor, first: int, limit: int) -> tuple[Tensor, Tensor]:
    """Columns of the labels [T, 1], 0 or the last where not ours; ours? [T]."""
    local = labels - first
    return local.clamp(0, limit - 1)[:, None], (local >= 0) & (local < limit)


def _tiles(logits: Tensor, chunk_tokens: int, buffers: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows, and two float32 tiles of their size to write in, which are one and the same with a single buffer.

    All buffers together have chunk_tokens rows, or one each.
    """
    tokens, columns = logits.shape
    height = min(max(chunk_tokens // buffers, 1), tokens)
    if logits.device.type == "cpu":
        height = min(height, max(CACHED // columns, 1))
    scratch = logits.new_empty(buffers, height, columns, dtype=torch.float32)
    for start in range(0, tokens, height):
        count = min(height, tokens - start)
        yield slice(start, start + count), scratch[0, :count], scratch[-1, :count]


def _in_float32(logits: Tensor, *, into: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float32 else into.copy_(logits)


def _distances(logits: Tensor, top: Tensor, temperature: float, *, into: Tensor) -> None:
    """x - top, of float32 logits, which may be the caller's and stay."""
    if temperature != 1:
        logits = torch.div(logits, temperature, out=into)
    torch.sub(logits, top[:, None], out=into)
