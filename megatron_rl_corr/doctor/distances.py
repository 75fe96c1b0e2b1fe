"""How far apart two lists of log-probs are, and whether that is rounding.

N tokens, K likeliest ids of a token; D is the difference of two log-probs of one token.
"""

from dataclasses import dataclass

import numpy as np

FLOAT32_MAX = 1e-3
"""Largest |D| that float32 explains. Measured between decode and prefill: 1e-6 on the tiny model."""
HALF_K3 = 3e-3
"""Largest mean k3 that 16 bits explain over a response of 24 tokens. Measured between decode and prefill in bfloat16:
up to 7e-4 on the tiny model, of one token that is routed to other experts; published runs with healthy kernels lie
below 1e-3 between trainer and server, over many tokens, those with broken ones above 1e-2."""
BUCKETS = (1e-4, 1e-3, 1e-2, 0.1)
"""Bounds of pi_rollout that log-prob differences are tabled by."""


@dataclass(frozen=True)
class Distance:
    """Of N tokens: max and mean |D|, and the mean of k3 = e^D - 1 - D with D = reference - measured."""

    tokens: int
    max: float
    mean: float
    k3: float

    def __str__(self) -> str:
        return f"max |D| {self.max:.1e}, mean {self.mean:.1e}, k3 {self.k3:.1e} over {self.tokens} tokens"

    def is_rounding(self, half: bool) -> bool:
        """Whether the arithmetic explains it: float32, or 16 bits (`half`). A difference that is NaN is none."""
        return self.k3 <= HALF_K3 if half else self.max <= FLOAT32_MAX

    def numbers(self) -> dict[str, float]:
        return {"max": self.max, "mean": self.mean, "k3": self.k3, "tokens": self.tokens}


def distance(measured: np.ndarray, reference: np.ndarray) -> Distance:
    """Between two [N] arrays of natural log-probs. Raises ValueError where N differs or is 0."""
    if measured.shape != reference.shape or measured.size == 0:
        raise ValueError(f"{measured.shape} log-probs have a reference of {reference.shape}")
    d = reference.astype(np.float64) - measured.astype(np.float64)
    k3 = np.expm1(np.clip(d, -20, 20)) - np.clip(d, -20, 20)
    return Distance(d.size, float(np.abs(d).max()), float(np.abs(d).mean()), float(k3.mean()))


def by_probability(measured: np.ndarray, reference: np.ndarray) -> dict[str, Distance]:
    """The distance of the tokens in each bucket of pi_rollout = e^measured; empty buckets are left out."""
    bucket = np.searchsorted(BUCKETS, np.exp(measured), side="right")
    names = [*(f"<{bound:g}" for bound in BUCKETS), f">={BUCKETS[-1]:g}"]
    return {
        name: distance(measured[bucket == index], reference[bucket == index])
        for index, name in enumerate(names)
        if (bucket == index).any()
    }


def slope(logprobs: np.ndarray, best: np.ndarray, raw: np.ndarray, raw_best: np.ndarray) -> tuple[float, float]:
    """1 / T of a temperature-scaled softmax, and the evidence for it.

    Within one softmax log p(a) - log p(b) = (z_a - z_b) / T, so the normaliser need not be known: least squares
    of (logprobs - best) on (raw - raw_best), [N] each, where a is the sampled id and b the likeliest. The second
    value is the sum of squares of (raw - raw_best): 0 where every sample was the likeliest id.
    """
    x, y = raw - raw_best, logprobs - best
    weight = float((x * x).sum())
    return (float((x * y).sum()) / weight if weight else float("nan")), weight


def grid_step(gaps: np.ndarray) -> float | None:
    """The coarsest step 2^-g, g in 0..9, that at least 95 % of the gaps between log-probs are multiples of.

    Log-probs of one token differ by differences of logits. Where logits are bfloat16, one of magnitude at least
    0.25 is a multiple of 2^-9, so the gaps are too, to float32 rounding of the log-softmax; where they are
    float32, 1 % are by chance. None: no step.
    """
    for power in range(10):
        units = gaps * 2.0**power
        if (np.abs(units - np.round(units)) < 1e-5 * 2.0**power).mean() >= 0.95:
            return 2.0**-power
    return None


def switch_position(logprobs: np.ndarray, before: np.ndarray, after: np.ndarray) -> tuple[int, np.ndarray]:
    """The first token that was sampled with the weights of `after`: the cut with the least sum of |difference|.

    logprobs, before, after [N]. Also returns that sum for every cut, [N + 1].
    """
    old, new = np.abs(logprobs - before), np.abs(logprobs - after)
    costs = np.concatenate([[0], np.cumsum(old)]) + np.concatenate([np.cumsum(new[::-1])[::-1], [0]])
    return int(costs.argmin()), costs
