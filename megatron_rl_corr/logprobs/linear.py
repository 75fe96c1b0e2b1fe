"""Log-prob of the label, and entropy, from hidden states and the output weight: the logits of all
tokens never exist.

T tokens, N of them sampled, H hidden size, V vocabulary columns (padded), tp tensor-parallel ranks,
C tokens a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs.products import multiply, pieces
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.torch_backend import LogitColumns
from megatron_rl_corr.logprobs.vocab import backend, check_sampled, check_settings, vocab_columns
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective

WIDER_ROWS = 8192
"""Rows of the weight at a time where logits are wider than it: then it, or their gradient, is copied."""


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    with_collision: bool = False,
    chunk_tokens: int = 1024,
    fp32_lm_head: bool = False,
    reduce_hidden_gradient: bool = True,
    sampled: SampledRows | None = None,
    into_main_grad: bool = False,
) -> tuple[Tensor | None, ...]:
    """vocab_parallel_logprobs of logits = hidden weight^T, of which only C V/tp numbers exist at a time.

    The columns are cut, not the tokens: tiles of C / N of them, with all N rows. So each row of the weight's
    gradient is of one tile alone; hidden's gradient is summed over tiles in float32. The tiles of backward
    are those of forward, so that their logits are the same numbers. Collectives over tp_group: one in
    forward, and one in backward, an all-reduce of hidden's gradient [N, H], to which every rank has a share.

    Args:
        hidden: [T, H], the same on all tensor-parallel ranks.
        weight: [V/tp, H] of the same type, this rank's rows.
        labels: [T] int64, global ids.
        tp_group: ranks that share the vocabulary; None: this rank alone.
        temperature: of the sampling.
        vocab_size: columns from here on do not belong to the vocabulary; None: all do.
        with_entropy: whether to compute the entropy.
        with_collision: whether to compute the probability that two draws are the same; it has no gradient.
        chunk_tokens: C; with N tokens or more there is one tile.
        fp32_lm_head: logits and their gradient are float32, as of float32 copies of hidden and weight; else
            they have the type of hidden, as in Megatron's output layer. On a GPU no copies of bfloat16 are
            made: `products.py`.
        reduce_hidden_gradient: False leaves hidden's gradient as this rank's share, for hidden states whose
            own backward sums over tp: those that Megatron gathers from sequence-parallel ranks.
        sampled: the rows to work on. The others are not multiplied, whatever they hold; their results are 0,
            without a gradient. None: all.
        into_main_grad: add the weight's gradient to weight.main_grad and set weight.grad_added_to_main_grad,
            as Megatron's output layer does under gradient accumulation fusion. Its .grad gets a tensor
            without meaning then (zeros if weight.zero_out_wgrad), which Megatron's DistributedDataParallel
            throws away (or adds).

    Returns:
        (log-probs [T] float32, entropies [T] float32 or None), and with_collision the collisions [T] float32.

    Raises:
        ValueError: for different lengths or types, and for a temperature or chunk_tokens that
            is not positive.
    """
    if (
        hidden.dim() != 2
        or labels.shape != hidden.shape[:1]
        or weight.dim() != 2
        or weight.shape[1] != hidden.shape[1]
    ):
        raise ValueError(
            f"log-probs take hidden [T, H], weight [V/tp, H] and labels [T], got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(labels.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden and weight must be of one type, got {hidden.dtype} and {weight.dtype}; cast one"
        )
    check_settings(temperature, chunk_tokens)
    check_sampled(sampled, labels)
    first, limit = vocab_columns(len(weight), tp_group, vocab_size)
    columns = LogitColumns(first, limit, temperature, with_entropy, chunk_tokens, with_collision)
    head = torch.float32 if fp32_lm_head else hidden.dtype
    reduced = tp_group if reduce_hidden_gradient else None
    logprobs, entropy, *collision = _LinearLogProbs.apply(
        hidden, weight, labels, tp_group, reduced, head, columns, sampled, into_main_grad
    )
    return logprobs, entropy if with_entropy else None, *collision


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, tp_group, reduced, head, columns, sampled, into_main_grad):
        inputs = hidden if sampled is None else hidden.index_select(0, sampled.rows)
        labels = labels if sampled is None else labels.index_select(0, sampled.rows)
        kernels, stats = backend(hidden), None
        for _, part, logits in _tiles(inputs, weight, head, columns):
            more = kernels.label_stats(logits, labels, part)
            stats = more if stats is None else kernels.merge_stats(torch.stack([stats, more]))
        combined = kernels.combine_stats(all_gather_stacked(stats, tp_group), columns.with_entropy, sampled)
        logprobs, entropy, *collision = combined[0], combined[1], *combined[4:]
        ctx.save_for_backward(hidden, weight, labels, combined)
        ctx.reduced, ctx.head, ctx.columns, ctx.sampled = reduced, head, columns, sampled
        # Its attributes are read and set, which a saved tensor may not have.
        ctx.parameter = weight if into_main_grad else None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([] if columns.with_entropy else [entropy]), *collision)
        return logprobs, entropy, *collision

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, *_):
        hidden, weight, labels, combined = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(combined[0])
        upstream, inputs, sampled = [combined, grad_logprobs, grad_entropy], hidden, ctx.sampled
        if sampled is not None:
            upstream = [None if x is None else x.index_select(-1, sampled.rows) for x in upstream]
            inputs = hidden.index_select(0, sampled.rows)
        hidden_needed, weight_needed = ctx.needs_input_grad[:2]
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_hidden = grad_weight = None
        if hidden_needed:
            # One share is rounded once, by its multiplication; several are summed in float32.
            alone = _tile_width(inputs, weight, ctx.head, ctx.columns.chunk_tokens) == len(weight)
            grad_hidden = torch.zeros_like(inputs, dtype=ctx.head if alone else wide)
        if weight_needed:
            grad_weight = torch.empty_like(weight) if ctx.parameter is None else ctx.parameter.main_grad
            # Products of a wider type are summed before they are rounded to the gradient's.
            direct = torch.promote_types(grad_weight.dtype, ctx.head) == grad_weight.dtype
        for some, part, logits in _tiles(inputs, weight, ctx.head, ctx.columns):
            backend(logits).logits_gradient(logits, labels, *upstream, part, out=logits)
            if weight_needed:
                rows = grad_weight[some] if direct else weight.new_empty(weight[some].shape, dtype=ctx.head)
            for number, piece in enumerate(pieces(logits, weight)):
                if hidden_needed:
                    multiply(piece, weight[some], out=grad_hidden, add=True)
                if weight_needed:
                    multiply(
                        piece.t(), inputs, out=rows, add=number > 0 or direct and ctx.parameter is not None
                    )
            if weight_needed and not direct:
                grad_weight[some] = rows if ctx.parameter is None else grad_weight[some] + rows
        if hidden_needed:
            grad_hidden = _whole_hidden_gradient(grad_hidden, hidden, ctx.sampled, ctx.reduced)
        if weight_needed and ctx.parameter is not None:
            grad_weight = _without_meaning(ctx.parameter)
        return grad_hidden, grad_weight, *[None] * 7


def _tile_width(inputs: Tensor, weight: Tensor, head: torch.dtype, chunk_tokens: int) -> int:
    """Columns of a tile of all N rows with as many logits as C rows have; a multiple of 64,
    if that is near.
    """
    width = max(len(weight) * chunk_tokens // max(len(inputs), 1), 1)
    if weight.dtype != head:
        width = min(width, WIDER_ROWS)
    if width >= len(weight):
        return len(weight)
    return width if width < 1024 else width // 64 * 64


def _tiles(
    inputs: Tensor, weight: Tensor, head: torch.dtype, columns: LogitColumns
) -> Iterator[tuple[slice, LogitColumns, Tensor]]:
    """(rows of the weight, the columns they make, their logits [N, width]): all in one buffer,
    free to overwrite.
    """
    width = _tile_width(inputs, weight, head, columns.chunk_tokens)
    buffer = inputs.new_empty(len(inputs) * width, dtype=head)
    for start in range(0, len(weight), width):
        some = slice(start, min(start + width, len(weight)))
        logits = buffer[: len(inputs) * (some.stop - start)].view(len(inputs), some.stop - start)
        multiply(inputs, weight[some].t(), out=logits)
        limit = min(max(columns.limit - start, 0), some.stop - start)
        yield some, replace(columns, first=columns.first + start, limit=limit), logits


@collective
def _whole_hidden_gradient(
    share: Tensor, hidden: Tensor, sampled: SampledRows | None, group: ProcessGroup | None
) -> Tensor:
    """The gradient [T, H] of the ranks' shares [N, H] in one exchange; without a group this rank's share."""
    share = share.to(hidden.dtype)
    if group is not None and group.size() > 1:
        dist.all_reduce(share, group=group)
    return share if sampled is None else torch.zeros_like(hidden).index_copy_(0, sampled.rows, share)


def _without_meaning(weight: Tensor) -> Tensor:
    """What autograd gets in place of a gradient that is in main_grad already: its hooks must
    run all the same.
    """
    weight.grad_added_to_main_grad = True
    zeros = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if zeros else torch.empty_like(weight)
