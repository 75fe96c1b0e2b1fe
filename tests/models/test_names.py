"""Parameter names of Megatron's local and Transformer Engine specs to Hugging Face's, layer and
expert numbers too.
"""

import pytest

from megatron_rl_corr.models.layouts import (
    GatedUp,
    GroupedQKV,
    InterleavedGateUp,
    Replicated,
    RowsOrWhole,
    Sharded,
    Transposed,
    Vocabulary,
)
from megatron_rl_corr.models.names import ARCHITECTURES, NameTable, global_name

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
    "num_hidden_layers": 6,
}
TABLE = NameTable(CONFIG, padded_vocab_size=1024)
LAYER, HF = "decoder.layers.3.", "model.layers.3."
VOCABULARY, QKV = Vocabulary(1000, 1024), GroupedQKV(4, 2, 24)


@pytest.mark.parametrize(
    "name, layout, hf_names",
    [
        ("embedding.word_embeddings.weight", VOCABULARY, ["model.embed_tokens.weight"]),
        ("output_layer.weight", VOCABULARY, ["lm_head.weight"]),
        ("decoder.final_layernorm.weight", Replicated(), ["model.norm.weight"]),
        # The local spec's norms, and Transformer Engine's, folded into the linear layer behind them.
        (LAYER + "input_layernorm.weight", Replicated(), [HF + "input_layernorm.weight"]),
        (
            LAYER + "self_attention.linear_qkv.layer_norm_weight",
            Replicated(),
            [HF + "input_layernorm.weight"],
        ),
        (LAYER + "pre_mlp_layernorm.weight", Replicated(), [HF + "post_attention_layernorm.weight"]),
        (LAYER + "mlp.linear_fc1.layer_norm_weight", Replicated(), [HF + "post_attention_layernorm.weight"]),
        (
            LAYER + "self_attention.linear_qkv.weight",
            QKV,
            [HF + "self_attn.q_proj.weight", HF + "self_attn.k_proj.weight", HF + "self_attn.v_proj.weight"],
        ),
        (LAYER + "self_attention.linear_proj.weight", Sharded(1), [HF + "self_attn.o_proj.weight"]),
        (LAYER + "self_attention.q_layernorm.weight", Replicated(), [HF + "self_attn.q_norm.weight"]),
        (LAYER + "self_attention.k_layernorm.weight", Replicated(), [HF + "self_attn.k_norm.weight"]),
        # A dense layer, also one among layers of experts.
        (
            LAYER + "mlp.linear_fc1.weight",
            GatedUp(),
            [HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight"],
        ),
        (LAYER + "mlp.linear_fc2.weight", Sharded(1), [HF + "mlp.down_proj.weight"]),
        (LAYER + "mlp.router.weight", Replicated(), [HF + "mlp.gate.weight"]),
    ],
)
def test_find_when_a_parameter_is_known_then_its_layout_and_names(name, layout, hf_names):
    rule = TABLE.find(name)
    assert (rule.layout, list(rule.hf_names), rule.is_expert, rule.is_copy) == (
        layout,
        hf_names,
        False,
        False,
    )


@pytest.mark.parametrize("name", ["local_experts.17.linear_fc{}.weight", "linear_fc{}.weight17"])
def test_find_when_an_experts_then_its_own_names_from_either_spec(name):
    expert = HF + "mlp.experts.17."
    up = TABLE.find(LAYER + "mlp.experts." + name.format(1))
    assert (up.layout, up.hf_names) == (GatedUp(), (expert + "gate_proj.weight", expert + "up_proj.weight"))
    down = TABLE.find(LAYER + "mlp.experts." + name.format(2))
    assert (down.layout, down.hf_names) == (Sharded(1), (expert + "down_proj.weight",))
    assert up.is_expert and down.is_expert


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("name", ["local_experts.17.linear_fc{}.{}", "linear_fc{}.{}17"])
def test_find_when_one_tensor_stacks_the_experts_then_its_row(name, kind):
    config = CONFIG | {"model_type": "gpt_oss", "num_local_experts": 32}
    table, suffix = NameTable(config, padded_vocab_size=1024), "_bias" if kind == "bias" else ""
    for number, hf, layout in (
        (1, "gate_up_proj", InterleavedGateUp()),
        (2, "down_proj", Replicated() if kind == "bias" else Transposed()),
    ):
        rule = table.find(LAYER + "mlp.experts." + name.format(number, kind))
        assert (rule.layout, rule.hf_names) == (layout, (f"{HF}mlp.experts.{hf}{suffix}",))
        assert (rule.is_expert, rule.row, rule.rows) == (True, 17, 32)
    local = LAYER + "mlp.experts." + name.format(1, kind).replace("17", "1")
    assert global_name(local, layer_offset=0, expert_offset=16) == LAYER + "mlp.experts." + name.format(
        1, kind
    )


def test_find_when_head_dim_is_not_given_then_hidden_size_over_heads():
    config = {key: value for key, value in CONFIG.items() if key != "head_dim"} | {"model_type": "qwen2"}
    for given in (config, config | {"head_dim": None}, config | {"model_type": "qwen3", "head_dim": None}):
        rule = NameTable(given, padded_vocab_size=1000).find(LAYER + "self_attention.linear_qkv.weight")
        assert rule.layout == GroupedQKV(4, 2, 16)


def test_find_when_head_dim_is_not_given_to_a_family_with_a_size_of_its_own_then_that_one():
    config = {key: value for key, value in CONFIG.items() if key != "head_dim"} | {"model_type": "qwen3"}
    rule = NameTable(config, padded_vocab_size=1000).find(LAYER + "self_attention.linear_qkv.weight")
    assert rule.layout == GroupedQKV(4, 2, 128)


def test_find_when_there_are_no_groups_of_keys_then_as_many_as_heads():
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"} | {
        "model_type": "llama"
    }
    rule = NameTable(config, padded_vocab_size=1000).find(LAYER + "self_attention.linear_qkv.weight")
    assert rule.layout == GroupedQKV(4, 4, 24)


DEEPSEEK = CONFIG | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
}
MLP, ATTENTION = HF + "mlp.", HF + "self_attn."


@pytest.mark.parametrize(
    "config, name, layout, hf_names",
    [
        (
            {"model_type": "qwen2"},
            "self_attention.linear_qkv.bias",
            QKV,
            [ATTENTION + "q_proj.bias", ATTENTION + "k_proj.bias", ATTENTION + "v_proj.bias"],
        ),
        (
            {"model_type": "qwen2_moe"},
            "mlp.shared_experts.linear_fc1.weight",
            GatedUp(),
            [MLP + "shared_expert.gate_proj.weight", MLP + "shared_expert.up_proj.weight"],
        ),
        (
            {"model_type": "qwen2_moe"},
            "mlp.shared_experts.linear_fc2.weight",
            Sharded(1),
            [MLP + "shared_expert.down_proj.weight"],
        ),
        (
            {"model_type": "qwen2_moe"},
            "mlp.shared_experts.gate_weight",
            Replicated(),
            [MLP + "shared_expert_gate.weight"],
        ),
        ({"model_type": "mixtral"}, "mlp.router.weight", Replicated(), [HF + "block_sparse_moe.gate.weight"]),
        (
            DEEPSEEK,
            "mlp.shared_experts.linear_fc2.weight",
            Sharded(1),
            [MLP + "shared_experts.down_proj.weight"],
        ),
        (DEEPSEEK, "mlp.router.expert_bias", Replicated(), [MLP + "gate.e_score_correction_bias"]),
        (
            DEEPSEEK,
            "self_attention.linear_q_down_proj.weight",
            RowsOrWhole(16),
            [ATTENTION + "q_a_proj.weight"],
        ),
        # Rows of the latent, and of the part of the key that carries positions.
        (
            DEEPSEEK,
            "self_attention.linear_kv_down_proj.weight",
            RowsOrWhole(16),
            [ATTENTION + "kv_a_proj_with_mqa.weight"],
        ),
        (DEEPSEEK, "self_attention.q_layernorm.weight", Replicated(), [ATTENTION + "q_a_layernorm.weight"]),
        (
            DEEPSEEK,
            "self_attention.linear_q_up_proj.layer_norm_weight",
            Replicated(),
            [ATTENTION + "q_a_layernorm.weight"],
        ),
        (DEEPSEEK, "self_attention.kv_layernorm.weight", Replicated(), [ATTENTION + "kv_a_layernorm.weight"]),
        (
            DEEPSEEK,
            "self_attention.linear_kv_up_proj.layer_norm_weight",
            Replicated(),
            [ATTENTION + "kv_a_layernorm.weight"],
        ),
        (DEEPSEEK, "self_attention.linear_q_up_proj.weight", Sharded(0), [ATTENTION + "q_b_proj.weight"]),
        (DEEPSEEK, "self_attention.linear_kv_up_proj.weight", Sharded(0), [ATTENTION + "kv_b_proj.weight"]),
        (DEEPSEEK, "self_attention.linear_proj.weight", Sharded(1), [ATTENTION + "o_proj.weight"]),
        *(
            (
                DEEPSEEK | {"model_type": kind},
                f"self_attention.core_attention.indexer.{name}",
                Replicated(),
                [f"{ATTENTION}indexer.{name.removeprefix('linear_')}"],
            )
            for kind in ("deepseek_v32", "glm_moe_dsa")
            for name in (
                "linear_wq_b.weight",
                "linear_wk.weight",
                "k_norm.weight",
                "k_norm.bias",
                "linear_weights_proj.weight",
            )
        ),
    ],
)
def test_find_when_a_part_is_of_some_architectures_then_theirs_have_it(config, name, layout, hf_names):
    rule = NameTable(CONFIG | config, padded_vocab_size=1024).find(LAYER + name)
    assert (rule.layout, list(rule.hf_names), rule.is_expert, rule.is_copy) == (
        layout,
        hf_names,
        False,
        False,
    )


GLM = CONFIG | {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}


@pytest.mark.parametrize(
    ("part", "key"), [("linear_qkv.bias", "attention_bias"), ("q_layernorm.weight", "use_qk_norm")]
)
def test_find_when_config_json_switches_a_part_of_glm_off_then_it_has_none(part, key):
    name = LAYER + "self_attention." + part
    assert NameTable(GLM, padded_vocab_size=1024).find(name).hf_names
    for config in (GLM | {key: False}, {name: value for name, value in GLM.items() if name != key}):
        with pytest.raises(ValueError, match="does not exist in the checkpoint's architecture"):
            NameTable(config, padded_vocab_size=1024).find(name)


def test_why_kept_when_layers_behind_the_models_own_predict_tokens_then_any_family_keeps_them():
    """The model's own are 0 to 5."""
    for config in (GLM, DEEPSEEK | {"num_nextn_predict_layers": 1}, DEEPSEEK | {"model_type": "kimi_k2"}):
        table = NameTable(config, padded_vocab_size=1024)
        assert table.why_kept("model.layers.5.mlp.gate.weight") is None
        kept = table.why_kept("model.layers.6.mlp.gate.weight")
        assert (kept is not None) == ("num_nextn_predict_layers" in config), config["model_type"]


def test_kimi_k2_then_every_rule_is_that_of_deepseek_v3():
    deepseek, kimi = (
        NameTable(DEEPSEEK | {"model_type": kind}, padded_vocab_size=1024)
        for kind in ("deepseek_v3", "kimi_k2")
    )
    for name in ("self_attention.linear_q_down_proj.weight", "mlp.router.expert_bias", "mlp.router.weight"):
        assert deepseek.find(LAYER + name) == kimi.find(LAYER + name)


@pytest.mark.parametrize("name", ["local_experts.7.linear_fc{}.weight", "linear_fc{}.weight7"])
def test_find_when_an_expert_of_mixtral_then_w1_and_w3_are_stacked_and_w2_is_behind(name):
    table, expert = (
        NameTable(CONFIG | {"model_type": "mixtral"}, padded_vocab_size=1024),
        "block_sparse_moe.experts.7.",
    )
    up, down = (table.find(LAYER + "mlp.experts." + name.format(i)) for i in (1, 2))
    assert up.hf_names == (HF + expert + "w1.weight", HF + expert + "w3.weight") and up.is_expert
    assert down.hf_names == (HF + expert + "w2.weight",) and down.is_expert


def test_find_when_embeddings_are_tied_then_the_output_layer_is_a_copy_of_the_embedding():
    table = NameTable(CONFIG | {"tie_word_embeddings": True}, padded_vocab_size=1024)
    first, last = table.find("embedding.word_embeddings.weight"), table.find("output_layer.weight")
    assert first.hf_names == last.hf_names == ("model.embed_tokens.weight",)
    assert (first.is_copy, last.is_copy) == (False, True) and first.layout == last.layout == VOCABULARY


@pytest.mark.parametrize(
    "hf_tied, num_layers, tied, words",
    [
        (False, 5, False, "--num-layers 5: the checkpoint has 6; give --num-layers 6"),
        (
            True,
            6,
            False,
            "config.json: the checkpoint ties its word embeddings and Megatron's model does not; "
            "leave out --untie-embeddings-and-output-weights",
        ),
        (
            False,
            6,
            True,
            "config.json: the checkpoint does not tie its word embeddings and Megatron's model does; "
            "give --untie-embeddings-and-output-weights",
        ),
    ],
)
def test_check_model_when_it_is_not_the_checkpoints_then_flag_and_remedy(hf_tied, num_layers, tied, words):
    table = NameTable(CONFIG | {"tie_word_embeddings": hf_tied}, padded_vocab_size=1024)
    with pytest.raises(ValueError) as raised:
        table.check_model(num_layers=num_layers, tied=tied)
    assert str(raised.value) == words
    table.check_model(num_layers=6, tied=hf_tied)


@pytest.mark.parametrize(
    "name",
    [
        LAYER + "self_attention.linear_qkv.bias",
        LAYER + "mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.x.mlp.router.weight",
        "mtp.layers.0.eh_proj.weight",
        LAYER + "mlp.router.weight.extra",
        "module." + LAYER + "mlp.router.weight",
    ],
)
def test_find_when_a_parameter_is_unknown_then_refused_with_its_name(name):
    with pytest.raises(ValueError) as raised:
        TABLE.find(name)
    assert str(raised.value) == (
        f"Megatron's parameter {name} does not exist in the checkpoint's architecture; do the model flags "
        "(--num-experts, --qk-layernorm, --disable-bias-linear, --mtp-num-layers, ...) describe that model?"
    )


@pytest.mark.parametrize(
    "change, padded, words",
    [
        (
            {"model_type": "gpt2"},
            1024,
            "config.json: model_type 'gpt2' is not supported (supported: deepseek_v3, deepseek_v32, "
            "glm4_moe, glm4_moe_lite, glm_moe_dsa, gpt_oss, kimi_k2, llama, mixtral, qwen2, qwen2_moe, "
            "qwen3, qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next); use a "
            "model of one of these, or add its row to FAMILIES in megatron_rl_corr/models/architectures.py; "
            "Megatron-Bridge, where it is installed, has more families (--rollout-model-provider bridge)",
        ),
        (
            {"model_type": "minimax_m2"},
            1024,
            "config.json: model_type 'minimax_m2' is not supported: its norms of queries and keys are over "
            f"all heads together, and Megatron's over each head (supported: {', '.join(ARCHITECTURES)}); "
            "use a model of one of these; Megatron-Bridge, where it is installed, has more families "
            "(--rollout-model-provider bridge)",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            1024,
            "config.json: quantization_config is set, and quantised weights are not loaded; name the model "
            "in bfloat16 here, which servers may serve in block-wise FP8, or convert the checkpoint",
        ),
        (
            {"model_type": "deepseek_v3", "q_lora_rank": None},
            1024,
            "config.json: q_lora_rank is null: Megatron-core 0.19 would normalise its queries, which this "
            "model does not; use a model with low-rank queries",
        ),
        (
            {},
            999,
            "--vocab-size: Megatron's padded vocabulary of 999 is smaller than the checkpoint's 1000; give "
            "--vocab-size 1000, and --tokenizer-type NullTokenizer where Megatron's own tokenizer has fewer "
            "ids: it makes no prompts",
        ),
    ],
)
def test_table_when_the_model_is_not_supported_then_flag_value_and_remedy(change, padded, words):
    with pytest.raises(ValueError) as raised:
        NameTable(CONFIG | change, padded_vocab_size=padded)
    assert str(raised.value) == words


@pytest.mark.parametrize(
    "local, expected",
    [
        # Second pipeline stage from layer 24, second expert-parallel rank from expert 8.
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.24.mlp.experts.local_experts.11.linear_fc1.weight",
        ),
        (
            "decoder.layers.11.mlp.experts.linear_fc2.weight7",
            "decoder.layers.35.mlp.experts.linear_fc2.weight15",
        ),
        # No expert, so only the layer moves; outside the layers nothing does.
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.25.mlp.linear_fc1.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_global_name_when_on_a_later_stage_and_expert_rank_then_the_whole_models_numbers(local, expected):
    assert global_name(local, layer_offset=24, expert_offset=8) == expected
    assert global_name(local, layer_offset=0, expert_offset=0) == local


MTP = {
    "model_type": "deepseek_v3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 2,
    "num_attention_heads": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "n_routed_experts": 8,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("name", "hf_names"),
    [
        # V3's own layers are 0 to 60.
        ("mtp.layers.0.eh_proj.weight", ("model.layers.61.eh_proj.weight",)),
        ("mtp.layers.1.hnorm.weight", ("model.layers.62.hnorm.weight",)),
        ("mtp.layers.0.final_layernorm.weight", ("model.layers.61.shared_head.norm.weight",)),
        (
            "mtp.layers.1.mtp_model_layer.mlp.experts.linear_fc2.weight7",
            ("model.layers.62.mlp.experts.7.down_proj.weight",),
        ),
        (
            "mtp.layers.0.mtp_model_layer.mlp.router.expert_bias",
            ("model.layers.61.mlp.gate.e_score_correction_bias",),
        ),
        # As Megatron calls it in a checkpoint.
        (
            "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
            ("model.layers.61.self_attn.o_proj.weight",),
        ),
    ],
)
def test_find_when_a_layer_predicts_further_tokens_then_its_tensors_follow_those_of_the_models_layers(
    name, hf_names
):
    table = NameTable(MTP, padded_vocab_size=1024)
    rule = table.find(name)
    assert rule.hf_names == hf_names and rule.is_expert == ("experts." in name)
    assert all(table.is_of_mtp(hf) and table.why_kept(hf) for hf in hf_names)


def test_find_when_latent_projections_of_such_a_layer_are_sent_then_together():
    rule = NameTable(MTP, padded_vocab_size=1024).find(
        "mtp.layers.0.mtp_model_layer.self_attention.linear_q_down_proj.weight"
    )
    assert rule.sent_with == tuple(
        f"model.layers.61.self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")
    )


def test_table_when_layers_predict_further_tokens_then_embedding_and_output_layer_are_the_models():
    table = NameTable(MTP, padded_vocab_size=1024)
    assert table.shared_by_mtp["model.layers.62.shared_head.head.weight"] == "lm_head.weight"
    assert table.shared_by_mtp["model.layers.61.embed_tokens.weight"] == "model.embed_tokens.weight"
    assert not any(map(table.is_of_mtp, [*table.shared_by_mtp, "model.layers.60.eh_proj.weight"]))


@pytest.mark.parametrize(
    ("there", "given", "words"),
    [
        (
            2,
            1,
            "--mtp-num-layers 1: the checkpoint has 2 layers that predict further tokens "
            "(num_nextn_predict_layers in config.json); give --mtp-num-layers 2, or leave it out",
        ),
        (
            0,
            1,
            "--mtp-num-layers 1: the checkpoint has no layers that predict further tokens "
            "(num_nextn_predict_layers in config.json); leave it out",
        ),
    ],
)
def test_check_model_when_it_has_other_layers_of_further_tokens_then_flag_and_remedy(there, given, words):
    table = NameTable(MTP | {"num_nextn_predict_layers": there}, padded_vocab_size=1024)
    with pytest.raises(ValueError) as raised:
        table.check_model(num_layers=61, tied=False, mtp_layers=given)
    assert str(raised.value) == words
    table.check_model(num_layers=61, tied=False, mtp_layers=there)
    table.check_model(num_layers=61, tied=False)
