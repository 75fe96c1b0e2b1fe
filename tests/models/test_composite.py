"""Models of images and text, whose part for text is trained; settings of gated delta nets that differ."""

import pytest

from megatron_rl_corr.models.architectures import is_tied, linear_layers, of_text, unusual_weights
from megatron_rl_corr.models.megatron_flags import model_flags
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.models.settings import computed, setting_problems, with_defaults

KINDS = ["linear_attention"] * 3 + ["full_attention"]
TEXT = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "layer_types": KINDS * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
WHOLE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5_moe",
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5_moe"},
    "vision_start_token_id": 248053,
}
NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
}


def changed(**changes):
    return WHOLE | {"text_config": TEXT | changes}


def test_whole_model_then_the_flags_are_those_of_its_text():
    flags = model_flags(WHOLE)
    text = {key: value for key, value in TEXT.items() if key != "layer_types"}
    assert flags == model_flags(text | {"architectures": ["Qwen3_5MoeForCausalLM"]})
    words = " ".join(flags)
    for part in (
        "--num-layers 40 --hidden-size 2048 --ffn-hidden-size 512",
        "--attention-output-gate --apply-layernorm-1p --experimental-attention-variant gated_delta_net",
        f"--linear-attention-freq [{','.join(['1,1,1,0'] * 10)}]",
        "--linear-conv-kernel-dim 4 --linear-key-head-dim 128 --linear-value-head-dim 128",
        "--linear-num-key-heads 16 --linear-num-value-heads 32",
        "--rotary-base 10000000 --rotary-percent 0.25",
        "--moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate",
    ):
        assert part in words
    short = changed(num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    assert setting_problems(short) == [] and "[1,1]" in model_flags(short)
    assert setting_problems(WHOLE) == [] and with_defaults(with_defaults(WHOLE)) == with_defaults(WHOLE)


def test_names_of_the_whole_model_then_under_the_part_for_text_and_experts_in_one_tensor():
    table = NameTable(with_defaults(WHOLE), padded_vocab_size=248320)
    fc1 = table.find("decoder.layers.7.mlp.experts.linear_fc1.weight9")
    assert fc1.hf_names == ("model.language_model.layers.7.mlp.experts.gate_up_proj",)
    assert (fc1.row, fc1.rows, fc1.is_expert) == (9, 256, True)
    gated = table.find("decoder.layers.7.self_attention.linear_qkv.weight")
    assert gated.hf_names[0] == "model.language_model.layers.7.self_attn.q_proj.weight" and gated.layout.gated
    delta = table.find("decoder.layers.4.self_attention.in_proj.weight")
    assert [name.rpartition("linear_attn.")[2] for name in delta.hf_names] == [
        "in_proj_qkv.weight",
        "in_proj_z.weight",
        "in_proj_b.weight",
        "in_proj_a.weight",
    ]
    assert delta.layout.rows == ((2048, 2048, 4096), (4096,), (32,), (32,))
    assert table.find("output_layer.weight").hf_names == ("lm_head.weight",)
    assert "no image" in table.why_kept("model.visual.blocks.0.attn.qkv.weight")
    assert "drafts" in table.why_kept("mtp.layers.0.self_attn.q_proj.weight")
    assert table.why_kept("model.language_model.norm.weight") is None
    assert unusual_weights(WHOLE) == "one tensor stacks all experts of a layer"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (WHOLE | {"text_config": []}, "text_config of a qwen3_5_moe must be an object with model_type"),
        (changed(model_type="qwen3_5_text"), "must be an object with model_type qwen3_5_moe_text"),
    ],
)
def test_part_for_text_that_is_none_then_refused(config, words):
    with pytest.raises(ValueError, match=words):
        of_text(config)
    with pytest.raises(ValueError, match=words):
        model_flags(config)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("outside", [True, False, None])
def test_tied_embeddings_then_as_engines_read_it_outside_of_the_text(inside, outside):
    config = {key: value for key, value in WHOLE.items() if key != "tie_word_embeddings"}
    config |= {"text_config": TEXT | {"tie_word_embeddings": inside}}
    config |= {} if outside is None else {"tie_word_embeddings": outside}
    assert is_tied(with_defaults(config)) == bool(outside)
    assert ("--untie-embeddings-and-output-weights" in model_flags(config)) == (not outside)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (changed(layer_types=["full_attention"] * 40), "must be full_attention for every 4th layer"),
        (changed(attn_output_gate=False), "attn_output_gate false is not what the flags train"),
        (changed(output_gate_type="sigmoid"), "output_gate_type 'sigmoid' is not what the flags train"),
        (changed(norm_topk_prob=False), "norm_topk_prob false is not what the flags train"),
        (changed(decoder_sparse_step=2), "decoder_sparse_step 2 is not what the flags train"),
        (changed(attention_bias=True), "attention_bias true is not what the flags train"),
        (changed(linear_num_key_heads=0), "linear_num_key_heads 0 must be a whole number from 1 on"),
        (changed(logit_scale=2.0), "logit_scale 2.0 is no setting"),
        (WHOLE | {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 stands outside of text_config"),
        (WHOLE | {"logit_scale": 2.0}, "logit_scale 2.0 stands outside of text_config"),
        (
            changed(rope_parameters=TEXT["rope_parameters"] | {"partial_rotary_factor": 0.5}),
            "partial_rotary_factor 0.5 stands among rope_parameters alone",
        ),
        (
            changed(num_hidden_layers=2, layer_types=["full_attention"] * 2),
            "must be full_attention for every 4th layer",
        ),
        (WHOLE | {"architectures": ["Qwen3_5MoeForCausalLM"]}, "servers choose their model by it"),
        (
            {key: value for key, value in NEXT.items() if not key.startswith(("rope", "partial"))}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}},
            "rope_theta 10000000.0 stands among rope_parameters alone, where servers do not read it: they "
            "would take 10000.0; add it beside rope_parameters, too",
        ),
        (NEXT | {"mlp_only_layers": [1]}, "mlp_only_layers [1] is not what the flags train"),
        (NEXT | {"full_attention_interval": 0}, "full_attention_interval 0 must be a whole number from 1 on"),
    ],
)
def test_setting_that_the_flags_do_not_train_then_a_line_with_it(config, words):
    assert any(words in line for line in setting_problems(config)), setting_problems(config)


def test_rotary_settings_of_qwen3_next_in_both_places_then_taken():
    both = NEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000000}}
    assert setting_problems(both) == [] and setting_problems(NEXT) == []
    assert computed(both)["rope rope_theta"] == 10000000
    assert linear_layers(with_defaults(NEXT))[:5] == (0, 1, 2, 4, 5)
