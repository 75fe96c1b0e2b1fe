"""The flags of environments, which answer between the turns of an episode.

Only the standard library, as in arguments.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

DEFAULT_MAX_TURNS, DEFAULT_ENVIRONMENT_TIMEOUT_S = 8, 600.0


def add_environment(add: Callable) -> None:
    """Add them by a group's add_argument."""
    add("--rollout-environment", metavar="FILE.py:NAME", default=None,
        help="episodes of several turns: NAME(prompt) makes an Environment, which answers between the policy's turns "
        "and may score them; also package.module:NAME")
    add("--rollout-max-turns", metavar="N", type=int, default=None,
        help=f"turns of the policy in an episode, at most (default {DEFAULT_MAX_TURNS}); with --rollout-environment")
    add("--rollout-environment-timeout-s", metavar="S", type=float, default=None,
        help="longest call of one method of the environment, after which its sample has failed (default "
        f"{DEFAULT_ENVIRONMENT_TIMEOUT_S:g}); with --rollout-environment")


def max_turns(values: argparse.Namespace) -> int | None:
    """Turns of the policy in an episode; None without an environment. Raises as `_setting`."""
    return _setting(values, "max-turns", values.rollout_max_turns, DEFAULT_MAX_TURNS)


def environment_timeout_s(values: argparse.Namespace) -> float | None:
    """Longest call of one method, in seconds; None without an environment. Raises as `_setting`."""
    given = values.rollout_environment_timeout_s
    return _setting(values, "environment-timeout-s", given, DEFAULT_ENVIRONMENT_TIMEOUT_S)


def _setting[Number: (int, float)](
    values: argparse.Namespace, flag: str, given: Number | None, default: Number
) -> Number | None:
    """The given number, or the default; ValueError where it is not positive, or where there is no environment."""
    if not values.rollout_environment:
        if given is not None:
            raise ValueError(f"--rollout-{flag} {given} has no effect without --rollout-environment; drop it")
        return None
    if given is not None and not given > 0:
        raise ValueError(f"--rollout-{flag} must be positive, got {given}")
    return default if given is None else given
