"""How far whole distributions are apart, by the ids that servers list at a token: what sampled tokens may not
show.

T' tokens of this rank, K listed ids of each, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.ledger_verdict import explained_tv
from megatron_rl_corr.core.listed_distances import listed_distances
from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import communication_device
from megatron_rl_corr.reduce.metrics import Max, Mean, Metric

MOST_IDS = 4
"""Ids that are named of a batch."""
LEAST_SHARE = 0.05
"""An id is named that has this share of the distance, or more."""


@dataclass(frozen=True)
class ListedTokens:
    """Tokens with the ids that their server lists, on ranks of the last stage."""

    ids: Tensor
    """[T', K] int32."""
    rollout: Tensor
    """[T', K] the server's log-probs of these, in one prefill under the weights that train."""
    train: Tensor
    """[T', K] the trainer's."""
    label: Tensor
    """[T'] log p - log q of the sampled token in the same two passes; not finite where nothing is listed."""
    valid: Tensor
    """[T'] bool."""


@collective
def distance_metrics(tokens: ListedTokens | None, vocab_size: int, noise: float) -> dict[str, Metric]:
    """KL, total variation and the listed mass; where it is beyond rounding the ids with most of it.

    Ids are named alike on all ranks: one all-reduce of V numbers.

    Args:
        tokens: of this rank; None on ranks of other stages.
        vocab_size: V.
        noise: mean |D| that rounding explains.
    """
    # Of each id its part of the distance; behind them that of no id of the vocabulary, the whole, the tokens.
    sums = torch.zeros(vocab_size + 3, dtype=torch.float64, device=communication_device())
    found: dict[str, Metric] = {}
    if tokens is not None:
        known = tokens.valid & tokens.label.isfinite()
        far = listed_distances(tokens.rollout, tokens.train)
        count = known.sum(dtype=torch.float64)
        columns = {
            "kl": far.kl,
            "reverse_kl": far.reverse_kl,
            "tv_least": far.least_tv,
            "tv_most": far.most_tv,
            "mass": far.mass,
            "label_mean_abs": tokens.label.double().abs(),
        }
        columns = {name: torch.where(known, value, 0.0) for name, value in columns.items()}
        found = {f"ledger/dist/{name}": Mean(torch.stack([x.sum(), count])) for name, x in columns.items()}
        for name in ("kl", "tv_least"):
            # A rank without a token has no largest value.
            largest = torch.cat([columns[name], columns[name].new_zeros(1)]).max()[None]
            found[f"ledger/dist/{name}_max"] = Max(largest)
        places = tokens.ids.long().clamp(max=vocab_size)  # of padding one place for all
        by_id = torch.where(known[:, None], far.by_id, 0.0)
        sums.index_add_(0, places.reshape(-1).to(sums.device), by_id.reshape(-1).to(sums.device))
        sums[-2:] += torch.stack([columns["tv_least"].sum(), count]).to(sums.device)
    dist.all_reduce(sums)
    whole, total = sums[-2:].tolist()
    if tokens is None or not total or whole / total <= explained_tv(noise):
        return found
    like = found["ledger/dist/tv_least"].values
    values, ids = sums[:-2].topk(min(MOST_IDS, vocab_size + 1))
    for value, place in zip(values.tolist(), ids.tolist(), strict=True):
        if value >= LEAST_SHARE * whole:
            name = "outside" if place == vocab_size else place
            found[f"ledger/dist/by_id/{name}"] = Max(like.new_full((1,), value / total))
    return found


METRICS = in_group(
    "Ledger",
    MetricSpec(
        "ledger/dist/kl",
        "divergence of the server's whole distribution from the trainer's, at least",
        "mean of a lower bound of KL(rollout || train)",
    ),
    MetricSpec(
        "ledger/dist/reverse_kl",
        "the same the other way round",
        "mean of a lower bound of KL(train || rollout)",
    ),
    MetricSpec("ledger/dist/kl_max", "the largest at a token", "max of that of kl"),
    MetricSpec(
        "ledger/dist/tv_least",
        "total variation of the two distributions, at least",
        "mean(sum_K |q - p| / 2 + |q_o - p_o| / 2), q_o and p_o outside of the list",
    ),
    MetricSpec("ledger/dist/tv_least_max", "the largest at a token", "max of that"),
    MetricSpec(
        "ledger/dist/tv_most",
        "total variation, at most",
        "mean(sum_K |q - p| / 2 + (q_o + p_o) / 2)",
    ),
    MetricSpec(
        "ledger/dist/mass",
        "share of the server's distribution that its list has",
        "mean(sum_K q)",
    ),
    MetricSpec(
        "ledger/dist/label_mean_abs",
        "disagreement on the sampled tokens alone, in the same two passes",
        "mean |log p - log q|",
    ),
    MetricSpec(
        "ledger/dist/by_id/",
        "the ids with most of the distance, if it is beyond rounding; outside: none of the model",
        "sum |q - p| / 2 of the id / tokens",
    ),
    only_with="--rollout-ledger-top",
    may_be_nan=True,  # where servers have scored nothing
)
