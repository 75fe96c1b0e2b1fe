"""What each key of a Hugging Face config.json is here: used for flags, of one value alone, without
effect, or refused.

A key that no table has is refused: a server may compute with it, and Megatron would not. Defaults stand in
models/defaults.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from megatron_rl_corr.models.architectures import (
    CODE_OF,
    EXPERTS,
    LINEAR_TYPES,
    OF_WHOLE,
    TEXT_OF,
    WINDOWED,
    WINDOWED_TYPES,
    Config,
    has_table,
    num_experts,
    of_text,
    parts_of,
)
from megatron_rl_corr.models.defaults import ALIASES, DEFAULTS
from megatron_rl_corr.models.rope import is_number, rope_problems, rope_settings

COUNTS = ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")
NUMBERS = ("rms_norm_eps", "routed_scaling_factor", "swiglu_limit")
SWITCHES = (
    "tie_word_embeddings",
    "norm_topk_prob",
    "attention_bias",
    "use_qk_norm",
    "qkv_bias",
    "use_sliding_window",
)
ELSEWHERE = ("sliding_window", "mlp_only_layers", "layer_types")
"""Keys of DEFAULTS with a check of their own. All that are in no list are sizes: whole numbers from 1 on."""
NULLS = ("head_dim", "num_key_value_heads", "n_shared_experts", "q_lora_rank")
"""Sizes and counts that may be null: the hidden size over the heads, as many as heads, 0; no
low-rank queries.
"""


ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Where rotary settings stand, which `models/rope.py` checks."""


FOLLOWS = {
    "head_dim": "qk_rope_head_dim",
    "qk_head_dim": "qk_nope_head_dim and qk_rope_head_dim",
    "num_key_value_heads": "num_attention_heads",
    "mlp_layer_types": "first_k_dense_replace and num_hidden_layers",
    "indexer_types": "num_hidden_layers, as layers that take the keys of the one before are not supported",
    "experts_per_token": "num_experts_per_tok",
    "initial_context_length": "original_max_position_embeddings of the rotary settings",
}
"""Keys that say again what others do: of latent attention, as transformers writes them, and of published
gpt-oss -> those others.
"""


class Only(NamedTuple):
    """A setting that Megatron's flags can express in one way alone."""

    values: tuple[Any, ...]
    """What the flags train, in the words of config.json; the first is that of a config.json
    without the key.
    """
    why: str


NO_BIAS = Only(
    (False,), "its attention would have biases, behind it too, for which Megatron has no flag of their own"
)
HAS_BIAS = Only((True,), "this family has biases of queries, keys and values")
SIGMOID = {
    "scoring_func": Only(("sigmoid",), "experts are scored by sigmoids in this family"),
    "topk_method": Only(("noaux_tc",), "experts are chosen with a bias of the router in this family"),
    "moe_layer_freq": Only((1,), "transformers makes experts of every layer behind the dense ones"),
}
ONLY_ALL: dict[str, Only] = {
    "hidden_act": Only(
        ("silu",), "--swiglu is SiLU, and Megatron has no flag for another gated activation here"
    ),
    "mlp_bias": Only((False,), "the MLP would have biases, which no table of names has"),
    "attention_bias": NO_BIAS,
    "qkv_bias": NO_BIAS,
    "use_sliding_window": Only((False,), "attention within a window is not supported"),
    "use_mrope": Only((False,), "positions of several axes are not supported"),
    "is_encoder_decoder": Only((False, None), "only decoders are trained"),
    "add_cross_attention": Only((False, None), "only decoders are trained"),
    "pruned_heads": Only(({}, [], None), "heads are trained all"),
}
LATENT = SIGMOID | {
    "rope_interleave": Only(
        (True,), "Megatron's latent attention rotates neighbouring numbers, and has no flag for halves"
    ),
}
NOT_SHARED = Only((1,), "layers that take the keys of the one before them are not supported")
RENORMALISED = Only(
    (True,), "transformers always scales a token's chosen experts to a sum of 1 in this family"
)
DELTA_NETS = {
    "attn_output_gate": Only((True,), "attention of this family has a gate for its output"),
    "output_gate_type": Only(("silu", "swish", None), "Megatron's gate of a delta net is SiLU"),
}
ALL_EXPERTS = {
    "decoder_sparse_step": Only((1,), "servers make experts of every layer of this family"),
    "mlp_only_layers": Only(([], None), "servers make experts of every layer of this family"),
}
ONLY: dict[str, dict[str, Only]] = {
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT
    | {"indexer_rope_interleave": Only((False,), "transformers rotates halves in this family's indexer")},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT
    | {
        "indexer_rope_interleave": Only(
            (True,), "transformers rotates neighbouring numbers in this family's indexer"
        ),
        "index_topk_freq": NOT_SHARED,
    },
    "glm4_moe": SIGMOID,
    "gpt_oss": {
        "attention_bias": HAS_BIAS,
        "swiglu_alpha": Only((1.702,), "Megatron's --quick-geglu has 1.702 without a flag for it"),
        "hidden_act_alpha": Only((1.702,), "Megatron's --quick-geglu has 1.702 without a flag for it"),
    },
    "qwen2": {"attention_bias": HAS_BIAS, "qkv_bias": HAS_BIAS},
    "qwen2_moe": {"attention_bias": HAS_BIAS},
    "qwen3": {"use_qk_norm": Only((True,), "this family has norms of queries and keys")},
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe_text": DELTA_NETS | ALL_EXPERTS | {"norm_topk_prob": RENORMALISED},
    "qwen3_next": DELTA_NETS | ALL_EXPERTS,
    "qwen3_moe": {
        "use_qk_norm": Only((True,), "this family has norms of queries and keys"),
        "shared_expert_intermediate_size": Only((0, None), "this family has no shared expert"),
    },
}
"""Settings of one value, beside those of ONLY_ALL, by `model_type`; a key of DEFAULTS is none of them."""

MODEL_CLASS = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
"""The class in `architectures` by which servers choose their model."""

HARMLESS: dict[str, tuple[str, ...]] = {
    "where the file comes from": (
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "_commit_hash",
        "unsloth_version",
        "unsloth_fixed",
        "transformers.js_config",
    ),
    "code that came with the checkpoint, which is never run here": ("auto_map",),
    "how numbers are stored, cut or computed; precision, layout and kernels are the user's": (
        "torch_dtype",
        "dtype",
        "use_bfloat16",
        "_attn_implementation",
        "attn_implementation",
        "_attn_implementation_autoset",
        "experts_implementation",
        "_experts_implementation",
        "chunk_size_feed_forward",
        "pretraining_tp",
        "ep_size",
        "torchscript",
        "gradient_checkpointing",
        "mamba_ssm_dtype",
    ),
    "how a checkpoint is quantised, which is checked where weights are loaded and sent": (
        "quantization_config",
        "compression_config",
    ),
    "what a call keeps or returns": (
        "use_cache",
        "return_dict",
        "use_return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "tie_last_hidden_states",
    ),
    "training as it once was: its initial weights, dropout and auxiliary losses; the run's are flags of its "
    "own": (
        "initializer_range",
        "attention_dropout",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "aux_loss_alpha",
        "seq_aux",
        "tf_legacy_loss",
    ),
    "another task's head, which a causal model does not have": (
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
    ),
    "an encoder's": (
        "is_decoder",
        "tie_encoder_decoder",
        "cross_attention_hidden_size",
    ),
    "the tokenizer's, and a limit": ("tokenizer_class", "prefix", "model_max_length", "max_sequence_length"),
    "how old versions sampled; a run sets it by flags": (
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "epsilon_cutoff",
        "eta_cutoff",
        "encoder_repetition_penalty",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "num_beam_groups",
        "diversity_penalty",
    ),
    "layers that draft tokens, beside the policy; mcore/mtp.py compares them": (
        "num_nextn_predict_layers",
        "num_mtp_layers",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    ),
}
"""Why a key changes no flag, and nothing that is trained -> the keys; those that end with
_token_id are text's.
"""


def family_of(config: Config) -> str:
    """The `model_type` by whose code the model is loaded. Raises ValueError for one that is not supported."""
    parts_of(config)
    kind = _code_of(config["model_type"])
    if kind not in DEFAULTS:
        raise ValueError(
            f"config.json: model_type {kind!r} has no settings here, only names of weights; add them to "
            "DEFAULTS and MODEL_CLASS in megatron_rl_corr/models/settings.py"
        )
    return kind


def with_defaults(config: Config) -> dict[str, Any]:
    """config.json with transformers' default for each key of DEFAULTS that it lacks, and with one
    name for each key.

    Args:
        config: of any model; of one that is not supported it is returned as it is.
    """
    config, kind = of_text(config), config.get("model_type")
    kind = _code_of(kind) if isinstance(kind, str) else None
    if kind not in DEFAULTS:
        return dict(config)
    names = ALIASES.get(kind, {})
    named = {names.get(key, key): value for key, value in config.items()}
    # Rotary settings may stand in several places, and `rope_settings` knows them all.
    filled = {key: value for key, value in DEFAULTS[kind].items() if key not in ROPE} | named
    if filled.get("mlp_only_layers", 0) in (None, ()):
        filled["mlp_only_layers"] = []
    if filled.get("num_key_value_heads", 0) is None:
        filled["num_key_value_heads"] = filled["num_attention_heads"]
    return filled


def _code_of(kind: str) -> str:
    return CODE_OF.get(kind, TEXT_OF.get(kind, kind))


def why_harmless(key: str, config: Config) -> str | None:
    """Why a key may have any value without another policy being trained; None for one that is looked at."""
    if key.endswith("_token_id"):
        return "a token's number: prompts and the end of a text, not the model"
    if key in ("sliding_window", "use_sliding_window", "max_window_layers"):
        return _why_no_window(key, with_defaults(config), DEFAULTS[family_of(config)])
    return next((why for why, keys in HARMLESS.items() if key in keys), None)


def computed(config: Config) -> dict[str, Any]:
    """The settings that decide what a model computes, each under one name and with its default; no limits.

    Of a model that no table has these are all settings that are not known to be harmless.

    Raises:
        ValueError: its rotary settings are not supported.
    """
    if not has_table(config):
        return {
            key: value
            for key, value in config.items()
            if key not in ("architectures", "max_position_embeddings")
            and not key.endswith("_token_id")
            and all(key not in keys for keys in HARMLESS.values())
        }
    kind, filled = family_of(config), with_defaults(config)
    only = _only(kind)
    found = {key: one.values[0] for key, one in only.items() if key not in filled}
    left_out = {*ROPE, "max_position_embeddings", "architectures", "model_type", *_derived(kind, filled)}
    for key, value in filled.items():
        if (
            key not in left_out
            and why_harmless(key, config) is None
            and not (key == "layer_types" and not _layer_types(value, filled))
        ):
            found[key] = only[key].values[0] if key in only and _is_one_of(value, only[key].values) else value
    hidden, heads = filled["hidden_size"], filled["num_attention_heads"]
    if (
        "num_key_value_heads" in found
        and found.get("head_dim") is None
        and _is_whole(hidden)
        and _is_whole(heads)
    ):
        found["head_dim"] = hidden // max(heads, 1)
    return found | {f"rope {key}": value for key, value in rope_settings(filled, DEFAULTS[kind]).items()}


def malformed(config: Config) -> list[str]:
    """A line for each setting that no flag can be made of: a value of another kind, or two that
    contradict each other.

    Raises:
        ValueError: the architecture is not supported.
    """
    config, kind = of_text(config), family_of(config)
    names = ALIASES.get(kind, {})
    lines = _two_names(kind, config)
    for key, value in config.items():
        if names.get(key, key) in DEFAULTS[kind] and key not in ROPE:
            lines += _wrong_value(names.get(key, key), key, value)
    filled = with_defaults(config)
    return lines + _too_many_chosen(config, filled) + rope_problems(filled, DEFAULTS[kind])


def not_trained(config: Config) -> list[str]:
    """A line for each setting that Megatron's flags would pass over, or train as something else.

    Raises:
        ValueError: the architecture is not supported.
    """
    lines = _outside_of_text(config)
    config, kind, filled = of_text(config), family_of(config), with_defaults(config)
    only, derived, used = (
        _only(kind),
        _derived(kind, filled),
        {*DEFAULTS[kind], *ALIASES.get(kind, {}), *ROPE},
    )
    for key, value in config.items():
        if key in only:
            lines += _another(key, value, only[key])
        elif key in derived:
            lines += _another(key, value, Only(derived[key], f"it follows from {FOLLOWS[key]}"))
        elif key == "architectures":
            lines += _another(
                key,
                value,
                Only(
                    ([MODEL_CLASS.get(config["model_type"], MODEL_CLASS[kind])], [], None),
                    "servers choose their model by it",
                ),
            )
        elif key == "layer_types":
            lines += _layer_types(value, filled)
        elif key not in ("model_type", "sliding_window", *used) and why_harmless(key, config) is None:
            lines.append(
                f"config.json: {_shown(key, value)} is no setting of {config['model_type']} that is known "
                "here: a server may compute with it, and Megatron would not; use a model without it, or "
                "take it out of the config.json of trainer and servers if it changes nothing"
            )
    if kind == "glm4_moe_lite" and filled["first_k_dense_replace"] != 1 and "mlp_layer_types" not in config:
        shown = _shown("first_k_dense_replace", filled["first_k_dense_replace"])
        lines.append(
            f"config.json: {shown} without mlp_layer_types: servers read the first, and transformers the "
            "second, without which it has one dense layer; add mlp_layer_types"
        )
    return lines + _window(filled) + _not_read_by_servers(kind, config)


def setting_problems(config: Config) -> list[str]:
    """The lines of `malformed` and `not_trained`. Raises ValueError: the architecture is not supported."""
    return malformed(config) + not_trained(config)


def check_settings(config: Config) -> None:
    """Raises ValueError with the lines of `setting_problems`, if there are any."""
    lines = setting_problems(config)
    if lines:
        raise ValueError("\n  ".join(lines))


def _only(kind: str) -> dict[str, Only]:
    return {key: one for key, one in (ONLY_ALL | ONLY.get(kind, {})).items() if key not in DEFAULTS[kind]}


def _derived(kind: str, filled: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Keys of FOLLOWS, for latent attention -> the values that they can have."""
    if kind == "gpt_oss":
        first = filled.get("initial_context_length")
        with suppress(ValueError):  # which rope_problems says
            first = rope_settings(filled, DEFAULTS[kind]).get("original_max_position_embeddings", first)
        return {
            "experts_per_token": (filled["num_experts_per_tok"], None),
            "initial_context_length": (first, None),
        }
    if "kv_lora_rank" not in DEFAULTS[kind]:
        return {}
    rope, nope, heads = (
        filled.get(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "num_attention_heads")
    )
    if not all(_is_whole(size) for size in (rope, nope, heads)):
        return {"head_dim": (), "qk_head_dim": (), "num_key_value_heads": ()}
    found = {"head_dim": (rope, None), "qk_head_dim": (rope + nope,), "num_key_value_heads": (heads, None)}
    dense, layers = filled["first_k_dense_replace"], filled["num_hidden_layers"]
    sparse = "index_topk" in DEFAULTS[kind]
    if (sparse or kind == "glm4_moe_lite") and _is_whole(dense) and _is_whole(layers):
        found["mlp_layer_types"] = (["dense"] * dense + ["sparse"] * (layers - dense), None)
    if kind == "glm_moe_dsa" and _is_whole(layers):
        found["indexer_types"] = (["full"] * layers, None)
    return found


def _two_names(kind: str, config: Config) -> list[str]:
    return [
        f"config.json: {_shown(alias, config[alias])} and {_shown(key, config[key])} are two names of one "
        "setting; take one of the two out"
        for alias, key in ALIASES.get(kind, {}).items()
        if alias in config and key in config and config[alias] != config[key]
    ]


def _wrong_value(name: str, key: str, value: Any) -> list[str]:
    """A line for a value of a key of DEFAULTS that is none of its kind."""
    if name in ELSEWHERE:
        kind, right = (
            "a list of numbers of layers",
            name != "mlp_only_layers"
            or value is None
            or (isinstance(value, list | tuple) and all(_is_whole(layer) and layer >= 0 for layer in value)),
        )
    elif value is None and name in NULLS:
        return []
    elif name in SWITCHES:
        kind, right = "true or false", isinstance(value, bool)
    elif name in NUMBERS:
        kind, right = "a number above 0", is_number(value) and value > 0
    elif name in COUNTS:
        kind, right = "a whole number", _is_whole(value) and value >= 0
    else:
        kind, right = "a whole number from 1 on", _is_whole(value) and value > 0
    return [] if right else [f"config.json: {_shown(key, value)} must be {kind}; correct it"]


def _outside_of_text(config: Config) -> list[str]:
    """A line for each setting of a model of images and text that stands where engines do not look for it."""
    if config.get("text_config") is None or config.get("model_type") not in TEXT_OF:
        return []
    read = (*OF_WHOLE, "text_config", "vision_config")
    return [
        f"config.json: {_shown(key, value)} stands outside of text_config, where engines do not read it; "
        "move it into text_config, or take it out"
        for key, value in config.items()
        if key not in read and why_harmless(key, config) is None
    ]


def _not_read_by_servers(kind: str, config: Config) -> list[str]:
    """A line for each rotary setting that servers do not find where transformers does."""
    inner = config.get("rope_parameters")
    if kind == "glm_moe_dsa" and config.get("architectures") and "indexer_rope_interleave" not in config:
        return [
            "config.json: it has no indexer_rope_interleave, without which servers rotate halves in the "
            "indexer, and transformers neighbouring numbers; add indexer_rope_interleave true"
        ]
    if "full_attention_interval" not in DEFAULTS[kind] or not isinstance(inner, Mapping):
        return []
    alone = ("rope_theta", "partial_rotary_factor") if kind == "qwen3_next" else ("partial_rotary_factor",)
    return [
        f"config.json: {_shown(key, inner[key])} stands among rope_parameters alone, where servers do not "
        f"read it: they would take {DEFAULTS[kind][key]}; add it beside rope_parameters, too"
        for key in alone
        if inner.get(key, DEFAULTS[kind][key]) != DEFAULTS[kind][key] and key not in config
    ]


def _too_many_chosen(config: Config, filled: Mapping[str, Any]) -> list[str]:
    """A line where a token has more experts than a layer has."""
    chosen, experts = filled.get("num_experts_per_tok"), num_experts(filled)
    if not (_is_whole(experts) and _is_whole(chosen) and chosen > experts):
        return []
    names = [key for key in EXPERTS if key in config]  # the alias, too
    return [
        f"config.json: num_experts_per_tok {chosen} is more than {' or '.join(names or EXPERTS)} {experts}; "
        "correct one of the two"
    ]


def _another(key: str, value: Any, only: Only) -> list[str]:
    if _is_one_of(value, only.values):
        return []
    right = f"use a model with {_shown(key, only.values[0])}" if only.values else "correct those"
    return [f"config.json: {_shown(key, value)} is not what the flags train: {only.why}; {right}"]


def _why_no_window(key: str, filled: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    """Why a setting of attention within a window has no effect; None for one that has, or that
    the family lacks.
    """
    if "use_sliding_window" not in defaults:
        return None
    window, longest = filled["sliding_window"], filled["max_position_embeddings"]
    if key == "max_window_layers":
        return "which layers attend within a window, where there is one"
    if filled["use_sliding_window"] is False:
        return "of attention within a window, which is switched off" if key == "sliding_window" else None
    if filled["use_sliding_window"] is True and (
        window is None or _is_whole(window) and _is_whole(longest) and window >= longest
    ):
        return "of attention within a window that no text is longer than"
    return None


def _window(filled: Mapping[str, Any]) -> list[str]:
    """A line for attention within a window that is smaller than the longest text, or for a window that is not
    one.
    """
    if filled["model_type"] in WINDOWED:
        if _is_whole(filled["sliding_window"]) and filled["sliding_window"] > 1:
            return []
        shown = _shown("sliding_window", filled["sliding_window"])
        return [f"config.json: {shown} must be a whole number from 2 on; correct it"]
    window, longest = filled.get("sliding_window"), filled["max_position_embeddings"]
    if (
        window is None
        or filled.get("use_sliding_window", True) is False
        and why_harmless("sliding_window", filled)
    ):
        return []
    if _is_whole(window) and _is_whole(longest) and window >= longest:
        return []
    on = " (use_sliding_window is true)" if filled.get("use_sliding_window") is True else ""
    return [
        f"config.json: {_shown('sliding_window', window)} is not supported{on}; use a model with full "
        "attention"
    ]


def _layer_types(value: Any, filled: Mapping[str, Any]) -> list[str]:
    """A line for kinds of attention that are not the family's."""
    layers, words = filled["num_hidden_layers"], "full_attention for each layer"
    kinds, given = ("full_attention",), len(value) if isinstance(value, list) else 0
    if filled["model_type"] in WINDOWED:
        # as servers have it: vLLM does not read the key
        kinds, words = WINDOWED_TYPES, "sliding_attention and full_attention in turn, the first sliding,"
    elif "index_topk" in filled:
        kinds, words = ("indexed_attention",), "indexed_attention for each layer"
    elif _is_whole(step := filled.get("full_attention_interval")) and step > 1:
        # as servers have it: SGLang does not read the key
        kinds = (*LINEAR_TYPES[:1] * (step - 1), LINEAR_TYPES[1])
        words = f"full_attention for every {step}th layer (full_attention_interval), linear_attention else,"
    if value is None or (given == layers and value == [kinds[i % len(kinds)] for i in range(given)]):
        return []
    return [
        f"config.json: {_shown('layer_types', value)} must be {words} "
        f"(num_hidden_layers {layers}): attention of another kind is not supported; use "
        f"a model with {'these' if len(kinds) > 1 else 'full attention'}"
    ]


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """True if a value is there; true is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(key: str, value: Any) -> str:
    """The key and its value, as a message has them."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return f"{key} {text if len(text) <= 80 else text[:77] + '...'}"
