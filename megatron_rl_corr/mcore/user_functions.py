"""The user's own advantage and loss: loaded once, and tried on made-up numbers before a run begins.

N sequences: P prompts of G samples; T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.losses import is_own
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses.own import OwnLoss, check_tensor, gradient_of, own_loss
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs
from megatron_rl_corr.data.loading import load


def loss_of(name: str) -> str | OwnLoss:
    """A loss by its name, or the user's function that the name names."""
    return _loaded(name, "`loss`") if is_own(name) else name


def own_advantages(spec: str, rewards: Tensor, kept: Tensor, tokens: Tensor) -> Tensor:
    """What the user's function makes of all groups of the global batch: [P, G] float64, 0 for
    rejected samples.

    The function is advantage(rewards, kept, tokens) -> [P, G]. Every rank calls it with the same numbers, so
    it must return the same ones.

    Args:
        spec: the function.
        rewards: [P, G] float64, less the KL to a reference where `kl_reward_coef` is given; a row is a
            prompt's group, in no order.
        kept: [P, G] bool: counts in baselines: no sequence-level rule rejected it, and it has tokens, or was
            cut short and is left out of the loss alone.
        tokens: [P, G] float64, sampled tokens with finite log-probs.

    Raises:
        ValueError: it returns anything but a floating-point tensor [P, G] on the inputs' device.
    """
    made = _loaded(spec, "`advantage`")(rewards.clone(), kept.clone(), tokens.clone())
    check_tensor(f"`advantage` {spec}", made, rewards)
    return torch.where(kept, made.detach().double(), 0.0)


def check_user_functions(config: RolloutCorrectionConfig, group_size: int) -> None:
    """Load the user's functions and call each on made-up numbers on the CPU.

    Raises:
        ValueError: one can't be loaded, raises, or returns what can't be trained on; the message names the
            flag, the rule and the value.
    """
    if is_own(config.advantage_kind):
        _called(
            "advantage", config.advantage_kind, lambda: _check_advantage(config.advantage_kind, group_size)
        )
    if is_own(config.loss):
        _called("loss", config.loss, lambda: _check_loss(config))


@cache
def _loaded(spec: str, flag: str) -> Callable[..., Tensor]:
    function = load(spec, flag)

    @wraps(function)
    def called(*args: object, **named: object) -> Tensor:
        try:
            return function(*args, **named)
        # taken for the orderly end of a run, it would leave the other ranks waiting
        except SystemExit as error:
            raise RuntimeError(
                f"{flag} {spec} called exit({error.code!r}); a run ends after --train-iters, and a function "
                "that can't go on raises an error"
            ) from error

    return called


def _called(field: str, spec: str, check: Callable[[], None]) -> None:
    """Raises what the function raises as a ValueError that names it."""
    _loaded(spec, f"`{field}`")
    try:
        check()
    except ValueError as error:
        text = str(error)
        failed = f"`{field}` {spec} failed on made-up numbers: "
        raise ValueError(text if text.startswith("`") else failed + text) from error
    except Exception as error:
        raise ValueError(
            f"`{field}` {spec} failed on made-up numbers: {type(error).__name__}: {error}"
        ) from error


def _check_advantage(spec: str, group_size: int) -> None:
    """A group with a spread, one without, and one of which only one sample is kept."""
    rewards = torch.zeros(3, group_size, dtype=torch.float64)
    rewards[0] = torch.arange(group_size) / 2.0
    rewards[1:] = 1.0
    kept = torch.ones(3, group_size, dtype=torch.bool)
    kept[2, 1:] = False
    tokens = torch.arange(1.0, 3 * group_size + 1, dtype=torch.float64).view(3, group_size)
    made, again = (own_advantages(spec, rewards, kept, tokens) for _ in range(2))
    if not made.isfinite().all():
        raise ValueError(
            f"`advantage` {spec} must return finite numbers for kept samples, got {made.tolist()} of rewards "
            f"{rewards.tolist()}, kept {kept.tolist()}"
        )
    if not torch.equal(made, again):
        raise ValueError(
            f"`advantage` {spec} must return the same for the same numbers, because every rank calls it; two "
            f"calls gave {made.tolist()} and {again.tolist()}"
        )


def _check_loss(config: RolloutCorrectionConfig) -> None:
    """Two sequences of three tokens, one token outside the mask, advantages of either sign."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -0.7], requires_grad=True)
    old = logprobs.detach() + torch.tensor([0.05, -0.1, 0.0, 0.02, 0.1, -0.05])
    mask, seq_ids = torch.tensor([1, 1, 1, 1, 0, 1], dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1, 1])
    correction = compute_correction(
        old, old - 0.01, mask, seq_ids, num_sequences=2, config=RolloutCorrectionConfig()
    )
    advantages = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5])
    inputs = PolicyLossInputs(logprobs, old, advantages, correction, seq_ids, 2)
    loss = own_loss(loss_of(config.loss), inputs, config, metrics={})
    if not loss.isfinite().all():
        raise ValueError(f"`loss` {config.loss} must return finite numbers, got {loss.tolist()}")
    gradient = gradient_of(loss, logprobs)
    if not gradient.isfinite().all() or not gradient.any():
        raise ValueError(
            f"`loss` {config.loss} must have a finite gradient in inputs.logprobs that is not 0 everywhere, "
            f"got {gradient.tolist()}; detach() or no_grad() around logprobs cuts it off"
        )
