"""The ledger's numbers: each term's share of the mean square of D, which add up to 1, and its size.

D = log pi_train - log pi_rollout of a token; N tokens of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl_corr.core.ledger_verdict import TERMS
from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.features.ledger.causes import Cause, Rest
from megatron_rl_corr.reduce.metrics import Max, Mean, Metric, Sum

THIRDS = ("first", "middle", "last")


def ledger_metrics(
    terms: Mapping[str, Tensor], valid: Tensor, third: Tensor, known: Mapping[str, Tensor]
) -> dict[str, Metric]:
    """share = sum(term D) / sum(D^2), mean = mean(term), mean_abs = mean |term| of each, over valid tokens.

    Terms add up to D, so shares add up to 1 and means to the mean of D. A share is negative where a term
    lowers the mismatch.

    Args:
        terms: name -> [N] float64.
        valid: [N] bool.
        third: [N] int64 in [0, 3), of its sequence.
        known: name -> [N] bool, the tokens whose term a pass has found.
    """
    count = valid.sum(dtype=torch.float64)
    terms = {name: torch.where(valid, term, 0.0) for name, term in terms.items()}
    whole = torch.stack(list(terms.values())).sum(dim=0)
    square = whole.square().sum()
    found: dict[str, Metric] = {
        "ledger/tokens": Sum(count[None]),
        "ledger/mean_abs": Mean(torch.stack([whole.abs().sum(), count])),
        "ledger/mean": Mean(torch.stack([whole.sum(), count])),
        "ledger/mean_square": Mean(torch.stack([square, count])),
    }
    for name, term in terms.items():
        found |= {
            f"ledger/{name}/share": Mean(torch.stack([(term * whole).sum(), square])),
            f"ledger/{name}/mean": Mean(torch.stack([term.sum(), count])),
            f"ledger/{name}/mean_abs": Mean(torch.stack([term.abs().sum(), count])),
        }
    for name, tokens in known.items():
        total = (tokens & valid).sum(dtype=torch.float64)
        found[f"ledger/{name}/known"] = Mean(torch.stack([total, count]))
    for place, name in enumerate(THIRDS):
        here = valid & (third == place)
        values = [torch.where(here, terms["rest"].abs(), 0.0).sum(), here.sum(dtype=torch.float64)]
        found[f"ledger/rest/by_position/{name}"] = Mean(torch.stack(values))
    return found


class FittedTemperature(Metric):
    """T of the sampler, where d = -(1 / T - 1) g; values = [sum dg, sum g^2]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        both, square = values
        inverse = 1 - both / square if square else math.nan
        return 1 / inverse if inverse else math.inf


class FitShare(Metric):
    """Share of d^2 that lies along g: (sum dg)^2 / (sum d^2 sum g^2); values = [sum dg, sum g^2, sum d^2]."""

    @staticmethod
    def finish(values: Sequence[float]) -> float:
        both, g, d = values
        return both * both / (g * d) if g and d else math.nan


def temperature_metrics(decode: Tensor, slope: Tensor, known: Tensor) -> dict[str, Metric]:
    """Which temperature the decode term looks like, and how much of it one would explain.

    With inverse temperature b a label's log-prob changes by d log p / d log b = log p + H, so that a sampler
    at temperature T shows d = -(1 / T - 1)(log p + H) at first order.

    Args:
        decode: [N] d.
        slope: [N] g = log p + H, of the policy that trains at temperature 1.
        known: [N] bool.
    """
    decode, slope = (torch.where(known, one.double(), 0.0) for one in (decode, slope))
    both, g, d = (decode * slope).sum(), slope.square().sum(), decode.square().sum()
    return {
        "ledger/decode/as_temperature": FittedTemperature(torch.stack([both, g])),
        "ledger/decode/as_temperature_share": FitShare(torch.stack([both, g, d])),
    }


def surplus_metrics(slope: Tensor, valid: Tensor) -> dict[str, Metric]:
    """Whether tokens were drawn from the policy that their log-probs are of.

    E_p[log p + H(p)] = 0 at every token, whatever came before. A sampler that leaves out improbable tokens
    draws more probable ones, though each has the log-prob that it should: top-p shows here, and not in D.

    Args:
        slope: [N] log p + H, of the policy that trains.
        valid: [N] bool.
    """
    slope = torch.where(valid, slope.double(), 0.0)
    count = valid.sum(dtype=torch.float64)
    return {
        "ledger/sampling/surplus": Mean(torch.stack([slope.sum(), count])),
        "ledger/sampling/surplus_square": Mean(torch.stack([slope.square().sum(), count])),
    }


def own_metrics(seconds: float, noise: float, like: Tensor) -> dict[str, Metric]:
    """The ledger's own time, and the noise that its verdict is made with. like: a tensor on the device."""
    values = {"seconds": seconds, "noise": noise}
    return {
        f"ledger/{name}": Max(like.new_full((1,), value, dtype=torch.float64))
        for name, value in values.items()
    }


def cause_metrics(causes: Sequence[Cause], servers: int, rest: Rest) -> dict[str, Metric]:
    """What the rest looks like, alike on all ranks. servers: named ones, whose samples alone were tried."""
    count = rest.valid.sum(dtype=torch.float64)
    numbers = {
        f"ledger/as/{cause.name}/{name}": value
        for cause in causes
        for name, value in (("share", cause.share), ("times", cause.times))
    }
    if causes and servers:
        numbers["ledger/as_servers"] = servers
    return {"ledger/as_square": Mean(torch.stack([rest.e.square().sum(), count]))} | {
        name: Max(rest.e.new_full((1,), value)) for name, value in numbers.items()
    }


_WITH = "--rollout-ledger-interval"
_TEXTS = {
    "staleness": "the weights of now against those that sampled the token",
    "routing": "the trainer's own experts against the servers', under the weights that sampled",
    "head": "the output layer in the model's number type against float32",
    "rounding": "the weights that sampled against what servers made of them",
    "rest": "what no pass takes apart: the trainer's arithmetic against the server's prefill",
    "decode": "the server's prefill of the tokens against what it sampled them with",
}
assert tuple(_TEXTS) == TERMS
METRICS = in_group(
    "Ledger",
    MetricSpec("ledger/tokens", "tokens that the ledger has split", "count", only_with=_WITH),
    MetricSpec("ledger/mean_abs", "their average disagreement", "mean |D|", only_with=_WITH),
    MetricSpec("ledger/mean", "the same with its sign", "mean(D)", only_with=_WITH),
    MetricSpec("ledger/mean_square", "what the terms' shares are of", "mean(D^2)", only_with=_WITH),
    *(
        spec
        for name, text in _TEXTS.items()
        for spec in (
            MetricSpec(
                f"ledger/{name}/share",
                text,
                "sum(term D) / sum(D^2), of all terms 1",
                only_with=_WITH,
            ),
            MetricSpec(
                f"ledger/{name}/mean",
                "the term with its sign; they add up to ledger/mean",
                "mean(term)",
                only_with=_WITH,
            ),
            MetricSpec(f"ledger/{name}/mean_abs", "size of the term", "mean |term|", only_with=_WITH),
        )
    ),
    *(
        MetricSpec(
            f"ledger/{name}/known",
            f"share of the tokens whose {text}; of others the term is 0",
            "tokens / ledger/tokens",
            only_with=_WITH,
        )
        for name, text in {
            "staleness": "weights at sampling are kept",
            "decode": "prefill a server of these weights gave",
        }.items()
    ),
    MetricSpec(
        "ledger/decode/as_temperature",
        "the temperature that a server would have sampled with, if the decode term were that alone",
        "1 / (1 - sum(d g) / sum(g^2)) with d the term, g = log p + entropy",
        only_with=_WITH,
        may_be_nan=True,  # where servers have scored nothing
    ),
    MetricSpec(
        "ledger/decode/as_temperature_share",
        "how much of the decode term such a temperature explains",
        "sum(d g)^2 / (sum(d^2) sum(g^2))",
        only_with=_WITH,
        may_be_nan=True,  # where servers have scored nothing
    ),
    MetricSpec(
        "ledger/sampling/surplus",
        "how much more probable sampled tokens are than the policy has them on average; about 0",
        "mean(g), g = log p + entropy",
        only_with=_WITH,
    ),
    MetricSpec("ledger/sampling/surplus_square", "its spread over tokens", "mean(g^2)", only_with=_WITH),
    MetricSpec(
        "ledger/rest/by_position/",
        "size of the rest in the first, middle and last third of a sequence",
        "mean |rest|",
        only_with=_WITH,
    ),
    MetricSpec(
        "ledger/as/",
        "share: what is gone of the rest's square if servers compute so; times: how much so",
        "1 - sum((e - d)^2) / sum(e^2); sum(de) / sum(d^2), of logits their factor",
        only_with=_WITH,
    ),
    MetricSpec(
        "ledger/as_square", "what these shares are of", "mean(e^2), e = routing + rest", only_with=_WITH
    ),
    MetricSpec(
        "ledger/as_servers",
        "servers that alone compute so; absent where all do",
        "count",
        only_with=_WITH,
    ),
    MetricSpec(
        "ledger/at/",
        "part of the rest's square at a server, an engine or a rank's experts, and chance of it",
        "share: sum(e^2) here / sum(e^2); excess: mean(e^2) here / elsewhere; chance: Student's t",
        only_with=_WITH,
    ),
    MetricSpec(
        "ledger/noise",
        "mean |D| up to which the ledger blames nothing, of the coarsest number type of both sides",
        only_with=_WITH,
    ),
    MetricSpec("ledger/seconds", "seconds that the ledger took, of time/score_s", only_with=_WITH),
)
