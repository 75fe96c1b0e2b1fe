"""Weights that are rounded for a push: blocks by hand and against loops, what is spared, what
stays the trainer's.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.models.architectures import FAMILIES, ends, unusual_weights
from megatron_rl_corr.weight_sync.drafts import NO_DRAFTS
from megatron_rl_corr.weight_sync.rounding import (
    ROUNDINGS,
    is_rounded,
    round_fp8_blockwise,
    round_int4_group,
    rounded_units,
)
from megatron_rl_corr.weight_sync.update import _send_stage


def naive_fp8(value: float) -> float:
    """The number of 4 exponent bits (bias 7), 3 bits behind the point and no infinity that is
    nearest, ties to even.
    """
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), -6)  # subnormal below 2^-6
    step = 2.0 ** (exponent - 3)
    return math.copysign(min(round(abs(value) / step) * step, 448.0), value)


def naive_blocks(weight: torch.Tensor, rows: int, columns: int, largest: float, nearest) -> torch.Tensor:
    """Loops over blocks, rows and columns, in float32 where the formula has it."""
    out = torch.empty_like(weight)
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            block = weight[top : top + rows, left : left + columns]
            scale = block.float().abs().max() / largest
            for i, row in enumerate(block.float()):
                for j, value in enumerate(row):
                    rounded = nearest(float(value / scale)) * scale if scale else torch.tensor(0.0)
                    out[top + i, left + j] = rounded.to(weight.dtype)
    return out


def naive(rounding: str, weight: torch.Tensor) -> torch.Tensor:
    if rounding == "fp8_blockwise":
        return naive_blocks(weight, 128, 128, 448.0, naive_fp8)
    return naive_blocks(weight, 1, 128, 7.0, lambda value: max(-7, min(7, round(value))))


def random(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_fp8_when_a_block_is_small_then_its_numbers_are_those_by_hand():
    # The largest is 4.48, so the scale is 0.01, and in units of it the row is 448, 100, -17, 1.05, 0.001.
    # Between 64 and 128 the steps are 8: 100 is half way between 96 (12 steps, even) and 104. Between 16 and
    # 32 they are 2: -17 is half way between -16 (8 steps, even) and -18. From 1 to 2 they are 1/8: 1.05
    # becomes 1. The smallest step is 2^-9 = 0.00195, and 0.001 is nearer to it than to 0.
    weight = torch.tensor([[4.48, 1.0, -0.17, 0.0105, 0.00001]])
    expected = torch.tensor([[4.48, 0.96, -0.16, 0.01, 0.01 * 2**-9]])
    torch.testing.assert_close(round_fp8_blockwise(weight), expected, rtol=1e-6, atol=0)


def test_fp8_when_129_rows_and_columns_then_the_last_blocks_are_their_own():
    # Each block has a largest number of its own: 448, 1, 1, and 3 alone, of which 3 alone is kept
    # whatever the others.
    weight = torch.full((129, 129), 1.0)
    weight[0, 0], weight[128, 128] = 448.0, 3.3
    weight[5, 5] = 17.0  # in units of 1: half way between 16 and 18, as above
    rounded = round_fp8_blockwise(weight)
    assert rounded[5, 5] == 16.0 and rounded[0, 0] == 448.0
    torch.testing.assert_close(rounded[128, 128], torch.tensor(3.3), rtol=1e-6, atol=0)
    torch.testing.assert_close(rounded[128, :128], torch.ones(128), rtol=1e-6, atol=0)
    weight[128, 7] = 0.53  # in units of 1 / 448: 237.4, between 224 and 240
    torch.testing.assert_close(
        round_fp8_blockwise(weight)[128, 7], torch.tensor(240 / 448), rtol=1e-6, atol=0
    )


def test_int4_when_a_row_has_two_groups_then_each_has_its_own_scale():
    # The first group's largest is 7, so its scale is 1: 2.5 and 3.5 go to the even 2 and 4, -0.4 to 0. The
    # second group, of 2 columns, has the scale 0.1: 0.33 becomes 0.3. The second row is all zeros.
    weight = torch.zeros(2, 130)
    weight[0, :4] = torch.tensor([-7.0, 2.5, 3.5, -0.4])
    weight[0, 128:] = torch.tensor([0.7, 0.33])
    rounded = round_int4_group(weight)
    assert rounded[0, :4].tolist() == [-7, 2, 4, 0] and not rounded[1].any()
    torch.testing.assert_close(rounded[0, 128:], torch.tensor([0.7, 0.3]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounding_when_blocks_do_not_divide_the_shape_then_as_loops_over_numbers(rounding, dtype):
    weight = random(150, 140, dtype=dtype)
    weight[130:] *= 100  # another block's scale would lose these or the others
    rounded = ROUNDINGS[rounding](weight)
    assert rounded.dtype == dtype and rounded.shape == weight.shape and rounded.is_contiguous()
    assert torch.equal(rounded, naive(rounding, weight))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounding_when_experts_are_fused_then_each_is_rounded_as_if_it_were_alone(rounding):
    experts = random(3, 40, 30) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    rounded = ROUNDINGS[rounding](experts)
    for one, expected in zip(rounded, experts, strict=True):
        assert torch.equal(one, ROUNDINGS[rounding](expected))


def test_fp8_when_rounded_then_within_a_half_step_and_no_further_than_float8_itself():
    weight = random(128, 128)
    scale = weight.abs().max() / 448
    rounded = round_fp8_blockwise(weight)
    # 3 bits behind the point: half a step is at most 1/16 of a number, and 2^-10 scales below
    # the normal ones.
    assert ((rounded - weight).abs() <= weight.abs() / 16 + scale * 2**-10 + 1e-7).all()
    assert (rounded - weight).abs().max() > 0.01  # it is no identity
    codes = (rounded / scale).to(torch.float8_e4m3fn)
    assert codes.view(torch.uint8).unique().numel() > 100 and torch.equal(codes.float() * scale, rounded)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounding_when_a_number_is_not_finite_then_its_block_shows_it_and_others_do_not(rounding):
    weight = torch.ones(128, 256)
    weight[0, 0] = math.inf
    rounded = ROUNDINGS[rounding](weight)
    assert rounded[0, 1].isnan() and torch.equal(rounded[:, 128:], weight[:, 128:])


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounding_when_numbers_are_too_small_for_a_scale_then_they_become_zero_and_not_nan(rounding):
    assert not ROUNDINGS[rounding](torch.full((2, 2), 1e-45)).any()


CONFIG = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 4,
    "kv_lora_rank": 3,
    "qk_rope_head_dim": 1,
}
SPARED = {
    "embed_tokens",
    "lm_head",
    "norm",
    "input_layernorm",
    "post_attention_layernorm",
    "q_norm",
    "k_norm",
    "q_a_layernorm",
    "kv_a_layernorm",
    "gate",
    "shared_expert_gate",
}
ROUNDED = {
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "w1",
    "w2",
    "w3",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
}
"""Modules of all architectures, as quantised checkpoints have them: every one is in one of the two."""


@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if unusual_weights({"model_type": one}) is None]
)  # the others are refused
def test_names_of_every_architecture_then_linear_layers_are_rounded_and_the_others_spared(family):
    rows = [
        *ends(CONFIG, 96),
        *(row for part in FAMILIES[family] for row in part(CONFIG | {"model_type": family})),
    ]
    names = {name.format(L=1, E=3) for row in rows for name in row.hf_names}
    assert len(names) > 10
    for name in names:
        module, kind = name.split(".")[-2:]
        assert is_rounded(name, torch.ones(2, 2)) == (module in ROUNDED and kind == "weight"), name
        assert module in ROUNDED | SPARED, name
        assert not is_rounded(name, torch.ones(2)), name  # a vector: a norm, a bias


def test_names_when_experts_are_fused_then_rounded_without_their_biases():
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    assert is_rounded(fused, torch.ones(4, 2, 2)) and not is_rounded(fused + "_bias", torch.ones(4, 2))


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("rounding", ["none", *ROUNDINGS])
def test_stage_when_sent_then_only_the_senders_copy_is_rounded_and_the_model_is_as_it_was(rounding, sends):
    weights = {"model.layers.0.self_attn.q_proj.weight": random(8, 8), "model.norm.weight": random(8, seed=1)}
    before, sent = {name: tensor.clone() for name, tensor in weights.items()}, {}
    servers = SimpleNamespace(
        rounding=rounding,
        quantization=None,
        drafts=NO_DRAFTS,
        send=lambda bucket, version: sent.update(bucket),
        finish=lambda: None,
    )
    exporter = SimpleNamespace(sends=sends, units=lambda meet: ([one] for one in weights.items()))
    assert _send_stage(exporter, servers, "v", 10**6, lambda: None) is None
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    expected = (
        {
            name: ROUNDINGS[rounding](tensor) if rounding != "none" and tensor.ndim == 2 else tensor
            for name, tensor in before.items()
        }
        if sends
        else {}
    )
    assert sent.keys() == expected.keys() and all(
        torch.equal(sent[name], expected[name]) for name in expected
    )


def test_units_when_rounded_then_tensors_that_one_request_brings_together_stay_together():
    unit = [("a.q_a_proj.weight", random(4, 4)), ("a.kv_a_proj_with_mqa.weight", random(4, 4))]
    [together] = rounded_units([unit], "int4_group")
    assert [name for name, _ in together] == [name for name, _ in unit]
