"""FP8 values and scales, bit for bit those of transformers and of SGLang, and by hand."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.models.block_fp8 import dequantise_blockwise, quantise_blockwise
from tests.preloaded import run_preloaded

WORKER = Path(__file__).with_name("fp8_reference_worker.py")
FORMATS = ("float32", "ue8m0")


def random(*shape, seed=0, dtype=torch.float32, size=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def bits(quantised):
    """Values and scales as integers: equal codes, a zero's sign too."""
    return quantised[0].view(torch.uint8), quantised[1].view(torch.int32)


def assert_same_bits(found, expected):
    for ours, theirs in zip(bits(found), bits(expected), strict=True):
        assert ours.shape == theirs.shape and torch.equal(ours, theirs)


def of_transformers(weight, scale_format):
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(
        weight_block_size=(128, 128), scale_fmt="float" if scale_format == "float32" else scale_format
    )
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=config))
    made = quantise.convert({"a.weight": weight})
    return made["a.weight"], made["a.weight_scale_inv"].float()


def with_zeros(weight):
    """A block of zeros and one of negative zeros, and a zero of each sign beside other numbers."""
    weight = weight.clone()
    weight[..., :128, :128], weight[..., 128:, 128:256] = 0.0, -0.0
    weight[..., 200, 300:302] = torch.tensor([-0.0, 0.0], dtype=weight.dtype)
    return weight


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *(
            (size, dtype)
            for size in (1.0, 0.02, 1e-7, 1e-20, 2e-36, 1e37)
            for dtype in (torch.bfloat16, torch.float32)
        ),
        (1.0, torch.float16),
        (1e-7, torch.float16),
        (1e4, torch.float16),
    ],
)
def test_weights_of_any_size_then_values_and_scales_are_those_of_transformers(size, dtype, scale_format):
    weight = with_zeros(random(256, 384, dtype=dtype, size=size))
    found = quantise_blockwise(weight, scale_format)
    assert (
        found[0].dtype == torch.float8_e4m3fn and found[1].dtype == torch.float32 and found[1].shape == (2, 3)
    )
    assert_same_bits(found, of_transformers(weight, scale_format))
    assert found[1][0, 0] == found[1][1, 1] == 1 and not found[0].float()[:128, :128].any()


def test_experts_when_stacked_then_as_transformers_and_each_as_if_alone():
    experts = random(3, 128, 256, dtype=torch.bfloat16) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    values, scales = quantise_blockwise(experts)
    assert_same_bits((values, scales), of_transformers(experts, "float32"))
    for one, value, scale in zip(experts, values, scales, strict=True):
        assert_same_bits((value, scale), quantise_blockwise(one))


@pytest.fixture(scope="module")
def of_sglang(tmp_path_factory):
    """(weight, what SGLang makes of it) of shapes that 128 divides and does not."""
    shapes = [(256, 128), (129, 129), (1, 1), (127, 300), (576, 200), (300, 127)]
    weights = [random(*shape, seed=i, dtype=torch.bfloat16, size=0.05) for i, shape in enumerate(shapes)]
    weights[3][:, 256:] = 0.0
    folder = tmp_path_factory.mktemp("fp8")
    torch.save(weights, folder / "in.pt")
    run = run_preloaded([WORKER, folder / "in.pt", folder / "out.pt"], engine="sglang")
    assert run.returncode == 0, run.stderr[-2000:]
    return list(zip(weights, torch.load(folder / "out.pt"), strict=True))


def test_blocks_at_edges_then_values_and_powers_of_two_are_those_of_sglang(of_sglang):
    for weight, found in of_sglang:
        ours, theirs = quantise_blockwise(weight, "ue8m0"), found["ue8m0"]
        # SGLang takes the largest number of a block of zeros for 1e-4; zero has every scale.
        empty = ours[1] == 1
        assert torch.equal(theirs[1][empty], torch.full_like(theirs[1][empty], 2.0**-22))
        theirs[1][empty] = 1.0
        assert_same_bits(ours, theirs)


def test_blocks_at_edges_when_scales_are_any_numbers_then_as_sglangs_to_the_last_bit(
    of_sglang,
):
    for weight, found in of_sglang:
        values, scales = quantise_blockwise(weight)
        assert torch.equal(values.view(torch.uint8), found["float32"][0].view(torch.uint8))
        kept = scales != 1
        torch.testing.assert_close(scales[kept], found["float32"][1][kept], rtol=2e-7, atol=0)


def test_way_back_then_as_sglang_computes_it(of_sglang):
    for weight, found in of_sglang:
        back = dequantise_blockwise(*found["float32"], torch.bfloat16)
        assert back.shape == weight.shape and torch.equal(back, found["back"])


def test_scales_when_powers_of_two_then_rounded_up_and_an_exact_one_stays():
    # The largest numbers are 448 x 2^-3, the next number above it in float32, and 448 x 2^-3 x 1.5.
    for largest, scale in ((56.0, 0.125), (math.nextafter(56.0, 57.0) + 4e-6, 0.25), (84.0, 0.25)):
        weight = torch.full((2, 2), largest)
        values, scales = quantise_blockwise(weight, "ue8m0")
        assert scales.tolist() == [[scale]] and (values.float() * scale - weight).abs().max() <= largest / 16


def test_numbers_by_hand_when_a_block_is_small():
    # The largest is 4.48: the scale is 0.01, and in units of it the row is 448, 100, -17, -0.0. Steps are 8
    # from 64 on and 2 from 16 on: 100 is half way between 96 (12 steps, even) and 104, -17 between -16 (8
    # steps, even) and -18.
    values, scales = quantise_blockwise(torch.tensor([[4.48, 1.0, -0.17, -0.0]]))
    assert values.float().tolist() == [[448.0, 96.0, -16.0, -0.0]]
    torch.testing.assert_close(scales, torch.tensor([[0.01]]))
    # As a power of two it is 2^-6 = 0.0156: 286.7, 64 and -10.9 become 288, 64 and -11.
    values, scales = quantise_blockwise(torch.tensor([[4.48, 1.0, -0.17]]), "ue8m0")
    assert values.float().tolist() == [[288.0, 64.0, -11.0]] and scales.tolist() == [[2.0**-6]]


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_blocks_when_a_number_is_not_finite_then_their_scale_is_nan_and_other_blocks_stay(
    number, scale_format
):
    weight = random(128, 256)
    expected = quantise_blockwise(weight, scale_format)
    weight[3, 5] = number
    values, scales = quantise_blockwise(weight, scale_format)
    assert scales[0, 0].isnan() and dequantise_blockwise(values, scales, torch.float32)[:, :128].isnan().all()
    assert_same_bits((values[:, 128:], scales[:, 1:]), (expected[0][:, 128:], expected[1][:, 1:]))


def test_blocks_when_too_small_for_a_scale_then_zeros_where_the_reference_has_nan():
    weight = torch.full((128, 128), 1e-38)
    weight[0, 0] = 0.0
    assert of_transformers(weight, "float32")[0].float().isnan().any()
    values, scales = quantise_blockwise(weight)
    assert not values.float().any() and scales.tolist() == [[1.0]]


@pytest.mark.parametrize("scale_format", FORMATS)
def test_numbers_when_quantised_again_then_they_stay(scale_format):
    """What is read from an FP8 checkpoint into float32 is pushed as the very same numbers."""
    weight = random(300, 200, dtype=torch.bfloat16)
    once = dequantise_blockwise(*quantise_blockwise(weight, scale_format), torch.float32)
    again = dequantise_blockwise(*quantise_blockwise(once, scale_format), torch.float32)
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0)
