"""Log-prob of the label, and entropy, from logits sharded over the vocabulary.

T tokens, N of them sampled, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs import torch_backend
from megatron_rl_corr.logprobs.further_ids import IdColumns, id_logits
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.torch_backend import LogitColumns
from megatron_rl_corr.reduce.collectives import all_gather_stacked, collective


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    with_collision: bool = False,
    chunk_tokens: int = 1024,
    inplace_gradient: bool = False,
    sampled: SampledRows | None = None,
    ids: Tensor | None = None,
    whole_rows: bool = False,
) -> tuple[Tensor | None, ...]:
    """Log-prob of each label, log softmax(logits / temperature)[label], entropy, -sum p log p, and
    collision, sum p^2.

    One collective over tp_group in forward, none in backward: tensor-parallel ranks hold the same tokens, so
    every rank's upstream gradient must be that of the same loss, and none is summed. A label outside [0,
    vocab_size), or with a logit of -inf, gives -inf, which is a constant: no gradient.

    Args:
        logits: [T, V/tp] in any float type, this rank's columns. Never modified, unless inplace_gradient.
        labels: [T] int64, global ids.
        tp_group: ranks that share the vocabulary; None: this rank alone.
        temperature: of the sampling.
        vocab_size: columns from here on (padding of the embedding) do not belong to the
            vocabulary; None: all do.
        with_entropy: whether to compute the entropy.
        with_collision: whether to compute the probability that two draws are the same; it has no gradient.
        chunk_tokens: C. Beside logits and gradient only C rows are held in float32 (two with
            entropy, if C is 1).
        inplace_gradient: backward writes the gradient over the logits, which saves their size. Nobody may
            read them after that: tensors that autograd saved raise its error about an in-place change, as a
            second backward does; a plain read finds the gradient.
        sampled: the rows to work on. The others' logits are not read, whatever they hold; their results are
            0, without a gradient. None: all.
        ids: [T, I] of any integer type, more global ids, distinct for a token, whose log-probs are wanted
            too: they travel in the same collective, and have a gradient where neither they nor the label's
            are -inf.
        whole_rows: make the labels' log-probs by torch.log_softmax of whole rows in float32, as servers do,
            so that both may agree in every bit; ranks exchange C rows of logits at a time. The gradient is
            the same.

    Returns:
        (log-probs [T] float32, entropies [T] float32 or None), with_collision the collisions [T] float32, and
        with ids their log-probs [T, I] float32.

    Raises:
        ValueError: for different lengths, and for a temperature or chunk_tokens that is not positive.
    """
    check_inputs(logits, labels, temperature, chunk_tokens)
    check_sampled(sampled, labels)
    if ids is not None and (ids.dim() != 2 or len(ids) != len(labels)):
        raise ValueError(f"ids {tuple(ids.shape)} do not fit labels of {len(labels)}")
    first, limit = vocab_columns(logits.shape[1], tp_group, vocab_size)
    columns = LogitColumns(first, limit, temperature, with_entropy, chunk_tokens, with_collision)
    size = 1 if tp_group is None else tp_group.size()
    whole = (size * logits.shape[1] if vocab_size is None else vocab_size) if whole_rows else None
    logprobs, entropy, *more = _VocabParallelLogProbs.apply(
        logits, labels, tp_group, columns, sampled, inplace_gradient, ids, whole
    )
    return logprobs, entropy if with_entropy else None, *more


def check_inputs(logits: Tensor, labels: Tensor, temperature: float, chunk_tokens: int) -> None:
    """Check the arguments of `vocab_parallel_logprobs`.

    Raises:
        ValueError: different lengths, or a temperature or chunk_tokens that is not positive.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"log-probs take logits [T, V/tp] and labels [T], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    check_settings(temperature, chunk_tokens)


def check_settings(temperature: float, chunk_tokens: int) -> None:
    """Check that both are positive.

    Raises:
        ValueError: one is not.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; greedy samples have no log-prob to correct"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}; 1024 is usual")


def check_sampled(sampled: SampledRows | None, labels: Tensor) -> None:
    """Check that the rows are those of the labels.

    Raises:
        ValueError: they are of another number of tokens.
    """
    if sampled is not None and sampled.num_tokens != len(labels):
        raise ValueError(f"sampled rows of {sampled.num_tokens} tokens do not fit labels of {len(labels)}")


def vocab_columns(width: int, tp_group: ProcessGroup | None, vocab_size: int | None) -> tuple[int, int]:
    """This rank's part of the vocabulary.

    Args:
        width: V/tp, columns of this rank, padding included.
        tp_group: ranks that share the vocabulary; None: this rank alone.
        vocab_size: columns from here on do not belong to the vocabulary; None: all do.

    Returns:
        (global id of the first column, how many of the columns belong to the vocabulary).
    """
    first = 0 if tp_group is None else tp_group.rank() * width
    return first, width if vocab_size is None else min(max(vocab_size - first, 0), width)


def backend(logits: Tensor) -> ModuleType:
    """The module with the four functions of torch_backend: Triton's on a GPU, torch's without
    Triton or for float64.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None:
        from megatron_rl_corr.logprobs import triton_backend

        return triton_backend
    return torch_backend


@collective
def _with_whole_rows(
    combined: Tensor,
    logits: Tensor,
    labels: Tensor,
    tp_group: ProcessGroup | None,
    columns: LogitColumns,
    sampled: SampledRows | None,
    vocab_size: int,
) -> Tensor:
    """`combine_stats`' result with log-probs by log-softmax of the logits of all ranks, C rows at a time."""
    rows = torch.arange(len(labels), device=labels.device) if sampled is None else sampled.rows
    found = combined.new_empty(len(rows))
    for start in range(0, len(rows), columns.chunk_tokens):
        some = rows[start : start + columns.chunk_tokens]
        # [tp, C, V/tp] -> [C, V]: a server has the columns one behind the other
        parts = all_gather_stacked(logits[some], tp_group).movedim(0, 1).flatten(1)
        logprobs = torch.log_softmax(parts[:, :vocab_size].float() / columns.temperature, dim=1)
        labels_here = labels[some]
        known = (labels_here >= 0) & (labels_here < vocab_size)
        of_labels = logprobs.gather(1, labels_here.clamp(0, vocab_size - 1)[:, None])[:, 0]
        found[start : start + len(some)] = torch.where(known, of_labels, -torch.inf)
    # A row of no finite logit has the constant -inf, as in `combine_stats`.
    found = torch.where(combined[0, rows] == -torch.inf, -torch.inf, found)
    return torch.cat([combined[0].index_copy(0, rows, found)[None], combined[1:]])


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, tp_group, columns, sampled, inplace_gradient, ids, whole_rows):
        kernels = backend(logits)
        stats = kernels.label_stats(logits, labels, columns, sampled)
        if ids is not None:
            stats = torch.cat([stats, id_logits(logits, ids, columns, sampled)])
        stats = all_gather_stacked(stats, tp_group)
        stats, of_ids = stats.split([columns.num_stats, stats.shape[1] - columns.num_stats], dim=1)
        # Every rank combines the same numbers in one order, so tensor-parallel ranks agree bit by bit.
        combined = kernels.combine_stats(stats.contiguous(), columns.with_entropy, sampled)
        if whole_rows is not None:
            combined = _with_whole_rows(combined, logits, labels, tp_group, columns, sampled, whole_rows)
        logprobs, entropy, *more = combined[0], combined[1], *combined[4:]
        ctx.mark_non_differentiable(*([] if columns.with_entropy else [entropy]), *more)
        if ids is not None:
            found = of_ids.amax(dim=0)
            found = found if sampled is None else sampled.spread(found)
            # Subtracted one after the other, as in `combine_stats`; 0 in rows that are not sampled.
            more.append((found - combined[2] - combined[3]).t())
        ctx.save_for_backward(logits, labels, combined, ids, more[-1] if ids is not None else None)
        ctx.columns, ctx.sampled, ctx.inplace_gradient = columns, sampled, inplace_gradient
        ctx.set_materialize_grads(False)
        return logprobs, entropy, *more

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy, *grad_more):
        logits, labels, combined, ids, id_logprobs = ctx.saved_tensors
        if ctx.inplace_gradient:
            out = logits.detach()
            # Autograd does not see a kernel write: this makes any later use of saved logits its error.
            torch.autograd.graph.increment_version(logits)
        else:
            out = torch.empty_like(logits)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(combined[0])
        grad_ids = None if ids is None else grad_more[-1]
        grad_label = grad_logprobs
        if grad_ids is not None:
            constant = (id_logprobs == -torch.inf) | (combined[0] == -torch.inf)[:, None]
            grad_ids = grad_ids.masked_fill(constant, 0.0)
            grad_logprobs = grad_logprobs + grad_ids.sum(dim=1)
        backend(logits).logits_gradient(
            logits, labels, combined, grad_logprobs, grad_entropy, ctx.columns, out=out, sampled=ctx.sampled
        )
        if grad_ids is not None:
            at = IdColumns(labels, combined, ids, id_logprobs, ctx.columns, ctx.sampled)
            at.write_gradient(grad_label, grad_ids, grad_entropy, out)
        return out, None, None, None, None, None, None, None
