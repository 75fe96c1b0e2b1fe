"""One rank's share of the labels' log-probs, and the gradient with respect to its logits, as Triton kernels.

T tokens, N of them sampled, V vocabulary columns (padded), tp tensor-parallel ranks, P parts of a row;
x = logits / temperature. K is 4, or 5 with the collision probability.

One pass over the logits forward, one pass backward that writes the gradient; no other tensor has size [T,
V/tp]. Each program has a part of a row, and the next program the part behind it in memory: each of its
threads keeps its own running maximum and sums, rescaled when the maximum grows (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018), and they are merged only at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.torch_backend import LogitColumns
from megatron_rl_corr.logprobs.triton_kernels import (
    combine_kernel,
    gradient_kernel,
    merge_kernel,
    stats_kernel,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Blocks(NamedTuple):
    """How a row is cut into programs."""

    lanes: int = 128
    """Running maxima of a program, one a thread."""
    elements: int = 32
    """Columns of a tile that each lane has."""
    tiles: int = 8
    """Tiles that a program reads at most."""
    programs: int = 32
    """Programs that each multiprocessor gets at least; with few tokens a program gets
    fewer tiles for that.
    """

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.lanes * self.elements

    def span(self, columns: int, rows: int, logits: Tensor) -> int:
        """Columns that one program reads of one of so many rows, a multiple of a tile's."""
        processors = (
            torch.cuda.get_device_properties(logits.device).multi_processor_count if logits.is_cuda else 1
        )
        tiles = columns * rows // (self.columns * self.programs * processors)
        return min(max(tiles, 1), self.tiles) * self.columns


BLOCKS = Blocks()


def label_stats(
    logits: Tensor,
    labels: Tensor,
    columns: LogitColumns,
    sampled: SampledRows | None = None,
    *,
    blocks: Blocks = BLOCKS,
) -> Tensor:
    """Statistics of each token over this rank's columns: as torch_backend.label_stats, and [K, N]
    float32 as there.

    A row with a NaN or +inf gives NaN. Differences are taken between the logits and then divided by the
    temperature, so the sums have no rounding of x.

    Args:
        logits: [T, V/tp] in bfloat16, float16 or float32, with adjacent columns.
        labels: [T] int64, global ids.
        columns: of this rank. Its chunk_tokens is not used: the only scratch is [P, K, N].
        sampled: the rows that are read; None: all.
        blocks: how a row is cut into programs.

    Raises:
        ValueError: logits of another type, or whose columns are not adjacent.
    """
    _check(logits)
    count = len(labels) if sampled is None else len(sampled)
    out = logits.new_empty(columns.num_stats, count, dtype=torch.float32)
    if count == 0:
        return out
    span = blocks.span(columns.limit, count, logits)
    parts = max(triton.cdiv(columns.limit, span), 1)
    partial = out if parts == 1 else logits.new_empty(parts, *out.shape, dtype=torch.float32)
    inverse, vector = 1 / columns.temperature, _vector(logits)
    with torch.cuda.device_of(logits):
        stats_kernel[parts * count,](
            logits,
            logits.stride(0),
            labels.contiguous(),
            _order(sampled, labels),
            partial,
            count,
            parts,
            columns.first,
            columns.limit,
            span,
            inverse,
            inverse if parts == 1 else 1.0,
            WITH_ENTROPY=columns.with_entropy,
            WITH_COLLISION=columns.with_collision,
            SOME_ROWS=sampled is not None,
            ROWS=blocks.elements // vector,
            LANES=blocks.lanes,
            VECTOR=vector,
            num_warps=blocks.lanes // 32,
        )
    if parts > 1:
        _merge(partial, out, inverse, columns.with_entropy)
    return out


def merge_stats(stats: Tensor) -> Tensor:
    """[K, N] of the statistics [P, K, N] of parts of the columns: as torch_backend.merge_stats."""
    out = stats.new_empty(stats.shape[1:])
    _merge(stats, out, 1.0, with_entropy=True)
    return out


def _merge(partial: Tensor, out: Tensor, inverse: float, with_entropy: bool) -> None:
    """partial [P, K, N], in units of x / inverse -> out [K, N]."""
    parts, num_stats, count = partial.shape
    if count:
        with torch.cuda.device_of(partial):
            merge_kernel[triton.cdiv(count, 32),](
                partial,
                out,
                count,
                parts,
                inverse,
                WITH_ENTROPY=with_entropy,
                WITH_COLLISION=num_stats == 5,
                PARTS=triton.next_power_of_2(parts),
                TOKENS=32,
                num_warps=4,
            )


def combine_stats(stats: Tensor, with_entropy: bool, sampled: SampledRows | None = None) -> Tensor:
    """[K, T] log-prob, entropy, top, log_total (and collision) of all ranks' [tp, K, N]: as
    torch_backend's.
    """
    shards, num_stats, count = stats.shape
    tokens = count if sampled is None else sampled.num_tokens
    out = stats.new_empty(num_stats, tokens)
    if tokens:
        with torch.cuda.device_of(stats):
            combine_kernel[triton.cdiv(tokens, 128),](
                stats,
                _order(sampled, stats),
                out,
                tokens,
                count,
                shards,
                WITH_ENTROPY=with_entropy,
                WITH_COLLISION=num_stats == 5,
                SOME_ROWS=sampled is not None,
                SHARDS=triton.next_power_of_2(shards),
                TOKENS=128,
                num_warps=4,
            )
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
        gradient_kernel[parts * tokens,](
            logits,
            logits.stride(0),
            *(tensor.contiguous() for tensor in per_token),
            combined,
            _order(sampled, labels),
            out,
            out.stride(0),
            tokens,
            count,
            parts,
            columns.first,
            columns.limit,
            width,
            span,
            1 / columns.temperature,
            WITH_ENTROPY=with_entropy,
            SOME_ROWS=sampled is not None,
            COLUMNS=blocks.columns,
            num_warps=blocks.lanes // 32,
            enable_fp_fusion=False,
        )


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
            "the Triton log-probs take logits and gradient with adjacent columns, got strides "
            f"{matrix.stride()}; call .contiguous() on them"
        )


def _vector(logits: Tensor) -> int:
    """Columns of one 16-byte load; 1 unless all rows begin at a multiple of 16 bytes."""
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0
    return 16 // logits.element_size() if aligned else 1
