"""Products with float32 sums: the pieces that a GPU multiplies, with its multiplication stood in
for by float32's.
"""

import pytest
import torch

from megatron_rl_corr.logprobs import products
from megatron_rl_corr.logprobs.linear import linear_logprobs

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Types of the factors that went into float32, one pair a multiplication."""
    seen = []

    def multiply(left, right, out, add):
        seen.append((left.dtype, right.dtype))
        assert left.dtype == right.dtype and out.dtype == torch.float32  # or cuBLAS refuses
        torch.addmm(out, left.float(), right.float(), beta=int(add), out=out)

    monkeypatch.setattr(products, "_multiply_wide", multiply)
    monkeypatch.setattr(products, "sums_in_float32", lambda factor: factor.dtype in TYPES[:2])
    return seen


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gpu", [False, True])
def test_product_when_the_factors_are_bfloat16_then_that_of_float64_in_the_type_of_the_result(
    gpu, out_dtype, request
):
    if gpu:
        request.getfixturevalue("like_a_gpu")
    left, right = torch.randn(5, 64).bfloat16(), torch.randn(64, 7).bfloat16()
    out, total = torch.full((5, 7), torch.nan, dtype=out_dtype), torch.full((5, 7), 3.0, dtype=out_dtype)
    products.multiply(left, right, out)
    products.multiply(left, right, total, add=True)
    exact, rounding = left.double() @ right.double(), 1e-6 if out_dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), exact, rtol=rounding, atol=1e-5)
    torch.testing.assert_close(total.double(), 3 + exact, rtol=rounding, atol=1e-5)


def test_pieces_when_summed_then_the_number_but_for_2_to_the_minus_17_whatever_its_size(like_a_gpu):
    sizes = torch.logspace(-30, 30, 61)[:, None]
    wide = torch.randn(61, 500, generator=torch.Generator().manual_seed(0)) * sizes
    found = list(products.pieces(wide.clone(), torch.empty(0, dtype=torch.bfloat16)))
    assert [piece.dtype for piece in found] == [torch.bfloat16] * 2
    error = (sum(piece.double() for piece in found) - wide.double()).abs() / wide.double().abs()
    assert 2**-19 < error.max() < 2**-17


@pytest.mark.parametrize("dtype", TYPES[1:])
def test_pieces_when_the_other_factor_is_not_bfloat16_then_the_number_itself(like_a_gpu, dtype):
    wide = torch.randn(3, 4)
    [piece] = products.pieces(wide, torch.empty(0, dtype=dtype))
    assert piece is wide


@pytest.mark.parametrize("main_grad", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("dtype", TYPES)
def test_fp32_head_when_multiplied_as_on_a_gpu_then_log_probs_and_gradients_of_float64(
    like_a_gpu, dtype, main_grad
):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 64, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(90, 64, generator=generator) / 4).to(dtype).requires_grad_()
    labels, upstream = torch.arange(24), torch.randn(24, generator=generator)
    if main_grad:
        weight.main_grad = torch.ones_like(weight, dtype=main_grad)
    found, _ = linear_logprobs(
        hidden, weight, labels, chunk_tokens=7, fp32_lm_head=True, into_main_grad=main_grad is not None
    )
    gradients = torch.autograd.grad(found, [hidden, weight], upstream)
    of_weight = gradients[1] if main_grad is None else weight.main_grad
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = (exact[0] @ exact[1].t()).log_softmax(1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    of_exact = torch.autograd.grad(expected, exact, upstream.double())
    wanted = of_exact[1] + (main_grad is not None)
    for one, other in ((gradients[0], of_exact[0]), (of_weight, wanted)):
        step = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(one.dtype, 1e-5)
        torch.testing.assert_close(one.double(), other, rtol=step, atol=1e-5)
    pair = (dtype, dtype)
    # Tiles of 90 x 7 / 24 columns: forward, and in backward again, with both gradients in two pieces.
    tiles = 4
    assert (
        like_a_gpu == []
        if dtype == torch.float32
        else like_a_gpu.count(pair) == tiles * (2 + (4 if dtype == torch.bfloat16 else 0))
    )
