"""The flag of the filtered groups' mismatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Between, Options, option


@dataclass(frozen=True, kw_only=True)
class FilteredMismatchConfig(Options):
    """Filtered groups: their mismatch, which no batch shows."""

    acts_in_replay = False

    group_filter_measured: Annotated[float | None, Between(0, 1)] = option(
        None, metavar="X", needs="group_filter", usual=0.0625
    )
    """Mismatch of groups that do not pass: each step scores X times as many samples as it trains, one
    of each of some of these groups, and trains none of them. It costs a forward pass of these
    samples, at most X of one over the batch (about X / 3 of the training pass); 0 leaves it out, and
    nothing is known of them.
    """


OPTIONS = FilteredMismatchConfig
