"""What the mismatch of filtered groups is called; `core.mismatch.filtered_metrics` computes it."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group

METRICS = in_group(
    "Sampling",
    *(
        replace(spec, only_with="--rollout-group-filter")
        for spec in (
            MetricSpec(
                "rollout/by_fate/filtered_k3_kl",
                "train-infer KL of a few samples of groups that did not pass, scored and not trained",
                "mean(e^D - D - 1) over the tokens of one sample of each of some groups",
                "KL(k3) filtered",
                UsualRange(
                    "train and rollout disagree on prompts that are not trained",
                    "Compare it with KL(k3): where that is in its range, the gap is of easy (or hopeless) "
                    "prompts alone, and comes into the batch once these are solved sometimes. Otherwise "
                    "follow the advice for KL(k3).",
                    high=1e-2,
                ),
            ),
            MetricSpec("rollout/by_fate/filtered_kl", "the same, k1 estimate", "mean(-D)"),
            MetricSpec(
                "rollout/by_fate/filtered_log_ratio_abs_mean",
                "their average disagreement per token",
                "mean |D|",
            ),
            MetricSpec(
                "rollout/by_fate/filtered_log_ratio_abs_max",
                "their largest disagreement on one token",
                "max |D|",
            ),
            MetricSpec("rollout/by_fate/filtered_tokens", "their tokens with finite log-probs", "count"),
            MetricSpec(
                "rollout/by_fate/filtered_nonfinite_tokens",
                "their tokens with a null or NaN log-prob",
                "count",
            ),
        )
    ),
)
