"""Names of weight versions: `<id>-<number>`, for instance `5f2c91ab-50`.

The id is drawn anew at each start of a trainer. A run that is started again from an earlier checkpoint
counts the same numbers once more, with other weights: a server that has missed the pushes since must
not pass for fresh.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan


def new_run_id() -> str:
    """8 random hexadecimal digits: draw it on one rank, and give it to the others."""
    return secrets.token_hex(4)


def name(run_id: str, number: int) -> str:
    """The version of the weights after `number` steps of this start of the trainer."""
    return f"{run_id}-{number}"


def number(version: str) -> int:
    """The steps that the weights of this version were trained for: `5f2c91ab-50` -> 50, and 50 -> 50.

    Numbers may be compared only between versions of one start. Another trainer may have pushed a bare number.

    Raises:
        ValueError: the name has no number.
    """
    count = version.rpartition("-")[2]
    if not (count.isascii() and count.isdigit()):
        raise ValueError(
            f"weight version {version!r} has no number: versions are called <id>-<number>, or <number>"
        )
    return int(count)


def token_lags(sample: Trajectory, version: int) -> torch.Tensor:
    """Versions that the weights which sampled each response token are behind `version`: [R]
    int64, at least 0.

    Each token's own: one that was sampled after a push in the middle of a response has a smaller
    lag than the first.

    Raises:
        ValueError: a version has no number.
    """
    lags = torch.zeros(sample.output_ids.numel(), dtype=torch.int64)
    for span in sample.weight_versions:
        lags[span.start : span.end] = max(version - number(span.version), 0)
    return lags


def step_back(spans: Sequence[VersionSpan], versions: Sequence[str]) -> tuple[str, str] | None:
    """The versions of two spans in a row of which the second was pushed before the first;
    None: there are none.

    Args:
        spans: of one response, in the order of its tokens.
        versions: in the order in which they were pushed; each span's is among them.
    """
    place, before = 0, ""
    for span in spans:
        if span.version not in versions[place:]:
            return before, span.version
        place, before = versions.index(span.version, place), span.version
    return None
