"""Counts of a batch's collection on each replica's leader, and the metrics made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group
from megatron_rl_corr.data.skipped import CAUSES as SKIP_CAUSES
from megatron_rl_corr.engines.routes import has_routes
from megatron_rl_corr.engines.trajectory import FinishReason, Trajectory
from megatron_rl_corr.reduce.metrics import Mean, Metric, Share, Sum
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.failures import CAUSES
from megatron_rl_corr.rollout.queue import Group, Taken

COUNTED = (
    "samples",
    "unscored",
    "tokens",
    "token_lags",
    "mixed",
    "length",
    "abort",
    "ready",
    "running",
    "dropped",
    "retries",
    "continuations",
    "missed_stops",
    "left_out",
    "route_tokens",
    "route_bytes",
    "unrouted",
    "unrouted_sampled",
    "equal_groups",
    "duplicates",
    "ended",
    *(f"failed_{cause}" for cause in CAUSES),
    "replaced",
    "truncated",
    "lost_samples",
    "lost_tokens",
    *(f"skipped_{cause}" for cause in SKIP_CAUSES),
    "moved_bytes",
    "filtered",
    "filtered_above_0",
    "filtered_samples",
    "filtered_tokens",
    "filtered_rewards",
    "refilled",
    "aborted",
    "surplus",
    "surplus_samples",
    "surplus_tokens",
    "surplus_kept",
    "cut",
    "cut_tokens",
    "cut_ended",
    "cut_ended_tokens",
)
"""Names of the counts, in the order in which they are broadcast."""


def count_samples(taken: Taken, version: int, experts: int | None) -> dict[str, float]:
    """Counts over a batch's groups, by name. A sample is an episode: it is cut where one of its sequences is.

    Args:
        taken: the batch's groups.
        version: the trainer's weight version at the start of the batch.
        experts: experts of a layer, if the samples have routed experts.
    """
    samples = [episode for group in taken.groups for episode in group.episodes]
    sequences = [sequence for episode in samples for sequence in episode]
    by_version = [
        (version - versions.number(span.version), int(sequence.sampled[span.start : span.end].sum()))
        for sequence in sequences
        for span in sequence.weight_versions
    ]

    def ended(reason: FinishReason) -> int:
        return sum(any(one.finish_reason == reason for one in episode) for episode in samples)

    counted = {
        "samples": len(samples),
        "unscored": sum(any(map(_without_logprobs, episode)) for episode in samples),
        "tokens": sum(tokens for _, tokens in by_version),
        "token_lags": sum(lag * tokens for lag, tokens in by_version),
        "mixed": sum(_is_mixed(episode) for episode in samples),
        "length": ended("length"),
        "abort": ended("abort"),
        "ready": taken.ready,
        "running": taken.running,
        "dropped": taken.dropped,
        "route_tokens": 0,
        "route_bytes": 0,
        "unrouted": 0,
        "unrouted_sampled": 0,
        "moved_bytes": 0,
        "equal_groups": sum(
            len(group.episodes) > 1 and len(set(group.episode_rewards)) == 1 for group in taken.groups
        ),
        "duplicates": sum(_duplicates(group) for group in taken.groups),
        "filtered": taken.filtered.groups,
        "filtered_above_0": taken.filtered.above_0,
        "filtered_samples": taken.filtered.samples,
        "filtered_tokens": taken.filtered.tokens,
        "filtered_rewards": taken.filtered.rewards,
        "refilled": taken.refilled,
        "aborted": taken.aborted,
        "surplus": taken.surplus.groups,
        "surplus_samples": taken.surplus.samples,
        "surplus_tokens": taken.surplus.tokens,
        "surplus_kept": taken.kept_surplus,
    }
    if experts is not None:
        counted |= _count_routes(sequences, experts)
    return counted


def _without_logprobs(sample: Trajectory) -> bool:
    """It has tokens, and the server gave a finite log-prob for none."""
    return sample.output_ids.numel() > 0 and not bool(
        sample.rollout_logprobs[sample.sampled].isfinite().any()
    )


def _is_mixed(episode: Sequence[Trajectory]) -> bool:
    """Several weights sampled it."""
    return len({span.version for sequence in episode for span in sequence.weight_versions}) > 1


def _duplicates(group: Group) -> int:
    """Samples with the same ids as an earlier one of the group."""
    ids = {tuple(one.output_ids.numpy().tobytes() for one in episode) for episode in group.episodes}
    return len(group.episodes) - len(ids)


def _without_routes(rows: torch.Tensor, experts: int) -> torch.Tensor:
    """[T, M, k] -> [T]: tokens that have no routes in any layer. Few have none in the first: only these are
    looked at further.
    """
    without = ~has_routes(rows[:, 0], experts)
    without[without.clone()] = ~has_routes(rows[without], experts).any(dim=1)
    return without


def _count_routes(samples: Sequence[Trajectory], experts: int) -> dict[str, int]:
    routes = [sample.routed_experts for sample in samples]
    without = [_without_routes(rows, experts) for rows in routes]
    return {
        "route_tokens": sum(len(rows) for rows in routes),
        "route_bytes": sum(rows.nbytes for rows in routes),
        "unrouted": sum(int(rows.sum()) for rows in without),
        # A token is sampled in the pass of the one before it: the response's first in that of
        # the prompt's last.
        "unrouted_sampled": sum(
            int((rows[sample.prompt_ids.numel() - 1 :] & sample.sampled).sum())
            for rows, sample in zip(without, samples, strict=True)
        ),
    }


def collection_metrics(
    counted: torch.Tensor,
    *,
    with_routes: bool = False,
    packed: bool = False,
    filtered: bool = False,
    oversampled: bool = False,
    truncated_samples: str = "train",
) -> dict[str, Metric]:
    """Metrics by logged name, from a replica's counts [len(COUNTED)].

    Args:
        counted: the counts.
        with_routes: samples have routed experts.
        packed: samples are packed, and so dealt out over replicas.
        filtered, oversampled: groups are filtered; more of them are sampled than steps take.
        truncated_samples: train, mask or drop.
    """
    values = dict(zip(COUNTED, counted, strict=True))

    def mean(total: str, count: str) -> Mean:
        return Mean(torch.stack([values[total], values[count]]))

    routes = {
        "router_replay/bytes_per_token": mean("route_bytes", "route_tokens"),
        "router_replay/tokens_without_routes": Sum(values["unrouted"][None]),
        "router_replay/sampled_without_routes": mean("unrouted_sampled", "tokens"),
    }
    dealt = {"packing/moved_bytes": Sum(values["moved_bytes"][None])}
    # Samples of surplus groups that had ended, whether their group had or was cut.
    values["surplus_samples"] = values["surplus_samples"] + values["cut_ended"]
    values["surplus_tokens"] = values["surplus_tokens"] + values["cut_ended_tokens"]
    by_filter = {
        "rollout/groups_filtered": Sum(values["filtered"][None]),
        "rollout/groups_filtered_above_0": Sum(values["filtered_above_0"][None]),
        "rollout/groups_refilled": Sum(values["refilled"][None]),
        "rollout/by_fate/filtered_length_mean": mean("filtered_tokens", "filtered_samples"),
        "rollout/by_fate/filtered_reward_mean": mean("filtered_rewards", "filtered_samples"),
    }
    surplus = {
        "rollout/surplus_kept": Sum(values["surplus_kept"][None]),
        "rollout/surplus_discarded": Sum(values["surplus"][None]),
        "rollout/surplus_aborted": Sum(values["aborted"][None]),
        "rollout/samples_cut": Sum(values["cut"][None]),
        "rollout/by_fate/cut_length_mean": mean("cut_tokens", "cut"),
        "rollout/by_fate/surplus_length_mean": mean("surplus_tokens", "surplus_samples"),
    }
    values["failed"] = sum(values[f"failed_{cause}"] for cause in CAUSES)
    optional = (
        (routes, with_routes),
        (dealt, packed),
        (by_filter, filtered),
        (surplus, oversampled),
        ({"rollout/samples_masked": Sum(values["length"][None])}, truncated_samples == "mask"),
        ({"rollout/groups_truncated": Sum(values["truncated"][None])}, truncated_samples == "drop"),
    )
    return {name: metric for part, there in optional if there for name, metric in part.items()} | {
        "weight_lag_token_mean": mean("token_lags", "tokens"),
        "rollout/mixed_version_fraction": mean("mixed", "samples"),
        "rollout/samples_without_logprobs": Sum(values["unscored"][None]),
        "rollout/length_fraction": mean("length", "samples"),
        "rollout/abort_fraction": mean("abort", "samples"),
        "rollout/groups_without_spread": Sum(values["equal_groups"][None]),
        "rollout/duplicate_samples": Sum(values["duplicates"][None]),
        "rollout/groups_ready": Sum(values["ready"][None]),
        "rollout/groups_running": Sum(values["running"][None]),
        "rollout/groups_dropped": Sum(values["dropped"][None]),
        "rollout/retries": Sum(values["retries"][None]),
        "rollout/continuations": Sum(values["continuations"][None]),
        "rollout/missed_stops": Sum(values["missed_stops"][None]),
        "rollout/servers_left_out": Sum(values["left_out"][None]),
        "rollout/failed_fraction": Share(torch.stack([values["failed"], values["ended"]])),
        **{f"rollout/failed/{cause}": Sum(values[f"failed_{cause}"][None]) for cause in CAUSES},
        "rollout/groups_replaced": Sum(values["replaced"][None]),
        **{
            f"rollout/skipped_prompts/{cause}": Sum(values[f"skipped_{cause}"][None]) for cause in SKIP_CAUSES
        },
        "rollout/by_fate/kept_length_mean": mean("tokens", "samples"),
        "rollout/by_fate/dropped_length_mean": mean("lost_tokens", "lost_samples"),
    }


FILTER = tuple(
    replace(spec, only_with="--rollout-group-filter")
    for spec in (
        MetricSpec(
            "rollout/groups_filtered", "groups that did not pass the filter, since the batch before", "count"
        ),
        MetricSpec(
            "rollout/groups_filtered_above_0",
            "those of them whose mean reward is above 0: always solved, if 0 is wrong",
            "count",
        ),
        MetricSpec(
            "rollout/groups_refilled", "groups of the batch that did not pass, as too few others did", "count"
        ),
        MetricSpec(
            "rollout/by_fate/filtered_length_mean",
            "tokens per response of groups that did not pass the filter",
            "sampled tokens / samples",
        ),
        MetricSpec("rollout/by_fate/filtered_reward_mean", "their mean reward", "mean(r)"),
    )
)
SURPLUS = tuple(
    replace(spec, only_with="--rollout-oversampling")
    for spec in (
        MetricSpec(
            "rollout/surplus_kept",
            "groups done or running beyond those of the steps ahead, kept for later batches",
            "count",
        ),
        MetricSpec(
            "rollout/surplus_aborted",
            "groups cut when the batch had its own; their prompts are drawn again",
            "count",
        ),
        MetricSpec(
            "rollout/surplus_discarded",
            "groups done by then and not kept; their prompts are drawn again",
            "count",
        ),
        MetricSpec(
            "rollout/samples_cut",
            "samples cut at a server, their group being surplus or one of its samples failed",
            "count",
        ),
        MetricSpec(
            "rollout/by_fate/surplus_length_mean",
            "tokens per ended response of groups cut or discarded as surplus",
            "sampled tokens / samples",
        ),
        MetricSpec(
            "rollout/by_fate/cut_length_mean",
            "tokens that samples had when they were cut",
            "sampled tokens / samples",
        ),
    )
)

METRICS = (
    *in_group(
        "Staleness",
        MetricSpec(
            "weight_lag_token_mean",
            "weight_lag averaged over tokens, each by the weights that sampled it",
            "mean(version trained - version sampled)",
        ),
        MetricSpec(
            "rollout/mixed_version_fraction",
            "responses during which the weights changed",
            "samples of more than one version / samples",
        ),
    ),
    *in_group(
        "Sampling",
        MetricSpec(
            "rollout/samples_masked",
            "cut samples that are not in the loss, but in the baseline of their group",
            "count",
            only_with="--rollout-truncated-samples mask",
        ),
        MetricSpec(
            "rollout/groups_truncated",
            "groups dropped for a cut sample since the batch before",
            "count; also in groups_replaced",
            only_with="--rollout-truncated-samples drop",
        ),
        MetricSpec(
            "rollout/samples_without_logprobs",
            "responses without a finite log-prob: they train nothing, and lower kept_fraction",
            "count",
        ),
        MetricSpec(
            "rollout/length_fraction", "responses cut at --rollout-max-new-tokens", "cut samples / samples"
        ),
        MetricSpec(
            "rollout/abort_fraction",
            "responses that a server cut short and that could not be continued",
            "aborted samples / samples",
        ),
        MetricSpec(
            "rollout/groups_without_spread",
            "groups of equal rewards: group-relative advantages are 0; --rollout-group-filter",
            "count",
        ),
        MetricSpec(
            "rollout/duplicate_samples",
            "samples with the tokens of another one of their group; many: the server repeats itself",
            "count",
        ),
        MetricSpec(
            "rollout/groups_ready",
            "groups that wait for a later batch; with many, sampling is faster than training",
        ),
        MetricSpec(
            "rollout/groups_running",
            "groups being sampled when the batch took its own; with --rollout-max-lag 0 there are none",
        ),
        MetricSpec(
            "rollout/groups_dropped",
            "groups that --rollout-stale-samples drop discarded since the batch before",
        ),
        MetricSpec(
            "rollout/groups_replaced",
            "groups dropped because a sample failed for good, since the batch before",
        ),
        MetricSpec(
            "rollout/skipped_prompts/",
            "rows left out since the batch before: no prompt (bad), too long, or with an unread label",
            ", ".join(SKIP_CAUSES),
        ),
        MetricSpec(
            "rollout/by_fate/",
            "kept_length_mean, dropped_length_mean: tokens per response of groups kept and dropped",
            "sampled tokens / samples; of groups dropped for a failure, those that had been sampled",
        ),
        *FILTER,
        *SURPLUS,
        MetricSpec("rollout/retries", "requests sent again because a server failed, since the batch before"),
        MetricSpec(
            "rollout/continuations", "requests that continued an aborted response, since the batch before"
        ),
        MetricSpec(
            "rollout/missed_stops",
            "samples cut at a stop text that the server had missed, since the batch before",
        ),
        MetricSpec("rollout/servers_left_out", "times that a server was left out, since the batch before"),
        MetricSpec(
            "rollout/failed_fraction",
            "samples that failed for good since the batch before; --rollout-max-failed-fraction",
            "failed samples / samples that ended; 0 if none did",
        ),
        MetricSpec(
            "rollout/failed/",
            "samples that failed for good since the batch before, by cause",
            ", ".join(CAUSES),
        ),
    ),
    *in_group(
        "Speed",
        MetricSpec(
            "packing/moved_bytes",
            "bytes of samples that went to another replica, for an equal share of the work",
            "sum over replicas",
            only_with="packed sequences",
        ),
    ),
    *in_group(
        "Expert routing",
        MetricSpec(
            "router_replay/bytes_per_token",
            "size of the routes of a token of prompt or response, in all layers",
            "layers with experts x top-k x bytes of an id",
            only_with="--router-replay R3",
        ),
        MetricSpec(
            "router_replay/tokens_without_routes",
            "tokens of prompt or response whose routes are not known: they go where Megatron chooses",
            "count",
            only_with="--router-replay R3",
        ),
        MetricSpec(
            "router_replay/sampled_without_routes",
            "share of the sampled tokens trained without the routes that they were sampled with",
            "sampled tokens whose pass has no routes / sampled tokens",
            "routes of sampled tokens are lost",
            UsualRange(
                "many tokens are trained on other experts than sampled them",
                "Servers retract responses, and tell other routes of them then. For want of memory: give "
                "them more of it, or lower --rollout-max-concurrency. At pushes: --rollout-pause-mode "
                "in_place keeps the routes.",
                high=0.2,
            ),
            only_with="--router-replay R3",
        ),
    ),
)
