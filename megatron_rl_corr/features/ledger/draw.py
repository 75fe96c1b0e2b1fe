"""Which samples of a batch the ledger takes: whole ones, drawn by seed, alike on a replica's ranks."""

from __future__ import annotations

import math

import numpy as np

LEAST_LENGTH = 1024
"""Tokens of the samples that a replica takes at least, prompts included: a verdict needs some."""


def drawn_samples(
    share: float, lengths: np.ndarray, unit: int, *, seed: int, batch: int, replica: int
) -> list[int]:
    """Places of the samples, ascending: share x S of them, or more until they have LEAST_LENGTH tokens,
    rounded up to a multiple of unit.

    Args:
        share: of the batch's samples.
        lengths: [S] tokens of this replica's samples.
        unit: the schedule takes a multiple of so many.
        seed, batch, replica: each has a draw of its own.
    """
    order = np.random.default_rng([seed, batch, replica]).permutation(len(lengths))
    enough = 1 + int(np.searchsorted(np.cumsum(lengths[order]), LEAST_LENGTH))
    count = max(math.ceil(share * len(lengths)), enough)
    return sorted(order[: math.ceil(count / unit) * unit].tolist())
