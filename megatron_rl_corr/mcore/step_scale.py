"""VCPO's step scale: an update of few effective samples moves the weights less (--rollout-ess-step-scale).

n sequences of the update that no rule has rejected, w the product of rho over each
(`Correction.sequence_ratios`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.reduce.collectives import ParallelGroups
from megatron_rl_corr.reduce.metrics import EffectiveSampleSize


def sequences_ess(correction: Correction, groups: ParallelGroups) -> EffectiveSampleSize:
    """ESS / n = (sum w)^2 / (n sum w^2) over an update's sequences; adds up over ranks.

    Args:
        correction: of the update's samples.
        groups: its ranks; of those that share sequences one counts them.
    """
    weights = correction.sequence_ratios * correction.kept_sequences
    sums = torch.stack([weights, weights.square(), weights > 0]).sum(dim=1)
    return EffectiveSampleSize(sums if groups.cp_rank == 0 else torch.zeros_like(sums))


@contextlib.contextmanager
def scaled_learning_rates(optimizer: Any, factor: float) -> Iterator[None]:
    """Within, each of the optimizer's groups has its learning rate times the factor.

    It is the rate that scales an update, Adam's too, whose updates don't grow with the gradient; and with it
    decoupled weight decay, which is rate x decay x weight. The rates are put back before anybody saves, logs
    or schedules them.

    Args:
        optimizer: Megatron's; its groups' rates are what the schedule made them, each times its
            group's lr_mult.
        factor: of this update.
    """
    before = [_copy(group["lr"]) for group in optimizer.param_groups]
    _set_rates(optimizer, [rate * factor for rate in before])
    try:
        yield
    finally:
        _set_rates(optimizer, before)


def _copy(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate


def _set_rates(optimizer: Any, rates: Sequence[float | Tensor]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, Tensor):
            group["lr"].copy_(rate)  # in place: a graph of the optimizer reads this very tensor
        else:
            group["lr"] = rate
