"""Parameter names of Megatron's local and Transformer Engine specs to Hugging Face's, layer and expert numbers too."""

import pytest

from megatron_rl_corr.weight_sync.layouts import GatedUp, GroupedQKV, Replicated, Sharded, Vocabulary
from megatron_rl_corr.weight_sync.names import NameTable, global_name

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 24, "vocab_size": 1000, "tie_word_embeddings": False,
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
        (LAYER + "self_attention.linear_qkv.layer_norm_weight", Replicated(), [HF + "input_layernorm.weight"]),
        (LAYER + "pre_mlp_layernorm.weight", Replicated(), [HF + "post_attention_layernorm.weight"]),
        (LAYER + "mlp.linear_fc1.layer_norm_weight", Replicated(), [HF + "post_attention_layernorm.weight"]),
        (LAYER + "self_attention.linear_qkv.weight", QKV,
         [HF + "self_attn.q_proj.weight", HF + "self_attn.k_proj.weight", HF + "self_attn.v_proj.weight"]),
        (LAYER + "self_attention.linear_proj.weight", Sharded(1), [HF + "self_attn.o_proj.weight"]),
        (LAYER + "self_attention.q_layernorm.weight", Replicated(), [HF + "self_attn.q_norm.weight"]),
        (LAYER + "self_attention.k_layernorm.weight", Replicated(), [HF + "self_attn.k_norm.weight"]),
        # A dense layer, also one among layers of experts.
        (LAYER + "mlp.linear_fc1.weight", GatedUp(), [HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight"]),
        (LAYER + "mlp.linear_fc2.weight", Sharded(1), [HF + "mlp.down_proj.weight"]),
        (LAYER + "mlp.router.weight", Replicated(), [HF + "mlp.gate.weight"]),
    ],
)
def test_find_when_a_parameter_is_known_then_its_layout_and_names(name, layout, hf_names):
    rule = TABLE.find(name)
    assert (rule.layout, list(rule.hf_names), rule.is_expert) == (layout, hf_names, False)


@pytest.mark.parametrize("name", ["local_experts.17.linear_fc{}.weight", "linear_fc{}.weight17"])
def test_find_when_an_experts_then_its_own_names_from_either_spec(name):
    expert = HF + "mlp.experts.17."
    up = TABLE.find(LAYER + "mlp.experts." + name.format(1))
    assert (up.layout, up.hf_names) == (GatedUp(), (expert + "gate_proj.weight", expert + "up_proj.weight"))
    down = TABLE.find(LAYER + "mlp.experts." + name.format(2))
    assert (down.layout, down.hf_names) == (Sharded(1), (expert + "down_proj.weight",))
    assert up.is_expert and down.is_expert


def test_find_when_head_dim_is_not_given_then_hidden_size_over_heads():
    config = {key: value for key, value in CONFIG.items() if key != "head_dim"} | {"model_type": "qwen3"}
    for given in (config, config | {"head_dim": None}):
        rule = NameTable(given, padded_vocab_size=1000).find(LAYER + "self_attention.linear_qkv.weight")
        assert rule.layout == GroupedQKV(4, 2, 16)


@pytest.mark.parametrize(
    "name",
    [
        LAYER + "self_attention.linear_qkv.bias", LAYER + "mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.x.mlp.router.weight", "mtp.layers.0.eh_proj.weight", LAYER + "mlp.router.weight.extra",
        "module." + LAYER + "mlp.router.weight",
    ],
)
def test_find_when_a_parameter_is_unknown_then_refused_with_its_name(name):
    with pytest.raises(ValueError) as raised:
        TABLE.find(name)
    assert str(raised.value) == (
        f"Megatron parameter {name} has no counterpart in the checkpoint's architecture; do the model flags "
        "(--num-experts, --qk-layernorm, --disable-bias-linear, ...) describe that model?"
    )


@pytest.mark.parametrize(
    "change, padded, words",
    [
        ({"model_type": "llama"}, 1024,
         "--rollout-hf-checkpoint: model_type 'llama' has no table of weight names; "
         "supported: qwen3, qwen3_moe"),
        ({"tie_word_embeddings": True}, 1024,
         "--rollout-hf-checkpoint: tied word embeddings are not supported; "
         "use a checkpoint with tie_word_embeddings false"),
        ({}, 999,
         "--vocab-size: Megatron's padded vocabulary of 999 is smaller than the checkpoint's 1000; "
         "give --vocab-size 1000"),
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
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
         "decoder.layers.24.mlp.experts.local_experts.11.linear_fc1.weight"),
        ("decoder.layers.11.mlp.experts.linear_fc2.weight7", "decoder.layers.35.mlp.experts.linear_fc2.weight15"),
        # No expert, so only the layer moves; outside the layers nothing does.
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.25.mlp.linear_fc1.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_global_name_when_on_a_later_stage_and_expert_rank_then_the_whole_models_numbers(local, expected):
    assert global_name(local, layer_offset=24, expert_offset=8) == expected
    assert global_name(local, layer_offset=0, expert_offset=0) == local
