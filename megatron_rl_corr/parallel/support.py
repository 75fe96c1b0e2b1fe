"""Log-prob of the label on the support that the server sampled from (top-p, top-k), from sharded logits.

T tokens, K ids of the largest support, V vocabulary columns (padded), tp tensor-parallel ranks, C tokens a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.parallel.gather import all_gather_stacked
from megatron_rl_corr.parallel.label_stats import NEGLIGIBLE, SMALLEST
from megatron_rl_corr.parallel.vocab import check_inputs, combine_stats


def support_logprobs(
    logits: Tensor,
    labels: Tensor,
    support: Tensor,
    *,
    tp_group: ProcessGroup | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor | None]:
    """log softmax of logits / temperature over each token's support, at the label; and its entropy, else None.

    As vocab_parallel_logprobs, with support [T, K] int: the global ids that the label was drawn from, distinct, -1
    behind their end. pi_train is then renormalised on the set that pi_rollout was: the two are probabilities of the
    same event. A token without any id gives -inf and no gradient. Only the support's columns are read and get a
    gradient; all else that is made has at most [C, K] elements.
    """
    check_inputs(logits, labels, temperature, chunk_tokens)
    if support.dim() != 2 or len(support) != len(labels):
        raise ValueError(f"support must be [T, K] beside labels [{len(labels)}], got {tuple(support.shape)}")
    logprobs, entropy = _SupportLogProbs.apply(
        logits, labels, support, tp_group, temperature, with_entropy, chunk_tokens
    )
    return logprobs, entropy if with_entropy else None


class _SupportLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, support, tp_group, temperature, with_entropy, chunk_tokens):
        first = 0 if tp_group is None else tp_group.rank() * logits.shape[1]
        stats = logits.new_empty(4, logits.shape[0], dtype=torch.float32)
        for start in range(0, logits.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            x, _, _ = _columns(logits[rows], support[rows], first, temperature)
            at_label = support[rows] == labels[rows, None]
            target = torch.where(at_label, x, -torch.inf).amax(dim=1)
            stats[:, rows] = _stats(x, target, with_entropy)
        logprobs, entropy, top, log_total = combine_stats(all_gather_stacked(stats, tp_group), with_entropy)
        ctx.save_for_backward(logits, labels, support, top, log_total, entropy, logprobs)
        ctx.settings = (first, temperature, with_entropy, chunk_tokens)
        ctx.mark_non_differentiable(*([] if with_entropy else [entropy]))
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        logits, labels, support, top, log_total, entropy, logprobs = ctx.saved_tensors
        first, temperature, with_entropy, chunk_tokens = ctx.settings
        # -inf is a constant, as over the whole vocabulary.
        grad_logprobs = grad_logprobs.masked_fill(logprobs == -torch.inf, 0.0)
        grad = torch.zeros_like(logits)
        for start in range(0, logits.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            x, local, mine = _columns(logits[rows], support[rows], first, temperature)
            log_p = x - top[rows, None] - log_total[rows, None]
            upstream = grad_logprobs[rows, None]
            slope = upstream
            if with_entropy:
                # dH/dx = -p (log p + H), as over the whole vocabulary.
                slope = upstream + grad_entropy[rows, None] * (log_p.clamp(min=NEGLIGIBLE) + entropy[rows, None])
            chunk = torch.where(support[rows] == labels[rows, None], upstream, 0.0) - log_p.exp() * slope
            # The label's share belongs to the rank that has it.
            chunk = torch.where(mine, chunk / temperature, 0.0)
            grad[rows].scatter_add_(1, local, chunk.to(grad.dtype))
        return grad, None, None, None, None, None, None


def _columns(logits: Tensor, support: Tensor, first: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The support's logits over temperature [C, K] float32, -inf where another rank has them; local ids; ours?"""
    local = support.long() - first
    mine = (support >= 0) & (local >= 0) & (local < logits.shape[1])
    local = local.clamp(0, logits.shape[1] - 1)
    x = torch.where(mine, logits.gather(1, local).float() / temperature, -torch.inf)
    return x, local, mine


def _stats(x: Tensor, target: Tensor, with_entropy: bool) -> Tensor:
    """As label_stats, of a chunk's x [C, K], which is consumed, and the label's x, or -inf."""
    out = x.new_zeros(4, len(x))
    out[0], out[2] = x.amax(dim=1), target
    x -= out[0].clamp(min=SMALLEST)[:, None]
    weights = x.exp()
    out[1] = weights.sum(dim=1)
    if with_entropy:
        out[3] = weights.mul_(x.clamp_(min=NEGLIGIBLE)).sum(dim=1)
    return out
