"""Which samples of a batch the ledger takes: whole ones, drawn by seed, alike on a replica's ranks."""

from __future__ import annotations

import math

import numpy as np

LEAST_LENGTH = 1024
"""Tokens of the samples that a replica takes at least, prompts included: a verdict needs some."""


def draw_order(rows: int, *, seed: int, batch: int, replica: int) -> np.ndarray:
    """[S] the places of a replica's samples by chance; each seed, batch and replica has its own."""
    return np.random.default_rng([seed, batch, replica]).permutation(rows)


def drawn_count(share: float, lengths: np.ndarray, unit: int) -> int:
    """How many samples are taken: share x S, or more until they have LEAST_LENGTH tokens, at most S.

    Args:
        share: of the batch's samples.
        lengths: [S] tokens of the samples in their order.
        unit: the schedule takes a multiple of so many.
    """
    enough = 1 + int(np.searchsorted(np.cumsum(lengths), LEAST_LENGTH))
    count = max(math.ceil(share * len(lengths)), enough)
    return min(math.ceil(count / unit) * unit, len(lengths))
