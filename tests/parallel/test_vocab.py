"""Log-prob and entropy from sharded logits, value and gradient, against float64 on the whole vocabulary."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_corr.parallel.vocab import vocab_parallel_logprobs

INF = float("inf")
CASES = [
    "plain", "temperature", "chunks that do not divide", "one padded column", "a rank of padding",
    "a rank of -inf", "no entropy", "bfloat16", "no tokens",
]


def reference(logits, labels, grads, *, temperature=1.0, vocab_size=None, with_entropy=True):
    """In float64 without shards: log-probs, entropy and the gradient in the logits, padding included."""
    exact = logits.double().requires_grad_()
    log_p = (exact[:, :vocab_size] / temperature).log_softmax(dim=1)
    masked = labels < 0
    logprobs = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(masked, -INF)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(dim=1)
    outputs = [logprobs, entropy] if with_entropy else [logprobs]
    torch.autograd.backward(outputs, [g.double() for g in grads[: len(outputs)]])
    return logprobs.detach(), entropy.detach() if with_entropy else None, exact.grad


def assert_close(actual, expected, tolerance):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_logprobs_when_sharded_then_value_and_gradient_of_the_whole(ranks, name, size):
    inputs, options = ranks[0]["inputs"]["vocab"][name], dict(ranks[0]["options"][name])
    options.pop("chunk_tokens", None)
    logprobs, entropy, gradient = reference(**inputs, **options)
    results = [rank["vocab"][name, size] for rank in ranks]
    for result in results:
        assert_close(result["logprobs"], logprobs, 2e-6)
        if options.get("with_entropy", True):
            assert_close(result["entropy"], entropy, 3e-6)
        else:
            assert result["entropy"] is None
    merged = torch.cat([result["gradient"] for result in results[:size]], dim=1)
    # The gradient has the logits' type: bfloat16 keeps 8 bits.
    assert merged.dtype == inputs["logits"].dtype
    assert_close(merged, gradient, 8e-3 if name == "bfloat16" else 5e-6)
    # Padding gets exactly nothing.
    assert merged[:, options.get("vocab_size") or 12 :].count_nonzero() == 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_when_they_hold_the_same_tokens_then_bit_for_bit_the_same_log_probs(ranks, name, size):
    first, *others = [rank["vocab"][name, size] for rank in ranks]
    for other in others:
        assert torch.equal(other["logprobs"], first["logprobs"])
        assert name == "no entropy" or torch.equal(other["entropy"], first["entropy"])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_when_counted_then_one_forward_and_none_backward(ranks, name, size):
    for rank in ranks:
        assert len(rank["vocab"][name, size]["forward"]) == 1
        assert rank["vocab"][name, size]["backward"] == []


def test_logits_when_sharded_then_never_modified(ranks):
    assert all(result["untouched"] for rank in ranks for result in rank["vocab"].values())


@pytest.mark.parametrize("name", CASES)
def test_logprobs_when_on_one_rank_then_value_and_gradient(ranks, name):
    inputs, options = ranks[0]["inputs"]["vocab"][name], ranks[0]["options"][name]
    logits = inputs["logits"].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(logits, inputs["labels"], **({"with_entropy": True} | options))
    outputs = [logprobs] if entropy is None else [logprobs, entropy]
    torch.autograd.backward(outputs, list(inputs["grads"][: len(outputs)]))
    exact = reference(**inputs, **{k: v for k, v in options.items() if k != "chunk_tokens"})
    assert_close(logprobs.detach(), exact[0], 2e-6)
    if entropy is not None:
        assert_close(entropy.detach(), exact[1], 3e-6)
    assert_close(logits.grad, exact[2], 8e-3 if name == "bfloat16" else 5e-6)
    assert torch.equal(logits.detach(), inputs["logits"])


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


class LargestFloat32(TorchDispatchMode):
    """The number of elements of the largest float32 tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_memory_when_chunked_then_never_more_than_a_chunk_in_float32():
    logits = torch.randn(64, 50).bfloat16().requires_grad_()
    saved = []
    with LargestFloat32() as seen, torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        logprobs, entropy = vocab_parallel_logprobs(
            logits, torch.zeros(64, dtype=torch.int64), with_entropy=True, chunk_tokens=8
        )
        (logprobs + entropy).sum().backward()
    assert seen.elements == 8 * 50
    # Nothing of the logits' size is kept for backward but the logits themselves.
    large = [tensor for tensor in saved if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


@pytest.mark.parametrize(
    "logits, labels, options, words",
    [
        ((2, 3), (3,), {}, "log-probs take logits [T, V/tp] and labels [T], got (2, 3) and (3,)"),
        ((1, 2, 3), (2,), {},
         "log-probs take logits [T, V/tp] and labels [T], got (1, 2, 3) and (2,)"),
        ((2, 3), (2,), {"temperature": 0.0},
         "temperature must be positive, got 0.0; greedy samples have no log-prob to correct"),
        ((2, 3), (2,), {"chunk_tokens": 0}, "chunk_tokens must be positive, got 0; 1024 is usual"),
    ],
)
def test_arguments_when_wrong_then_the_rule_and_the_value(logits, labels, options, words):
    with pytest.raises(ValueError) as raised:
        vocab_parallel_logprobs(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64), **options)
    assert str(raised.value) == words
