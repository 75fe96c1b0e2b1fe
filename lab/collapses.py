"""The trainings that are compared, and their table: how often each arm collapses, and what it learns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lab.training import Runs, Setting

WRONG, FAR_WRONG = -4.0, -8.0
"""Added to every reward where advantages are raw: baselines that are too high by as much."""
HARSH: dict[str, float] = {
    "rounding": 1.0,
    "relative": 1.0,
    "tail": 2.0,
    "routing": 0.3,
    "lag": 8,
    "top_p": 0.2,
}
"""Kind -> the size that is trained with: among the largest of the map."""
HARD = Setting(
    "outcome",
    "rounding",
    0.5,
    length=4,
    vocabulary=8,
    batch=128,
    steps=400,
    start=20,
    advantage="raw",
    shift=FAR_WRONG,
)
"""A larger vocabulary, longer: a policy that was driven off is never right by chance."""
SETTINGS: tuple[Setting, ...] = (
    *(Setting("outcome", kind, size, start=6) for kind, size in HARSH.items()),
    *(Setting("outcome", kind, size, start=6, advantage="raw", shift=WRONG) for kind, size in HARSH.items()),
    dataclasses.replace(HARD, advantage="group_mean", shift=0.0),
    HARD,
)
"""All that `make lab` trains, in each of which every arm of TRAINED runs."""
TRAINED = (
    "none",
    "token_truncate",
    "token_mask",
    "token_unbounded",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "rule:seq_mean_ratio",
)
LEARNED = 0.8
"""A seed has learned the task when J is at least this."""
RESAMPLES = 1000


def wilson(hits: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share: (lowest, highest).

    Source: Wilson 1927; (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n).
    """
    share, spread = hits / of, z * z / of
    centre = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / of + spread / (4 * of))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))


def bootstrap(values: Tensor, *, median: bool = False) -> tuple[float, float]:
    """95 % interval of the mean, or the median, of values [B] by resampling, always the same draws."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    resampled = values[drawn].sort(dim=1).values
    found = resampled[:, (len(values) - 1) // 2] if median else resampled.mean(dim=1)
    ordered = found.sort().values
    return ordered[int(0.025 * RESAMPLES)].item(), ordered[int(0.975 * RESAMPLES) - 1].item()


def table_of_collapses(runs: dict[str, dict[str, Runs]]) -> str:
    """Markdown: a row a setting and arm."""
    lines = [
        "Collapse: J at the end is below half of its best before, and has been for 20 steps. Learned: the "
        f"step at which J was first {LEARNED} or more, the median over seeds. In brackets 95 %: Wilson's "
        "interval of the share, bootstraps of the others.",
        "",
        "| setting | arm | collapsed | J at the start | best J | J at the end | learned | k3, first 10 steps "
        "| last 10 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, arms in runs.items():
        lines += [
            f"| {setting} | {arm} | " + " | ".join(_columns(found)) + " |" for arm, found in arms.items()
        ]
    return "\n".join(lines) + "\n"


def _columns(found: Runs) -> Sequence[str]:
    hits, of = int(found.collapsed.sum()), found.collapsed.numel()
    low, high = wilson(hits, of)
    end, best = found.rewards[-1], found.rewards.max(dim=0).values
    when = torch.tensor(found.steps_to(LEARNED), dtype=torch.float64)
    middle = when.sort().values[(len(when) - 1) // 2].item()
    return (
        f"{hits} of {of} ({100 * low:.0f} to {100 * high:.0f} %)",
        f"{found.rewards[0].mean():.2f}",
        f"{best.mean():.2f}",
        "{:.3f} ({:.3f} to {:.3f})".format(end.mean(), *bootstrap(end)),
        "{} ({} to {})".format(*(_step(one) for one in (middle, *bootstrap(when, median=True)))),
        f"{found.gap[:10].mean():.2g}",
        f"{found.gap[-10:].mean():.2g}",
    )


def _step(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f}"
