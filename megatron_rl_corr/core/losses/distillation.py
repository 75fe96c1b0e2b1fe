"""On-policy distillation: the gradient of the reverse KL to a frozen teacher, at prefixes that were sampled.

T tokens, V ids of the vocabulary, H the K of them that the teacher finds likeliest at a token. At one prefix
p is the distribution that trains, t the teacher's, l_v = log p_v - log t_v. KL(p || t) = sum_V p_v l_v has
the gradient sum_V p_v l_v grad log p_v, as sum_V p_v grad log p_v = 0: the mean over y drawn from p of l_y
grad log p_y, which is the policy gradient of the advantage -l_y.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses.ratio import as_exponent, inside
from megatron_rl_corr.reduce.metrics import Mean, Metric, Sum

LEAST_REST = 1e-6
"""Mass outside of H, at least, in the ratio of the two rests: float32 log-probs tell no less."""


@dataclass(frozen=True)
class TeacherScores:
    """What a teacher says of T tokens."""

    logprobs: Tensor
    """[T] float32, log t of the label; not finite where it is not known."""
    top_ids: Tensor | None = None
    """[T, K] integers, H; None: distillation is of the sampled tokens alone."""
    top_logprobs: Tensor | None = None
    """[T, K] float32, log t of these."""


@dataclass(frozen=True)
class Distilled:
    """What a teacher adds to the loss of T tokens, before masks and weights."""

    known: Tensor
    """[T] bool: the teacher's log-probs are known."""
    kl: Tensor
    """[T] float32, constant: the estimate of KL(p || t) whose gradient this is; 0 where it is not known."""
    advantages: Tensor
    """[T] float32, constant, to be added to those of the reward; times the coefficient."""
    top: TopDistilled | None = None
    """None: without H."""


@dataclass(frozen=True)
class TopDistilled:
    """The exact part of the reverse KL, and the masses of H."""

    kl: Tensor
    """[T] float32, of H and the rest as one outcome, with the gradient; 0 where it is not known."""
    masses: Tensor
    """[2, T] float64: sum_H p and sum_H t."""


def distill(
    logprobs: Tensor,
    teacher: TeacherScores,
    coefficient: float,
    *,
    labels: Tensor | None = None,
    top_logprobs: Tensor | None = None,
) -> Distilled:
    """The reverse KL to the teacher of T tokens, as advantages and with H as a term of the loss.

    Without H a token has the advantage -X l_y, |l_y| at most 20. log p_y in it is that of the policy that
    trains, of this very pass and constant, not of the one that sampled nor of pi_old: weights and ratio make
    the mean over samples the one under p, and there l is p's. With pi_old's the second update of a batch
    would follow KL(p || t) - KL(p || pi_old), which runs past the teacher.

    With H, P = 1 - sum_H p and Q = 1 - sum_H t the KL is parted without a remainder,

        KL(p || t) = [sum_H p_v l_v + P c] + sum_rest p_v (l_v - c),  c = log P - log Q.

    The bracket is a KL, of H and the rest as one outcome: it is computed, not sampled, and its gradient is
    sum_H p_v (l_v - c) grad log p_v. The sum over the rest is P times the KL within it, and is sampled: a
    label outside of H has the advantage -X (l_y - c), one in H has 0. So the mean of the gradient is that of
    the whole KL for every K; K says how much of it is noise. A sum over H alone, of p_v l_v, is not a KL: its
    minimum has less mass in H than the teacher.

    H is of the teacher, not of the policy that sampled. SGLang scores the likeliest ids of its own, and no
    others that differ from place to place; the policy's own mass outside of H, which the reverse KL must see
    above all, is P, whose part in the bracket, P c, grows as Q falls (c is cut at Q = 1e-6, in both parts
    alike).

    Sources: reverse KL of the student's samples, GKD, arXiv:2306.13649, and MiniLLM, arXiv:2306.08543; as
    advantages of tokens, slime's `--use-opd`.

    Args:
        logprobs: [T] log p of the label; its gradient is not used.
        teacher: its log-probs.
        coefficient: X.
        labels: [T] ids; with H.
        top_logprobs: [T, K] log p of H, with the gradient.

    Raises:
        ValueError: there is an H, and labels or top_logprobs are missing.
    """
    known = teacher.logprobs.isfinite() & logprobs.detach().isfinite()
    gaps = as_exponent(inside(known, logprobs.detach().float() - teacher.logprobs.float()))
    if teacher.top_ids is None:
        return Distilled(known, gaps, -coefficient * gaps)
    if labels is None or top_logprobs is None:
        raise ValueError("`distill_top_k` needs the policy's log-probs of the ids; pass labels, top_logprobs")
    log_p, log_t = top_logprobs.detach().double(), teacher.top_logprobs.double()
    # A log-prob of -inf, as of an id that only the teacher has, is a constant. Selected, as 0 x it is NaN.
    used = known[:, None] & log_p.isfinite()
    p, differences = log_p.exp(), as_exponent(torch.where(used, log_p - log_t, 0.0))
    masses = torch.stack([p.sum(dim=1), log_t.exp().sum(dim=1)])
    rests = (1 - masses).clamp(min=0)
    own, theirs = rests.clamp(min=LEAST_REST).log()
    c = own - theirs
    coefficients = torch.where(used, p * (differences - c[:, None]), 0.0).float()
    value = torch.where(known, torch.where(used, p * differences, 0.0).sum(dim=1) + rests[0] * c, 0.0).float()
    slope = (coefficients * torch.where(used, top_logprobs.float(), 0.0)).sum(dim=1)
    outside = known & (teacher.top_ids != labels[:, None]).all(dim=1)
    within = torch.where(outside, gaps - c.float(), 0.0)
    top = TopDistilled(slope - slope.detach() + value, masses)
    return Distilled(known, value + within, -coefficient * within, top)


def prefix_weights(correction: Correction, config: RolloutCorrectionConfig) -> Tensor | None:
    """The weights of what is exact at a prefix, and only its prefix was sampled: [T], or None for 1.

    A weight of the whole sequence, or of its turn, corrects the prefix too. A weight of the token alone is
    for the drawing of this token, and where nothing was drawn there is nothing to correct.
    """
    return None if config.rollout_is in (None, "token") else correction.weights


def top_distillation(
    distilled: Distilled,
    correction: Correction,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor | None:
    """X w KL of H and the rest, to be added to the loss: [T], 0 outside correction.mask; None without H.

    Args:
        distilled: of the T tokens.
        correction: its mask, and its weights as `prefix_weights`.
        config: the coefficient X.
        metrics: distill_kl, distill_missing, and of H distill_top_kl and both masses are added to it; None:
            none.
    """
    mask, top = correction.mask & distilled.known, distilled.top
    if metrics is not None:
        columns = {"distill_kl": distilled.kl}
        if top is not None:
            names = ("distill_student_mass", "distill_teacher_mass")
            columns |= {"distill_top_kl": top.kl.detach()} | dict(zip(names, top.masses, strict=True))
        count = mask.sum(dtype=torch.float64)
        for name, values in columns.items():
            metrics[name] = Mean(torch.stack([torch.where(mask, values.double(), 0.0).sum(), count]))
        metrics["distill_missing"] = Sum((correction.mask & ~mask).sum(dtype=torch.float64)[None])
    if top is None:
        return None
    weights = prefix_weights(correction, config)
    kl = inside(mask, top.kl)
    return config.distill_coef * (kl if weights is None else weights * kl)
