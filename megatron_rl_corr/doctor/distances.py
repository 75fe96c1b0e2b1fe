"""Distances between two lists of log-probs, and whether rounding explains them.

N tokens, K likeliest ids of a token; D is the difference of two log-probs of one token.
"""

from dataclasses import dataclass

import numpy as np

FLOAT32_MAX = 1e-3
"""Largest |D| that float32 explains. Measured between decode and prefill: 1e-6 on the tiny model."""
HALF_K3 = 3e-3
"""Largest mean k3 over a response of 24 tokens that 16 bits explain. Measured between decode and prefill
in bfloat16 on the tiny model: up to 7e-4, from one token that is routed to other experts. Published
runs, over many tokens between trainer and server, lie below 1e-3 with healthy kernels and above 1e-2
with broken ones.
"""
BUCKETS = (1e-4, 1e-3, 1e-2, 0.1)
"""Bounds of pi_rollout between the buckets of `by_probability`."""


@dataclass(frozen=True)
class Distance:
    """The distance of N tokens; D = reference - measured.

    Example: D = 0, ln 2, -1 gives tokens 3, max 1, mean 0.564, k3 0.225.
    """

    tokens: int
    """N."""
    max: float
    """Largest |D|."""
    mean: float
    """Mean |D|."""
    k3: float
    """Mean of e^D - 1 - D."""

    def __str__(self) -> str:
        return f"max |D| {self.max:.1e}, mean {self.mean:.1e}, k3 {self.k3:.1e} over {self.tokens} tokens"

    def is_rounding(self, half: bool) -> bool:
        """True if float32 arithmetic explains it, or 16-bit arithmetic for `half`. NaN is never rounding."""
        return self.k3 <= HALF_K3 if half else self.max <= FLOAT32_MAX

    def numbers(self) -> dict[str, float]:
        return {"max": self.max, "mean": self.mean, "k3": self.k3, "tokens": self.tokens}


def distance(measured: np.ndarray, reference: np.ndarray) -> Distance:
    """The distance between two arrays of natural log-probs.

    Args:
        measured: [N].
        reference: [N].

    Raises:
        ValueError: N differs or is 0.
    """
    if measured.shape != reference.shape or measured.size == 0:
        raise ValueError(f"{measured.shape} log-probs have a reference of {reference.shape}")
    d = reference.astype(np.float64) - measured.astype(np.float64)
    k3 = np.expm1(np.clip(d, -20, 20)) - np.clip(d, -20, 20)
    return Distance(d.size, float(np.abs(d).max()), float(np.abs(d).mean()), float(k3.mean()))


def by_probability(measured: np.ndarray, reference: np.ndarray) -> dict[str, Distance]:
    """The distance of the tokens in each bucket of pi_rollout = e^measured, without empty buckets."""
    bucket = np.searchsorted(BUCKETS, np.exp(measured), side="right")
    names = [*(f"<{bound:g}" for bound in BUCKETS), f">={BUCKETS[-1]:g}"]
    return {
        name: distance(measured[bucket == index], reference[bucket == index])
        for index, name in enumerate(names)
        if (bucket == index).any()
    }


def slope(
    logprobs: np.ndarray, best: np.ndarray, raw: np.ndarray, raw_best: np.ndarray
) -> tuple[float, float]:
    """Estimate 1 / T of a temperature-scaled softmax by least squares.

    Within one softmax log p(a) - log p(b) = (z_a - z_b) / T, so the normaliser cancels; a is the sampled id
    and b the likeliest one.

    Args:
        logprobs: [N] of the sampled ids at temperature T.
        best: [N] of the likeliest ids at temperature T.
        raw: [N] of the sampled ids at temperature 1.
        raw_best: [N] of the likeliest ids at temperature 1.

    Returns:
        (slope, sum of (raw - raw_best)^2); the slope is NaN if the sum is 0, that is if every sample
        was the likeliest.
    """
    x, y = raw - raw_best, logprobs - best
    weight = float((x * x).sum())
    return (float((x * y).sum()) / weight if weight else float("nan")), weight


def grid_step(gaps: np.ndarray) -> float | None:
    """The coarsest step 2^-g, g in 0..9, of which 95 % of the gaps between log-probs are multiples, or None.

    Log-probs of one token differ by differences of logits. A bfloat16 logit of magnitude at least 0.25 is
    a multiple of 2^-9, and so are the gaps, up to float32 rounding of the log-softmax. Of float32 logits 1
    % are, by chance.
    """
    for power in range(10):
        units = gaps * 2.0**power
        if (np.abs(units - np.round(units)) < 1e-5 * 2.0**power).mean() >= 0.95:
            return 2.0**-power
    return None


def switch_position(logprobs: np.ndarray, before: np.ndarray, after: np.ndarray) -> tuple[int, np.ndarray]:
    """Find the first token that was sampled with new weights: the cut with the smallest sum of |difference|.

    Args:
        logprobs: [N] of the sampled tokens.
        before: [N] of the same tokens under the old weights.
        after: [N] of the same tokens under the new weights.

    Returns:
        (position, [N + 1] sum of each cut).
    """
    old, new = np.abs(logprobs - before), np.abs(logprobs - after)
    costs = np.concatenate([[0], np.cumsum(old)]) + np.concatenate([np.cumsum(new[::-1])[::-1], [0]])
    return int(costs.argmin()), costs
