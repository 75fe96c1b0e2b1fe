"""The flag of the effect of replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Options, Positive, option


@dataclass(frozen=True, kw_only=True)
class ReplayEffectConfig(Options):
    """Replay effect: how much of the mismatch it removes."""

    router_replay_effect_every: Annotated[int | None, Positive()] = option(
        None, flag="--router-replay-effect-every", metavar="N", needs="router_replay=R3"
    )
    """In the first batch and every N-th after it, also compute each replica's first microbatch without
    replay, and log how much of the mismatch replay removes: two forward passes of one microbatch.
    """


OPTIONS = ReplayEffectConfig
