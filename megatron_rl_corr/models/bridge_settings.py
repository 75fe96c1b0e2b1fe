"""Settings of config.json that were compared with transformers, of families that Megatron-Bridge builds.

Bridge passes over a setting that it does not know, and servers would compute with it. So a key is one of the
sizes of FREE, or has the value of transformers' own class, or one of OTHER_VALUES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.models.bridge import PROVEN
from megatron_rl_corr.models.settings import HARMLESS

FREE = {
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "max_position_embeddings"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "norm_eps", "rope_theta", "tie_word_embeddings"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    *("first_k_dense_replace", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"),
}
"""Keys of numbers that Bridge reads."""
WINDOWED = {"sliding_window", "query_pre_attn_scalar"}
FREE_OF = {
    "gemma2": {*WINDOWED, "attn_logit_softcapping", "final_logit_softcapping"},
    "gemma3_text": WINDOWED,
}
"""Further ones of a family."""
GELU = {"hidden_act": ("gelu_pytorch_tanh",), "cache_implementation": ("hybrid", None)}
OTHER_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gemma": GELU,
    "gemma2": GELU,
    "gemma3_text": GELU | {"sliding_window_pattern": (6,), "_sliding_window_pattern": (6,)},
    "minimax_m2": {
        "qk_norm_type": ("per_layer",),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
        "scoring_func": ("sigmoid",),
        "shared_intermediate_size": (0,),
    },
    "mistral": {"sliding_window": (None,)},
}
"""Values that other keys may have beside that of transformers' class."""


def not_proven(hf_config: Mapping[str, Any]) -> list[str]:
    """A line for what a run with Bridge's model was not shown to train as servers sample; [] for a model of
    PROVEN whose settings were.

    Args:
        hf_config: the model's config.json.
    """
    kind = hf_config.get("model_type")
    if kind not in PROVEN:
        return [
            f"config.json: model_type {kind!r}: Megatron-Bridge may have it, and its logits were not "
            f"compared with transformers' (those of {', '.join(PROVEN)} were); use one of these"
        ]
    from transformers import AutoConfig

    layers = {key: hf_config[key] for key in ("num_hidden_layers",) if key in hf_config}
    defaults = AutoConfig.for_model(kind, **layers).to_dict()
    lines = []
    for key, value in hf_config.items():
        if key in ("architectures", "model_type") or key.endswith("_token_id"):
            continue
        if any(key in keys for keys in HARMLESS.values()) or _is_proven(kind, key, value, defaults):
            continue
        lines.append(
            f"config.json: {key} {value!r} was not compared with transformers in a {kind} that "
            f"Megatron-Bridge builds ({defaults.get(key, 'no such key')} was); use a model without it"
        )
    return lines


def _is_proven(kind: str, key: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    if key in FREE | FREE_OF.get(kind, set()):
        return value is not None or defaults.get(key, 0) is None
    if key in ("rope_parameters", "rope_scaling"):
        return value is None or _is_plain_rope(value, defaults.get("rope_parameters") or {})
    own = (defaults[key],) if key in defaults else ()
    return any(value == one for one in (*own, *OTHER_VALUES.get(kind, {}).get(key, ())))


def _is_plain_rope(value: Any, defaults: Mapping[str, Any]) -> bool:
    """True for rotary settings without scaling, whose part of a head is that of transformers' class."""
    if not isinstance(value, Mapping):
        return False
    if "rope_theta" not in value and any(isinstance(one, Mapping) for one in value.values()):
        return value.keys() == defaults.keys() and all(
            _is_plain_rope(one, defaults[kind]) for kind, one in value.items()
        )
    others = {key: one for key, one in value.items() if key not in ("rope_theta", "rope_type", "type")}
    kinds = (value.get("rope_type", "default"), value.get("type", "default"))
    known = {key: one for key, one in defaults.items() if key not in ("rope_theta", "rope_type", "type")}
    return kinds == ("default", "default") and all(known.get(key) == one for key, one in others.items())
