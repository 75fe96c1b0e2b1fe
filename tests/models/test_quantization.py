"""What a config.json says of quantised weights: FP8 in blocks, something else by name, and which
modules are spared.
"""

import json
from pathlib import Path

import pytest

from megatron_rl_corr.models.quantization import BlockFP8, is_linear_weight
from tests.preloaded import run_preloaded

WORKER = Path(__file__).with_name("spared_worker.py")

QWEN3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
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
        ("model.layers.1.self_attn.o_proj", ATTENTION + "k_proj.weight", True),
        ("model.layers.1", "model.layers.11.self_attn.q_proj.weight", True),
        ("model.layers.1.", ATTENTION + "q_proj.weight", False),
        ("model.layers.1.mlp", EXPERTS + "3.up_proj.weight", False),
        ("mlp.experts", EXPERTS + "3.up_proj.weight", False),
        (EXPERTS + "7.up_proj", EXPERTS + "3.down_proj.weight", False),  # all of a layer, or none
        (EXPERTS + "7.up_proj", "model.layers.2.mlp.experts.7.up_proj.weight", True),
        # a layer's experts are one module, which is no down_proj
        ("down_proj", EXPERTS + "3.down_proj.weight", True),
        ("down_proj", "model.layers.1.mlp.shared_experts.down_proj.weight", False),
        ("model.layers.1.mlp.shared_experts", EXPERTS + "3.up_proj.weight", True),
    ],
)
def test_module_when_a_path_is_spared_then_it_and_what_is_below_is_not_quantised(spared, name, expected):
    assert of().quantises(name) == is_linear_weight(name)
    assert of(modules_to_not_convert=[spared]).quantises(name) is expected


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        ATTENTION + "q_norm.weight",
        ATTENTION + "q_proj.bias",
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ],
)
def test_tensor_when_no_linear_layers_weight_then_never_quantised(name):
    assert not of().quantises(name)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("re:.*mlp.gate$", "servers of FP8 read no regular expressions"),
        ("re:model.layers.0.*", "servers of FP8 read no regular expressions"),
        ("model.layers.*.mlp", "it is no path of a module"),
        (".self_attn", "it is no path of a module"),
        ("", "it is no path of a module"),
        ("model", "it is no path of a module"),
        ("model.", "it is no path of a module"),
        (
            "model.layers.0.self_attn.qkv_proj",
            "some servers look for q_proj, k_proj, v_proj of the checkpoint",
        ),
        ("mlp.gate_up_proj", "some servers look for gate_proj, up_proj of the checkpoint"),
        (
            "self_attn.fused_qkv_a_proj_with_mqa",
            "some servers look for q_a_proj, kv_a_proj_with_mqa of the checkpoint",
        ),
        ("model.layers.0.mlp.down_proj.weight", "it is a tensor's name"),
        ("mlp.experts.7.up_proj", "servers look for experts by their layer too"),
        ("experts.7", "servers look for experts by their layer too"),
    ],
)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_config_when_an_entry_would_spare_other_modules_than_it_names_then_refused_with_why(key, entry, why):
    with pytest.raises(ValueError) as raised:
        of(**{key: ["lm_head", entry]})
    assert f"config.json: quantization_config has {entry!r} in {key}: {why}" in str(raised.value)
    assert str(raised.value).endswith("as the checkpoint does, such as model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(
    ("spared", "said"),
    [
        (["model.layers.1.self_attn.q_proj"], "model.layers.1.self_attn.q_proj without k_proj and v_proj"),
        (
            ["layers.3.self_attn.k_proj", "layers.3.self_attn.v_proj"],
            "model.layers.3.self_attn.k_proj and v_proj without q_proj",
        ),
        (["up_proj"], "model.layers.0.mlp.up_proj without gate_proj"),
        (
            ["model.layers.0.mlp.shared_experts.gate_proj"],
            "model.layers.0.mlp.shared_experts.gate_proj without up_proj",
        ),
        (
            ["model.layers.2.mlp.shared_expert.up_proj"],
            "model.layers.2.mlp.shared_expert.up_proj without gate_proj",
        ),
        (["self_attn.q_a_proj"], "model.layers.0.self_attn.q_a_proj without kv_a_proj_with_mqa"),
        # Layer 1 is whole; of the others a half is spared.
        (["mlp.gate_proj", "model.layers.1.mlp"], "model.layers.2.mlp.gate_proj without up_proj"),
    ],
)
def test_config_when_a_part_of_a_fused_layer_is_spared_then_refused_with_the_others(spared, said):
    with pytest.raises(ValueError) as raised:
        of(modules_to_not_convert=spared)
    assert f"spares {said}, which servers hold as one layer; spare all of them, or none" in str(raised.value)


@pytest.mark.parametrize(
    "spared",
    [
        [ATTENTION + "q_proj", ATTENTION + "k_proj", ATTENTION + "v_proj"],
        ["self_attn.q_a_proj", "kv_a_proj_with_mqa"],
        ["lm_head", "model.norm", "model.layers.1.input_layernorm", "model.layers.1.mlp.gate"],
        ["model.embed_tokens.weight", "model.norm.weight"],
    ],
)
def test_config_when_fused_layers_are_spared_whole_or_names_are_of_what_is_never_quantised_then_taken(spared):
    found = of(modules_to_not_convert=spared)
    assert found.quantises(ATTENTION + "o_proj.weight")
    assert found.quantises(ATTENTION + "q_proj.weight") == (ATTENTION + "q_proj" not in spared)


@pytest.mark.parametrize("empty", [[], None])
def test_config_when_one_list_is_empty_beside_the_other_then_refused_as_engines_take_different_ones(empty):
    config = QWEN3 | {"ignored_layers": empty, "modules_to_not_convert": ["mlp.down_proj"]}
    with pytest.raises(ValueError, match="beside modules_to_not_convert, which some servers take then and"):
        BlockFP8.from_config({"quantization_config": config})


@pytest.mark.parametrize("wrong", ["lm_head", [1], {"lm_head": True}])
def test_config_when_the_list_is_none_of_names_then_refused(wrong):
    with pytest.raises(ValueError, match="modules_to_not_convert .* must have a list of names"):
        of(modules_to_not_convert=wrong)


@pytest.mark.parametrize(
    "key",
    ["exclude_modules", "ignore", "exclude", "modules_to_convert", "packed_modules_mapping", "config_groups"],
)
def test_config_when_it_has_a_key_that_is_not_known_then_refused_by_name_unless_it_says_nothing(key):
    with pytest.raises(
        ValueError, match=rf"quantization_config has {key} \['mlp'\], and a push quantises only"
    ):
        of(**{key: ["mlp"]})
    for nothing in ([], {}, False):
        assert of(**{key: nothing}) == of()
    assert BlockFP8.from_config({"quantization_config": QWEN3 | {key: None}}) == of()


def test_config_of_transformers_then_taken():
    from transformers import FineGrainedFP8Config

    written = FineGrainedFP8Config(modules_to_not_convert=["lm_head"]).to_dict()
    written["quant_method"] = str(getattr(written["quant_method"], "value", written["quant_method"]))
    assert BlockFP8.from_config({"quantization_config": written}).spared == {"lm_head"}


NAMES = [
    f"model.layers.{layer}.{part}.weight"
    for layer in (0, 1, 10)
    for part in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "mlp.experts.3.up_proj",
        "mlp.experts.13.down_proj",
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
]
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def held_by_sglang(name):
    """The path of the module in which SGLang holds a weight."""
    path = name.removesuffix(".weight")
    if ".experts." in path:
        return path.split(".experts.")[0] + ".experts"
    parent, last = path.rsplit(".", 1)
    return f"{parent}.{FUSED.get(last, last)}"


SPARED = [
    [],
    ["self_attn"],
    ["model.layers.1"],
    ["layers.1.mlp"],
    ["mlp.gate"],
    ["mlp.experts"],
    ["experts"],
    ["mlp"],
    ["model.layers.1.mlp.experts.3.up_proj"],
    ["model.layers.10"],
    ["mlp.shared_expert"],
    ["down_proj"],
    ["layers"],
    ["gate_proj", "up_proj"],
    ["model.layers.1."],
    ["q_proj"],
    ["up_proj"],
    ["model"],
    ["model."],
    [""],
    ["self_attn.qkv_proj"],
    ["re:.*self_attn.*"],
    ["mlp.experts.3"],
    [".self_attn"],
    ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"],
]
REFUSED = SPARED[15:24]


@pytest.fixture(scope="module")
def of_sglang(tmp_path_factory):
    """Of each of SPARED, whether SGLang skips the module of each of NAMES; None where it does not start."""
    folder = tmp_path_factory.mktemp("spared")
    (folder / "in.json").write_text(json.dumps([SPARED, [held_by_sglang(name) for name in NAMES]]))
    run = run_preloaded([WORKER, folder / "in.json", folder / "out.json"], engine="sglang")
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("number", range(len(SPARED)))
def test_modules_when_spared_then_those_that_sglang_itself_skips_or_the_list_is_refused(number, of_sglang):
    if SPARED[number] in REFUSED:
        with pytest.raises(ValueError, match="config.json: quantization_config"):
            of(modules_to_not_convert=SPARED[number])
        return
    found = of(modules_to_not_convert=SPARED[number])
    assert [not found.quantises(name) for name in NAMES] == of_sglang[number]


def test_list_when_it_spares_a_part_of_a_fused_layer_then_sglang_does_not_start(of_sglang):
    assert of_sglang[SPARED.index(["q_proj"])] is None and of_sglang[SPARED.index(["up_proj"])] is None
