"""The Triton kernels behind triton_backend.py, which says what they compute and launches them.

T tokens, N of them sampled, tp tensor-parallel ranks, P parts of a row; K statistics of a token, 4 or 5.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
SMALLEST = tl.constexpr(torch.finfo(torch.float32).min)
NEGLIGIBLE = tl.constexpr(-1e30)
"""Stands for -inf where it is multiplied: 0 times it is 0, not NaN."""


@triton.jit
def _absorb(
    top, total, product, squares, x, inverse, WITH_ENTROPY: tl.constexpr, WITH_COLLISION: tl.constexpr
):
    """Add a tile x [ROWS, LANES, VECTOR] to the lanes' running maxima, sums of e = exp(x - max),
    e (x - max), e^2.
    """
    new = tl.maximum(top, tl.max(tl.max(x, 2), 0))
    # Never -inf - (-inf): the maxima begin finite.
    distance = x - new[None, :, None]
    e = tl.exp2(distance * (inverse * LOG2E))
    drop = top - new
    scale = tl.exp2(drop * (inverse * LOG2E))
    if WITH_ENTROPY:
        here = tl.sum(tl.sum(e * tl.maximum(distance, NEGLIGIBLE), 2), 0)
        product = (product + total * tl.maximum(drop, NEGLIGIBLE)) * scale + here
    if WITH_COLLISION:
        squares = squares * scale * scale + tl.sum(tl.sum(e * e, 2), 0)
    total = total * scale + tl.sum(tl.sum(e, 2), 0)
    return new, total, product, squares


@triton.jit
def _merge_lanes(top, total, product, squares, inverse, WITH_ENTROPY: tl.constexpr):
    """Merge maxima, sums, products and sums of squares of lanes or parts along the first dimension."""
    largest = tl.maximum(tl.max(top, 0), SMALLEST)
    drop = top - largest
    scale = tl.exp2(drop * (inverse * LOG2E))
    if WITH_ENTROPY:
        product = tl.sum((product + total * tl.maximum(drop, NEGLIGIBLE)) * scale, 0)
    else:
        product = tl.sum(product, 0)
    return largest, tl.sum(total * scale, 0), product, tl.sum(squares * scale * scale, 0)


@triton.jit
def _write(out, tokens, top, total, label, product, squares, unit, mask, WITH_COLLISION: tl.constexpr):
    """Write one column of out [K, T]."""
    # The largest x adds 1 to the sum, so 0 means a row of -inf. tl.max skips a NaN, the sum does not.
    top = tl.where(total == 0, float("-inf"), tl.where(total == total, top * unit, total))
    tl.store(out, top, mask=mask)
    tl.store(out + tokens, total, mask=mask)
    tl.store(out + 2 * tokens, label * unit, mask=mask)
    tl.store(out + 3 * tokens, product * unit, mask=mask)
    if WITH_COLLISION:
        tl.store(out + 4 * tokens, squares, mask=mask)


@triton.jit(do_not_specialize=["count", "parts"])
def stats_kernel(
    logits,
    stride,
    labels,
    order,
    out,
    count,
    parts,
    first,
    limit,
    span,
    inverse,
    unit,
    WITH_ENTROPY: tl.constexpr,
    WITH_COLLISION: tl.constexpr,
    SOME_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Column `place` of out[part] [K, N], over logits [part * span, (part + 1) * span); in
    units of x / unit.
    """
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
    squares = tl.zeros([LANES], tl.float32)
    whole = start + (stop - start) // COLUMNS * COLUMNS
    for at in range(start, whole, COLUMNS):
        x = tl.load(logits + at + columns).to(tl.float32)
        top, total, product, squares = _absorb(
            top, total, product, squares, x, inverse, WITH_ENTROPY, WITH_COLLISION
        )
    if whole < stop:
        x = tl.load(logits + whole + columns, mask=whole + columns < stop, other=float("-inf")).to(tl.float32)
        top, total, product, squares = _absorb(
            top, total, product, squares, x, inverse, WITH_ENTROPY, WITH_COLLISION
        )
    top, total, product, squares = _merge_lanes(top, total, product, squares, inverse, WITH_ENTROPY)
    local = tl.load(labels + token) - first
    mine = (local >= start) & (local < stop)
    label = tl.load(logits + local, mask=mine, other=float("-inf")).to(tl.float32)
    out += part.to(tl.int64) * (5 if WITH_COLLISION else 4) * count + place
    _write(out, count, top, total, label, product, squares, unit, None, WITH_COLLISION)


@triton.jit(do_not_specialize=["tokens", "parts"])
def merge_kernel(
    partial,
    out,
    tokens,
    parts,
    inverse,
    WITH_ENTROPY: tl.constexpr,
    WITH_COLLISION: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """partial [P, K, T] -> out [K, T]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.arange(0, PARTS)[:, None]
    partial += part * (5 if WITH_COLLISION else 4) * tokens + token[None, :]
    mask = (part < parts) & (token < tokens)[None, :]
    top = tl.load(partial, mask=mask, other=float("-inf"))
    total = tl.load(partial + tokens, mask=mask, other=0.0)
    label = tl.max(tl.load(partial + 2 * tokens, mask=mask, other=float("-inf")), 0)
    product = tl.load(partial + 3 * tokens, mask=mask, other=0.0)
    squares = total
    if WITH_COLLISION:
        squares = tl.load(partial + 4 * tokens, mask=mask, other=0.0)
    top, total, product, squares = _merge_lanes(top, total, product, squares, inverse, WITH_ENTROPY)
    _write(out + token, tokens, top, total, label, product, squares, inverse, token < tokens, WITH_COLLISION)


@triton.jit(do_not_specialize=["tokens", "count", "shards"])
def combine_kernel(
    stats,
    order,
    out,
    tokens,
    count,
    shards,
    WITH_ENTROPY: tl.constexpr,
    WITH_COLLISION: tl.constexpr,
    SOME_ROWS: tl.constexpr,
    SHARDS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """stats [tp, K, N] -> column order[place] of out [K, T]: zeros for a place from N on."""
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside, sampled = place < tokens, place < count
    token = place.to(tl.int64)
    if SOME_ROWS:
        token = tl.load(order + place, mask=inside, other=0)
    shard = tl.arange(0, SHARDS)[:, None]
    stats += shard * (5 if WITH_COLLISION else 4) * count + place[None, :]
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
    if WITH_COLLISION:
        squares = tl.sum(tl.load(stats + 4 * count, mask=mask, other=0.0) * scale * scale, 0)
        tl.store(out + 4 * tokens, tl.where(sampled, squares / (whole * whole), 0.0), mask=inside)


@triton.jit(do_not_specialize=["tokens", "count", "parts"])
def gradient_kernel(
    logits,
    stride,
    labels,
    grad_logprobs,
    grad_entropy,
    combined,
    order,
    out,
    out_stride,
    tokens,
    count,
    parts,
    first,
    limit,
    width,
    span,
    inverse,
    WITH_ENTROPY: tl.constexpr,
    SOME_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
            g = _gradient(
                x, slot == hit, top_here, log_total_here, offset, upstream, slope, inverse, WITH_ENTROPY
            )
            tl.store(out + slot, g.to(out.dtype.element_ty))
        for at in range(whole, stop, COLUMNS):
            slot = at + columns
            x = tl.load(logits + slot, mask=slot < limit, other=float("-inf")).to(tl.float32) * inverse
            g = _gradient(
                x, slot == hit, top_here, log_total_here, offset, upstream, slope, inverse, WITH_ENTROPY
            )
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
