"""Counts of a batch's collection on each replica's leader, and the metrics made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.core.metrics import Mean, Metric, Sum
from megatron_rl_corr.engines.routes import has_routes
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.rollout import versions
from megatron_rl_corr.rollout.failures import CAUSES
from megatron_rl_corr.rollout.queue import Group, Taken

COUNTED = (
    "samples", "tokens", "token_lags", "mixed", "length", "abort", "ready", "running", "dropped", "retries",
    "continuations", "left_out", "route_tokens", "route_bytes", "unrouted", "equal_groups", "duplicates", "ended",
    *(f"failed_{cause}" for cause in CAUSES), "replaced", "lost_samples", "lost_tokens",
    "skipped_bad", "skipped_long", "moved_bytes",
)  # fmt: skip
"""Names of the counts, in the order in which they are broadcast."""


def count_samples(taken: Taken, version: int, experts: int | None) -> dict[str, float]:
    """Counts over a batch's groups, by name.

    Args:
        taken: the batch's groups.
        version: the trainer's weight version at the start of the batch.
        experts: experts of a layer, if the samples have routed experts.
    """
    samples = [sample for group in taken.groups for sample in group.trajectories]
    by_version = [
        (version - versions.number(span.version), int(sample.sampled[span.start : span.end].sum()))
        for sample in samples for span in sample.weight_versions
    ]
    counted = {
        "samples": len(samples),
        "tokens": sum(tokens for _, tokens in by_version),
        "token_lags": sum(lag * tokens for lag, tokens in by_version),
        "mixed": sum(len(sample.weight_versions) > 1 for sample in samples),
        "length": sum(sample.finish_reason == "length" for sample in samples),
        "abort": sum(sample.finish_reason == "abort" for sample in samples),
        "ready": taken.ready, "running": taken.running, "dropped": taken.dropped,
        "route_tokens": 0, "route_bytes": 0, "unrouted": 0, "moved_bytes": 0,
        "equal_groups": sum(len(set(group.rewards)) == 1 for group in taken.groups),
        "duplicates": sum(_duplicates(group) for group in taken.groups),
    }  # fmt: skip
    if experts is not None:
        counted |= _count_routes(samples, experts)
    return counted


def _duplicates(group: Group) -> int:
    """Samples with the same ids as an earlier one of the group."""
    return len(group.trajectories) - len({tuple(sample.output_ids.tolist()) for sample in group.trajectories})


def _count_routes(samples: Sequence[Trajectory], experts: int) -> dict[str, int]:
    routes = [sample.routed_experts for sample in samples]
    return {
        "route_tokens": sum(len(rows) for rows in routes),
        "route_bytes": sum(rows.nbytes for rows in routes),
        "unrouted": sum(int((~has_routes(rows, experts)).all(dim=1).sum()) for rows in routes),
    }


def collection_metrics(
    counted: torch.Tensor, *, with_routes: bool = False, packed: bool = False
) -> dict[str, Metric]:
    """Metrics by logged name, from a replica's counts [len(COUNTED)].

    Args:
        counted: the counts.
        with_routes: samples have routed experts.
        packed: samples are packed, and so dealt out over replicas.
    """
    values = dict(zip(COUNTED, counted, strict=True))

    def mean(total: str, count: str) -> Mean:
        return Mean(torch.stack([values[total], values[count]]))

    routes = {
        "router_replay/bytes_per_token": mean("route_bytes", "route_tokens"),
        "router_replay/tokens_without_routes": Sum(values["unrouted"][None]),
    }
    dealt = {"packing/moved_bytes": Sum(values["moved_bytes"][None])}
    values["failed"] = sum(values[f"failed_{cause}"] for cause in CAUSES)
    return (routes if with_routes else {}) | (dealt if packed else {}) | {
        "weight_lag_token_mean": mean("token_lags", "tokens"),
        "rollout/mixed_version_fraction": mean("mixed", "samples"),
        "rollout/length_fraction": mean("length", "samples"),
        "rollout/abort_fraction": mean("abort", "samples"),
        "rollout/groups_without_spread": Sum(values["equal_groups"][None]),
        "rollout/duplicate_samples": Sum(values["duplicates"][None]),
        "rollout/groups_ready": Sum(values["ready"][None]),
        "rollout/groups_running": Sum(values["running"][None]),
        "rollout/groups_dropped": Sum(values["dropped"][None]),
        "rollout/retries": Sum(values["retries"][None]),
        "rollout/continuations": Sum(values["continuations"][None]),
        "rollout/servers_left_out": Sum(values["left_out"][None]),
        "rollout/failed_fraction": mean("failed", "ended"),
        **{f"rollout/failed/{cause}": Sum(values[f"failed_{cause}"][None]) for cause in CAUSES},
        "rollout/groups_replaced": Sum(values["replaced"][None]),
        **{f"rollout/skipped_prompts/{cause}": Sum(values[f"skipped_{cause}"][None]) for cause in ("bad", "long")},
        "rollout/by_fate/kept_length_mean": mean("tokens", "samples"),
        "rollout/by_fate/dropped_length_mean": mean("lost_tokens", "lost_samples"),
    }


METRICS = (
    *in_group(
        "Staleness",
        MetricSpec(
            "weight_lag_token_mean", "weight_lag averaged over tokens, each by the weights that sampled it",
            "mean(version trained - version sampled)",
        ),
        MetricSpec(
            "rollout/mixed_version_fraction", "responses during which the weights changed",
            "samples of more than one version / samples",
        ),
    ),
    *in_group(
        "Sampling",
        MetricSpec("rollout/length_fraction", "responses cut at --rollout-max-new-tokens", "cut samples / samples"),
        MetricSpec(
            "rollout/abort_fraction", "responses that a server cut short and that could not be continued",
            "aborted samples / samples",
        ),
        MetricSpec(
            "rollout/groups_without_spread",
            "groups whose rewards are all equal: their advantages are 0, they teach nothing", "count",
        ),
        MetricSpec(
            "rollout/duplicate_samples",
            "samples with the tokens of another one of their group; many: the server repeats itself", "count",
        ),
        MetricSpec(
            "rollout/groups_ready", "groups that wait for a later batch; with many, sampling is faster than training"
        ),
        MetricSpec(
            "rollout/groups_running",
            "groups being sampled when the batch took its own; with --rollout-max-lag 0 there are none",
        ),
        MetricSpec(
            "rollout/groups_dropped", "groups that --rollout-stale-samples drop discarded since the batch before"
        ),
        MetricSpec(
            "rollout/groups_replaced", "groups dropped because a sample failed for good, since the batch before"
        ),
        MetricSpec(
            "rollout/skipped_prompts/",
            "rows that were drawn since the batch before and left out: bad: they make no prompt; long: too long",
            "bad, long",
        ),
        MetricSpec(
            "rollout/by_fate/", "kept_length_mean, dropped_length_mean: tokens per response of groups kept and dropped",
            "sampled tokens / samples; of groups dropped for a failure, those that had been sampled",
        ),
        MetricSpec("rollout/retries", "requests sent again because a server failed, since the batch before"),
        MetricSpec("rollout/continuations", "requests that continued an aborted response, since the batch before"),
        MetricSpec("rollout/servers_left_out", "times that a server was left out, since the batch before"),
        MetricSpec(
            "rollout/failed_fraction",
            "samples that failed for good since the batch before; --rollout-max-failed-fraction",
            "failed samples / samples that ended",
        ),
        MetricSpec(
            "rollout/failed/", "samples that failed for good since the batch before, by cause", ", ".join(CAUSES)
        ),
    ),
    *in_group(
        "Speed",
        MetricSpec(
            "packing/moved_bytes", "bytes of samples that went to another replica, for an equal share of the work",
            "sum over replicas", only_with="packed sequences",
        ),
    ),
    *in_group(
        "Expert routing",
        MetricSpec(
            "router_replay/bytes_per_token", "size of the routes of a token of prompt or response, in all layers",
            "layers with experts x top-k x bytes of an id", only_with="--router-replay R3",
        ),
        MetricSpec(
            "router_replay/tokens_without_routes",
            "tokens that the server gave no routes for; they go where Megatron chooses", "count",
            only_with="--router-replay R3",
        ),
    ),
)
