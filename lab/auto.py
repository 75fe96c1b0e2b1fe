"""Trainings under a mismatch that changes on the way, with weights that are fixed, or chosen as
--rollout-correction auto does.

B seeds, N responses a step of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.collapses import HARD, bootstrap
from lab.estimators import Arm, all_arms
from lab.long import measured_mismatch
from lab.mismatch import Noise
from lab.policies import World, expected_reward
from lab.training import Begun, Runs, Setting, gradient_of_step, log_ratios, sample, sampled_k3
from megatron_rl_corr.core.auto_weights import LEVELS, AutoWeights

AUTO = "auto"
FIXED_ARMS = (
    "none",
    "token_truncate",
    "token_mask",
    "token_unbounded",
    "turn_truncate",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
)
NEAR = 0.005
"""Ends of J that differ by no more are alike."""


@dataclass(frozen=True)
class Phase:
    """Steps under one mismatch."""

    name: str
    kind: str
    size: float
    steps: int = 40
    lag: int = 0
    stale: float = 0.0
    """Share of the responses that a server of weights that are `STALE` steps old samples."""


STALE = 24
SCHEDULE = (
    Phase("clean", "rounding", 0.0),
    Phase("FP8", "rounding", 0.03),
    Phase("INT4", "relative", 0.3),
    Phase("lag 8", "rounding", 0.0, lag=8),
    Phase("a stale server", "rounding", 0.0, stale=0.25),
    Phase("heavy tail", "tail", 2.0),
    Phase("clean", "rounding", 0.0),
)
_RAW = Setting("outcome", "rounding", 0.0, batch=64, start=2, advantage="raw", shift=-2.0)
AUTO_SETTINGS: dict[str, Setting] = {
    "mean of the group": dataclasses.replace(_RAW, advantage="group_mean", shift=0.0),
    "baseline off by 2": _RAW,
    "8 tokens, off by 4": dataclasses.replace(HARD, size=0.0, start=10, shift=-4.0),
}
"""Name -> what all arms have; kind, size and steps are the schedule's."""


def train_on_schedule(
    setting: Setting,
    arm: str,
    *,
    seeds: range,
    schedule: Sequence[Phase] = SCHEDULE,
) -> tuple[Runs, Tensor]:
    """One policy a seed through all phases; all arms begin alike, with the same draws.

    Args:
        arm: one of all_arms, or AUTO.

    Returns:
        The runs; and int64 [steps, B], the level that each step had (AUTO alone; else -1).
    """
    begun = Begun.of(setting, seeds)
    world, rewards, noise, optimiser = begun.world, begun.rewards, begun.noise, begun.optimiser
    weights = [AutoWeights(setting.batch) for _ in seeds]
    history, reached, gaps, levels = [optimiser.theta], [], [], []
    for phase in _steps(schedule):
        theta, now = optimiser.theta, dataclasses.replace(setting, kind=phase.kind, size=phase.size)
        reached.append(expected_reward(world, theta, rewards))
        drawn = sample(world, history[max(0, len(history) - 1 - phase.lag)], noise, now, begun.generator)
        if phase.stale:
            old = sample(world, history[max(0, len(history) - 1 - STALE)], noise, now, begun.generator)
            first = int(phase.stale * setting.batch)
            drawn = tuple(
                torch.cat([b[:, :first], a[:, first:]], dim=1) for a, b in zip(drawn, old, strict=True)
            )
        if arm == AUTO:
            found = [measured_mismatch(d) for d in log_ratios(world, theta, drawn)]
            levels.append(torch.tensor([LEVELS.index(one.level) for one in weights]))
            gradient = _by_level(world, theta, drawn, noise, now, weights)
            weights = [one.after(mismatch) for one, mismatch in zip(weights, found, strict=True)]
        else:
            levels.append(torch.full((len(seeds),), -1))
            gradient = gradient_of_step(world, theta, drawn, noise, all_arms()[arm], now)
        optimiser.ascend(gradient)
        history = [*history[-STALE:], optimiser.theta]
        gaps.append(sampled_k3(world, theta, drawn))
    reached.append(expected_reward(world, optimiser.theta, rewards))
    return Runs(torch.stack(reached), torch.stack(gaps)), torch.stack(levels)


def _steps(schedule: Sequence[Phase]) -> Iterator[Phase]:
    for phase in schedule:
        for _ in range(phase.steps):
            yield phase


def _by_level(
    world: World,
    theta: Tensor,
    drawn: tuple[Tensor, Tensor, Tensor],
    noise: Noise,
    setting: Setting,
    weights: Sequence[AutoWeights],
) -> Tensor:
    """The gradient of each seed with the weights that it has chosen, and with a baseline."""
    setting = dataclasses.replace(setting, advantage="group_mean")  # batch_mean: a seed's batch is a group
    gradient = torch.zeros_like(theta)
    for one in set(weights):
        mine = torch.tensor([place for place, other in enumerate(weights) if other == one])
        config = one.corrected(all_arms()["none"].config)
        of_mine = Noise(*(getattr(noise, field.name)[mine] for field in dataclasses.fields(Noise)))
        part = tuple(values[mine] for values in drawn)
        gradient[mine] = gradient_of_step(world, theta[mine], part, of_mine, Arm((AUTO,), config), setting)
    return gradient


def table_of_auto(found: dict[str, dict[str, tuple[Runs, Tensor]]]) -> str:
    """Markdown: a row a setting and arm; and how often auto ends where the best fixed arm does."""
    lines = [
        f"Phases of {SCHEDULE[0].steps} steps: {', '.join(one.name for one in SCHEDULE)}. In brackets 95 % "
        f"of a bootstrap. Not below: seeds in which auto ends at most {NEAR:g} below this arm.",
        "",
        "| setting | arm | collapsed | J at the end | mean J | auto not below |",
        "|---|---|---|---|---|---|",
    ]
    for setting, arms in found.items():
        auto = arms[AUTO][0].rewards[-1]
        for arm, (runs, _) in arms.items():
            end = runs.rewards[-1]
            lines.append(
                f"| {setting} | {arm} | {int(runs.collapsed.sum())} of {len(end)} | {end.mean():.3f} "
                f"({' to '.join(f'{one:.3f}' for one in bootstrap(end))}) | {runs.rewards.mean():.3f} | "
                f"{int((auto >= end - NEAR).sum())} of {len(end)} |"
            )
    lines += ["", "Share of steps and seeds at each level of auto, by phase:", ""]
    lines += ["| setting | phase | " + " | ".join(LEVELS) + " |", "|---|---|" + "---|" * len(LEVELS)]
    for setting, arms in found.items():
        begin = 0
        for phase in SCHEDULE:
            part = arms[AUTO][1][begin : begin + phase.steps]
            shares = [f"{(part == level).double().mean():.2f}" for level in range(len(LEVELS))]
            lines.append(f"| {setting} | {phase.name} | " + " | ".join(shares) + " |")
            begin += phase.steps
    return "\n".join(lines) + "\n"
