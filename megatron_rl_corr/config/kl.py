"""KL penalties of a correction: against a reference policy, in the loss or in the reward, and
against the sampler.

d = log pi_theta - log pi_ref of a sampled token, D = log pi_theta - log pi_rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.fields import Between, Options, option
from megatron_rl_corr.config.losses import KL_TYPES

_COEFFICIENT = Between(0, remedy="0 turns it off", finite=True)


@dataclass(frozen=True)
class KLPenalties(Options):
    """KL penalties: what keeps the policy near another one.

    Example: KLPenalties(kl_loss_coef=0.001, kl_loss_type="k3+")
    """

    kl_loss_coef: Annotated[float, _COEFFICIENT] = option(0.0, metavar="X")
    """Coefficient of the KL penalty against the reference policy, as a term of the loss; 0 turns it off.
    Without a flag that names another one, the reference is the model that the run starts from.
    """

    kl_loss_type: str = option("k3", choices=KL_TYPES, needs="kl_loss_coef")
    """Its estimate of a token, d = log pi_theta - log pi_ref: k1 is d (its gradient has mean 0), k2 d^2 /
    2, k3 e^-d - 1 + d, at most 10; k3+ has the value of k3 and the gradient of k2, which is that of the
    KL; unbiased is that times pi_theta / pi_old and the token's weight (DeepSeek-V3.2). Squares have no
    gradient beyond |d| = 20.
    """

    kl_reward_coef: Annotated[float, _COEFFICIENT] = option(0.0, metavar="X")
    """Coefficient of the KL to the reference policy that is taken from the rewards: each sample's reward,
    before advantages, is lowered by X times the sum of the estimates of its tokens; 0 turns it off.
    """

    kl_reward_type: Literal["k1", "k2", "k3"] = option("k1", needs="kl_reward_coef")
    """Its estimate of a token, of pi_old, |d| at most 20; k1 is the one whose sum over a sample has the KL
    as its mean, and whose policy gradient is the KL's.
    """

    sampler_kl_coef: Annotated[float, _COEFFICIENT] = option(0.0, metavar="X")
    """Coefficient of a penalty against the policy that sampled, whose log-probs are there: a pull
    towards pi_rollout that needs no second model; 0 turns it off. Kimi-K2.5 (arXiv:2602.02276) has
    it with squared.
    """

    sampler_kl_type: Literal["squared", "k3"] = option("squared", needs="sampler_kl_coef")
    """Its estimate of a token, D = log pi_theta - log pi_rollout: squared is D^2, |D| at most 20, k3 is
    e^D - 1 - D, at most 10, an unbiased estimate of KL(pi_rollout || pi_theta).
    """

    @property
    def needs_reference(self) -> bool:
        """True if log-probs of a reference policy are needed."""
        return bool(self.kl_loss_coef or self.kl_reward_coef)
