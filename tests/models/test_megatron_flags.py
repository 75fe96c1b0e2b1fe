"""Megatron's flags for a config.json: what real ones say, in old and new spelling, and what is refused.

That the flags make the model is proven by tests/mcore/test_hf_models.py.
"""

from argparse import ArgumentParser

import pytest

from megatron_rl_corr.models.megatron_flags import add_missing_flags, model_flags
from tests.models.published_configs import GPT_OSS_20B

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN2_MOE = {key: value for key, value in MIXTRAL.items() if key != "num_local_experts"} | {
    "model_type": "qwen2_moe",
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "tie_word_embeddings": False,
    "num_key_value_heads": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 2,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "n_shared_experts": 1,
    "rope_theta": 50000.0,
    "rope_scaling": DEEPSEEK["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}
GLM = LLAMA | {
    "model_type": "glm4_moe",
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 1536,
}


def options(config) -> dict[str, str]:
    """Flag to value; an empty one for a switch."""
    found, flag = {}, None
    for word in model_flags(config):
        if word.startswith("--"):
            flag = word
            assert flag not in found, "given twice"
            found[flag] = ""
        else:
            found[flag] = word
    return found


def test_flags_of_llama_3_2_when_its_config_is_of_transformers_4_then_scaled_rope_and_tied_embeddings():
    flags = options(LLAMA)
    assert "--untie-embeddings-and-output-weights" not in flags and "--add-qkv-bias" not in flags
    expected = {
        "--num-layers": "16",
        "--hidden-size": "2048",
        "--ffn-hidden-size": "8192",
        "--num-attention-heads": "32",
        "--num-query-groups": "8",
        "--kv-channels": "64",
        "--rotary-base": "500000",
        "--norm-epsilon": "1e-05",
        "--use-rope-scaling": "",
        "--rope-scaling-factor": "32.0",
        "--vocab-size": "128256",
    }
    assert flags.items() >= expected.items() and "--num-experts" not in flags


def test_flags_of_mixtral_then_experts_are_as_wide_as_the_dense_layer_and_scores_normalised_over_the_top_k():
    flags = options(MIXTRAL)
    expected = {"--num-experts": "8", "--moe-router-topk": "2", "--moe-ffn-hidden-size": "8192"}
    assert flags.items() >= expected.items() and "--untie-embeddings-and-output-weights" in flags
    assert not flags.keys() & {
        "--moe-router-pre-softmax",
        "--moe-layer-freq",
        "--moe-shared-expert-intermediate-size",
    }


def test_flags_of_qwen2_moe_then_a_gated_shared_expert_and_scores_of_all_experts():
    flags = options(QWEN2_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [1]})
    expected = {
        "--num-experts": "60",
        "--moe-ffn-hidden-size": "1408",
        "--moe-shared-expert-intermediate-size": "5632",
        "--moe-shared-expert-gate": "",
        "--moe-router-pre-softmax": "",
        "--add-qkv-bias": "",
        # Every second layer, but for the one that is named: only the last.
        "--moe-layer-freq": "[0,0,0,1]",
    }
    assert flags.items() >= expected.items()


def test_flags_of_deepseek_v3_then_latent_attention_yarn_sigmoid_scores_groups_and_dense_first_layers():
    flags = options(DEEPSEEK)
    expected = {
        "--multi-latent-attention": "",
        "--q-lora-rank": "1536",
        "--kv-lora-rank": "512",
        "--qk-head-dim": "128",
        "--qk-pos-emb-head-dim": "64",
        "--v-head-dim": "128",
        "--qk-layernorm": "",
        "--rope-type": "yarn",
        "--rotary-scaling-factor": "40",
        "--mscale": "1.0",
        "--mscale-all-dim": "1.0",
        "--num-experts": "256",
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": "",
        "--moe-router-topk-scaling-factor": "2.5",
        "--moe-router-num-groups": "8",
        "--moe-router-group-topk": "4",
        # 2 shared experts of 2048 are one of 4096.
        "--moe-shared-expert-intermediate-size": "4096",
        "--moe-layer-freq": "[0,0,0,1]",
    }
    assert flags.items() >= expected.items() and "--group-query-attention" not in flags


def test_flags_of_gpt_oss_then_biases_sinks_windows_a_clamped_activation_and_yarn():
    flags = options(GPT_OSS_20B)
    expected = {
        "--quick-geglu": "",
        "--glu-linear-offset": "1.0",
        "--activation-func-clamp-value": "7.0",
        "--softmax-type": "learnable",
        "--window-size": "127,0",
        "--window-attn-skip-freq": f"[{','.join(['1,0'] * 12)}]",
        "--no-bias-dropout-fusion": "",
        "--position-embedding-type": "yarn",
        "--rotary-base": "150000",
        "--rotary-scaling-factor": "32.0",
        "--yarn-original-max-position-embeddings": "4096",
        "--yarn-beta-fast": "32.0",
        "--yarn-beta-slow": "1.0",
        "--no-yarn-correction-range-round-to-int": "",
        "--num-experts": "32",
        "--moe-router-topk": "4",
        "--moe-ffn-hidden-size": "2880",
    }
    assert flags.items() >= expected.items()
    other_families = {"--swiglu", "--disable-bias-linear", "--add-qkv-bias", "--moe-router-pre-softmax"}
    assert not flags.keys() & {*other_families, "--rope-type", "--mscale"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": None}, "sliding_window null must be a whole number from 2 on"),
        ({"sliding_window": 1}, "sliding_window 1 must be a whole number from 2 on"),
        ({"layer_types": ["full_attention"] * 24}, "sliding_attention and full_attention in turn"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 12}, "the first sliding"),
        ({"num_hidden_layers": 22}, "(num_hidden_layers 22)"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha 1.5 is not what the flags train"),
        ({"attention_bias": False}, "attention_bias false is not what the flags train"),
        ({"experts_per_token": 2}, "it follows from num_experts_per_tok"),
        ({"initial_context_length": 8192}, "it follows from original_max_position_embeddings"),
        ({"swiglu_limit": 0}, "swiglu_limit 0 must be a number above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear' is not supported"),
    ],
)
def test_flags_of_gpt_oss_when_a_setting_is_another_then_refused_by_name(change, words):
    with pytest.raises(ValueError) as raised:
        model_flags(GPT_OSS_20B | change)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": None},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_flags_of_latent_attention_without_yarn_then_megatrons_fused_kernel_is_off_which_is_yarns_alone(
    scaling,
):
    flags = options(DEEPSEEK | scaling)
    assert flags["--rope-type"] == "rope" and "--no-rope-fusion" in flags
    assert "--no-rope-fusion" not in options(DEEPSEEK)


def test_flags_of_kimi_k2_then_deepseeks_and_the_border_of_yarn_that_megatron_has_no_flag_for():
    flags = options(KIMI)
    expected = {
        "--beta-fast": "1.0",
        "--rotary-scaling-factor": "32.0",
        "--rotary-base": "50000",
        "--num-experts": "384",
        "--moe-router-score-function": "sigmoid",
        "--moe-router-topk-scaling-factor": "2.827",
        "--moe-layer-freq": "[0,1,1,1]",
        "--moe-shared-expert-intermediate-size": "2048",
    }
    assert flags.items() >= expected.items() and not flags.keys() & {"--beta-slow", "--moe-router-num-groups"}
    assert options(DEEPSEEK).keys() - flags.keys() == {"--moe-router-num-groups", "--moe-router-group-topk"}
    slow = KIMI["rope_scaling"] | {"beta_fast": 32, "beta_slow": 2}
    assert options(KIMI | {"rope_scaling": slow})["--beta-slow"] == "2"


def test_flags_of_deepseek_v3_2_then_deepseeks_and_an_indexer_without_rotation_and_fused_rope():
    sparse = DEEPSEEK | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    flags, before = options(sparse | {"model_type": "deepseek_v32"}), options(DEEPSEEK)
    own = {
        "--experimental-attention-variant": "dsa",
        "--dsa-indexer-n-heads": "64",
        "--dsa-indexer-head-dim": "128",
        "--dsa-indexer-topk": "2048",
        "--dsa-indexer-k-norm-epsilon": "1e-06",
        "--no-dsa-indexer-rotate-activation": "",
        "--no-rope-fusion": "",
    }
    assert flags == before | own
    glm = options(
        sparse | {"rope_scaling": None, "model_type": "glm_moe_dsa"}
    )  # the flag of the fused kernel once
    assert glm.keys() - flags.keys() == {"--dsa-indexer-rope-interleaved"}


def test_added_flags_when_megatrons_parser_has_one_then_it_is_left_alone():
    parser = ArgumentParser()
    parser.add_argument("--beta-slow", type=float, default=0.5)
    args = add_missing_flags(parser).parse_args([])
    assert (args.beta_fast, args.beta_slow) == (32.0, 0.5)


def test_flags_of_glm_4_5_then_half_of_each_head_is_rotated_and_biases_and_norms_are_as_config_json_says():
    flags = options(GLM)
    expected = {
        "--rotary-percent": "0.5",
        "--kv-channels": "128",
        "--add-qkv-bias": "",
        "--qk-layernorm": "",
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": "",
        "--num-experts": "160",
        "--moe-router-topk-scaling-factor": "2.5",
        "--moe-layer-freq": "[0,1,1,1]",
        "--moe-shared-expert-intermediate-size": "1536",
    }
    assert flags.items() >= expected.items() and "--disable-bias-linear" in flags
    air = options(GLM | {"use_qk_norm": False, "attention_bias": False, "routed_scaling_factor": 1.0})
    assert flags.keys() - air.keys() == {
        "--add-qkv-bias",
        "--qk-layernorm",
        "--moe-router-topk-scaling-factor",
    }
    # transformers 5 has it among the rotary parameters, and 0.5 stands for none.
    new = {key: value for key, value in GLM.items() if key not in ("partial_rotary_factor", "rope_scaling")}
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    assert options(new | {"rope_parameters": rope})["--rotary-percent"] == "0.5"
    assert (
        options(new | {"rope_parameters": rope | {"partial_rotary_factor": 0.25}})["--rotary-percent"]
        == "0.25"
    )


@pytest.mark.parametrize(
    "config, words",
    [
        (
            {"model_type": "gpt2"},
            "config.json: model_type 'gpt2' is not supported (supported: deepseek_v3, deepseek_v32",
        ),
        (MIXTRAL | {"sliding_window": 4096}, "config.json: sliding_window 4096 is not supported"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        (
            LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | {"low_freq_factor": 2.0}},
            "config.json: low_freq_factor is 2.0, and Megatron has 1 without a flag for it",
        ),
        (
            DEEPSEEK
            | {"rope_scaling": DEEPSEEK["rope_scaling"] | {"original_max_position_embeddings": 8192}},
            "config.json: original_max_position_embeddings is 8192, and Megatron has 4096 without a flag for "
            "it",
        ),
        (GLM | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        (GLM | {"norm_topk_prob": False}, "config.json: norm_topk_prob is false"),
        (
            LLAMA | {"model_type": "nemotron_h"},
            "config.json: model_type 'nemotron_h' is not supported: most of its layers are of Mamba",
        ),
        (DEEPSEEK | {"q_lora_rank": None}, "config.json: q_lora_rank is null"),
        (DEEPSEEK | {"norm_topk_prob": False}, "config.json: norm_topk_prob is false"),
        (DEEPSEEK | {"topk_group": 2}, "config.json: num_experts_per_tok / topk_group is 4"),
    ],
)
def test_flags_when_megatron_computes_something_else_then_refused_with_the_setting(config, words):
    with pytest.raises(ValueError) as raised:
        model_flags(config)
    assert words in str(raised.value)


def test_flags_of_qwen2_when_its_window_is_not_used_then_none_is_asked_for():
    config = LLAMA | {
        "model_type": "qwen2",
        "rope_scaling": None,
        "sliding_window": 4096,
        "use_sliding_window": False,
    }
    assert "--add-qkv-bias" in options(config)
