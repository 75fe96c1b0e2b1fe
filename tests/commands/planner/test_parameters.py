"""Parameters by config.json: published totals, transformers' own models, and one layer by hand."""

import pytest

from megatron_rl_corr.commands.planner.parameters import PARTS, LayerParameters, model_parameters
from megatron_rl_corr.models.architectures import CODE_OF, FAMILIES
from megatron_rl_corr.models.settings import with_defaults
from tests.commands.planner.published import CARDS, DEEPSEEK_V3, QWEN3_4B, QWEN3_30B_A3B


@pytest.mark.parametrize("name", CARDS)
def test_parameters_of_a_published_model_then_the_totals_of_its_card(name):
    config, total, active = CARDS[name]
    counted = model_parameters(with_defaults(config))
    # Kimi-K2's report says 1.04 trillion, and its files have 1.026.
    assert counted.total / 1e9 == pytest.approx(total, rel=0.015 if name == "Kimi-K2" else 0.01)
    # Qwen counts 2.7 without the embedding, GLM without both ends; the others round.
    ends = counted.ends if name.startswith("GLM") else 0
    assert (counted.active - ends) / 1e9 == pytest.approx(active, rel=0.02) or name == "Qwen1.5-MoE-A2.7B"


@pytest.mark.parametrize("name", CARDS)
def test_parameters_when_transformers_makes_the_model_then_it_has_as_many(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config, *_ = CARDS[name]
    kind = dict(config)
    own = kind.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(CODE_OF.get(own, own), **kind))
    found = sum(parameter.numel() for parameter in model.parameters())
    # The bias that balances experts is a buffer there, of a number for each expert.
    buffers = {"DeepSeek-V3": 256 * 58, "Kimi-K2": 384 * 60, "GLM-4.5": 160 * 89, "GLM-4.5-Air": 128 * 45}
    assert model_parameters(with_defaults(config)).total == found + buffers.get(name, 0)


@pytest.mark.parametrize(
    ("kind", "biases"),
    [
        ("qwen3_next", 0),
        ("qwen3_5_moe_text", 0),
        ("qwen3_5_text", 0),
        ("deepseek_v32", 256 * 58),
        ("glm_moe_dsa", 256 * 75),
    ],
)
def test_parameters_of_delta_nets_and_indexers_then_transformers_makes_as_many(kind, biases):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))
    found = sum(parameter.numel() for parameter in model.parameters())
    assert model_parameters(with_defaults({"model_type": kind})).total == found + biases


def test_layer_of_qwen3_30b_a3b_when_counted_by_hand_then_the_same():
    # Queries 32 x 128 = 4096, keys and values 4 x 128 = 512 each: 2048 x (4096 + 1024) + 4096 x
    # 2048 = 18874368. Norms 2 x 2048 and 2 x 128, router 128 x 2048: 266496. Experts 128 x 3 x 2048
    # x 768 = 603979776.
    counted = model_parameters(QWEN3_30B_A3B)
    assert counted.layers == (LayerParameters(split=18874368, whole=266496, routed=603979776),) * 48
    # K / E = 8 / 128 of the routed ones.
    assert counted.active == counted.total - 48 * 603979776 * 120 // 128


def test_ends_when_tied_then_one_embedding_and_without_experts_all_are_active():
    counted = model_parameters(QWEN3_4B)
    assert counted.ends == 151936 * 2560 and counted.active == counted.total and counted.routed == 0


def test_deepseek_when_its_first_layers_are_dense_then_only_the_others_have_experts():
    layers = model_parameters(DEEPSEEK_V3).layers
    assert [layer.routed for layer in layers[:4]] == [0, 0, 0, 256 * 3 * 7168 * 2048]


def test_parts_of_all_architectures_then_each_has_a_count():
    assert {part for parts in FAMILIES.values() for part in parts} == set(PARTS)


def test_architecture_when_it_is_unknown_then_the_supported_ones_are_named():
    with pytest.raises(
        ValueError, match=r"model_type 'gpt2' is not supported \(supported: deepseek_v3, .*qwen3_next\)"
    ):
        model_parameters({"model_type": "gpt2"})
    with pytest.raises(
        ValueError, match="model_type 'nemotron_h' is not supported: most of its layers are of Mamba"
    ):
        model_parameters({"model_type": "nemotron_h"})
