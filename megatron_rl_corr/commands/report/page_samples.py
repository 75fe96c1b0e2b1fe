"""The samples on a run's page: a few of a few steps, so that the page stays small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl_corr.commands.samples.sample_view import SHADES, ViewSettings, views_of
from megatron_rl_corr.commands.samples.saved_samples import SavedRun, chosen, episodes_of, path_setting
from megatron_rl_corr.rollout.sample_file import Sample

STEPS, TOKENS, MESSAGES = 3, 400, 24
"""Steps whose samples are on the page, tokens that are shown of a prompt, a response or a message, and
messages of a conversation, at most.
"""


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
        "most_messages": MESSAGES,
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
    samples = saved.samples(step)
    settings = ViewSettings(saved.tokenizer(step), TOKENS, MESSAGES, saved.tool_format)
    rejections = saved.rejections(samples)
    shown = [
        {
            "why": why,
            "branches": views_of([samples[at] for at in own], [rejections[at] for at in own], settings),
        }
        for own, why in _worth_a_look(samples).items()
    ]
    return {"step": step, "of": len(episodes_of(samples)), "samples": shown}


def _worth_a_look(samples: Sequence[Sample]) -> dict[range, str]:
    """Places of an episode -> why it is shown: the highest and the lowest reward, the largest |D|, one that
    was dropped, the most branches.
    """
    found: dict[range, list[str]] = {}
    for order, why in (("best", "highest reward"), ("worst", "lowest reward"), ("dropped", "dropped")):
        for own in chosen(samples, order=order, limit=1):
            found.setdefault(own, []).append(why)
    episodes = episodes_of(samples)
    largest = {own: max(_largest(samples[place]) for place in own) for own in episodes}
    for sizes, least, why in (
        (largest, 0, "largest |D|"),
        ({own: len(own) for own in episodes}, 1, "most branches"),
    ):
        farthest = max(episodes, key=lambda own, sizes=sizes: sizes[own], default=None)
        if farthest is not None and sizes[farthest] > least:
            found.setdefault(farthest, []).append(why)
    return {own: ", ".join(why) for own, why in found.items()}


def _largest(sample: Sample) -> float:
    """The largest |D| of the sample's tokens; 0 where none is known."""
    if sample.train_logprobs is None or not sample.trajectory.sampled.any():
        return 0.0
    ratios = (sample.train_logprobs - sample.trajectory.rollout_logprobs)[sample.trajectory.sampled]
    return float(torch.nan_to_num(ratios, posinf=0.0, neginf=0.0).abs().max())
