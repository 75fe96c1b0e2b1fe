"""The samples on a run's page: a few of a few steps, so that the page stays small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl_corr.commands.samples.sample_view import SHADES, view_of
from megatron_rl_corr.commands.samples.saved_samples import SavedRun, chosen, path_setting
from megatron_rl_corr.rollout.sample_file import Sample

STEPS, TOKENS = 3, 400
"""Steps whose samples are on the page, and tokens of a prompt and of a response that are shown, at most."""


def page_samples(run_dir: Path) -> dict[str, Any] | None:
    """What the page's template needs to show samples; None for a run that saved none.

    Where they cannot be shown (files or the tokenizer's folder are gone), `why_not` says why: the page is
    of use without them.
    """
    if path_setting(run_dir, "save_trajectories") is None:
        return None
    try:
        saved = SavedRun.find([str(run_dir)])
        steps = [_step(saved, step) for step in _spread(sorted(saved.files))]
    except (ValueError, OSError) as error:
        return {"why_not": str(error)}
    return {
        "why_not": None,
        "steps": steps,
        "all_steps": len(saved.files),
        "most_tokens": TOKENS,
        "legend": [
            *((f"n{place}", f"D <= -{SHADES[place - 1]:g}") for place in (4, 3, 2, 1)),
            *((f"p{place}", f"D >= {SHADES[place - 1]:g}") for place in (1, 2, 3, 4)),
        ],
    }


def _spread(steps: Sequence[int]) -> list[int]:
    """The first step, the last one, and those evenly between them: STEPS at most."""
    if len(steps) <= STEPS:
        return list(steps)
    return [steps[place * (len(steps) - 1) // (STEPS - 1)] for place in range(STEPS)]


def _step(saved: SavedRun, step: int) -> dict[str, Any]:
    samples, tokenizer = saved.samples(step), saved.tokenizer(step)
    rejections = saved.rejections(samples)
    views = [
        {"why": why, "view": view_of(samples[place], tokenizer, rejections[place], most_tokens=TOKENS)}
        for place, why in _worth_a_look(samples).items()
    ]
    return {"step": step, "of": len(samples), "samples": views}


def _worth_a_look(samples: Sequence[Sample]) -> dict[int, str]:
    """Place -> why it is shown: the highest and the lowest reward, the largest |D|, one that was dropped."""
    found: dict[int, list[str]] = {}
    for order, why in (("best", "highest reward"), ("worst", "lowest reward"), ("dropped", "dropped")):
        for place in chosen(samples, order=order, limit=1):
            found.setdefault(place, []).append(why)
    farthest = max(range(len(samples)), key=lambda place: _largest(samples[place]), default=None)
    if farthest is not None and _largest(samples[farthest]) > 0:
        found.setdefault(farthest, []).append("largest |D|")
    return {place: ", ".join(why) for place, why in found.items()}


def _largest(sample: Sample) -> float:
    """The largest |D| of the sample's tokens; 0 where none is known."""
    if sample.train_logprobs is None or not sample.trajectory.sampled.any():
        return 0.0
    ratios = (sample.train_logprobs - sample.trajectory.rollout_logprobs)[sample.trajectory.sampled]
    return float(torch.nan_to_num(ratios, posinf=0.0, neginf=0.0).abs().max())
