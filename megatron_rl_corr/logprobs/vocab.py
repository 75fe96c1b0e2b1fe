"""Log-prob of the label, and entropy, from logits sharded over the vocabulary.

T tokens, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs import torch_backend as label_stats
from megatron_rl_corr.parallel.gather import all_gather_stacked


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
    """log softmax(logits / temperature)[label] and, with_entropy, -sum p log p (else None); each float32 [T].

    logits [T, V/tp] in any float type, this rank's slice of the vocabulary; labels [T] int64, global ids. Columns
    >= vocab_size (padding of the embedding) are outside the support. One collective over tp_group in forward, none in
    backward. Beside the logits and their gradient, no more than one chunk of C tokens is held in float32 (of two with
    entropy, if C is 1). Every rank's upstream gradient must be that of the same loss (tensor-parallel ranks hold the
    same tokens), so none is summed over tp.

    The logits are never modified, unless inplace_gradient: then backward writes the gradient over them, which saves
    their size again. Nobody may read them after that. What autograd saved of them raises its error about an in-place
    change, a second backward too; a plain read finds the gradient.

    A label outside [0, vocab_size), or of a logit of -inf, gives -inf, and that is a constant: no gradient. Raises
    ValueError for unlike lengths, and for a temperature or chunk_tokens that is not positive.
    """
    check_inputs(logits, labels, temperature, chunk_tokens)
    logprobs, entropy = _VocabParallelLogProbs.apply(
        logits, labels, tp_group, temperature, vocab_size, with_entropy, chunk_tokens, inplace_gradient
    )
    return logprobs, entropy if with_entropy else None


def check_inputs(logits: Tensor, labels: Tensor, temperature: float, chunk_tokens: int) -> None:
    """ValueError for unlike lengths, and for a temperature or chunk_tokens that is not positive."""
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"log-probs take logits [T, V/tp] and labels [T], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    check_settings(temperature, chunk_tokens)


def check_settings(temperature: float, chunk_tokens: int) -> None:
    if not temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; greedy samples have no log-prob to correct"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}; 1024 is usual")


def support_columns(width: int, tp_group: ProcessGroup | None, vocab_size: int | None) -> tuple[int, int]:
    """The global id of this rank's first column, and how many of its width columns are below vocab_size."""
    first = 0 if tp_group is None else tp_group.rank() * width
    return first, width if vocab_size is None else min(max(vocab_size - first, 0), width)


def backend(logits: Tensor) -> ModuleType:
    """Where label_stats and logits_gradient come from: Triton on a GPU that has it, else torch; torch for float64."""
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None:
        from megatron_rl_corr.logprobs import triton_backend as label_logprobs

        return label_logprobs
    return label_stats


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, tp_group, temperature, vocab_size, with_entropy, chunk_tokens, inplace_gradient):
        first, limit = support_columns(logits.shape[1], tp_group, vocab_size)
        settings = {
            "first": first, "limit": limit, "temperature": temperature, "with_entropy": with_entropy,
            "chunk_tokens": chunk_tokens,
        }  # fmt: skip
        stats = backend(logits).label_stats(logits, labels, **settings)
        # Every rank combines the same numbers in one order, so tensor-parallel ranks agree bit by bit.
        logprobs, entropy, top, log_total = combine_stats(all_gather_stacked(stats, tp_group), with_entropy)
        ctx.save_for_backward(logits, labels, top, log_total, entropy, logprobs)
        ctx.settings, ctx.inplace_gradient = settings, inplace_gradient
        ctx.mark_non_differentiable(*([] if with_entropy else [entropy]))
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, labels, top, log_total, entropy, logprobs = ctx.saved_tensors
        grad_logprobs = grad_logprobs.masked_fill(logprobs == -torch.inf, 0.0)
        if ctx.inplace_gradient:
            out = logits.detach()
            # A kernel writes unseen by autograd: whoever saved the logits, a second backward too, must get an error.
            torch.autograd.graph.increment_version(logits)
        else:
            out = torch.empty_like(logits)
        backend(logits).logits_gradient(
            logits, labels, top, log_total, entropy, grad_logprobs, grad_entropy, out=out, **ctx.settings
        )
        return out, None, None, None, None, None, None, None


def combine_stats(stats: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[tp, 4, T] -> log-prob of the label, entropy, largest x and log of the sum of exp(x - that), each [T].

    Where no rank has a finite x: -inf, 0, 0 and 0, which gives a gradient of 0.

    Differences from the largest logit, not the logits themselves: near 0 a log-prob would lose its digits.
    """
    maxima, sums, targets, products = stats.unbind(dim=1)
    top = maxima.amax(dim=0)
    nothing = top == -torch.inf
    top = top.masked_fill(nothing, 0.0)
    # A rank whose columns are all padding has max -inf and sum 0: exp(-inf) drops it.
    drop = maxima - top
    scale = drop.exp()
    total = (sums * scale).sum(dim=0).masked_fill(nothing, 1.0)
    log_total = total.log()
    logprobs = targets.amax(dim=0) - top - log_total
    entropy = torch.empty_like(logprobs)
    if with_entropy:
        products = products + sums * drop.clamp(min=label_stats.NEGLIGIBLE)
        entropy = log_total - (products * scale).sum(dim=0) / total
    return logprobs, entropy, top, log_total
