"""What the metrics of --router-replay mean: how far servers and Megatron route alike, and what the routes cost."""

from megatron_rl_corr.observability.usual import Meaning, UsualRange

ROUTING: dict[str, Meaning] = {
    "router_replay/disagreement/": Meaning(
        "the same in one layer", "tokens whose experts are not the same set / tokens with routes"
    ),
    "router_replay/overlap/": Meaning("the same in one layer", "experts that both chose / experts of the tokens"),
    "router_replay/gate_mass_apart/": Meaning("the same in one layer", "sum of those weights / tokens"),
    "router_replay/gate_mass_apart": Meaning(
        "with R3: weight that Megatron would give to experts the server did not choose", "sum of those weights / tokens"
    ),
    "router_replay/disagreement": Meaning(
        "with R3: tokens sent to other experts than Megatron would, the layers before replayed",
        "tokens x layers whose experts are not the same set / tokens x layers",
        "routes differ",
        UsualRange(
            "servers and Megatron route many tokens to different experts",
            "Compare the router's dtype on both sides (--moe-router-dtype fp32, and SGLang's), and the age of the "
            "samples. If single layers stand out, look for weights that only one side has, as a router's bias.",
            high=0.1,
        ),
    ),
    "router_replay/overlap": Meaning(
        "with R3: share of the server's experts that Megatron would choose too", "experts that both chose / experts"
    ),
    "router_replay/bytes_per_token": Meaning(
        "what the routes of a token of prompt or response take, in all layers",
        "layers with experts x top-k x bytes of an id",
    ),
    "experts/load_max": Meaning(
        "tokens of the busiest expert, against its layer's mean; with --expert-statistics",
        "max over layers of max(tokens) / mean(tokens)",
    ),
    "experts/log_ratio_abs_mean_max": Meaning(
        "largest mean disagreement of an expert's tokens; experts.jsonl says which", "max over experts of mean |D|"
    ),
    "experts/without_tokens": Meaning("experts of all layers that no valid token went to", "count"),
    "router_replay/tokens_without_routes": Meaning(
        "tokens that the server gave no routes for; they go where Megatron chooses", "count"
    ),
}
