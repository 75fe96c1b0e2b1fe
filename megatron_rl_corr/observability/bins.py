"""The histogram of |log-ratio| as the metrics carry it: one share a bin, named by the bin's upper end.

B bins.
"""

import math
from collections.abc import Iterable

PREFIX = "rollout_corr/log_ratio_abs_bin/"


def bins_of(names: Iterable[str]) -> dict[str, float]:
    """The bins among these metrics, by name, with their upper ends, in their order; infinite for the open one."""
    ends = {name: _upper_end(name) for name in names if name.startswith(PREFIX)}
    return dict(sorted(ends.items(), key=lambda item: item[1]))


def _upper_end(name: str) -> float:
    side, _, end = name.removeprefix(PREFIX).partition("_")
    if side not in ("upto", "above"):
        raise ValueError(f"metric {name!r} names no bin; its name must end in upto_NUMBER or above_NUMBER")
    return math.inf if side == "above" else float(end)
