"""What the metrics of collecting samples mean: how old they are, how they ended, what waits, what failed."""

from megatron_rl_corr.observability.usual import Meaning

COLLECTION: dict[str, Meaning] = {
    "weight_lag": Meaning(
        "weight versions that the oldest sample is behind the trained weights; 0 is on-policy",
        "max(version trained - version sampled)", "lag",
    ),
    "weight_lag_mean": Meaning("the same, averaged over samples", "mean(version trained - version sampled)"),
    "weight_lag_token_mean": Meaning(
        "the same, averaged over tokens, each by the weights that sampled it", "mean(version trained - version sampled)"
    ),
    "rollout/mixed_version_fraction": Meaning(
        "responses during which the weights changed", "samples of more than one version / samples"
    ),
    "rollout/length_fraction": Meaning(
        "responses cut at --rollout-max-new-tokens", "cut samples / samples"
    ),
    "rollout/abort_fraction": Meaning(
        "responses that a server cut short and that could not be continued", "aborted samples / samples"
    ),
    "rollout/groups_without_spread": Meaning(
        "groups whose rewards are all equal: their advantages are 0, they teach nothing", "count"
    ),
    "rollout/duplicate_samples": Meaning(
        "samples with the tokens of another one of their group; many: the server repeats itself", "count"
    ),
    "rollout/groups_ready": Meaning(
        "groups that wait for a later step; with many, sampling is faster than training"
    ),
    "rollout/groups_running": Meaning(
        "groups being sampled when the step took its own; with --rollout-max-lag 0 there are none"
    ),
    "rollout/groups_dropped": Meaning("groups put aside by --rollout-stale-samples drop since the step before"),
    "rollout/retries": Meaning("requests sent again because a server failed, since the step before"),
    "rollout/continuations": Meaning("requests that went on with an aborted response, since the step before"),
    "rollout/servers_left_out": Meaning("times that a server was left out, since the step before"),
    "rollout/failed_fraction": Meaning(
        "samples that failed for good since the step before; --rollout-max-failed-fraction",
        "failed samples / samples that ended",
    ),
    "rollout/groups_replaced": Meaning("groups dropped because a sample failed for good, since the step before"),
}

COLLECTION_FAMILIES: dict[str, Meaning] = {
    "rollout/failed/": Meaning(
        "samples that failed for good since the step before, by cause",
        "refused, retries, protocol, environment, environment_timeout, reward_error, reward_timeout",
    ),
    "rollout/by_fate/": Meaning(
        "kept_length_mean, dropped_length_mean: tokens per response of groups kept and dropped",
        "sampled tokens / samples; of groups dropped for a failure, those that had been sampled",
    ),
}
