"""A run that can't start as it was asked for, told once, by one rank."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl_corr.parallel.failure import all_reduce_failure


class Refusal(ValueError):
    """The run can't start as it was asked for; the message names the flag and the remedy."""


def all_reduce_refusal[Prepared](prepare: Callable[[], Prepared]) -> Prepared:
    """prepare() on every rank; what it finds wrong (ValueError, OSError) is told once, by one rank."""
    prepared, error = None, None
    try:
        prepared = prepare()
    except (ValueError, OSError) as failure:
        error = Refusal(str(failure))
    all_reduce_failure(error)
    return prepared
