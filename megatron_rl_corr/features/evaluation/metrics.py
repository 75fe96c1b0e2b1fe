"""What an evaluation measures."""

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group

METRICS = (
    *in_group(
        "Rewards and responses",
        MetricSpec(
            "eval/",
            "held-out prompts, by set: reward, lengths, mean@N, pass@K; samples scored, samples failed",
            "every --eval-interval steps, over samples that did not fail; mean@N over prompts; pass@K: mean "
            "over prompts of 1 - C(n - c, K) / C(n, K), where c of n samples passed",
            only_with="--rollout-eval-prompts",
        ),
    ),
    *in_group(
        "Speed",
        MetricSpec(
            "time/eval_s",
            "seconds waiting for an evaluation; with --rollout-max-lag that of the step before",
            only_with="--rollout-eval-prompts",
        ),
    ),
)
