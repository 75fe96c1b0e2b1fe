"""What a ledger of the mismatch says, in one line: which terms carry it, where it is more than rounding.

features/ledger measures the terms; D = log pi_train - log pi_rollout of a token is their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from megatron_rl_corr.core.ledger_places import LEAST_TOKENS, place_lines

TERMS = ("staleness", "routing", "head", "rounding", "rest", "decode")
"""The steps from the trainer's policy to the sampler's, in their order."""
UNEXPLAINED = ("routing", "rest")
"""The terms that another way to compute the same model makes: its routers choose otherwise, too."""
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
SURPLUS_ERRORS = 5.0
"""Standard errors from which on a surplus of log p + entropy is no chance: 3e-7 of the time."""
WORDS = {
    "staleness": "staleness",
    "routing": "routing",
    "head": "the output layer's number type",
    "rounding": "rounding of the pushed weights",
    "rest": "the engines' arithmetic, or what no pass takes apart",
    "decode": "the server's decoding against its own prefill",
}
CAUSES = {
    "norm_epsilon": "an epsilon of {} in the norms",
    "rotary_base": "a rotary base of {}",
    "rotary_stretch": "positions divided by {}",
    "rotary_scaling": "no scaling of the rotary frequencies",
    "kv_cache": "keys and values in {}",
    "router_type": "routers in {}",
    "expert_weights": "experts' weights {} over the chosen ones",
    "expert_scaling": "no scaling of the experts' sum",
    "expert_bias": "no bias in the choice of experts",
    "logit_scale": "logits times {}",
    "weights": "the weights of the version before{}",
    "fp8_weights": "weights rounded to block-wise FP8{}",
    "int4_weights": "weights rounded to 4 bits in groups{}",
    "experts": "others in the places of {}",
    "routes": "chosen the trainer's {} experts, not those that they report",
    "layout": "{}",
    "without": "no {}",
    "places": "something else in the place of {}",
}
"""What servers may compute otherwise, by the kind of the suspect that the rest looks like."""
LAYOUTS = {
    "layout": {
        "gate_up": "gate and up exchanged",
        "gate_up_turns": "gate and up one behind the other, not in turns",
        "gate_up_experts": "gate and up of routed experts exchanged",
        "gate_up_shared": "gate and up of shared experts exchanged",
        "keys_values": "keys and values exchanged",
        "qkv_behind": "queries, keys and values by groups of heads, not one behind the other",
        "rotary_pairs": "rotated dimensions in halves, not in pairs",
        "rotary_halves": "rotated dimensions in pairs, not in halves",
        "heads_dealt": "query heads by groups, not dealt to them in turn",
        "heads_grouped": "query heads dealt to groups in turn",
        "qk_norms": "norms of queries and keys exchanged",
        "query_gates": "queries and gates of the output exchanged",
        "query_gate_turns": "queries and gates of the output in turns, not one behind the other",
        "delta_keys": "queries and keys of delta nets exchanged",
        "delta_gates": "values and gates of delta nets exchanged",
        "delta_steps": "steps and decays of delta nets exchanged",
        "kv_behind": "keys and values of latent attention by heads, not one behind the other",
    },
    "without": {
        "qkv_bias": "bias of queries, keys and values",
        "output_bias": "bias behind attention",
        "mlp_bias": "biases of the MLP",
        "router_bias": "bias of routers",
        "sinks": "attention sinks",
        "shared_experts": "shared experts",
        "shared_gate": "gate of shared experts",
    },
    "places": {"queries": "queries or keys", "attention": "attention", "mlp": "the MLP"},
}
"""Weights that servers have in other places than the trainer, or leave out, by the suspect's second word."""
UNUSED = "unused"
"""In the place of "without": leaving a part out changes no log-prob of the trainer by a single bit."""
SIZED = ("norm_epsilon", "rotary_base", "rotary_stretch", "weights")
"""Kinds of which there may be more or less than was tried."""
MOST_SCORED = 0.5
"""Where servers have scored fewer of the tokens, a temperature is told from logits by the run alone."""
SAME = (0.9, 1.1)
"""Factors between which a change is as large as the one that was tried."""


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


def explained_tv(noise: float) -> float:
    """The total variation that rounding explains: as sum q |e^D - 1| / 2, half of mean |D|."""
    return noise / 2


def distance_line(numbers: Mapping[str, float]) -> str:
    """What whole distributions show and sampled tokens do not; "" where that is nothing.

    Args:
        numbers: of the ledger, by their logged names.
    """
    least, noise = numbers.get("ledger/dist/tv_least", 0.0), numbers["ledger/noise"]
    if not least > explained_tv(noise) or numbers["ledger/dist/label_mean_abs"] > noise:
        return ""
    prefix = "ledger/dist/by_id/"
    parts = {
        name.removeprefix(prefix): value / least
        for name, value in numbers.items()
        if name.startswith(prefix) and value > 0
    }
    told = ", ".join(
        f"{_percent(share)} {'at ids outside of the vocabulary' if one == 'outside' else f'at id {one}'}"
        for one, share in sorted(parts.items(), key=lambda pair: -pair[1])
    )
    return f"the distributions differ by at least TV {least:.2g}, although sampled tokens agree" + (
        f": {told}" if told else ""
    )


def verdict_line(numbers: Mapping[str, float], absent: Iterable[str] = (), urls: Sequence[str] = ()) -> str:
    """The verdict with its evidence.

    Args:
        numbers: of the ledger, by their logged names.
        absent: terms that no pass takes; their parts are in the rest.
        urls: of the servers, in their order; () where they are not known.
    """
    noise, tokens, size = (numbers[f"ledger/{name}"] for name in ("noise", "tokens", "mean_abs"))
    known = [name for name in TERMS if f"ledger/{name}/share" in numbers]
    evidence = f"{tokens:.0f} tokens, mean |D| {size:.2g}"
    parts = ", ".join(f"{name} {_part(numbers, name)}" for name in known)
    blamed = blamed_terms(numbers)
    if not tokens:
        return "mismatch: no token with log-probs of both sides"
    if math.isnan(size):
        return f"mismatch: not known, as a log-prob is no number; {tokens:.0f} tokens"
    if blamed:
        told = ", ".join(
            f"{_percent(share)} {WORDS[name]} (mean size {numbers[f'ledger/{name}/mean_abs']:.2g})"
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
    if any(name in UNEXPLAINED for name, _ in blamed):
        told = place_lines(numbers, _name_of_rest(numbers), urls) + cause_lines(numbers)
        line += "".join(f"; {one}" for one in told)
    line += "".join(f"; {one}" for one in (sampling_line(numbers), distance_line(numbers)) if one)
    if absent:
        line += "; in the rest, as no pass takes them: " + ", ".join(absent)
    return line


def _part(numbers: Mapping[str, float], name: str) -> str:
    """A term's share in words; - where no token has it: servers have scored none of these weights."""
    unknown = numbers.get(f"ledger/{name}/known", 1.0) == 0
    return "-" if unknown else _percent(numbers[f"ledger/{name}/share"])


def sampling_line(numbers: Mapping[str, float]) -> str:
    """What is said of a sampler that draws otherwise than its log-probs have it; "" of one that does not.

    With g = log p + H(p) of the trainer's policy p and D = log p - log mu of the sampler's,
    |E_mu[g]| <= sqrt(E[D^2] E[g^2]) at first order in D (Cauchy and Schwarz): what D may explain is not told.

    Args:
        numbers: of the ledger, by their logged names.
    """
    tokens, surplus = numbers["ledger/tokens"], numbers.get("ledger/sampling/surplus", math.nan)
    if tokens < LEAST_TOKENS or not math.isfinite(surplus):
        return ""
    spread = math.sqrt(numbers["ledger/sampling/surplus_square"])
    error, explained = spread / math.sqrt(tokens), spread * math.sqrt(numbers["ledger/mean_square"])
    if not abs(surplus) > explained + SURPLUS_ERRORS * error:
        return ""
    more, what = (
        ("more", "top-p, top-k, min-p or a lower temperature")
        if surplus > 0
        else ("less", "a higher temperature")
    )
    return (
        f"sampled tokens are {more} probable than their log-probs have it, by {abs(surplus):.2g} nats each "
        f"({abs(surplus) / error:.0f} standard errors), as with {what} that the run does not know of: "
        "megatron-rl-corr doctor"
    )


def cause_lines(numbers: Mapping[str, float]) -> list[str]:
    """What the rest, with the routing, looks like: in words, the largest first.

    Args:
        numbers: of the ledger, by their logged names.
    """
    servers = numbers.get("ledger/as_servers", 0)
    whose = "servers" if not servers else "that server" if servers == 1 else "those servers"
    shares = [name for name in numbers if name.startswith("ledger/as/") and name.endswith("/share")]
    names = [name.removeprefix("ledger/as/").removesuffix("/share") for name in shares]
    lines = []
    for name in sorted(names, key=lambda name: -numbers[f"ledger/as/{name}/share"]):
        share, times = (numbers[f"ledger/as/{name}/{part}"] for part in ("share", "times"))
        kind, _, value = name.partition("/")
        if kind == UNUSED:
            what = LAYOUTS["without"][value]
            lines.append(f"the trainer computes as without its {what}: unused, or all zero")
            continue
        sized = _PARTS[kind](value) if kind in _PARTS else value.replace("_", " ") or f"{times:.3g}"
        words = CAUSES.get(kind, f"{kind} {{}}").format(sized)
        is_same = kind not in SIZED or SAME[0] <= times <= SAME[1]
        size = "" if is_same else f", {times:.2g} times as much"
        scored = numbers.get("ledger/decode/known", 0.0)
        if kind == "logit_scale" and scored < MOST_SCORED:
            why = ": their weights have moved on" if "ledger/decode/known" in numbers else ""
            size = f", or sampled at a temperature of {1 / times:.2g}{why}"
        told = _percent(share) if share >= 0.005 else "<1 %"
        lines.append(f"{told} of {_name_of_rest(numbers)} is as if {whose} had {words}{size}")
    return lines


def _name_of_rest(numbers: Mapping[str, float]) -> str:
    return "routing and rest" if "ledger/routing/share" in numbers else "the rest"


def _layers_in_words(parts: str) -> str:
    """in the embedding and layers 3 to 7, of embedding+layers_3-7."""
    return "" if parts in ("previous", "all") else f" in {_parts_in_words(parts)}"


def _parts_in_words(parts: str) -> str:
    names = [one.replace("_", " ").replace("-", " to ") for one in parts.split("+")]
    return " and ".join(name if name[-1].isdigit() else f"the {name}" for name in names)


def _experts_in_words(parts: str) -> str:
    """experts 5 to 6 of expert-parallel rank 1, of rank_1/experts_5-6."""
    *rank, some = parts.split("/")
    if some.startswith("rank_"):
        return f"the experts of expert-parallel {some.replace('_', ' ')}"
    return _parts_in_words(some) + "".join(f" of expert-parallel {one.replace('_', ' ')}" for one in rank)


def _layout_in_words(kind: str, value: str) -> str:
    """gate and up exchanged in layer 2, of gate_up/layer_2."""
    name, _, layers = value.partition("/")
    return LAYOUTS[kind][name] + _layers_in_words(layers)


_PARTS = dict.fromkeys(("weights", "fp8_weights", "int4_weights"), _layers_in_words)
_PARTS |= {"experts": _experts_in_words} | {kind: partial(_layout_in_words, kind) for kind in LAYOUTS}


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{round(100 * share)} %"
