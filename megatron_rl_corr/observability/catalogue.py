"""Every metric of a run, collected from the modules that compute them; whatever shows metrics
reads this table.
"""

import importlib
import math
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange

GROUPS = (
    "Run",
    "Rewards and responses",
    "Mismatch of tokens",
    "Mismatch of sequences",
    "Importance weights",
    "Rejection",
    "Loss and gradient",
    "Speed",
    "Staleness",
    "Sampling",
    "Expert routing",
    "Ledger",
    "Exactness",
)
"""Headings in their order; metrics of another group come after them."""
OTHERS = "Others"
"""Heading of metrics that nothing describes, and of those without a group."""
BINS = "rollout_corr/log_ratio_abs_bin/"
"""Family of the histogram of |log-ratio|: a share for each bin, named by the bin's upper end."""

_PACKAGE = Path(__file__).resolve().parents[1]


@cache
def catalogue() -> dict[str, MetricSpec]:
    """Metrics and families by name: by group, within a group as their modules list them.

    Raises:
        ValueError: two modules describe one metric.
    """
    specs = [spec for module in _modules() for spec in importlib.import_module(module).METRICS]
    order = {group: place for place, group in enumerate(GROUPS)}
    specs.sort(key=lambda spec: order.get(spec.group, len(GROUPS)))
    found: dict[str, MetricSpec] = {}
    for spec in specs:
        for each in (spec, _clamped_twin(spec)) if spec.clamped else (spec,):
            if each.name in found:
                raise ValueError(f"metric {each.name!r} is described twice; keep one of the descriptions")
            found[each.name] = each
    return found


def _modules() -> list[str]:
    """Names of the package's modules that assign METRICS; they are found by their text, as
    few need importing.
    """
    files = sorted(
        path for path in _PACKAGE.rglob("*.py") if re.search(r"^METRICS\b", path.read_text("utf-8"), re.M)
    )
    return [".".join((_PACKAGE.name, *file.relative_to(_PACKAGE).with_suffix("").parts)) for file in files]


def _clamped_twin(spec: MetricSpec) -> MetricSpec:
    short = spec.name.split("/")[-1]
    doc = f"{short} with outliers clamped; if the two differ, a few tokens cause it"
    return MetricSpec(f"{spec.name}_clamped", doc, spec.clamped, group=spec.group, only_with=spec.only_with)


def spec_of(name: str) -> MetricSpec | None:
    """The metric's description, or that of the family with the longest matching name; None for
    an unknown metric.
    """
    if name in catalogue():
        return catalogue()[name]
    families = [family for family in catalogue() if family.endswith("/") and name.startswith(family)]
    return catalogue()[max(families, key=len)] if families else None


def label_of(name: str) -> str:
    """The metric's short label, or its name where it has none."""
    spec = spec_of(name)
    return spec.label if spec and spec.label else name


def usual_range(name: str) -> UsualRange | None:
    """The metric's usual range, or None for a metric that has none or is not known."""
    spec = spec_of(name)
    return spec.usual if spec else None


def ordered(names: Iterable[str]) -> list[str]:
    """The names in the catalogue's order, members of a family by name; unknown metrics at
    the end, by name.
    """
    places = {name: place for place, name in enumerate(catalogue())}

    def place(name: str) -> tuple[int, str]:
        spec = spec_of(name)
        return (places[spec.name] if spec else len(places), name)

    return sorted(set(names), key=place)


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """The names by the heading that they stand under, in the catalogue's order."""
    groups: dict[str, list[str]] = {}
    for name in ordered(names):
        spec = spec_of(name)
        groups.setdefault(spec.group if spec and spec.group else OTHERS, []).append(name)
    return groups


def bins_of(names: Iterable[str]) -> dict[str, float]:
    """The bins of |log-ratio| among these metrics, by name, with their upper ends, in order; inf
    for the open one.

    Args:
        names: of any metrics; those that are no bins are left out.

    Raises:
        ValueError: one begins as a bin does, and names none.
    """
    ends = {name: _upper_end(name) for name in names if name.startswith(BINS)}
    return dict(sorted(ends.items(), key=lambda item: item[1]))


def _upper_end(name: str) -> float:
    side, _, end = name.removeprefix(BINS).partition("_")
    if side not in ("upto", "above"):
        raise ValueError(f"metric {name!r} names no bin; its name must end in upto_NUMBER or above_NUMBER")
    return math.inf if side == "above" else float(end)
