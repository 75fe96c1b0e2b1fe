"""How far the servers' keys are those that Megatron would take."""

from __future__ import annotations

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group

FLAG = "--rollout-indexer-replay"
METRICS = in_group(
    "Expert routing",
    MetricSpec(
        "indexer_replay/overlap",
        "share of the server's keys that Megatron would take too, the layers before replayed",
        "keys that both took / keys of the server",
        "keys shared",
        UsualRange(
            "servers and Megatron take many different keys in sparse attention",
            "Compare the indexer's weights and rotation on both sides, and see whether servers return "
            "positions or slots of their cache: the help of --rollout-indexer-replay says what makes them.",
            low=0.8,
        ),
        only_with=FLAG,
    ),
    MetricSpec(
        "indexer_replay/replayed",
        "share of tokens, over all layers, that took the server's keys; others take Megatron's",
        "tokens x layers with keys of the server / tokens x layers",
        only_with=FLAG,
    ),
)
