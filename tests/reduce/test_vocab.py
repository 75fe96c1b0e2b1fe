"""Log-prob and entropy from sharded logits, value and gradient, against float64 on the whole vocabulary."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.correction import peak_bytes
from megatron_rl_corr.logprobs.vocab import backend, vocab_parallel_logprobs

INF = float("inf")
CASES = [
    "plain",
    "temperature",
    "chunks that do not divide",
    "one token a chunk",
    "one padded column",
    "a rank of padding",
    "a rank of -inf",
    "rows of -inf",
    "rows of -inf, no entropy",
    "labels out of range",
    "extreme",
    "extreme bfloat16",
    "no entropy",
    "bfloat16",
    "bfloat16, no entropy",
    "float16",
    "float64",
    "in place",
    "in place, no entropy",
    "in place, bfloat16",
    "no tokens",
    "sampled rows",
    "sampled rows, in place",
    "sampled rows, bfloat16, no entropy",
    "no sampled row",
    "collision",
    "rows of -inf, collision, no entropy",
    "sampled rows, bfloat16, collision",
]
ROUNDING = {torch.float32: 5e-6, torch.float64: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of a gradient, which has the logits' type."""


def of_sampled_rows(reference, sampled, by_token, **rest):
    """A reference's results from the sampled rows of the tensors `by_token` alone, with 0
    for the other rows.
    """
    kept = torch.tensor(sampled).bool()
    rows = {name: x[:, kept] if name == "grads" else x[kept] for name, x in by_token.items()}
    results = []
    for values in reference(**rows, **rest):
        if values is not None and len(values) == kept.sum():
            values = values.new_zeros(len(kept), *values.shape[1:]).index_copy_(
                0, kept.nonzero()[:, 0], values
            )
        results.append(values)
    return results


def reference(logits, labels, grads, *, temperature=1.0, vocab_size=None, with_entropy=True, sampled=None):
    """In float64 without shards: log-probs, entropy and the gradient in the logits, padding included.

    A log-prob of -inf is a constant, and the entropy of a row without a finite logit is 0.
    """
    if sampled is not None:
        by_token = {"logits": logits, "labels": labels, "grads": grads}
        return of_sampled_rows(
            reference,
            sampled,
            by_token,
            temperature=temperature,
            vocab_size=vocab_size,
            with_entropy=with_entropy,
        )
    exact = logits.double().clone().requires_grad_()
    columns = exact[:, :vocab_size]
    nothing = (columns == -INF).all(dim=1)
    log_p = (columns.masked_fill(nothing[:, None], 0.0) / temperature).log_softmax(dim=1)
    at_label = log_p.gather(1, labels.clamp(0, log_p.shape[1] - 1)[:, None])[:, 0]
    impossible = nothing | (labels < 0) | (labels >= log_p.shape[1]) | (at_label == -INF)
    logprobs = at_label.masked_fill(impossible, -INF)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(dim=1).masked_fill(nothing, 0.0)
    outputs = [logprobs, entropy] if with_entropy else [logprobs]
    torch.autograd.backward(outputs, [g.double() for g in grads[: len(outputs)]])
    return logprobs.detach(), entropy.detach() if with_entropy else None, exact.grad


def check_collision(result, logits, *, temperature=1.0, vocab_size=None, sampled=None, with_collision=False):
    """Of a case without it there is none; else sum p^2 of each row in float64, 0 of a row
    without a finite logit.
    """
    assert (result["collision"] is not None) == with_collision
    if not with_collision:
        return
    expected = (logits.double()[:, :vocab_size] / temperature).softmax(dim=1).square().sum(dim=1)
    expected = expected.masked_fill((logits[:, :vocab_size] == -INF).all(dim=1), 0.0)
    if sampled is not None:
        expected = torch.where(torch.tensor(sampled).bool(), expected, 0.0)
    assert_close(result["collision"], expected, 3e-6)
    assert not result["collision"].requires_grad and 0 < result["collision"].max() <= 1


def assert_close(actual, expected, tolerance):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_logprobs_when_sharded_then_value_and_gradient_of_the_whole(vocab_ranks, name, size):
    inputs, options = vocab_ranks[0]["inputs"]["vocab"][name], dict(vocab_ranks[0]["options"]["vocab"][name])
    in_place = options.pop("inplace_gradient", False)
    options.pop("chunk_tokens", None)
    of_distribution = {name: value for name, value in options.items() if name != "with_entropy"}
    options.pop("with_collision", None)
    logprobs, entropy, gradient = reference(**inputs, **options)
    results = [rank["vocab"][name, size] for rank in vocab_ranks]
    for result in results:
        assert_close(result["logprobs"], logprobs, 2e-6)
        if options.get("with_entropy", True):
            assert_close(result["entropy"], entropy, 3e-6)
        else:
            assert result["entropy"] is None
        # One collective forward, none backward; and the logits as they were.
        assert len(result["forward"]) == (size > 1) and result["backward"] == []
        assert result["untouched"] != in_place
        # Tensor-parallel ranks hold the same tokens, and agree bit for bit.
        assert torch.equal(result["logprobs"], results[0]["logprobs"])
        assert result["entropy"] is None or torch.equal(result["entropy"], results[0]["entropy"])
        check_collision(result, inputs["logits"], **of_distribution)
        assert result["collision"] is None or torch.equal(result["collision"], results[0]["collision"])
    merged = torch.cat([result["gradients"][0] for result in results[:size]], dim=1)
    assert merged.dtype == inputs["logits"].dtype
    assert_close(merged, gradient, ROUNDING[merged.dtype])
    # Padding gets exactly nothing.
    assert merged[:, options.get("vocab_size") or 12 :].count_nonzero() == 0
    for row, sampled in enumerate(options.get("sampled", ())):
        assert sampled or torch.equal(merged[row], torch.zeros_like(merged[row]))


def test_cases_then_all_that_were_run(vocab_ranks):
    assert list(vocab_ranks[0]["options"]["vocab"]) == CASES


def test_logits_when_one_is_not_a_number_then_neither_is_the_log_prob():
    logits = torch.zeros(2, 3)
    logits[1, 2] = float("nan")
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([0, 0]), with_entropy=True)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradient_when_the_token_is_masked_then_zero_even_of_a_nan(with_entropy):
    logits = torch.zeros(3, 2)
    logits[:2, 0] = float("nan")
    logits.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([1, 1, 1]), with_entropy=with_entropy)
    outputs = [logprobs, entropy] if with_entropy else [logprobs]
    torch.autograd.backward(outputs, [torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3)][: len(outputs)])
    # Of two equal columns the label's gets 1 - 1/2.
    torch.testing.assert_close(
        logits.grad, torch.tensor([[0.0, 0.0], [torch.nan, torch.nan], [-0.5, 0.5]]), equal_nan=True
    )


def test_logprob_when_the_token_is_nearly_certain_then_it_keeps_its_digits():
    # ln(1 + 2 e^-14) = 1.663e-6, beside a logit of 300 whose float32 step is 3e-5.
    logits = torch.tensor([[300.0, 286.0, 286.0]])
    logprobs, _ = vocab_parallel_logprobs(logits, torch.tensor([0]))
    assert logprobs.item() == pytest.approx(-1.6630541e-6, rel=0.05)


def test_label_when_in_the_padding_or_outside_then_minus_infinity():
    logits = torch.zeros(4, 6)
    logprobs, _ = vocab_parallel_logprobs(logits, torch.tensor([3, 4, 6, -1]), vocab_size=4)
    # Four columns of equal probability.
    assert logprobs.tolist() == pytest.approx([-1.3862944, -INF, -INF, -INF])


def test_entropy_when_uniform_or_certain_then_log_of_the_support_or_zero():
    logits = torch.tensor([[0.0, 0.0, 0.0, 9.0], [200.0, 0.0, 0.0, 9.0], [0.0, -INF, 0.0, 9.0]])
    _, entropy = vocab_parallel_logprobs(logits, torch.tensor([0, 0, 0]), vocab_size=3, with_entropy=True)
    assert entropy.tolist() == pytest.approx([1.0986123, 0.0, 0.6931472], abs=1e-7)  # ln 3, 0, ln 2


def test_collision_when_uniform_or_certain_then_one_over_the_support_or_one():
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 9.0], [200.0, 0.0, 0.0, 9.0], [0.0, -INF, 0.0, 9.0]]
    ).requires_grad_()
    logprobs, _, collision = vocab_parallel_logprobs(
        logits, torch.tensor([0, 0, 0]), vocab_size=3, with_collision=True
    )
    assert collision.tolist() == pytest.approx([1 / 3, 1.0, 1 / 2], abs=1e-7)
    logprobs.sum().backward()
    # [label] - p of each row: the collision adds no gradient.
    torch.testing.assert_close(logits.grad[0], torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.0]))


MANY, WIDE, CHUNK = 256, 4000, 16


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_memory_when_chunked_then_one_chunk_in_float32_and_numbers_per_token(dtype, with_entropy, in_place):
    # A result, as in a model: a leaf keeps a copy of its gradient.
    logits = torch.randn(MANY, WIDE).to(dtype) + torch.zeros(MANY, 1, dtype=dtype, requires_grad=True)
    labels, outputs = torch.zeros(MANY, dtype=torch.int64), []

    def forward():
        logprobs, entropy, _ = vocab_parallel_logprobs(
            logits,
            labels,
            with_entropy=with_entropy,
            with_collision=True,
            chunk_tokens=CHUNK,
            inplace_gradient=in_place,
        )
        outputs.extend([logprobs, entropy] if with_entropy else [logprobs])

    def backward():
        torch.autograd.backward(outputs, [torch.ones(MANY)] * len(outputs))

    limit = 4 * CHUNK * WIDE + 40 * MANY
    assert 2 * CHUNK * WIDE < peak_bytes(forward, "cpu") <= limit
    assert peak_bytes(backward, "cpu") <= limit + (0 if in_place else logits.nbytes)


def test_memory_when_saved_for_backward_then_the_logits_themselves_and_numbers_per_token():
    logits, saved = torch.randn(64, 50).bfloat16().requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        vocab_parallel_logprobs(logits, torch.zeros(64, dtype=torch.int64), with_entropy=True, chunk_tokens=8)
    assert [x.data_ptr() for x in saved if x.numel() > 4 * 64] == [logits.data_ptr()]


def test_gradient_in_place_when_others_need_the_logits_then_an_error_where_autograd_sees_it():
    leaf = torch.randn(3, 5, requires_grad=True)
    labels, logits = torch.tensor([0, 1, 2]), leaf * 1
    logprobs, _ = vocab_parallel_logprobs(logits, labels, inplace_gradient=True)
    square = (logits**2).sum()  # saves the logits
    logprobs.sum().backward(retain_graph=True)
    for again in (logprobs.sum(), square):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            again.backward()


@pytest.mark.parametrize(
    "is_cuda, dtype, expected",
    [
        (True, torch.bfloat16, "triton_backend"),
        (True, torch.float64, "torch_backend"),
        (False, torch.bfloat16, "torch_backend"),
    ],
)
def test_backend_then_triton_on_a_gpu_and_torch_elsewhere(is_cuda, dtype, expected):
    pytest.importorskip("triton")
    assert (
        backend(SimpleNamespace(is_cuda=is_cuda, dtype=dtype)).__name__
        == f"megatron_rl_corr.logprobs.{expected}"
    )


@pytest.mark.parametrize(
    "logits, labels, options, words",
    [
        ((2, 3), (3,), {}, "log-probs take logits [T, V/tp] and labels [T], got (2, 3) and (3,)"),
        ((1, 2, 3), (2,), {}, "log-probs take logits [T, V/tp] and labels [T], got (1, 2, 3) and (2,)"),
        (
            (2, 3),
            (2,),
            {"temperature": 0.0},
            "temperature must be positive, got 0.0; greedy samples have no log-prob to correct",
        ),
        ((2, 3), (2,), {"chunk_tokens": 0}, "chunk_tokens must be positive, got 0; 1024 is usual"),
    ],
)
def test_arguments_when_wrong_then_the_rule_and_the_value(logits, labels, options, words):
    with pytest.raises(ValueError) as raised:
        vocab_parallel_logprobs(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64), **options)
    assert str(raised.value) == words
