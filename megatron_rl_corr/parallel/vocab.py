"""Log-prob of the label, and entropy, from logits sharded over the vocabulary.

T tokens, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

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
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[label] and, with_entropy, -sum p log p (else None); each float32 [T].

    logits [T, V/tp] in any float type, this rank's slice of the vocabulary, never modified; labels [T] int64,
    global ids. Columns >= vocab_size (padding of the embedding) are outside the support. One collective over
    tp_group in forward, none in backward. Beside the logits and their gradient, no more than one chunk of C
    tokens is held in float32. Every rank's upstream gradient must be that of the same loss (tensor-parallel
    ranks hold the same tokens), so none is summed over tp.

    Raises ValueError for unlike lengths, and for a temperature or chunk_tokens that is not positive. A label
    outside [0, vocab_size) gives -inf.
    """
    check_inputs(logits, labels, temperature, chunk_tokens)
    logprobs, entropy = _VocabParallelLogProbs.apply(
        logits, labels, tp_group, temperature, vocab_size, with_entropy, chunk_tokens
    )
    return logprobs, entropy if with_entropy else None


def check_inputs(logits: Tensor, labels: Tensor, temperature: float, chunk_tokens: int) -> None:
    """ValueError for unlike lengths, and for a temperature or chunk_tokens that is not positive."""
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"log-probs take logits [T, V/tp] and labels [T], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if not temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; greedy samples have no log-prob to correct"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}; 1024 is usual")


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, tp_group, temperature, vocab_size, with_entropy, chunk_tokens):
        width = logits.shape[1]
        first = 0 if tp_group is None else tp_group.rank() * width
        limit = width if vocab_size is None else min(max(vocab_size - first, 0), width)
        # Per token: max, sum of e = exp(x - max), the label's x (or -inf), sum of e (x - max).
        stats = logits.new_empty(4, logits.shape[0], dtype=torch.float32)
        for start in range(0, logits.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            local = labels[rows] - first
            stats[:, rows] = _chunk_stats(logits[rows, :limit], local, temperature, with_entropy)
        # Every rank combines the same numbers in one order, so tensor-parallel ranks agree bit by bit.
        logprobs, entropy, top, log_total = combine_stats(all_gather_stacked(stats, tp_group), with_entropy)
        ctx.save_for_backward(logits, labels, top, log_total, entropy)
        ctx.settings = (first, limit, temperature, with_entropy, chunk_tokens)
        ctx.mark_non_differentiable(*([] if with_entropy else [entropy]))
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, labels, top, log_total, entropy = ctx.saved_tensors
        first, limit, temperature, with_entropy, chunk_tokens = ctx.settings
        grad = torch.empty_like(logits)
        grad[:, limit:] = 0
        for start in range(0, logits.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            # Not div_: on float32 logits .float() is no copy, and they are the caller's.
            log_p = logits[rows, :limit].float() / temperature
            log_p.sub_(top[rows, None]).sub_(log_total[rows, None])
            p = log_p.exp()
            upstream = grad_logprobs[rows, None].float()
            if with_entropy:
                # dH/dx = -p (log p + H); log p is -inf where p is 0, and 0 * -inf must be 0.
                slope = grad_entropy[rows, None].float() * (log_p.clamp_(min=-1e4) + entropy[rows, None])
                chunk = p.mul_(-(upstream + slope))
            else:
                chunk = p.mul_(-upstream)
            local = labels[rows] - first
            mine = (local >= 0) & (local < limit)
            if limit:
                hit = torch.where(mine, grad_logprobs[rows].float(), 0.0)[:, None]
                chunk.scatter_add_(1, local.clamp(0, limit - 1)[:, None], hit)
            grad[rows, :limit] = chunk.div_(temperature).to(grad.dtype)
        return grad, None, None, None, None, None, None


def _chunk_stats(logits: Tensor, local_labels: Tensor, temperature: float, with_entropy: bool) -> Tensor:
    """[4, C] float32 of one chunk [C, columns in the support]."""
    columns = logits.shape[1]
    out = logits.new_zeros(4, logits.shape[0], dtype=torch.float32)
    out[0], out[2] = -torch.inf, -torch.inf
    if columns == 0 or logits.shape[0] == 0:
        return out
    x = logits.float() / temperature
    mine = (local_labels >= 0) & (local_labels < columns)
    target = x.gather(1, local_labels.clamp(0, columns - 1)[:, None])[:, 0]
    return stats_of(x, torch.where(mine, target, -torch.inf), with_entropy)


def stats_of(x: Tensor, target: Tensor, with_entropy: bool) -> Tensor:
    """Per token [4, C]: max, sum of e = exp(x - max), the label's x, sum of e (x - max); x [C, columns] is consumed."""
    out = x.new_zeros(4, x.shape[0])
    out[2] = target
    # Finite even where a rank's logits are all -inf, because -inf less itself is NaN.
    out[0] = x.amax(dim=1).clamp(min=torch.finfo(torch.float32).min)
    x -= out[0][:, None]
    if not with_entropy:
        out[1] = x.exp_().sum(dim=1)
        return out
    weights = x.exp()
    out[1] = weights.sum(dim=1)
    # A logit of -inf has weight 0, and 0 * -inf must be 0.
    out[3] = weights.mul_(x.clamp_(min=-1e4)).sum(dim=1)
    return out


def combine_stats(stats: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[tp, 4, T] -> log-prob of the label, entropy, largest x and log of the sum of exp(x - that), each [T].

    Differences from the largest logit, not the logits themselves: near 0 a log-prob would lose its digits.
    """
    maxima, sums, targets, products = stats.unbind(dim=1)
    top = maxima.amax(dim=0)
    # A rank whose columns are all padding has max -inf and sum 0: exp(-inf) drops it.
    drop = maxima - top
    scale = drop.exp()
    total = (sums * scale).sum(dim=0)
    log_total = total.log()
    logprobs = targets.amax(dim=0) - top - log_total
    entropy = torch.empty_like(logprobs)
    if with_entropy:
        products = products + sums * drop.clamp(min=-1e4)
        entropy = log_total - (products * scale).sum(dim=0) / total
    return logprobs, entropy, top, log_total
