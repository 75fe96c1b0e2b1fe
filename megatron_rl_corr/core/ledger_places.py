"""Where the rest of a mismatch sits: with which servers, with whose experts, behind which layer.

A place is named on evidence alone, of 1e-3 over all places of a kind, and never from fewer than 64 tokens.
The unit of evidence is a prompt's tokens on one server: tokens of one text are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

CHANCE = 1e-3
"""Chance at which a place is named where places do not differ, of all places of a kind together."""
LEAST_TOKENS = 64
"""Fewer tokens blame nothing."""
LEAST_UNITS = 4
LEAST_EXCESS = 2.0
"""mean e^2 of a place is so many times that of the others, at least."""
LEAST_SHARE = 0.1
"""Least part of the square of the rest."""
LEAST_ROUTED = 0.5
"""Part of the rest that goes with routes to a rank's experts, at least: tokens of some experts are harder."""
KINDS = {"server": "samples of server {} of {}", "engine": "samples of the engine {}"}
ROUTED = "expert_rank"
DISAGREEMENT = "router_replay/disagreement/layer_"
LAYERS_APART = 4.0
"""Routes differ so many times as often from a layer on."""
FEW = 0.05
"""Share of tokens whose routes differ in a layer that is before it, at most."""
MANY = 0.1
"""Share of tokens whose routes differ that says something where no layer is before."""


def pooled_chance(chances: Sequence[float]) -> float:
    """The chance of a place over several ledgers: twice the lesser of the least one times their number, and
    Fisher's of all of them, P(X > -2 sum log p) with X of chi^2 and 2 n degrees of freedom.

    The least one finds a place that a single ledger shows, Fisher's one that each shows a little.
    """
    count, half = len(chances), -sum(math.log(max(chance, 1e-300)) for chance in chances)
    term = total = math.exp(-half)
    for at in range(1, count):
        term *= half / at
        total += term
    return min(1.0, 2 * min(count * min(chances), total)) if count > 1 else chances[0]


def t_chance(t: float, freedom: float) -> float:
    """P(T > t) of Student's T, by Wallace's approximation to the normal one."""
    if freedom < 1 or math.isnan(t):
        return 1.0
    size = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return NormalDist().cdf(-math.copysign(size, t))


def place_numbers(rows: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """share of sum(e^2), excess and chance of each place.

    excess = mean e^2 of the place / mean e^2 of the others. chance is that of Student's t for the units'
    means of log(|e| + noise / 10) here above those of the others, one-sided, with one variance for both,
    times the number of places; 1 where either has too few tokens or all have too few units.

    Args:
        rows: of each place: tokens, sum(e^2), units, sum and sum of squares of the units' means.
    """
    whole = [sum(column) for column in zip(*rows, strict=True)]
    found = []
    for row in rows:
        (tokens, square, units, total, squares), others = (
            row,
            [b - a for a, b in zip(row, whole, strict=True)],
        )
        chance = 1.0
        if min(tokens, others[0]) >= LEAST_TOKENS and min(units, others[2]) >= 1 and whole[2] >= LEAST_UNITS:
            spread = squares - total**2 / units + others[4] - others[3] ** 2 / others[2]
            variance = max(spread, 1e-12 * whole[4]) / (whole[2] - 2) * (1 / units + 1 / others[2])
            apart = total / units - others[3] / others[2]
            t = apart / math.sqrt(variance) if variance else 0.0
            chance = min(1.0, len(rows) * t_chance(t, whole[2] - 2))
        found.append(
            {
                "share": _ratio(square, whole[1]),
                "excess": _ratio(_ratio(square, tokens), _ratio(others[1], others[0])),
                "chance": chance,
            }
        )
    return found


def routed_numbers(rows: Sequence[Sequence[float]]) -> list[dict[str, float]]:
    """share and chance of each expert-parallel rank.

    With w the share of a token's routes that go to experts of the rank, and e^2 = a + b w by least squares
    within each unit, share = b mean(w) / mean(e^2): 1 where all of the rest is made there. chance is that of
    Student's t for the units' sums of (x - mean x)(w - mean w), x = log(|e| + noise / 10), above 0,
    one-sided, times the number of ranks: a unit's tokens are compared with each other.

    Args:
        rows: of each rank: tokens, sum(w), sum(e^2), units, sum and sum of squares of the units' sums, sums
            of (w - mean w)^2 and of (e^2 - mean e^2)(w - mean w).
    """
    found = []
    for tokens, weight, square, units, total, squares, own, both in rows:
        variance, chance = 0.0, 1.0
        if units >= LEAST_UNITS and tokens >= LEAST_TOKENS:
            variance = (squares - total**2 / units) / (units - 1) / units
        if variance > 0:
            chance = min(1.0, len(rows) * t_chance(total / units / math.sqrt(variance), units - 1))
        found.append({"share": _ratio(both, own) * _ratio(weight, square), "chance": chance})
    return found


def is_place(numbers: Mapping[str, float]) -> bool:
    """True of a server or an engine that is named."""
    is_more = numbers["excess"] >= LEAST_EXCESS and numbers["share"] >= LEAST_SHARE
    return is_more and numbers["chance"] <= CHANCE


def is_routed_place(numbers: Mapping[str, float]) -> bool:
    """True of an expert-parallel rank that is named."""
    return numbers["share"] >= LEAST_ROUTED and numbers["chance"] <= CHANCE


def places_of(numbers: Mapping[str, float], kind: str) -> dict[str, dict[str, float]]:
    """Label -> its numbers, of the places of a kind that a ledger has.

    Args:
        numbers: of the ledger, by their logged names.
        kind: server, engine or expert_rank.
    """
    found: dict[str, dict[str, float]] = {}
    start = f"ledger/at/{kind}/"
    for name, value in numbers.items():
        if name.startswith(start):
            label, _, key = name.removeprefix(start).rpartition("/")
            found.setdefault(label, {})[key] = value
    return found


def first_layer_apart(numbers: Mapping[str, float]) -> tuple[int, float, float] | None:
    """(layer, share of tokens before, share from there on) of the first layer from which on servers route
    tokens otherwise; None where no layer stands out.

    Before it FEW of the tokens differ at most in each layer; from it on LAYERS_APART times as many as in any
    before, and more than two shares of so many tokens differ by chance, 1e-3 over all layers. Before layer 0
    there is none: MANY of the tokens differ in every layer.

    Args:
        numbers: of a step, by their logged names.
    """
    names = sorted(name for name in numbers if name.startswith(DISAGREEMENT))
    tokens, rates = numbers.get("ledger/tokens", 0.0), [numbers[name] for name in names]
    if tokens < LEAST_TOKENS or any(math.isnan(rate) for rate in rates):
        return None
    least = NormalDist().inv_cdf(1 - CHANCE / max(len(rates), 1))
    best = None
    for at in range(1, len(rates)):
        before, after = max(rates[:at]), min(rates[at:])
        mean = (before + after) / 2
        error = math.sqrt(2 * mean * (1 - mean) / tokens)
        if before <= FEW and after >= LAYERS_APART * before and after - before > least * error:
            best = max(best or (0.0, at), (after - before, at))
    if best is not None:
        at = best[1]
        return int(names[at].removeprefix(DISAGREEMENT)), max(rates[:at]), min(rates[at:])
    if rates and min(rates) >= MANY:
        return int(names[0].removeprefix(DISAGREEMENT)), 0.0, min(rates)
    return None


def place_lines(numbers: Mapping[str, float], of: str, urls: Sequence[str] = ()) -> list[str]:
    """In words, where the rest sits.

    Args:
        numbers: of a step, by their logged names.
        of: what is told of: the rest, or routing and rest.
        urls: of the servers, in their order; () where they are not known.
    """
    lines = []
    for kind, words in KINDS.items():
        found = places_of(numbers, kind)
        for label, place in found.items():
            if is_place(place):
                url = f" ({urls[int(label) - 1]})" if kind == "server" and urls else ""
                where = words.format(label, len(found)) + url
                lines.append(f"{100 * place['share']:.0f} % of {of} is of {where}")
    ranks = places_of(numbers, ROUTED)
    for label, place in ranks.items():
        if is_routed_place(place):
            lines.append(
                f"{100 * min(place['share'], 1.0):.0f} % of {of} goes with routes to the experts of "
                f"expert-parallel rank {label} of {len(ranks)}"
            )
    layer = first_layer_apart(numbers)
    if layer is not None:
        number, before, after = layer
        lines.append(
            f"servers choose other experts from layer {number} on ({100 * before:.2g} % of tokens before, "
            f"{100 * after:.2g} % or more from there)"
        )
    return lines


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan
