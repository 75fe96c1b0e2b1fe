"""What a config.json says of quantised weights: FP8 in blocks, something else by name, and which modules are spared."""

import pytest

from megatron_rl_corr.models.quantization import BlockFP8, is_linear_weight

QWEN3 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
"""Of the published Qwen3-8B-FP8; that of DeepSeek-V3 is the same, DeepSeek-V3.1 adds "scale_fmt": "ue8m0"."""


def of(**changed):
    config = {key: value for key, value in (QWEN3 | changed).items() if value is not None}
    return BlockFP8.from_config({"quantization_config": config})


def test_config_when_in_fp8_blocks_then_its_scale_format_and_what_is_spared():
    assert of() == BlockFP8("float32") and of().config == QWEN3
    assert of(scale_fmt="ue8m0") == BlockFP8("ue8m0") != of()
    assert of(scale_fmt="float") == of(fmt=None, activation_scheme=None, weight_block_size=(128, 128)) == of()
    spared = of(modules_to_not_convert=["lm_head", "model.layers.0.self_attn"])
    assert spared.spared == {"lm_head", "layers.0.self_attn"} and spared != of()
    # vLLM and SGLang look at ignored_layers alone where it stands beside.
    assert of(ignored_layers=["lm_head"], modules_to_not_convert=["mlp"]).spared == {"lm_head"}


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_config_when_nothing_is_quantised_then_none(config):
    assert BlockFP8.from_config(config) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "compressed-tensors"}, "quant_method 'compressed-tensors'"),
        ({"quant_method": None}, "no quant_method"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"weight_block_size": [1, 128]}, r"weight_block_size \[1, 128\]"),
        ({"weight_block_size": None}, "no weight_block_size"),  # one scale for each tensor
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"scale_fmt": "e8m3"}, "scale_fmt 'e8m3'"),
    ],
)
def test_config_when_quantised_otherwise_then_what_it_has_is_named_and_what_to_serve(changed, named):
    remedy = r"a push quantises only as quant_method fp8 with weight_block_size \[128, 128\], .* serve such a"
    with pytest.raises(ValueError, match=f"config.json: quantization_config has {named}, and {remedy}"):
        of(**changed)


def test_config_when_it_stands_under_compressed_tensors_own_key_then_refused_too():
    with pytest.raises(ValueError, match="quant_method 'compressed-tensors'"):
        BlockFP8.from_config({"compression_config": {"quant_method": "compressed-tensors"}})


ATTENTION, EXPERTS = "model.layers.1.self_attn.", "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("spared", "name", "expected"),
    [
        ("mlp.gate", "model.layers.1.mlp.gate_proj.weight", True),  # a part of a name is no part of a path
        ("mlp.gate", "model.layers.1.mlp.gate.weight", False),
        ("self_attn", ATTENTION + "q_proj.weight", False),
        ("model.layers.1.self_attn", ATTENTION + "q_proj.weight", False),
        ("layers.1.self_attn", ATTENTION + "q_proj.weight", False),
        ("model.layers.1.self_attn.q_proj", ATTENTION + "k_proj.weight", True),
        ("model.layers.1", "model.layers.11.self_attn.q_proj.weight", True),
        ("model.layers.1.", ATTENTION + "q_proj.weight", False),
        ("model.layers.1.mlp", EXPERTS + "3.up_proj.weight", False),
        ("mlp.experts", EXPERTS + "3.up_proj.weight", False),
        (EXPERTS + "7.up_proj", EXPERTS + "3.down_proj.weight", False),  # all of a layer, or none
        (EXPERTS + "7.up_proj", "model.layers.2.mlp.experts.7.up_proj.weight", True),
        ("up_proj", EXPERTS + "3.up_proj.weight", True),  # the layer's experts are one module, which is no up_proj
        ("up_proj", "model.layers.1.mlp.shared_experts.up_proj.weight", False),
        ("model.layers.1.mlp.shared_experts", EXPERTS + "3.up_proj.weight", True),
    ],
)
def test_module_when_a_path_is_spared_then_it_and_what_is_below_is_not_quantised(spared, name, expected):
    assert of().quantises(name) == is_linear_weight(name)
    assert of(modules_to_not_convert=[spared]).quantises(name) is expected


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight",
                                  ATTENTION + "q_norm.weight", ATTENTION + "q_proj.bias",
                                  "model.layers.1.mlp.gate.e_score_correction_bias"])  # fmt: skip
def test_tensor_when_no_linear_layers_weight_then_never_quantised(name):
    assert not of().quantises(name)
