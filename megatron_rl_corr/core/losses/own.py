"""The user's own policy loss, between what every loss is given and what every loss returns.

T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs, inside, moved_log_ratio, record
from megatron_rl_corr.reduce.metrics import Metric

OwnLoss = Callable[..., Tensor]
"""loss(inputs: PolicyLossInputs, config) -> [T], or with the keyword metrics, a dict that it
adds Metrics to.
"""
STANDARD = ("policy", "old_new_k3_kl", "old_new_k3_kl_clamped")
"""The metrics that `record` makes of every loss."""
_NAMES: dict[OwnLoss, list[str]] = {}
"""Function -> the names of its metrics."""


def own_loss(
    function: OwnLoss,
    inputs: PolicyLossInputs,
    config: RolloutCorrectionConfig,
    *,
    metrics: dict[str, Metric] | None = None,
) -> Tensor:
    """The function's loss of each token [T] float32, 0 outside the mask, where it is given zeros.

    So neither a NaN nor a gradient from outside the mask reaches the weights, whatever the
    function computes there.

    Raises:
        ValueError: it returns anything but a floating-point tensor [T] on the inputs' device, or
            metrics that are none.
    """
    mask, own = inputs.mask, {}
    weights = inside(mask, inputs.correction.weights)
    given = replace(
        inputs,
        logprobs=inside(mask, inputs.logprobs),
        old_logprobs=inside(mask, inputs.old_logprobs),
        advantages=inside(mask, inputs.advantages),
        correction=replace(inputs.correction, weights=weights),
    )
    takes_metrics = "metrics" in inspect.signature(function).parameters
    loss = function(given, config, metrics=own) if takes_metrics else function(given, config)
    check_tensor("`loss`", loss, mask)
    own = _checked_metrics(function, own)
    loss = inside(mask, loss)
    if metrics is not None:
        record(metrics, mask, loss, moved_log_ratio(inputs.logprobs.detach(), inputs.old_logprobs, mask))
        metrics |= own
    return loss


def _checked_metrics(function: OwnLoss, own: dict[str, Metric]) -> dict[str, Metric]:
    """The function's metrics without gradient, under the names of its first call: ranks exchange
    them by their order.

    Raises:
        ValueError: what is added is no metric, bears the name of a usual one, or other names
            come than at first.
    """
    for name, metric in own.items():
        if not isinstance(metric, Metric) or name in STANDARD:
            raise ValueError(
                f"`loss` adds {name!r} to metrics, which must be a Metric (Mean, Sum, ...) and none of "
                f"{', '.join(STANDARD)}; got {metric!r}"
            )
    first = _NAMES.setdefault(function, sorted(own))
    if sorted(own) != first:
        raise ValueError(
            f"`loss` must add the same metrics in every call, whatever its inputs are: it added {first} at "
            f"first, then {sorted(own)}"
        )
    return {name: type(metric)(metric.values.detach().double()) for name, metric in own.items()}


def check_tensor(field: str, made: object, like: Tensor) -> None:
    """ValueError unless a function of the user's made a floating-point tensor of the shape and
    device of `like`.

    Reads nothing from the device.
    """
    if not isinstance(made, Tensor):
        raise ValueError(f"{field} must return a tensor, got {type(made).__name__}")
    if made.shape != like.shape or not made.dtype.is_floating_point or made.device != like.device:
        raise ValueError(
            f"{field} must return a floating-point tensor of shape {list(like.shape)} on {like.device}, got "
            f"{made.dtype} {list(made.shape)} on {made.device}"
        )


def gradient_of(loss: Tensor, logprobs: Tensor) -> Tensor:
    """d sum(loss) / d logprobs, [T]; zeros where the loss does not depend on them. A backward
    pass may follow.
    """
    if not loss.requires_grad:
        return torch.zeros_like(logprobs)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True, allow_unused=True)
    return torch.zeros_like(logprobs) if gradient is None else gradient
