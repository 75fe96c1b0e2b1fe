"""Log-prob of the label, and entropy, from logits sharded over the vocabulary.

T tokens, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs import torch_backend
from megatron_rl_corr.logprobs.torch_backend import LogitColumns
from megatron_rl_corr.parallel.collectives import all_gather_stacked


def vocab_parallel_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    with_entropy: bool = False,
    chunk_tokens: int = 1024,
    inplace_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each label, log softmax(logits / temperature)[label], and entropy, -sum p log p.

    One collective over tp_group in forward, none in backward: tensor-parallel ranks hold the same tokens, so every
    rank's upstream gradient must be that of the same loss, and none is summed. A label outside [0, vocab_size), or with
    a logit of -inf, gives -inf, which is a constant: no gradient.

    Args:
        logits: [T, V/tp] in any float type, this rank's columns. Never modified, unless inplace_gradient.
        labels: [T] int64, global ids.
        tp_group: ranks that share the vocabulary; None: this rank alone.
        temperature: of the sampling.
        vocab_size: columns from here on (padding of the embedding) do not belong to the vocabulary; None: all do.
        with_entropy: whether to compute the entropy.
        chunk_tokens: C. Beside logits and gradient only C rows are held in float32 (two with entropy, if C is 1).
        inplace_gradient: backward writes the gradient over the logits, which saves their size. Nobody may read them
            after that: tensors that autograd saved raise its error about an in-place change, as a second backward
            does; a plain read finds the gradient.

    Returns:
        (log-probs [T] float32, entropies [T] float32 or None).

    Raises:
        ValueError: for different lengths, and for a temperature or chunk_tokens that is not positive.
    """
    check_inputs(logits, labels, temperature, chunk_tokens)
    first, limit = vocab_columns(logits.shape[1], tp_group, vocab_size)
    columns = LogitColumns(first, limit, temperature, with_entropy, chunk_tokens)
    logprobs, entropy = _VocabParallelLogProbs.apply(logits, labels, tp_group, columns, inplace_gradient)
    return logprobs, entropy if with_entropy else None


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
    """The module with label_stats and logits_gradient: Triton's on a GPU, torch's without Triton or for float64."""
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None:
        from megatron_rl_corr.logprobs import triton_backend

        return triton_backend
    return torch_backend


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, tp_group, columns, inplace_gradient):
        stats = backend(logits).label_stats(logits, labels, columns)
        # Every rank combines the same numbers in one order, so tensor-parallel ranks agree bit by bit.
        logprobs, entropy, top, log_total = combine_stats(
            all_gather_stacked(stats, tp_group), columns.with_entropy
        )
        ctx.save_for_backward(logits, labels, top, log_total, entropy, logprobs)
        ctx.columns, ctx.inplace_gradient = columns, inplace_gradient
        ctx.mark_non_differentiable(*([] if columns.with_entropy else [entropy]))
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, labels, top, log_total, entropy, logprobs = ctx.saved_tensors
        grad_logprobs = grad_logprobs.masked_fill(logprobs == -torch.inf, 0.0)
        if ctx.inplace_gradient:
            out = logits.detach()
            # Autograd does not see a kernel write: this makes any later use of saved logits its error.
            torch.autograd.graph.increment_version(logits)
        else:
            out = torch.empty_like(logits)
        backend(logits).logits_gradient(
            logits, labels, top, log_total, entropy, grad_logprobs, grad_entropy, ctx.columns, out=out
        )
        return out, None, None, None, None


def combine_stats(stats: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine every rank's `label_stats` [tp, 4, T] over the whole vocabulary.

    Works with differences from the largest logit: of the logits themselves, a log-prob near 0 would lose its digits.

    Returns:
        (log-prob of the label, entropy, top = largest x, log of the sum of exp(x - top)), each [T]. Where no rank has a
        finite x: -inf, 0, 0 and 0, which gives a gradient of 0.
    """
    maxima, sums, targets, products = stats.unbind(dim=1)
    top = maxima.amax(dim=0)
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0.0)
    # A rank whose columns are all padding has max -inf and sum 0: its scale, exp(-inf), is 0.
    drop = maxima - top
    scale = drop.exp()
    total = (sums * scale).sum(dim=0).masked_fill(empty, 1.0)
    log_total = total.log()
    logprobs = targets.amax(dim=0) - top - log_total
    entropy = torch.empty_like(logprobs)
    if with_entropy:
        products = products + sums * drop.clamp(min=torch_backend.NEGLIGIBLE)
        entropy = log_total - (products * scale).sum(dim=0) / total
    return logprobs, entropy, top, log_total
