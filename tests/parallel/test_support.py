"""Log-prob and entropy on the support the server sampled from, sharded, against float64 on the whole vocabulary."""

import pytest
import torch

from megatron_rl_corr.parallel.support import support_logprobs

CASES = ["plain", "temperature and chunks", "no entropy"]


def reference(logits, labels, support, grads, *, temperature=1.0, with_entropy=True):
    """In float64, one token after the other: softmax over its ids alone."""
    exact = logits.double().requires_grad_()
    total, logprobs, entropies = 0.0, [], []
    for token in range(len(labels) - 1):
        ids = support[token][support[token] >= 0].long()
        log_p = (exact[token, ids] / temperature).log_softmax(0)
        logprobs.append(log_p[ids == labels[token]][0])
        entropies.append(-(log_p.exp() * log_p).sum())
        total = total + grads[0, token] * logprobs[-1] + (grads[1, token] * entropies[-1] if with_entropy else 0.0)
    total.backward()
    return torch.stack(logprobs).detach(), torch.stack(entropies).detach(), exact.grad


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_support_when_sharded_then_value_gradient_and_one_collective(vocab_ranks, name, size):
    inputs, options = vocab_ranks[0]["inputs"]["support"][name], dict(vocab_ranks[0]["options"]["support"][name])
    options.pop("chunk_tokens", None)
    with_entropy = name != "no entropy"
    logprobs, entropy, gradient = reference(**inputs, **options, with_entropy=with_entropy)
    results = [rank["support"][name, size] for rank in vocab_ranks]
    for result in results:
        torch.testing.assert_close(result["logprobs"][:-1].double(), logprobs, rtol=2e-6, atol=2e-6)
        assert result["logprobs"][-1] == -torch.inf  # drawn from nothing that is known
        assert torch.equal(result["logprobs"], results[0]["logprobs"])
        if with_entropy:
            torch.testing.assert_close(result["entropy"][:-1].double(), entropy, rtol=3e-6, atol=3e-6)
        assert result["untouched"] and len(result["forward"]) == (size > 1) and result["backward"] == []
    merged = torch.cat([result["gradients"][0] for result in results[:size]], dim=1).double()
    torch.testing.assert_close(merged, gradient, rtol=5e-6, atol=5e-6)
    assert merged[-1].count_nonzero() == 0


def test_support_of_the_whole_vocabulary_then_the_plain_log_softmax():
    logits, labels = torch.randn(4, 6), torch.tensor([0, 5, 2, 3])
    everything = torch.arange(6, dtype=torch.int32).expand(4, -1)
    logprobs, _ = support_logprobs(logits, labels, everything)
    expected = logits.double().log_softmax(1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)


def test_support_when_of_another_length_then_named():
    with pytest.raises(ValueError, match=r"support must be \[T, K\] beside labels \[4\], got \(3, 2\)"):
        support_logprobs(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64), torch.zeros(3, 2))
