"""What saving samples costs a step."""

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group

METRICS = in_group(
    "Speed",
    MetricSpec(
        "time/save_s",
        "seconds gathering samples, and waiting for their files before the push",
        only_with="--rollout-save-trajectories",
    ),
)
