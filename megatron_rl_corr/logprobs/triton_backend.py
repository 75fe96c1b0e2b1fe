"""One rank's share of the labels' log-probs, and the gradient with respect to its logits, as Triton kernels.

T tokens, V vocabulary columns (padded), tp tensor-parallel ranks, P parts of a row; x = logits / temperature.

One pass over the logits forward, one pass backward that writes the gradient; no other tensor has size [T, V/tp]. Each
program has a part of a row: each of its threads keeps its own running maximum and sums, rescaled when the maximum grows
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), and they are merged only at the end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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

    def span(self, columns: int, logits: Tensor) -> int:
        """Columns that one program reads, a multiple of a tile's."""
        processors = torch.cuda.get_device_properties(logits.device).multi_processor_count if logits.is_cuda else 1
        tiles = columns * logits.shape[0] // (self.columns * self.programs * processors)
        return min(max(tiles, 1), self.tiles) * self.columns


BLOCKS = Blocks()


def label_stats(logits: Tensor, labels: Tensor, columns: LogitColumns, *, blocks: Blocks = BLOCKS) -> Tensor:
    """Statistics of each token over this rank's columns: as torch_backend.label_stats, and [4, T] float32 as there.

    A row with a NaN or +inf gives NaN. Differences are taken between the logits and then divided by the temperature, so
    the sums have no rounding of x.

    Args:
        logits: [T, V/tp] in bfloat16, float16 or float32, with adjacent columns.
        labels: [T] int64, global ids.
        columns: of this rank. Its chunk_tokens is not used: the only scratch is [P, 4, T].
        blocks: how a row is cut into programs.

    Raises:
        ValueError: logits of another type, or whose columns are not adjacent.
    """
    _check(logits)
    tokens = logits.shape[0]
    span = blocks.span(columns.limit, logits)
    parts = max(triton.cdiv(columns.limit, span), 1)
    out = logits.new_empty(4, tokens, dtype=torch.float32)
    if tokens == 0:
        return out
    partial = out if parts == 1 else logits.new_empty(parts, 4, tokens, dtype=torch.float32)
    inverse, vector = 1 / columns.temperature, _vector(logits)
    with torch.cuda.device_of(logits):
        _stats_kernel[tokens, parts](
            logits, logits.stride(0), labels.contiguous(), partial, tokens, columns.first, columns.limit, span,
            inverse, inverse if parts == 1 else 1.0, WITH_ENTROPY=columns.with_entropy,
            ROWS=blocks.elements // vector, LANES=blocks.lanes, VECTOR=vector,
            num_warps=blocks.lanes // 32,
        )  # fmt: skip
        if parts > 1:
            _merge_kernel[(triton.cdiv(tokens, 32),)](
                partial, out, tokens, parts, inverse, WITH_ENTROPY=columns.with_entropy,
                PARTS=triton.next_power_of_2(parts), TOKENS=32, num_warps=4,
            )  # fmt: skip
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
    blocks: Blocks = BLOCKS,
) -> None:
    """Write d loss / d logits into `out`: arguments as torch_backend.logits_gradient, types as `label_stats`.

    The logits of a token whose upstream gradients are 0 are not read.

    Raises:
        ValueError: logits or out of another type, or with columns that are not adjacent.
    """
    _check(logits)
    _check(out)
    tokens, width = logits.shape
    if tokens == 0 or width == 0:
        return
    per_token = [labels, top, log_total, entropy, grad_logprobs]
    per_token.append(grad_entropy if columns.with_entropy else grad_logprobs)
    span = blocks.span(width, logits)
    with torch.cuda.device_of(logits):
        # With fused multiply-add, x - top would not be 0 for the largest x, as top is rounded.
        _gradient_kernel[tokens, triton.cdiv(width, span)](
            logits, logits.stride(0), *(tensor.contiguous() for tensor in per_token), out, out.stride(0),
            columns.first, columns.limit, width, span, 1 / columns.temperature,
            WITH_ENTROPY=columns.with_entropy, COLUMNS=blocks.columns, num_warps=blocks.lanes // 32,
            enable_fp_fusion=False,
        )  # fmt: skip


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
def _merge(top, total, product, inverse, WITH_ENTROPY: tl.constexpr):
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


@triton.jit(do_not_specialize=["tokens"])
def _stats_kernel(
    logits, stride, labels, out, tokens, first, limit, span, inverse, unit,
    WITH_ENTROPY: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Column `token` of out[part] [4, T], over logits [part * span, (part + 1) * span); in units of x / unit."""
    COLUMNS: tl.constexpr = ROWS * LANES * VECTOR
    # int64: T * V passes 2^31.
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
    top, total, product = _merge(top, total, product, inverse, WITH_ENTROPY)
    local = tl.load(labels + token) - first
    mine = (local >= start) & (local < stop)
    label = tl.load(logits + local, mask=mine, other=float("-inf")).to(tl.float32)
    _write(out + part * 4 * tokens + token, tokens, top, total, label, product, unit, None)


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
    top, total, product = _merge(top, total, product, inverse, WITH_ENTROPY)
    _write(out + token, tokens, top, total, label, product, inverse, token < tokens)


@triton.jit
def _gradient_kernel(
    logits, stride, labels, top, log_total, entropy, grad_logprobs, grad_entropy, out, out_stride,
    first, limit, width, span, inverse, WITH_ENTROPY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns [part * span, (part + 1) * span) of row `token`."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += token * stride
    out += token * out_stride
    start = part * span
    stop = tl.minimum(start + span, width)
    columns = tl.arange(0, COLUMNS)
    upstream = tl.load(grad_logprobs + token)
    slope, offset = 0.0, 0.0
    if WITH_ENTROPY:
        slope = tl.load(grad_entropy + token)
    if (upstream == 0) & (slope == 0):
        for at in range(start, stop, COLUMNS):
            tl.store(out + at + columns, tl.zeros([COLUMNS], out.dtype.element_ty), mask=at + columns < stop)
    else:
        if WITH_ENTROPY:
            offset = tl.load(entropy + token)
        top_here, log_total_here = tl.load(top + token), tl.load(log_total + token)
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
