"""What a ledger of the mismatch says, in one line: which terms carry it, where it is more than rounding.

features/ledger measures the terms; D = log pi_train - log pi_rollout of a token is their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

TERMS = ("staleness", "routing", "head", "rounding", "rest", "decode")
"""The steps from the trainer's policy to the sampler's, in their order."""
NOISE = {
    "float32": 1e-5,
    "tf32": 2e-3,
    "float16": 2e-3,
    "bfloat16": 1.5e-2,
    "fp8": 0.15,
    "int4": 0.6,
}
"""mean |D| that rounding alone explains, in nats, by the coarsest type that a side computes in: four
times the relative error of one operation (push_probe/evidence.py), and of float32 what sums add to that.
"""
BLAMED = 0.1
"""A term is named from this share of the mean square on."""
AS_TEMPERATURE = 0.8
"""Share of the decode term from which on it is said to look like another temperature."""
LEAST_TOKENS = 64
"""Fewer tokens blame nothing."""
WORDS = {
    "staleness": "staleness",
    "routing": "routing",
    "head": "the output layer's number type",
    "rounding": "rounding of the pushed weights",
    "rest": "the engines' arithmetic, or what no pass takes apart",
    "decode": "the server's decoding against its own prefill",
}


def blamed_terms(numbers: Mapping[str, float]) -> list[tuple[str, float]]:
    """(term, share) of those that carry the mismatch, the largest first; [] where it is rounding.

    Nothing is blamed where mean |D| <= noise or fewer than LEAST_TOKENS were split. Else a term is blamed
    that has BLAMED of the mean square or more, and is larger than the noise by itself or has the largest
    share.

    Args:
        numbers: of the ledger, by their logged names.
    """
    noise = numbers["ledger/noise"]
    if numbers["ledger/tokens"] < LEAST_TOKENS or not numbers["ledger/mean_abs"] > noise:
        return []
    shares = {name: numbers[f"ledger/{name}/share"] for name in TERMS if f"ledger/{name}/share" in numbers}
    largest = max(shares, key=shares.__getitem__)
    found = [
        (name, share)
        for name, share in shares.items()
        if share >= BLAMED and (name == largest or numbers[f"ledger/{name}/mean_abs"] > noise)
    ]
    return sorted(found, key=lambda pair: -pair[1])


def verdict_line(numbers: Mapping[str, float], absent: Iterable[str] = ()) -> str:
    """The verdict with its evidence.

    Args:
        numbers: of the ledger, by their logged names.
        absent: terms that no pass takes; their parts are in the rest.
    """
    noise, tokens, size = (numbers[f"ledger/{name}"] for name in ("noise", "tokens", "mean_abs"))
    known = [name for name in TERMS if f"ledger/{name}/share" in numbers]
    evidence = f"{tokens:.0f} tokens, mean |D| {size:.2g}"
    parts = ", ".join(f"{name} {_percent(numbers[f'ledger/{name}/share'])}" for name in known)
    blamed = blamed_terms(numbers)
    if not tokens:
        return "mismatch: no token with log-probs of both sides"
    if blamed:
        told = ", ".join(
            f"{_percent(share)} {WORDS[name]} (mean {numbers[f'ledger/{name}/mean_abs']:.2g})"
            for name, share in blamed
        )
        line = f"mismatch: {told}; {evidence}, all parts: {parts}"
        if "decode" in dict(blamed) and numbers["ledger/decode/as_temperature_share"] >= AS_TEMPERATURE:
            heat = numbers["ledger/decode/as_temperature"]
            line += f"; the decoding looks like a sampling temperature of about {heat:.2g}, not 1"
    elif tokens < LEAST_TOKENS:
        line = f"mismatch: too few tokens for a verdict; {evidence}, parts: {parts}"
    else:
        line = (
            f"mismatch: no more than rounding (mean |D| up to {noise:g}), nothing is blamed; {evidence}, "
            f"parts: {parts}"
        )
    if absent:
        line += "; in the rest, as no pass takes them: " + ", ".join(absent)
    return line


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"
