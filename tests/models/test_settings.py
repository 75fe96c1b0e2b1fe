"""Every key of a config.json is used for flags, of one value, without effect for a reason, or
refused by name.
"""

import copy

import pytest

from megatron_rl_corr.models.architectures import CODE_OF, FAMILIES, TEXT_OF, WINDOWED
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.megatron_flags import model_flags
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.settings import (
    ALIASES,
    DEFAULTS,
    HARMLESS,
    MODEL_CLASS,
    NULLS,
    ONLY,
    ONLY_ALL,
    computed,
    why_harmless,
    with_defaults,
)
from tests.models.published_configs import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_2,
    GLM_4_5,
    GLM_4_7_FLASH,
    GLM_5,
    GPT_OSS_20B,
    KIMI_K2,
    LLAMA_3_1_8B,
    MIXTRAL_8X7B,
    MOONLIGHT,
    PUBLISHED,
    QWEN1_5_MOE,
    QWEN2_5_7B,
    QWEN3_8B,
    QWEN3_30B_A3B,
)

KINDS = sorted(DEFAULTS)
OTHERS = (
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    5,
    7,
    64,
    0.25,
    0.75,
    -1,
    "gelu",
    "other",
    [],
    [1],
    ["other"],
    {},
    {"other": 1},
)
"""Values that a key may be changed to."""


def of_transformers(kind):
    """What transformers writes of a configuration that nobody has set anything of."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind).to_dict()


def outcome(config):
    """The flags, or the message of the refusal."""
    try:
        return model_flags(config)
    except ValueError as error:
        return str(error)


def passed_over(config):
    """(key, value) of each change of one key that changes no flag, is not refused by name, and
    is not harmless.
    """
    before, found = model_flags(config), []
    for key, value in config.items():
        for other in OTHERS:
            if other == value and isinstance(other, bool) == isinstance(value, bool):
                continue
            changed = config | {key: copy.deepcopy(other)}
            after = outcome(changed)
            named = isinstance(after, str) and after.startswith("config.json: ") and key in after
            harmless = after == before and why_harmless(key, changed) is not None
            if not (named or harmless or (isinstance(after, list) and after != before)):
                found.append((key, other, after))
    return found


SAME = {
    ("num_key_value_heads", None),
    ("head_dim", None),
    ("n_shared_experts", None),
    ("rope_scaling", None),
    ("rope_parameters", None),
    ("mlp_only_layers", None),
    ("partial_rotary_factor", None),
    ("architectures", None),
    ("experts_per_token", None),
    ("initial_context_length", None),
    ("mlp_layer_types", None),
    ("indexer_types", None),
    ("architectures", "[]"),
    ("layer_types", None),
    ("rope_scaling", "{}"),
    ("rope_parameters", "{}"),
}
"""Changes that mean what stood there before: a null is transformers' default, and so on."""


@pytest.mark.parametrize("kind", KINDS)
def test_key_of_transformers_own_config_when_changed_then_flags_change_or_it_is_refused_or_harmless(kind):
    wrong = [(key, other) for key, other, _ in passed_over(of_transformers(kind))]
    assert [(key, other) for key, other in wrong if not means_the_same(kind, key, other)] == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_key_of_a_published_config_when_changed_then_flags_change_or_it_is_refused_or_harmless(name):
    config = PUBLISHED[name]
    kind = CODE_OF.get(config["model_type"], config["model_type"])
    wrong = [(key, other) for key, other, _ in passed_over(config)]
    assert [(key, other) for key, other in wrong if not means_the_same(kind, key, other)] == []


def means_the_same(kind, key, other):
    """Whether a change says again what the flags train: another of the values of a setting that
    may have several.
    """
    if (key, other if other is None else repr(other)) in SAME:
        return True
    only = (ONLY_ALL | ONLY.get(kind, {})).get(key)
    return only is not None and any(other == one and type(other) is type(one) for one in only.values)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_then_those_of_transformers_and_every_key_of_it_has_a_place(kind):
    written = of_transformers(kind)
    named = {ALIASES.get(kind, {}).get(key, key): value for key, value in written.items()}
    for key, value in DEFAULTS[kind].items():
        if key == "rope_theta":
            assert written["rope_parameters"]["rope_theta"] == value
        elif key == "partial_rotary_factor":
            assert written["rope_parameters"][key] == value
        elif key == "sliding_window" and kind not in WINDOWED:
            assert not named.get(key), "off, as use_sliding_window is"
        elif key == "layer_types":  # None: as transformers writes them
            assert model_flags(written) == model_flags(written | {key: value})
        elif key == "full_attention_interval":  # transformers writes the layers' kinds
            assert written["layer_types"][:value] == ["linear_attention"] * (value - 1) + ["full_attention"]
        elif key == "mlp_only_layers":
            assert named[key] == list(value)
        elif value is None and key in NULLS:
            heads = {
                "num_key_value_heads": written["num_attention_heads"],
                "head_dim": written["hidden_size"] // written["num_attention_heads"],
            }
            assert named.get(key) in (None, heads[key])
        elif key == "first_k_dense_replace" and "mlp_layer_types" in written:  # transformers writes that one
            assert written["mlp_layer_types"][: value + 1] == ["dense"] * value + ["sparse"]
        elif key == "num_nextn_predict_layers":
            assert value == 0  # of a checkpoint whose config.json has no such key: it has no such layers
        else:
            assert named[key] == value, key
    placed = {
        *DEFAULTS[kind],
        *ONLY_ALL,
        *ONLY.get(kind, {}),
        "model_type",
        "architectures",
        "layer_types",
        "rope_parameters",
        "head_dim",
        "qk_head_dim",
        "mlp_layer_types",
        "indexer_types",
        "num_key_value_heads",
    }
    assert [key for key in named if key not in placed and why_harmless(key, written) is None] == []
    assert not set(DEFAULTS[kind]) & set(ONLY.get(kind, {}))


def test_tables_then_every_family_has_its_own_and_no_key_is_harmless_twice():
    of_text = {TEXT_OF.get(kind, CODE_OF.get(kind, kind)) for kind in FAMILIES}
    assert of_text == set(DEFAULTS) == set(MODEL_CLASS) - set(TEXT_OF) and set(TEXT_OF) <= set(MODEL_CLASS)
    keys = [key for keys in HARMLESS.values() for key in keys]
    assert len(keys) == len(set(keys))
    used = {key for defaults in DEFAULTS.values() for key in defaults} | {*ONLY_ALL}
    assert set(keys) & used <= {"num_nextn_predict_layers"}


def test_settings_of_samples_that_transformers_moved_out_of_config_json_then_all_are_harmless():
    from transformers import GenerationConfig

    keys = GenerationConfig._get_default_generation_params()
    assert [key for key in keys if why_harmless(key, LLAMA_3_1_8B) is None] == []


@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_a_config_without_any_key_then_those_of_transformers_default(kind):
    assert model_flags({"model_type": kind}) == model_flags(of_transformers(kind))


@pytest.mark.parametrize("name", PUBLISHED)
def test_flags_of_a_published_config_when_transformers_has_read_and_written_it_then_the_same(name):
    from transformers import AutoConfig

    config = copy.deepcopy(PUBLISHED[name])
    kind = config.pop("model_type")
    again = AutoConfig.for_model(CODE_OF.get(kind, kind), **config).to_dict() | {"model_type": kind}
    again.pop("dtype", None)

    def numbers(flags):
        """A number is one, however it is written."""
        return [float(word) if word.replace(".", "").replace("e-", "").isdigit() else word for word in flags]

    assert numbers(model_flags(again)) == numbers(model_flags(PUBLISHED[name]))
    assert computed(again) == computed(PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_flags_when_a_key_is_left_out_then_those_of_its_default_and_never_a_traceback(name):
    config = PUBLISHED[name]
    kind = CODE_OF.get(config["model_type"], config["model_type"])
    for key in config.keys() - {"model_type"}:
        without = {one: value for one, value in config.items() if one != key}
        default = DEFAULTS[kind].get(ALIASES.get(kind, {}).get(key, key), "none")
        expected = outcome(config | {key: default}) if default not in ("none", ()) else None
        found = outcome(without)
        assert isinstance(found, list) or found.startswith("config.json: "), key
        if expected is not None and default is not None:
            assert found == expected, key


@pytest.mark.parametrize(
    ("config", "key", "value", "said"),
    [
        (QWEN3_8B, "hidden_act", "gelu", "hidden_act 'gelu' is not what the flags train: --swiglu is SiLU"),
        (LLAMA_3_1_8B, "hidden_act", "relu2", "use a model with hidden_act 'silu'"),
        (
            LLAMA_3_1_8B,
            "attention_bias",
            True,
            "attention_bias true is not what the flags train: its attention would",
        ),
        (
            LLAMA_3_1_8B,
            "mlp_bias",
            True,
            "mlp_bias true is not what the flags train: the MLP would have biases",
        ),
        (QWEN3_30B_A3B, "attention_bias", True, "use a model with attention_bias false"),
        (DEEPSEEK_V3, "attention_bias", True, "attention_bias true"),
        (QWEN2_5_7B, "attention_bias", False, "this family has biases of queries, keys and values"),
        (
            DEEPSEEK_V3,
            "rope_interleave",
            False,
            "rope_interleave false is not what the flags train: Megatron's latent",
        ),
        (DEEPSEEK_V3, "scoring_func", "softmax", "scoring_func 'softmax' is not what the flags train"),
        (KIMI_K2, "topk_method", "group_limited_greedy", "topk_method 'group_limited_greedy'"),
        (DEEPSEEK_V3, "moe_layer_freq", 2, "moe_layer_freq 2 is not what the flags train"),
        (DEEPSEEK_V3, "head_dim", 128, "head_dim 128 is not what the flags train: it follows from qk_rope"),
        (DEEPSEEK_V3, "qk_head_dim", 128, "use a model with qk_head_dim 192"),
        (DEEPSEEK_V3, "num_key_value_heads", 8, "use a model with num_key_value_heads 128"),
        (LLAMA_3_1_8B, "partial_rotary_factor", 0.5, "partial_rotary_factor 0.5 is not what the flags train"),
        (GLM_4_5, "partial_rotary_factor", 1.5, "must be a number above 0, and 1 at most"),
        (QWEN2_5_7B, "rope_theta", 10000.5, "rope_theta 10000.5 must be a whole number above 0"),
        (QWEN2_5_7B, "rope_theta", 0, "rope_theta 0 must be a whole number above 0"),
        (QWEN2_5_7B, "rope_theta", None, "rope_theta null must be a whole number above 0"),
        (QWEN2_5_7B, "rope_scaling", [], "rope_scaling [] must be an object of rotary settings"),
        (QWEN2_5_7B, "use_mrope", True, "use_mrope true"),
        (
            QWEN2_5_7B | {"sliding_window": 4096},
            "use_sliding_window",
            True,
            "4096 is not supported (use_sliding",
        ),
        (
            QWEN2_5_7B,
            "layer_types",
            ["full_attention"] * 27 + ["sliding_attention"],
            "layer_types ['full_attention'",
        ),
        (QWEN2_5_7B, "layer_types", ["full_attention"] * 27, "for each layer (num_hidden_layers 28)"),
        (
            MIXTRAL_8X7B,
            "sliding_window",
            4096,
            "sliding_window 4096 is not supported; use a model with full attention",
        ),
        (QWEN3_30B_A3B, "shared_expert_intermediate_size", 768, "this family has no shared expert"),
        (QWEN3_30B_A3B, "use_qk_norm", False, "this family has norms of queries and keys"),
        (QWEN3_30B_A3B, "num_local_experts", 64, "are two names of one setting"),
        (QWEN3_30B_A3B, "num_experts", 0, "num_experts 0 must be a whole number from 1 on"),
        (QWEN3_30B_A3B, "decoder_sparse_step", 0, "decoder_sparse_step 0 must be a whole number from 1 on"),
        (
            QWEN3_30B_A3B,
            "mlp_only_layers",
            ["3"],
            "mlp_only_layers ['3'] must be a list of numbers of layers",
        ),
        (QWEN3_30B_A3B, "mlp_only_layers", [-1], "mlp_only_layers [-1] must be a list of numbers of layers"),
        (QWEN3_30B_A3B, "num_experts_per_tok", 129, "num_experts_per_tok 129 is more than num_experts 128"),
        (
            DEEPSEEK_V3,
            "num_experts_per_tok",
            257,
            "num_experts_per_tok 257 is more than n_routed_experts 256",
        ),
        (QWEN1_5_MOE, "norm_topk_prob", None, "norm_topk_prob null must be true or false"),
        (DEEPSEEK_V3, "num_experts_per_tok", 1, "num_experts_per_tok is 1 with norm_topk_prob true"),
        (KIMI_K2, "num_experts_per_tok", 1, "Megatron does not normalise the score of one expert"),
        (MIXTRAL_8X7B, "num_experts_per_tok", 1, "num_experts_per_tok is 1"),
        (DEEPSEEK_V3, "n_group", 7, "n_group 7, topk_group 4 and n_routed_experts 256 do not fit"),
        (GLM_4_5, "topk_group", 2, "n_group 1, topk_group 2 and n_routed_experts 160 do not fit"),
        (DEEPSEEK_V3, "routed_scaling_factor", 0.0, "routed_scaling_factor 0.0 must be a number above 0"),
        (LLAMA_3_1_8B, "hidden_size", "4096", "hidden_size '4096' must be a whole number from 1 on"),
        (LLAMA_3_1_8B, "rms_norm_eps", None, "rms_norm_eps null must be a number above 0"),
        (
            LLAMA_3_1_8B,
            "architectures",
            ["LlamaForSequenceClassification"],
            "servers choose their model by it",
        ),
        (LLAMA_3_1_8B, "is_encoder_decoder", True, "only decoders are trained"),
        (LLAMA_3_1_8B, "logit_scale", 0.0625, "logit_scale 0.0625 is no setting of llama that is known here"),
        (QWEN3_8B, "attn_logit_softcapping", None, "attn_logit_softcapping null is no setting of qwen3"),
        (
            QWEN2_5_7B,
            "scale_emb",
            12,
            "take it out of the config.json of trainer and servers if it changes nothing",
        ),
        (
            QWEN3_8B,
            "per_layer_config",
            {"3": {"head_dim": 64}},
            "per_layer_config {'3': {'head_dim': 64}} is no",
        ),
        (
            QWEN3_8B,
            "text_config",
            {"hidden_size": 8} | dict.fromkeys("abcdefghijklmn", 1),
            "text_config {'hidden",
        ),
        (DEEPSEEK_V3_2, "indexer_rope_interleave", True, "transformers rotates halves in this family's"),
        (DEEPSEEK_V3_2, "index_topk", 0, "index_topk 0 must be a whole number from 1 on"),
        (DEEPSEEK_V3_2, "index_k_norm_type", "rms", "index_k_norm_type 'rms' is no setting of deepseek_v32"),
        (DEEPSEEK_V3_2, "layer_types", ["full_attention"] * 61, "must be indexed_attention for each layer"),
        (DEEPSEEK_V3_2, "mlp_layer_types", ["sparse"] * 61, "it follows from first_k_dense_replace"),
        (
            GLM_5,
            "indexer_rope_interleave",
            False,
            "transformers rotates neighbouring numbers in this family's",
        ),
        (GLM_5, "index_topk_freq", 4, "layers that take the keys of the one before them are not supported"),
        (GLM_5, "index_skip_topk_offset", 3, "index_skip_topk_offset 3 is no setting of glm_moe_dsa"),
        (GLM_5, "indexer_types", ["full", "shared"] * 39, "layers that take the keys of the one before"),
        (KIMI_K2, "swiglu_limit", 7.0, "swiglu_limit 7.0 is no setting of kimi_k2"),
    ],
)
def test_setting_that_flags_can_not_train_then_refused_with_key_value_and_remedy(config, key, value, said):
    with pytest.raises(ValueError) as raised:
        model_flags(config | {key: value})
    assert said in str(raised.value) and str(raised.value).startswith("config.json: ")
    assert all("; " in line for line in str(raised.value).splitlines()), "a remedy"


def test_setting_of_the_indexers_rotation_when_servers_would_not_find_it_then_refused():
    without = {key: value for key, value in GLM_5.items() if key != "indexer_rope_interleave"}
    with pytest.raises(ValueError, match="it has no indexer_rope_interleave.*; add indexer_rope_interleave"):
        model_flags(without)


def test_settings_when_several_are_wrong_then_all_are_told_at_once():
    with pytest.raises(ValueError) as raised:
        model_flags(LLAMA_3_1_8B | {"hidden_act": "gelu", "mlp_bias": True, "alibi": True})
    assert [line.split()[1] for line in str(raised.value).splitlines()] == ["hidden_act", "mlp_bias", "alibi"]


YARN, LLAMA3 = DEEPSEEK_V3["rope_scaling"], LLAMA_3_1_8B["rope_scaling"]


@pytest.mark.parametrize(
    ("config", "rope", "said"),
    [
        (
            LLAMA_3_1_8B,
            LLAMA3 | {"long_factor": [1.0]},
            "rope_scaling: long_factor [1.0] is no setting of rope_type",
        ),
        (LLAMA_3_1_8B, LLAMA3 | {"type": "linear"}, "rope_scaling has type 'linear' and rope_type 'llama3'"),
        (
            LLAMA_3_1_8B,
            LLAMA3 | {"rope_theta": 10000.0},
            "rope_theta is 500000.0, and 10000.0 among the rotary",
        ),
        (
            LLAMA_3_1_8B,
            {
                "rope_type": "llama3",
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 8192,
            },
            "rope_scaling: factor None must be a number",
        ),
        # transformers takes the longest text where the original one is not there, and Megatron 8192.
        (
            LLAMA_3_1_8B,
            {key: value for key, value in LLAMA3.items() if not key.startswith("original")},
            "original_max_position_embeddings is 131072, and Megatron has 8192 without a flag for it",
        ),
        (
            LLAMA_3_1_8B,
            {"full_attention": {"rope_type": "default"}},
            "full_attention {'rope_type': 'default'} is no",
        ),
        (
            LLAMA_3_1_8B,
            {"rope_type": "default", "mrope_section": [16, 24, 24]},
            "mrope_section [16, 24, 24] is no",
        ),
        (LLAMA_3_1_8B, {"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic' is not supported"),
        (LLAMA_3_1_8B, {"rope_type": ["llama3"]}, "rope_scaling has rope_type ['llama3'], which is no name"),
        (LLAMA_3_1_8B, {"rope_type": None}, "rope_scaling has rope_type null"),
        (LLAMA_3_1_8B, [1], "rope_scaling [1] must be an object"),
        (
            LLAMA_3_1_8B,
            LLAMA3 | {"partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 is not what the flags",
        ),
        (
            DEEPSEEK_V3,
            YARN | {"attention_factor": 1.5},
            "attention_factor is 1.5, and Megatron has no flag for it",
        ),
        (
            DEEPSEEK_V3,
            YARN | {"truncate": False},
            "truncate is False, and Megatron has True without a flag for it",
        ),
        (DEEPSEEK_V3, YARN | {"mscale_all_dim": 0}, None),
        (
            DEEPSEEK_V3,
            YARN | {"mscale": 0.707, "mscale_all_dim": 0},
            "mscale is 0.707 and mscale_all_dim 0, which",
        ),
        (
            DEEPSEEK_V3,
            YARN | {"mscale": None},
            "mscale is None and mscale_all_dim 1.0, which transformers and",
        ),
        (DEEPSEEK_V3, YARN | {"factor": 0}, "rope_scaling: factor 0 must be a number above 0"),
        # 0 for servers, and 1 for transformers.
        (DEEPSEEK_V3, YARN | {"beta_slow": 0}, "rope_scaling: beta_slow 0 must be a number above 0"),
        (DEEPSEEK_V3, YARN | {"factor": "40"}, "factor '40' must be a number above 0"),
        (
            QWEN3_8B,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            None,
        ),
        (
            QWEN3_8B,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096.5},
            "original_max_position_embeddings 4096.5 must be a whole number",
        ),
        (
            QWEN3_8B,
            {"rope_type": "yarn", "factor": 4.0, "truncate": "false"},
            "truncate 'false' must be true",
        ),
        (QWEN3_8B, {"rope_type": "yarn", "factor": 4.0, "mscale": 0.5}, "mscale is 0.5, which servers and"),
        (
            GPT_OSS_20B,
            GPT_OSS_20B["rope_scaling"] | {"attention_factor": 1.2},
            "attention_factor is 1.2, which servers and",
        ),
        (
            GLM_4_5,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            "rope_type 'yarn' is not supported for this architecture",
        ),
    ],
)
def test_rotary_setting_that_flags_can_not_train_then_refused_by_name(config, rope, said):
    found = outcome(config | {"rope_scaling": rope})
    assert isinstance(found, list) if said is None else (isinstance(found, str) and said in found), found


def test_yarn_when_truncate_is_null_then_as_servers_read_it_false():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768.0}
    flags = model_flags(QWEN3_8B | {"rope_scaling": yarn | {"truncate": None}})
    assert "--no-yarn-correction-range-round-to-int" in flags
    assert flags[flags.index("--yarn-original-max-position-embeddings") + 1] == "32768"
    assert "--no-yarn-correction-range-round-to-int" not in model_flags(QWEN3_8B | {"rope_scaling": yarn})
    null = DEEPSEEK_V3["rope_scaling"] | {"truncate": None}
    assert "truncate is False" in outcome(DEEPSEEK_V3 | {"rope_scaling": null})


def test_dense_layers_of_glm_flash_when_engines_read_them_otherwise_then_refused():
    changed = GLM_4_7_FLASH | {"first_k_dense_replace": 3}
    assert "first_k_dense_replace 3 without mlp_layer_types" in outcome(changed)
    kinds = ["dense"] * 3 + ["sparse"] * 44
    assert "[0,0,0,1," in " ".join(outcome(changed | {"mlp_layer_types": kinds}))
    assert "mlp_layer_types" in outcome(GLM_4_7_FLASH | {"mlp_layer_types": kinds})


def test_rotary_settings_when_two_tables_say_the_same_then_taken_and_else_refused():
    new = {
        "rope_type": "yarn",
        "rope_theta": 10000,
        **{key: value for key, value in YARN.items() if key != "type"},
    }
    assert model_flags(DEEPSEEK_V3 | {"rope_parameters": new}) == model_flags(DEEPSEEK_V3)
    assert "rope_scaling and rope_parameters differ" in outcome(
        DEEPSEEK_V3 | {"rope_parameters": new | {"factor": 8}}
    )
    assert "rope_scaling and rope_parameters differ" in outcome(
        DEEPSEEK_V3 | {"rope_parameters": {"rope_type": "default"}}
    )


def test_share_of_glm_when_its_two_places_differ_then_refused():
    rope = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.25}
    assert "partial_rotary_factor is 0.5, and 0.25 among" in outcome(GLM_4_5 | {"rope_parameters": rope})


def test_model_without_low_rank_queries_when_published_then_refused_for_that_alone():
    """Moonlight: every other key of its config.json is known."""
    assert outcome(MOONLIGHT).startswith(
        "config.json: q_lora_rank is null: Megatron-core 0.19 would normalise"
    )


def test_flags_of_qwen2_moe_when_it_has_no_biases_then_megatron_has_none():
    with_biases, without = (model_flags(QWEN1_5_MOE | {"qkv_bias": value}) for value in (True, False))
    assert [word for word in with_biases if word not in without] == ["--add-qkv-bias"]


def test_flags_when_sizes_are_left_out_then_each_family_has_its_own():
    """Worked out from transformers' classes: 4 groups, heads of 128, a base of a million, a factor of 2.5."""
    flags = model_flags({"model_type": "qwen3_moe", "rope_theta": 1000000.0})
    assert (
        flags[flags.index("--num-query-groups") + 1] == "4"
        and flags[flags.index("--kv-channels") + 1] == "64"
    )
    flags = model_flags({"model_type": "qwen3"})
    assert flags[flags.index("--kv-channels") + 1] == "128"
    flags = model_flags({"model_type": "mixtral"})
    assert (
        flags[flags.index("--rotary-base") + 1] == "1000000"
        and flags[flags.index("--norm-epsilon") + 1] == "1e-05"
    )
    flags = model_flags({"model_type": "deepseek_v3"})
    assert flags[flags.index("--moe-router-topk-scaling-factor") + 1] == "2.5"


def test_checkpoint_when_config_json_lacks_settings_then_names_and_sizes_are_those_of_the_defaults(tmp_path):
    import torch
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    config = HFCheckpoint(tmp_path).config
    assert (config["num_hidden_layers"], config["vocab_size"], config["head_dim"]) == (32, 151936, 128)
    table = NameTable({"model_type": "qwen3"}, padded_vocab_size=151936)
    rule = table.find("decoder.layers.0.self_attention.linear_proj.weight")
    assert rule.hf_names == ("model.layers.0.self_attn.o_proj.weight",)


def test_defaults_when_the_model_is_not_known_then_config_json_is_as_it_is():
    for config in ({"model_type": "gpt2", "n_embd": 8}, {}, {"model_type": ["llama"]}, {"model_type": None}):
        assert with_defaults(config) == config
        with pytest.raises(ValueError, match="config.json: model_type .* is not supported"):
            model_flags(config)


def test_flags_when_a_family_has_names_of_weights_alone_then_what_lacks_is_named(monkeypatch):
    monkeypatch.setitem(FAMILIES, "olmo2", FAMILIES["llama"])
    with pytest.raises(ValueError, match="model_type 'olmo2' has no settings here, .* add them to DEFAULTS"):
        model_flags(LLAMA_3_1_8B | {"model_type": "olmo2"})


def test_computed_settings_when_written_otherwise_then_equal_and_when_anything_counts_then_not():
    new = {key: value for key, value in LLAMA_3_1_8B.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = LLAMA3 | {"rope_theta": 500000.0}
    assert computed(new) == computed(LLAMA_3_1_8B)
    assert computed(LLAMA_3_1_8B | {"torch_dtype": "float32", "use_cache": False}) == computed(LLAMA_3_1_8B)
    for changed in (
        {"hidden_act": "gelu"},
        {"rope_theta": 1},
        {"mlp_bias": True},
        {"logit_scale": 2.0},
        {"rms_norm_eps": 1e-6},
        {"tie_word_embeddings": True},
    ):
        assert computed(LLAMA_3_1_8B | changed) != computed(LLAMA_3_1_8B), changed
