"""What the comparison in every bit is called; comparison.py computes it."""

from __future__ import annotations

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group

_WITH = "--rollout-expect-exact"
METRICS = in_group(
    "Exactness",
    MetricSpec("exact/tokens", "sampled tokens that were compared", "count", only_with=_WITH),
    MetricSpec(
        "exact/tokens_apart",
        "tokens whose two log-probs are further apart than is allowed",
        "count of ulps > --rollout-expect-exact",
        only_with=_WITH,
        usual=UsualRange(
            "training and servers do not compute alike",
            "The run ends with the first such token; see docs/guides/exact.md for what must agree.",
            low=0,
            high=0,
        ),
    ),
    MetricSpec(
        "exact/tokens_unknown",
        "tokens of which a side has no finite log-prob; they count as apart",
        "count",
        only_with=_WITH,
    ),
    MetricSpec(
        "exact/ulps_max",
        "largest distance, in units in the last place of the server's type",
        "max |p - q| / (eps 2^floor(log2 max(|p|, |q|, 1)))",
        only_with=_WITH,
    ),
    MetricSpec("exact/log_ratio_max", "largest distance of a token", "max |D|", only_with=_WITH),
)
