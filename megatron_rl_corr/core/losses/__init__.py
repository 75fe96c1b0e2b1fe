"""Policy losses by name: per token, unreduced, one formula a file; `token_coefficients` says how
they are averaged.

To add a loss: name, defaults and doc go into config/losses.py, the formula into a file here, named
LossKind.formula. The file has a function of the same name: formula(inputs, config, *, metrics) ->
[T], with the gradient, 0 outside inputs.mask; it adds its own metrics to the dict `metrics`,
unless that is None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.losses import LOSS_KINDS
from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.losses.distillation import Distilled, top_distillation
from megatron_rl_corr.core.losses.own import OwnLoss, own_loss
from megatron_rl_corr.core.losses.penalties import entropy_bonus, kl_penalties
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs
from megatron_rl_corr.core.losses.score_centering import TopPolicies, score_centering
from megatron_rl_corr.reduce.collectives import ParallelGroups
from megatron_rl_corr.reduce.metrics import Metric


@cache
def _formula(file: str) -> Callable[..., Tensor]:
    """The function FILE of core/losses/FILE.py."""
    return getattr(import_module(f"{__name__}.{file}"), file)


def policy_loss(
    name: str | OwnLoss,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    correction: Correction,
    config: RolloutCorrectionConfig,
    *,
    seq_ids: Tensor | None = None,
    num_sequences: int | None = None,
    groups: ParallelGroups | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    top: TopPolicies | None = None,
    distilled: Distilled | None = None,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """The loss of each token [T], with its penalties, 0 where correction.mask is False.

    Args:
        name: one of config.losses.LOSSES, or the user's function, as `own.OwnLoss`.
        logprobs: [T] log pi_theta, with the gradient.
        old_logprobs, advantages, ref_logprobs, rollout_logprobs: [T], without gradient.
        seq_ids, num_sequences: [T] int64 in [0, num_sequences), for a loss about whole sequences (gspo).
        groups: for such a loss, where sequences are split over cp.
        entropy: [T] with gradient, for an entropy bonus.
        top: of the ids that were likeliest, for score centering; None: without it.
        distilled: what `distillation.distill` makes of a teacher's log-probs, whose advantages are added to
            these; None: without it.
        metrics: the loss adds its own to it.

    Raises:
        ValueError: an unknown name, or an input that the loss or a penalty needs is missing.
    """
    if config.distill_coef and distilled is None:
        raise ValueError("`distill_coef` needs the log-probs of a teacher; pass distilled")
    advantages = advantages if distilled is None else advantages + distilled.advantages
    inputs = PolicyLossInputs(logprobs, old_logprobs, advantages, correction, seq_ids, num_sequences, groups)
    if callable(name):
        loss = own_loss(name, inputs, config, metrics=metrics)
    else:
        loss = _named_loss(name, inputs, config, metrics)
    if top is not None:
        loss = loss + score_centering(top, inputs, config, metrics=metrics)
    if distilled is not None:
        exact = top_distillation(distilled, correction, config, metrics=metrics)
        loss = loss if exact is None else loss + exact
    kl = kl_penalties(
        inputs, config, ref_logprobs=ref_logprobs, rollout_logprobs=rollout_logprobs, metrics=metrics
    )
    if kl is not None:
        loss = loss + kl
    if config.entropy_coef:
        if entropy is None:
            raise ValueError("`entropy_coef` needs the entropy of each token's distribution; pass entropy")
        loss = loss - config.entropy_coef * entropy_bonus(entropy, correction.mask)
    return loss


def _named_loss(
    name: str, inputs: PolicyLossInputs, config: RolloutCorrectionConfig, metrics: dict[str, Metric] | None
) -> Tensor:
    if name not in LOSS_KINDS:
        raise ValueError(f"`loss`: unknown loss {name!r}; known: {', '.join(sorted(LOSS_KINDS))}")
    if LOSS_KINDS[name].whole_sequences and (inputs.seq_ids is None or inputs.num_sequences is None):
        raise ValueError(f"`loss` {name} looks at whole sequences; pass seq_ids and num_sequences")
    return _formula(LOSS_KINDS[name].formula)(inputs, config, metrics=metrics)
