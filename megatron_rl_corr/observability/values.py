"""Which metric values are accepted, and how a number is written for a person."""

import math
from numbers import Integral, Real


def host_number(name: str, value: object) -> int | float:
    """The value as a plain int or float; a TypeError naming the metric if it is not a number of the host.

    A tensor is refused on purpose: converting it here would hide a device synchronisation in the logger.
    """
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"metric {name!r} must be an int or a float, got {type(value).__name__}; reduce it and read it back "
        "to the host first, or leave the key out when there is no value"
    )


def step_of(metrics: dict) -> int:
    """The step the metrics belong to; a ValueError if `step` is missing or is not a whole number."""
    if "step" not in metrics:
        raise ValueError(f"metrics need the key 'step', got {sorted(metrics)}; add the training step")
    step = host_number("step", metrics["step"])
    if not isinstance(step, int):
        raise ValueError(f"metric 'step' must be a whole number, got {step!r}; pass it as an int")
    return step


def readable(value: float | None) -> str:
    """The number in at most nine characters and four significant digits; `-` for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    magnitude = abs(value)
    if isinstance(value, int) and magnitude < 10_000_000:
        return str(value)
    if magnitude and not 1e-3 <= magnitude < 1e6:
        return f"{value:.2e}"
    return f"{value:.0f}" if magnitude >= 1000 else f"{value:.4g}"
