"""One rank's share of the labels' log-probs, and the gradient with respect to its logits, as Triton kernels.

T tokens, N of them sampled, V vocabulary columns (padded), tp tensor-parallel ranks, P parts of a row;
x = logits / temperature.

One pass over the logits forward, one pass backward that writes the gradient; no other tensor has size [T, V/tp]. Each
program has a part of a row, and the next program the next part, which lies behind it in memory: each of its threads keeps its own running maximum and sums, rescaled when the maximum grows
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and they are merged only at the end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.torch_backend import LogitColumns

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2E = tl.constexpr(math.log2(math.e))
SMALLEST = tl.constexpr(torch.finfo(torch.float32).min)
NEGLIGIBLE = tl.constexpr(-1e30)
"""Stands for -inf where it is multiplied: 0 times it is 0, not NaN."""


class Blocks(NamedTuple):
    """How a row is cut into programs."""

    lanes: int = 128
    """Running maxima of a program, one a thread."""
    elements: int = 32
    """Columns of a tile that each lane has."""
    tiles: int = 8
    """Tiles that a program reads at most."""
    programs: int = 32
    """Programs that each multiprocessor gets at least; with few tokens a program gets fewer tiles for that."""

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.lanes * self.elements

    def span(self, columns: int, rows: int, logits: Tensor) -> int:
        """Columns that one program reads of one of so many rows, a multiple of a tile's."""
        processors = torch.cuda.get_device_properties(logits.device).multi_processor_count if logits.is_cuda else 1
        tiles = columns * rows // (self.columns * self.programs * processors)
        return min(max(tiles, 1), self.tiles) * self.columns


BLOCKS = Blocks()


def label_stats(
    logits: Tensor, labels: Tensor, columns: LogitColumns, sampled: SampledRows | None = None, *,
    blocks: Blocks = BLOCKS,
) -> Tensor:
    """Statistics of each token over this rank's columns: as torch_backend.label_stats, and [4, N] float32 as there.

    A row with a NaN or +inf gives NaN. Differences are taken between the logits and then divided by the temperature, so
    the sums have no rounding of x.

    Args:
        logits: [T, V/tp] in bfloat16, float16 or float32, with adjacent columns.
        labels: [T] int64, global ids.
        columns: of this rank. Its chunk_tokens is not used: the only scratch is [P, 4, N].
        sampled: the rows that are read; None: all.
        blocks: how a row is cut into programs.

    Raises:
        ValueError: logits of another type, or whose columns are not adjacent.
    """
    _check(logits)
    count = len(labels) if sampled is None else len(sampled)
    out = logits.new_empty(4, count, dtype=torch.float32)
    if count == 0:
        return out
    span = blocks.span(columns.limit, count, logits)
    parts = max(triton.cdiv(columns.limit, span), 1)
    partial = out if parts == 1 else logits.new_empty(parts, 4, count, dtype=torch.float32)
    inverse, vector = 1 / columns.temperature, _vector(logits)
    with torch.cuda.device_of(logits):
        _stats_kernel[parts * count,](
            logits, logits.stride(0), labels.contiguous(), _order(sampled, labels), partial, count, parts,
            columns.first, columns.limit, span, inverse, inverse if parts == 1 else 1.0,
            WITH_ENTROPY=columns.with_entropy, SOME_ROWS=sampled is not None, ROWS=blocks.elements // vector,
            LANES=blocks.lanes, VECTOR=vector, num_warps=blocks.lanes // 32,
        )  # fmt: skip
    if parts > 1:
        _merge(partial, out, inverse, columns.with_entropy)
    return out


def merge_stats(stats: Tensor) -> Tensor:
    """[4, N] of the statistics [P, 4, N] of parts of the columns: as torch_backend.merge_stats."""
    out = stats.new_empty(stats.shape[1:])
    _merge(stats, out, 1.0, with_entropy=True)
    return out


def _merge(partial: Tensor, out: Tensor, inverse: float, with_entropy: bool) -> None:
    """partial [P, 4, N], in units of x / inverse -> out [4, N]."""
    parts, _, count = partial.shape
    if count:
        with torch.cuda.device_of(partial):
            _merge_kernel[triton.cdiv(count, 32),](
                partial, out, count, parts, inverse, WITH_ENTROPY=with_entropy,
                PARTS=triton.next_power_of_2(parts), TOKENS=32, num_warps=4,
            )  # fmt: skip


def combine_stats(stats: Tensor, with_entropy: bool, sampled: SampledRows | None = None) -> Tensor:
    """[4, T] log-prob, entropy, top and log_total of every rank's statistics [tp, 4, N]: as torch_backend's."""
    shards, _, count = stats.shape
    tokens = count if sampled is None else sampled.num_tokens
    out = stats.new_empty(4, tokens)
    if tokens:
        with torch.cuda.device_of(stats):
            _combine_kernel[triton.cdiv(tokens, 128),](
                stats, _order(sampled, stats), out, tokens, count, shards, WITH_ENTROPY=with_entropy,
                SOME_ROWS=sampled is not None, SHARDS=triton.next_power_of_2(shards), TOKENS=128, num_warps=4,
            )  # fmt: skip
    return out


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
    blocks: Blocks = BLOCKS,
) -> None:
    """Write d loss / d logits into `out`: arguments as torch_backend.logits_gradient, types as `label_stats`.

    The logits of a token that is not of `sampled`, or whose upstream gradients are 0, are not read.

    Raises:
        ValueError: logits or out of another type, or with columns that are not adjacent.
    """
    _check(logits)
    _check(out)
    tokens, width = logits.shape
    if tokens == 0 or width == 0:
        return
    with_entropy, count = grad_entropy is not None, tokens if sampled is None else len(sampled)
    per_token = [labels, grad_logprobs, grad_entropy if with_entropy else grad_logprobs]
    span = blocks.span(width, tokens, logits)
    parts = triton.cdiv(width, span)
    with torch.cuda.device_of(logits):
        # With fused multiply-add, x - top would not be 0 for the largest x, as top is rounded.
        _gradient_kernel[parts * tokens,](
            logits, logits.stride(0), *(tensor.contiguous() for tensor in per_token), combined,
            _order(sampled, labels), out, out.stride(0), tokens, count, parts, columns.first, columns.limit, width,
            span, 1 / columns.temperature, WITH_ENTROPY=with_entropy, SOME_ROWS=sampled is not None,
            COLUMNS=blocks.columns, num_warps=blocks.lanes // 32, enable_fp_fusion=False,
        )  # fmt: skip


def _order(sampled: SampledRows | None, unread: Tensor) -> Tensor:
    """The rows' order; without one anything of the device, which no kernel reads."""
    return unread if sampled is None else sampled.order


def _check(matrix: Tensor) -> None:
    if matrix.dtype not in DTYPES:
        raise ValueError(
            f"the Triton log-probs take logits in bfloat16, float16 or float32, got {matrix.dtype}; "
            "the torch backend takes every float type"
        )
    if matrix.stride(1) != 1 and matrix.shape[1] > 1:
        raise ValueError(
            f"the Triton log-probs take logits and gradient with adjacent columns, got strides {matrix.stride()}; "
            "call .contiguous() on them"
        )


def _vector(logits: Tensor) -> int:
    """Columns of one 16-byte load; 1 unless all rows begin at a multiple of 16 bytes."""
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0
    return 16 // logits.element_size() if aligned else 1


@triton.jit
def _absorb(top, total, product, x, inverse, WITH_ENTROPY: tl.constexpr):
    """Add a tile x [ROWS, LANES, VECTOR] to the lanes' running maxima, sums of e = exp(x - max) and of e (x - max)."""
    new = tl.maximum(top, tl.max(tl.max(x, 2), 0))
    # Never -inf - (-inf): the maxima begin finite.
    distance = x - new[None, :, None]
    e = tl.exp2(distance * (inverse * LOG2E))
    drop = top - new
    scale = tl.exp2(drop * (inverse * LOG2E))
    if WITH_ENTROPY:
        here = tl.sum(tl.sum(e * tl.maximum(distance, NEGLIGIBLE), 2), 0)
        product = (product + total * tl.maximum(drop, NEGLIGIBLE)) * scale + here
    total = total * scale + tl.sum(tl.sum(e, 2), 0)
    return new, total, product


@triton.jit
def _merge_lanes(top, total, product, inverse, WITH_ENTROPY: tl.constexpr):
    """Merge maxima, sums and products of lanes or parts along the first dimension."""
    largest = tl.maximum(tl.max(top, 0), SMALLEST)
    drop = top - largest
    scale = tl.exp2(drop * (inverse * LOG2E))
    if WITH_ENTROPY:
        product = tl.sum((product + total * tl.maximum(drop, NEGLIGIBLE)) * scale, 0)
    else:
        product = tl.sum(product, 0)
    return largest, tl.sum(total * scale, 0), product


@triton.jit
def _write(out, tokens, top, total, label, product, unit, mask):
    """Write one column of out [4, T]."""
    # The largest x adds 1 to the sum, so 0 means a row of -inf. tl.max skips a NaN, the sum does not.
    top = tl.where(total == 0, float("-inf"), tl.where(total == total, top * unit, total))
    tl.store(out, top, mask=mask)
    tl.store(out + tokens, total, mask=mask)
    tl.store(out + 2 * tokens, label * unit, mask=mask)
    tl.store(out + 3 * tokens, product * unit, mask=mask)


@triton.jit(do_not_specialize=["count", "parts"])
def _stats_kernel(
    logits, stride, labels, order, out, count, parts, first, limit, span, inverse, unit,
    WITH_ENTROPY: tl.constexpr, SOME_ROWS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Column `place` of out[part] [4, N], over logits [part * span, (part + 1) * span); in units of x / unit."""
    COLUMNS: tl.constexpr = ROWS * LANES * VECTOR
    place, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    # int64: T * V passes 2^31.
    token = place.to(tl.int64)
    if SOME_ROWS:
        token = tl.load(order + place)
    logits += token * stride
    start = part * span
    stop = tl.minimum(start + span, limit)
    # A thread has whole vectors of a lane, so only the reduction over lanes crosses threads.
    columns = (tl.arange(0, ROWS)[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]) * VECTOR
    columns += tl.arange(0, VECTOR)[None, None, :]
    top = tl.full([LANES], SMALLEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    product = tl.zeros([LANES], tl.float32)
    whole = start + (stop - start) // COLUMNS * COLUMNS
    for at in range(start, whole, COLUMNS):
        x = tl.load(logits + at + columns).to(tl.float32)
        top, total, product = _absorb(top, total, product, x, inverse, WITH_ENTROPY)
    if whole < stop:
        x = tl.load(logits + whole + columns, mask=whole + columns < stop, other=float("-inf")).to(tl.float32)
        top, total, product = _absorb(top, total, product, x, inverse, WITH_ENTROPY)
    top, total, product = _merge_lanes(top, total, product, inverse, WITH_ENTROPY)
    local = tl.load(labels + token) - first
    mine = (local >= start) & (local < stop)
    label = tl.load(logits + local, mask=mine, other=float("-inf")).to(tl.float32)
    _write(out + part.to(tl.int64) * 4 * count + place, count, top, total, label, product, unit, None)


@triton.jit(do_not_specialize=["tokens", "parts"])
def _merge_kernel(
    partial, out, tokens, parts, inverse, WITH_ENTROPY: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr
):
    """partial [P, 4, T] -> out [4, T]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.arange(0, PARTS)[:, None]
    partial += part * 4 * tokens + token[None, :]
    mask = (part < parts) & (token < tokens)[None, :]
    top = tl.load(partial, mask=mask, other=float("-inf"))
    total = tl.load(partial + tokens, mask=mask, other=0.0)
    label = tl.max(tl.load(partial + 2 * tokens, mask=mask, other=float("-inf")), 0)
    product = tl.load(partial + 3 * tokens, mask=mask, other=0.0)
    top, total, product = _merge_lanes(top, total, product, inverse, WITH_ENTROPY)
    _write(out + token, tokens, top, total, label, product, inverse, token < tokens)


@triton.jit(do_not_specialize=["tokens", "count", "shards"])
def _combine_kernel(
    stats, order, out, tokens, count, shards,
    WITH_ENTROPY: tl.constexpr, SOME_ROWS: tl.constexpr, SHARDS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """stats [tp, 4, N] -> column order[place] of out [4, T]: zeros for a place from N on."""
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside, sampled = place < tokens, place < count
    token = place.to(tl.int64)
    if SOME_ROWS:
        token = tl.load(order + place, mask=inside, other=0)
    shard = tl.arange(0, SHARDS)[:, None]
    stats += shard * 4 * count + place[None, :]
    mask = (shard < shards) & sampled[None, :]
    top = tl.load(stats, mask=mask, other=float("-inf"))
    total = tl.load(stats + count, mask=mask, other=0.0)
    label = tl.max(tl.load(stats + 2 * count, mask=mask, other=float("-inf")), 0)
    # A finite x adds at least 1 to its rank's sum. tl.max skips a NaN, the sum does not.
    empty = tl.sum(total, 0) == 0
    largest = tl.where(empty, 0.0, tl.max(top, 0))
    drop = top - largest[None, :]
    scale = tl.exp(drop)
    whole = tl.where(empty, 1.0, tl.sum(total * scale, 0))
    log_total = tl.log(whole)
    out += token
    tl.store(out, tl.where(sampled, label - largest - log_total, 0.0), mask=inside)
    if WITH_ENTROPY:
        product = tl.load(stats + 3 * count, mask=mask, other=0.0)
        product = tl.sum((product + total * tl.maximum(drop, NEGLIGIBLE)) * scale, 0)
        tl.store(out + tokens, tl.where(sampled, log_total - product / whole, 0.0), mask=inside)
    tl.store(out + 2 * tokens, tl.where(sampled, largest, 0.0), mask=inside)
    tl.store(out + 3 * tokens, log_total, mask=inside)


@triton.jit(do_not_specialize=["tokens", "count", "parts"])
def _gradient_kernel(
    logits, stride, labels, grad_logprobs, grad_entropy, combined, order, out, out_stride,
    tokens, count, parts, first, limit, width, span, inverse,
    WITH_ENTROPY: tl.constexpr, SOME_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns [part * span, (part + 1) * span) of row order[place]: zeros for a place from N on."""
    place, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    token = place.to(tl.int64)
    if SOME_ROWS:
        token = tl.load(order + place)
    logits += token * stride
    out += token * out_stride
    start = part * span
    stop = tl.minimum(start + span, width)
    columns = tl.arange(0, COLUMNS)
    combined += token
    # A log-prob of -inf is a constant.
    upstream = tl.where(tl.load(combined) == float("-inf"), 0.0, tl.load(grad_logprobs + token))
    slope, offset = 0.0, 0.0
    if WITH_ENTROPY:
        slope = tl.load(grad_entropy + token)
    if (place >= count) | ((upstream == 0) & (slope == 0)):
        for at in range(start, stop, COLUMNS):
            tl.store(out + at + columns, tl.zeros([COLUMNS], out.dtype.element_ty), mask=at + columns < stop)
    else:
        if WITH_ENTROPY:
            offset = tl.load(combined + tokens)
        top_here, log_total_here = tl.load(combined + 2 * tokens), tl.load(combined + 3 * tokens)
        local = tl.load(labels + token) - first
        hit = tl.where((local >= 0) & (local < limit), local, -1).to(tl.int32)
        whole = start + tl.maximum(tl.minimum(stop, limit) - start, 0) // COLUMNS * COLUMNS
        for at in range(start, whole, COLUMNS):
            x = tl.load(logits + at + columns).to(tl.float32) * inverse
            slot = at + columns
            g = _gradient(x, slot == hit, top_here, log_total_here, offset, upstream, slope, inverse, WITH_ENTROPY)
            tl.store(out + slot, g.to(out.dtype.element_ty))
        for at in range(whole, stop, COLUMNS):
            slot = at + columns
            x = tl.load(logits + slot, mask=slot < limit, other=float("-inf")).to(tl.float32) * inverse
            g = _gradient(x, slot == hit, top_here, log_total_here, offset, upstream, slope, inverse, WITH_ENTROPY)
            tl.store(out + slot, tl.where(slot < limit, g, 0.0).to(out.dtype.element_ty), mask=slot < stop)


@triton.jit
def _gradient(x, hit, top, log_total, entropy, upstream, slope, inverse, WITH_ENTROPY: tl.constexpr):
    """(upstream ([hit] - p) - slope p (log p + entropy)) / temperature."""
    log_p = x - top - log_total
    p = tl.exp2(log_p * LOG2E)
    if WITH_ENTROPY:
        p *= upstream + slope * (tl.maximum(log_p, NEGLIGIBLE) + entropy)
    else:
        p *= upstream
    return (tl.where(hit, upstream, 0.0) - p) * inverse
