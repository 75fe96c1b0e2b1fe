"""Log-prob of the label, and entropy, from hidden states and the output weight: the logits of all tokens never exist.

T tokens, H hidden size, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs.torch_backend import LogitColumns
from megatron_rl_corr.logprobs.vocab import backend, check_settings, combine_stats, vocab_columns
from megatron_rl_corr.parallel.collectives import all_gather_stacked

WEIGHT_ROWS = 8192
"""Rows of the weight that are converted to float32, or get a chunk's part of their gradient, at a time."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk_tokens: int = 1024,
    fp32_lm_head: bool = False,
    reduce_hidden_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """vocab_parallel_logprobs of logits = hidden weight^T, of which only C rows exist at a time.

    The logits are computed again in backward. Collectives over tp_group: one in forward, and one in backward, an
    all-reduce of hidden's gradient [T, H], to which every rank has a share. The weight's gradient is summed over chunks
    in float32 [V/tp, H].

    Args:
        hidden: [T, H], the same on all tensor-parallel ranks.
        weight: [V/tp, H] of the same type, this rank's rows.
        labels: [T] int64, global ids.
        tp_group: ranks that share the vocabulary; None: this rank alone.
        temperature: of the sampling.
        vocab_size: columns from here on do not belong to the vocabulary; None: all do.
        with_entropy: whether to compute the entropy.
        chunk_tokens: C.
        fp32_lm_head: logits and their gradient are float32, from float32 copies of hidden and weight, at float32's
            speed; else they have the type of hidden, as in Megatron's output layer.
        reduce_hidden_gradient: False leaves hidden's gradient as this rank's share, for hidden states whose own
            backward sums over tp: those that Megatron gathers from sequence-parallel ranks.

    Returns:
        (log-probs [T] float32, entropies [T] float32 or None).

    Raises:
        ValueError: for different lengths or types, and for a temperature or chunk_tokens that is not positive.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"log-probs take hidden [T, H], weight [V/tp, H] and labels [T], got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(labels.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must be of one type, got {hidden.dtype} and {weight.dtype}; cast one")
    check_settings(temperature, chunk_tokens)
    first, limit = vocab_columns(len(weight), tp_group, vocab_size)
    columns = LogitColumns(first, limit, temperature, with_entropy, chunk_tokens)
    head = torch.float32 if fp32_lm_head else hidden.dtype
    reduced = tp_group if reduce_hidden_gradient else None
    logprobs, entropy = _LinearLogProbs.apply(hidden, weight, labels, tp_group, reduced, head, columns)
    return logprobs, entropy if with_entropy else None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, tp_group, reduced, head, columns):
        stats = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        for rows, logits in _logits(hidden, weight, head, columns.chunk_tokens):
            stats[:, rows] = backend(logits).label_stats(logits, labels[rows], columns)
        logprobs, entropy, top, log_total = combine_stats(
            all_gather_stacked(stats, tp_group), columns.with_entropy
        )
        ctx.save_for_backward(hidden, weight, labels, top, log_total, entropy, logprobs)
        ctx.reduced, ctx.head, ctx.columns = reduced, head, columns
        ctx.mark_non_differentiable(*([] if columns.with_entropy else [entropy]))
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, labels, top, log_total, entropy, logprobs = ctx.saved_tensors
        hidden_needed, weight_needed = ctx.needs_input_grad[:2]
        grad_logprobs = grad_logprobs.masked_fill(logprobs == -torch.inf, 0.0)
        grad_hidden = torch.empty_like(hidden) if hidden_needed else None
        grad_weight = None
        if weight_needed:
            grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows, logits in _logits(hidden, weight, ctx.head, ctx.columns.chunk_tokens):
            given = [x[rows] for x in (labels, top, log_total, entropy, grad_logprobs, grad_entropy)]
            backend(logits).logits_gradient(logits, *given, ctx.columns, out=logits)
            if hidden_needed:
                part = logits.new_zeros(len(logits), hidden.shape[1])
                for some in _weight_rows(weight, ctx.head):
                    part.addmm_(logits[:, some], weight[some].to(ctx.head))
                grad_hidden[rows] = part
            if weight_needed:
                inputs = hidden[rows].to(ctx.head)
                for start in range(0, len(weight), WEIGHT_ROWS):
                    some = slice(start, start + WEIGHT_ROWS)
                    grad_weight[some] += logits[:, some].t() @ inputs
        if hidden_needed and ctx.reduced is not None and ctx.reduced.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.reduced)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, head: torch.dtype, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits [C, V/tp] in the head's type) of each chunk, all in one buffer that callers may overwrite."""
    buffer = hidden.new_empty(min(chunk_tokens, len(hidden)), len(weight), dtype=head)
    for start in range(0, len(hidden), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        inputs = hidden[rows].to(head)
        logits = buffer[: len(inputs)]
        for some in _weight_rows(weight, head):
            torch.mm(inputs, weight[some].to(head).t(), out=logits[:, some])
        yield rows, logits


def _weight_rows(weight: Tensor, head: torch.dtype) -> Iterator[slice]:
    """Slices of the weight's rows: all at once if they have the head's type, else WEIGHT_ROWS, which are converted."""
    step = len(weight) if weight.dtype == head else WEIGHT_ROWS
    return (slice(start, start + step) for start in range(0, len(weight), step))
