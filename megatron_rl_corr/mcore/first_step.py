"""A bound for the train-infer KL of the first step, whose samples come from exactly the weights
that are trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.reduce.failure import StartupError

FLOAT32_KL, HALF_KL, QUANTIZED_KL = 1e-4, 1e-2, 1e-1
"""Largest mean k3 that rounding explains: both sides in float32, one side in 16 bits, one side quantised."""
MOST = 20.0
"""A token counts with at most so many times the bound: it takes a twentieth of the tokens to reach it.
Another model is off everywhere; a router near a tie, or one absurd log-prob, at single tokens.
"""


@dataclass(frozen=True)
class FirstStep:
    """Bounds the train-infer KL of the first step, before its update."""

    iteration: int
    """Iteration that the run starts from: the number of steps before it."""
    max_kl: float
    """--rollout-max-first-step-kl, or `first_step_bound`."""
    restored: bool = False
    """The first steps may train samples of a checkpoint alone, all of older weights: such a step is not
    judged, but the next one in its place.
    """

    def is_left_to_next(self, kl: float) -> bool:
        """True if the step has no token to judge by, as its samples are a checkpoint's. kl: as in `judge`."""
        return self.restored and math.isnan(kl)

    @property
    def most(self) -> float:
        """The largest k3 that a token counts with."""
        return MOST * self.max_kl

    def judge(self, kl: float) -> StartupError | None:
        """The error that ends the run, or None.

        kl is the mean of min(k3, `most`) over tokens that the trainer's own weights sampled; NaN
        (log-probs are NaN, or there is no such token) is an error too.
        """
        if kl <= self.max_kl:
            return None
        found = f"{kl:.3g}"
        if math.isnan(kl):
            found = (
                "not a number (no token has a log-prob of the servers, or the trainer's own log-probs "
                "are NaN)"
            )
        return StartupError(
            f"--rollout-max-first-step-kl {self.max_kl:g}: in the first step the servers sampled with the "
            f"weights that are trained, and yet the train-infer KL (k3, of a token {self.most:g} at most) is "
            f"{found}, so the policy that would be trained is not the one that was sampled; nothing was "
            "trained. Look at: dropout (--hidden-dropout 0 --attention-dropout 0); Megatron's flags against "
            "config.json (`megatron-rl-corr model-flags`); whether the checkpoint is the one that the "
            "servers run; log-probs shifted by a token, and other temperatures (`megatron-rl-corr doctor`). "
            "If numerics alone explain it, give a larger bound"
        )


def first_step_bound(
    float32: bool, engines: Sequence[Engine], infos: Sequence[Mapping[str, Any]], *, rounded: bool = False
) -> float:
    """The bound for both sides' number types.

    Args:
        float32: the trainer computes in float32.
        engines: what each server runs.
        infos: their answers to `Engine.server_info`.
        rounded: they were sent weights that --rollout-push-rounding rounds, or the trainer
            multiplies in FP8 or FP4.

    Raises:
        UnsupportedByEngine: the engine does not tell its servers' number types.
    """
    servers = list(zip(engines, infos, strict=True))
    if rounded or any(engine.is_quantized(info) for engine, info in servers):
        return QUANTIZED_KL
    return (
        FLOAT32_KL
        if float32 and all(engine.dtype(info) == "float32" for engine, info in servers)
        else HALF_KL
    )
