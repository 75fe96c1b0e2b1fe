"""What a trial's numbers must be for a model to be accepted, and what they were."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_rl_corr.commands.accept.trial import REPLAYED
from megatron_rl_corr.core.ledger_verdict import verdict_line
from megatron_rl_corr.tables import readable

EXPERTS_APART = "most tokens of a layer to other experts"
HOST, DEVICE = "memory/host_gib/", "memory/device_gib/"
RANKS = 8
"""Ranks whose memory the page shows; accept.json's trials have all of them in their metrics."""
LEDGER = {"ledger/mean_square", "ledger/mean_abs", "ledger/noise"}


class Bar(NamedTuple):
    """The largest mismatch of an accepted model, in one number type."""

    d_max: float
    """Largest |D| of a token; of the trial with the servers' experts, if the model has some."""
    k3: float
    """Mean k3 of any step there."""
    own_k3: float
    """The same where the trainer's routers choose: near ties go the other way."""
    disagreement: float
    """Largest share of a layer's tokens for which the trainer would choose other experts."""


BARS = {
    # measured on the tiny models of every family: 2e-5; a tie of routers apart
    "float32": Bar(1e-4, 1e-8, 1e-3, 0.01),
    # the corrections' presets take single tokens of |D| 2 for harmless, and a mean k3 of 1e-3 is usual
    "bfloat16": Bar(2.0, 1e-3, 1e-2, 0.1),
}


@dataclass(frozen=True)
class TrialNumber:
    """One line of the page.

    Example: TrialNumber("replayed", "largest |D| of a token", "3.1e-05", "at most 0.0001", True).
    """

    trial: str
    what: str
    found: str
    bar: str
    passed: bool


def judge(
    trial: str, steps: Sequence[Mapping[str, float]], wanted: int, bar: Bar, *, has_experts: bool
) -> list[TrialNumber]:
    """The rows of one trial.

    Args:
        trial: OWN or REPLAYED of `trial`.
        steps: the metrics of each step that it made.
        wanted: steps that it was to make.
        bar: of the number type.
        has_experts: the model has some; without, the only trial is held to the narrow bar.
    """
    rows = [TrialNumber(trial, "steps", str(len(steps)), str(wanted), len(steps) == wanted)]
    if not steps:
        return rows
    narrow = not has_experts or trial == REPLAYED
    rows.append(
        _most(trial, "mean k3 of a step", steps, "rollout_corr/k3_kl", bar.k3 if narrow else bar.own_k3)
    )
    if narrow:
        rows.append(
            _most(trial, "largest |D| of a token", steps, "rollout_corr/log_ratio_abs_max", bar.d_max)
        )
    exact = [step["rollout_corr/exact_fraction"] for step in steps if "rollout_corr/exact_fraction" in step]
    if exact:
        rows.append(TrialNumber(trial, "tokens with D = 0", f"{sum(exact) / len(exact):.1%}", "-", True))
    bits = [step["rollout/probe_bits"] for step in steps if "rollout/probe_bits" in step]
    if bits:
        most = _largest(bits)
        rows.append(
            TrialNumber(trial, "evidence of other weights, bits", readable(most), "below 20", most < 20)
        )
    versions = [step.get("weight_version") for step in steps]
    pushed = versions == list(range(versions[0] or 0, (versions[0] or 0) + len(steps)))
    rows.append(TrialNumber(trial, "pushes", f"{len(steps)}" if pushed else "not all", "all", pushed))
    skipped = sum(step.get("skipped", 0) != 0 for step in steps)
    rows.append(TrialNumber(trial, "steps that were skipped", str(skipped), "0", skipped == 0))
    rows += _memory_rows(trial, steps[-1])
    layers = _by_layer(steps)
    if has_experts and not layers:
        rows.append(TrialNumber(trial, EXPERTS_APART, "not measured", "measured", False))
    elif layers:
        worst = max(layers, key=lambda layer: (math.isnan(layers[layer]), layers[layer]))
        shown = f"{layers[worst]:.2%} ({worst})"
        bound = f"at most {bar.disagreement:.0%}"
        passed = layers[worst] <= bar.disagreement
        rows.append(TrialNumber(trial, EXPERTS_APART, shown, bound, passed))
    return rows


def _memory_rows(trial: str, step: Mapping[str, float]) -> list[TrialNumber]:
    """Peaks of the ranks, the largest first: of the host, and of GPUs where there are some."""
    rows = []
    for where, prefix in (("on the host", HOST), ("on its GPU", DEVICE)):
        peaks = {name.removeprefix(prefix): gib for name, gib in step.items() if name.startswith(prefix)}
        ranks = sorted(peaks, key=lambda rank: -peaks[rank])
        shown = ", ".join(f"{peaks[rank]:.2f} GiB ({rank.replace('_', ' ')})" for rank in ranks[:RANKS])
        shown += f", less on {len(ranks) - RANKS} ranks" if len(ranks) > RANKS else ""
        rows += [TrialNumber(trial, f"peak memory of a rank {where}", shown, "-", True)] if ranks else []
    return rows


def measured(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of a trial's worst step, and the mean share of tokens with D = 0.

    Example: {"d_max": 1.4e-05, "k3": 2.4e-12, "exact": 0.05, "probe_bits": 0.0, "disagreement": 0.0}.
    """
    worst = {
        "d_max": "rollout_corr/log_ratio_abs_max",
        "k3": "rollout_corr/k3_kl",
        "probe_bits": "rollout/probe_bits",
    }
    found = {
        key: _largest([step[name] for step in steps if name in step])
        for key, name in worst.items()
        if any(name in step for step in steps)
    }
    exact = [step["rollout_corr/exact_fraction"] for step in steps if "rollout_corr/exact_fraction" in step]
    layers = _by_layer(steps)
    found |= {"exact": sum(exact) / len(exact)} if exact else {}
    return found | ({"disagreement": _largest([*layers.values()])} if layers else {})


def explanation(steps: Sequence[Mapping[str, float]]) -> str:
    """The ledger's verdict on the last step that has one; "" where none has."""
    ledgers = [step for step in steps if step.get("ledger/tokens", 0) > 0 and step.keys() >= LEDGER]
    return verdict_line(ledgers[-1]) if ledgers else ""


def _most(trial: str, what: str, steps: Sequence[Mapping[str, float]], name: str, most: float) -> TrialNumber:
    found = _largest([step.get(name, math.nan) for step in steps])
    return TrialNumber(trial, what, readable(found), f"at most {readable(most)}", found <= most)


def _largest(values: Sequence[float]) -> float:
    """NaN if one is."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _by_layer(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Layer -> the disagreement of its routers, in the mean of all steps: a step alone has few tokens."""
    prefix, found = "router_replay/disagreement/", {}
    for step in steps:
        for name, value in step.items():
            if name.startswith(prefix):
                found.setdefault(name.removeprefix(prefix), []).append(value)
    return {layer: math.fsum(shares) / len(shares) for layer, shares in found.items()}
