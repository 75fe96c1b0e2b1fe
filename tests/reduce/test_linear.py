"""Log-probs from hidden states and weight, sharded: value, both gradients, collectives and memory,
against float64.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.correction import peak_bytes
from megatron_rl_corr.logprobs import linear
from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from tests.reduce.test_vocab import check_collision, of_sampled_rows

INF = float("inf")
CASES = [
    "plain",
    "temperature, padding",
    "a rank of padding, no entropy",
    "share of the caller",
    "bfloat16",
    "bfloat16, fp32 head",
    "float64",
    "sampled rows",
    "sampled rows, share of the caller",
    "sampled rows, bfloat16, fp32 head",
    "no sampled row",
    "collision",
    "sampled rows, bfloat16, fp32 head, collision",
]


def reference(
    hidden,
    weight,
    labels,
    grads,
    *,
    temperature=1.0,
    vocab_size=None,
    with_entropy=True,
    rounded=False,
    sampled=None,
):
    """In float64: log-probs, entropy, gradients in hidden and weight; rounded: of logits of hidden's type."""
    if sampled is not None:
        return of_sampled_rows(
            reference,
            sampled,
            {"hidden": hidden, "labels": labels, "grads": grads},
            weight=weight,
            temperature=temperature,
            vocab_size=vocab_size,
            with_entropy=with_entropy,
            rounded=rounded,
        )
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = exact[0] @ exact[1].t()
    if rounded:
        logits = logits + (logits.to(hidden.dtype).double() - logits).detach()
    log_p = (logits[:, :vocab_size] / temperature).log_softmax(dim=1)
    logprobs = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, -INF)
    entropy = -(log_p.exp() * log_p).sum(dim=1)
    outputs = [logprobs, entropy] if with_entropy else [logprobs]
    torch.autograd.backward(outputs, [g.double() for g in grads[: len(outputs)]])
    return logprobs.detach(), entropy.detach(), *[x.grad for x in exact]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_linear_when_sharded_then_value_and_both_gradients_of_the_whole(vocab_ranks, name, size):
    inputs, options = (
        vocab_ranks[0]["inputs"]["linear"][name],
        dict(vocab_ranks[0]["options"]["linear"][name]),
    )
    reduced, fp32_lm_head = options.pop("reduce_hidden_gradient", True), options.pop("fp32_lm_head", False)
    options.pop("chunk_tokens", None)
    of_distribution = {name: value for name, value in options.items() if name != "with_entropy"}
    options.pop("with_collision", None)
    narrow = inputs["hidden"].dtype == torch.bfloat16
    logprobs, entropy, hidden, weight = reference(**inputs, **options, rounded=narrow and not fp32_lm_head)
    results = [rank["linear"][name, size] for rank in vocab_ranks]
    for result in results:
        torch.testing.assert_close(result["logprobs"].double(), logprobs, rtol=3e-6, atol=3e-6)
        assert torch.equal(result["logprobs"], results[0]["logprobs"])
        if result["entropy"] is not None:
            torch.testing.assert_close(result["entropy"].double(), entropy, rtol=3e-6, atol=3e-6)
        exact_logits = inputs["hidden"].double() @ inputs["weight"].double().t()
        check_collision(result, exact_logits, **of_distribution)
        assert len(result["forward"]) == (size > 1)
        assert result["backward"] == ["allreduce_"] * (reduced and size > 1)
    shares = torch.stack([result["gradients"][0].double() for result in results[:size]])
    # Each rank has the whole gradient of hidden; or a share, which the caller sums.
    found = shares if reduced else shares.sum(dim=0, keepdim=True)
    # bfloat16: each rank's share, their sum and, without an fp32 head, the gradient of the
    # logits are rounded.
    tolerance = 3e-2 if narrow else 5e-6
    torch.testing.assert_close(found, hidden.expand_as(found), rtol=tolerance, atol=tolerance)
    for row, sampled in enumerate(options.get("sampled", ())):
        assert sampled or torch.equal(found[:, row], torch.zeros_like(found[:, row]))
    merged = torch.cat([result["gradients"][1] for result in results[:size]])
    assert merged.dtype == inputs["weight"].dtype
    torch.testing.assert_close(merged.double(), weight, rtol=tolerance, atol=tolerance)
    assert reduced or size == 1 or not torch.allclose(shares[0], hidden, atol=0.1)


def test_cases_then_all_that_were_run(vocab_ranks):
    assert list(vocab_ranks[0]["options"]["linear"]) == CASES


def inputs(tokens=48, size=64, columns=40, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(columns, size, generator=generator) / 4).to(dtype).requires_grad_()
    return {
        "hidden": hidden,
        "weight": weight,
        "labels": torch.arange(tokens) % columns,
        "grads": torch.randn(2, tokens, generator=generator),
    }


def run(given, **options):
    logprobs, entropy = linear_logprobs(
        given["hidden"], given["weight"], given["labels"], with_entropy=True, **options
    )
    return logprobs, *torch.autograd.grad(
        [logprobs, entropy], [given["hidden"], given["weight"]], list(given["grads"])
    )


def test_fp32_head_when_the_inputs_are_bfloat16_then_log_probs_of_exact_logits(monkeypatch):
    monkeypatch.setattr(linear, "WIDER_ROWS", 7)  # 40 rows in six parts
    given = inputs()
    logprobs, _, hidden, weight = reference(**given)
    narrow, wide = run(given, chunk_tokens=20), run(given, chunk_tokens=20, fp32_lm_head=True)
    # Logits of 4 to 8 have steps of 1/32 in bfloat16; float32 products of bfloat16 numbers are exact.
    assert (narrow[0].double() - logprobs).abs().max() > 5e-3
    assert (wide[0].double() - logprobs).abs().max() < 1e-5
    # And then the gradients are rounded once, at the end: half a step of 2^-8.
    for found, expected in zip(wide[1:], (hidden, weight), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


def test_weight_gradient_when_in_many_chunks_then_summed_in_float32():
    # 1024 tokens give each 0.5 - tiny to row 0: in bfloat16 a sum of halves stays at 128.
    hidden, weight = torch.ones(1024, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    logprobs, _ = linear_logprobs(hidden, weight, torch.zeros(1024, dtype=torch.int64), chunk_tokens=1)
    [gradient] = torch.autograd.grad(logprobs.sum(), [weight])
    assert gradient.tolist() == [[512.0], [-512.0]]


def test_memory_then_a_chunk_of_logits_not_all():
    tokens, columns, chunk = 512, 4000, 16
    given = inputs(tokens, 8, columns, torch.float32)
    weight_bytes, rows_bytes = 4 * columns * 8, 4 * tokens * 8
    # A chunk of logits, another to work in; the weight's gradient and what a chunk adds to it;
    # numbers per token.
    limit = 2 * 4 * chunk * columns + 3 * weight_bytes + rows_bytes + 80 * tokens
    assert peak_bytes(lambda: run(given, chunk_tokens=chunk), "cpu") < limit < 4 * tokens * columns / 3


class Products(TorchDispatchMode):
    """Numbers that matrix products write, and rows of their left factor, by the shape of what they make."""

    def __init__(self):
        super().__init__()
        self.written: dict[tuple[int, ...], int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::addmm_", "aten::addmm"):
            self.written[tuple(made.shape)] = self.written.get(tuple(made.shape), 0) + 1
        return made


@pytest.mark.parametrize("tiles", [1, 4])
def test_products_when_half_of_the_rows_were_sampled_then_of_those_and_each_row_of_the_weight_once(tiles):
    tokens, size, columns = 48, 8, 40
    given, mask = inputs(tokens, size, columns, torch.float32), torch.arange(tokens) % 2 == 0
    with Products() as products:
        run(given, sampled=SampledRows.of(mask.numpy()), chunk_tokens=24 // tiles)
    width = columns // tiles
    # The logits, forward and backward; hidden's gradient; and the weight's, a tile's rows of it each time.
    expected = Counter({(24, width): 2 * tiles})
    expected.update({(24, size): tiles})
    expected.update({(width, size): tiles})
    assert products.written == expected


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_weight_gradient_when_into_main_grad_then_added_there_and_autograd_gets_none_of_it(wide, zeros):
    given = inputs(dtype=torch.bfloat16)
    weight, sums = given["weight"], torch.randn(40, 64)
    expected = sums.double() + reference(**given, rounded=True)[3]
    weight.main_grad = sums.clone() if wide else sums.bfloat16()
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeros
    found = run(given, into_main_grad=True, chunk_tokens=20)[2]
    assert weight.grad_added_to_main_grad and found.shape == weight.shape
    assert not zeros or found.count_nonzero() == 0
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_linear_when_one_input_is_frozen_then_the_others_gradient_alone(frozen):
    given = inputs(dtype=torch.float32)
    other = {"hidden": "weight", "weight": "hidden"}[frozen]
    expected = dict(zip(("hidden", "weight"), run(given)[1:], strict=True))
    given[frozen].requires_grad_(False)
    logprobs, entropy = linear_logprobs(given["hidden"], given["weight"], given["labels"], with_entropy=True)
    torch.autograd.backward([logprobs, entropy], list(given["grads"]))
    assert given[frozen].grad is None and torch.equal(given[other].grad, expected[other])


@pytest.mark.parametrize(
    "hidden, weight, options, words",
    [
        (
            (2, 3),
            (5, 4),
            {},
            "log-probs take hidden [T, H], weight [V/tp, H] and labels [T], got (2, 3), (5, 4) and (2,)",
        ),
        (
            (3, 3),
            (5, 3),
            {},
            "log-probs take hidden [T, H], weight [V/tp, H] and labels [T], got (3, 3), (5, 3) and (2,)",
        ),
        (
            (2, 3),
            (5, 3),
            {"temperature": -1.0},
            "temperature must be positive, got -1.0; greedy samples have no log-prob to correct",
        ),
        ((2, 3), (5, 3), {"chunk_tokens": 0}, "chunk_tokens must be positive, got 0; 1024 is usual"),
    ],
)
def test_arguments_when_wrong_then_the_rule_and_the_value(hidden, weight, options, words):
    with pytest.raises(ValueError) as raised:
        linear_logprobs(
            torch.zeros(hidden), torch.zeros(weight), torch.zeros(2, dtype=torch.int64), **options
        )
    assert str(raised.value) == words


def test_types_when_unlike_then_named():
    with pytest.raises(ValueError, match="of one type, got torch.float32 and torch.bfloat16; cast one"):
        linear_logprobs(torch.zeros(2, 3), torch.zeros(5, 3).bfloat16(), torch.zeros(2, dtype=torch.int64))
