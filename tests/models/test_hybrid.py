"""HybridModel's layers as those of GPTModel: which patterns are, and what their parameters are called."""

from types import SimpleNamespace

import pytest
from torch import nn

from megatron_rl_corr.models.hybrid import expert_layers, gpt_name, layers_per_block


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("*E", [1]),
        ("*-*E|*E*-", [0, 1, 1, 0]),
        ("E*", None),
        ("*E*", None),
        ("*EE*", None),
        ("M*E", None),
        ("+E", None),
        ("*E/*E", None),
        ("", None),
    ],
)
def test_expert_layers_of_a_pattern_then_one_a_pair_and_none_for_other_layers(pattern, expected):
    assert expert_layers(pattern) == expected


def chunk(pattern, numbers):
    made = nn.Module()
    made.hybrid_layer_pattern = pattern
    made.decoder = nn.Module()
    made.decoder.layers = [SimpleNamespace(layer_number=number) for number in numbers]
    return made


def test_layers_per_block_of_a_chunk_then_two_of_a_hybrid_model_and_one_of_gpt():
    assert layers_per_block(nn.Module()) == 1
    assert layers_per_block(chunk("*E*E|*E*-", [5, 6, 7, 8])) == 2
    assert layers_per_block(chunk("*E*E|", [])) == 2


@pytest.mark.parametrize(
    "pattern, numbers, words",
    [
        ("M-*E", [1, 2, 3, 4], "--hybrid-layer-pattern M-*E: weights are loaded and sent of attention"),
        (
            "*E*|E*E",
            [4, 5, 6],
            r"a pipeline stage has layers 4 to 6, and so ends or begins within a pair; use pairs",
        ),
        (
            "*E*|E*E",
            [1, 2, 3],
            r"a pipeline stage has layers 1 to 3, and so ends or begins within a pair; use pairs",
        ),
    ],
)
def test_layers_per_block_when_layers_are_not_those_of_gpt_then_refused_with_the_remedy(
    pattern, numbers, words
):
    with pytest.raises(ValueError) as error:
        layers_per_block(chunk(pattern, numbers))
    assert words in str(error.value) and "put | between pairs" in str(error.value)


@pytest.mark.parametrize(
    "hybrid, gpt",
    [
        (
            "decoder.layers.4.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.5.mlp.experts.linear_fc1.weight7",
            "decoder.layers.2.mlp.experts.linear_fc1.weight7",
        ),
        ("decoder.layers.13.pre_mlp_layernorm.weight", "decoder.layers.6.pre_mlp_layernorm.weight"),
        ("decoder.final_norm.weight", "decoder.final_layernorm.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_gpt_name_of_a_hybrid_models_parameter_then_that_of_its_transformer_layer(hybrid, gpt):
    assert gpt_name(hybrid) == gpt
