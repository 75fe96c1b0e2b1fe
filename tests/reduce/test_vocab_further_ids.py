"""Log-probs of further ids beside the label's, from sharded logits: against float64 without shards."""

import pytest
import torch

from megatron_rl_corr.core.listed_distances import listed_distances
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs

INF = float("inf")
CASES = [
    "plain",
    "temperature",
    "a rank of padding",
    "rows of -inf",
    "labels out of range",
    "no entropy",
    "bfloat16",
    "in place",
    "in place, bfloat16",
    "no tokens",
    "sampled rows",
    "sampled rows, in place",
    "sampled rows, bfloat16, collision",
    "no sampled row",
]
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 8e-3}


def reference(inputs, *, temperature=1.0, vocab_size=None, with_entropy=True, sampled=None, **_):
    """Log-probs of the ids [T, I] and the gradient in the logits, in float64; 0 in rows not sampled."""
    logits, labels, ids = inputs["logits"].double(), inputs["labels"], inputs["ids"].long()
    kept = torch.ones(len(labels), dtype=torch.bool) if sampled is None else torch.tensor(sampled).bool()
    values, gradient = torch.zeros(ids.shape, dtype=torch.float64), torch.zeros_like(logits)
    for row in kept.nonzero()[:, 0].tolist():
        one = logits[row, :vocab_size].clone().requires_grad_()
        if (one == -INF).all():
            values[row] = -INF
            continue
        log_p = (one / temperature).log_softmax(dim=0)
        values[row] = log_p[ids[row]].detach()
        label = labels[row].item()
        possible = 0 <= label < len(one) and one[label] > -INF
        # Nothing of a token whose label can't be, but for its entropy.
        terms = [log_p[label] * inputs["grads"][0, row]] if possible else []
        finite = values[row] > -INF
        if possible and finite.any():
            terms.append((log_p[ids[row][finite]] * inputs["id_grads"][row][finite]).sum())
        if with_entropy:
            there = log_p[one > -INF]
            terms.append(-(there.exp() * there).sum() * inputs["grads"][1, row])
        if terms:
            (gradient[row, : len(one)],) = torch.autograd.grad(sum(terms), one)
    return values, gradient


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_further_ids_when_sharded_then_value_and_gradient_of_the_whole(vocab_ranks, name, size):
    inputs, options = vocab_ranks[0]["inputs"]["ids"][name], vocab_ranks[0]["options"]["ids"][name]
    values, gradient = reference(inputs, **options)
    results = [rank["ids"][name, size] for rank in vocab_ranks]
    alone = [rank["vocab"][name, size] for rank in vocab_ranks]
    for result, other in zip(results, alone, strict=True):
        # A logit of 300 / 0.7 has a float32 step of 3e-5.
        torch.testing.assert_close(result["of_ids"].double(), values, rtol=2e-6, atol=4e-5)
        # In the collective of the label's, and its bits do not depend on them.
        assert len(result["forward"]) == (size > 1) and result["backward"] == []
        assert torch.equal(result["logprobs"], other["logprobs"])
        assert torch.equal(result["of_ids"], results[0]["of_ids"])
    merged = torch.cat([result["gradient"] for result in results[:size]], dim=1)
    rounding = ROUNDING[merged.dtype]
    torch.testing.assert_close(merged.double(), gradient, rtol=rounding, atol=rounding)
    assert merged[:, options.get("vocab_size") or 12 :].count_nonzero() == 0
    if len(merged):
        assert merged[1].count_nonzero() == 0


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["plain", "temperature", "a rank of padding", "labels out of range"])
def test_distances_from_shards_then_bounds_of_those_of_the_whole_distributions(vocab_ranks, name, size):
    inputs, options = vocab_ranks[0]["inputs"]["ids"][name], vocab_ranks[0]["options"]["ids"][name]
    logits = inputs["logits"].double()[:, : options.get("vocab_size")] / options.get("temperature", 1.0)
    p, q = logits.softmax(dim=1), (0.9 * logits).softmax(dim=1)
    tv, kl = (q - p).abs().sum(dim=1) / 2, (q * (q.log() - p.log())).nan_to_num().sum(dim=1)
    rollout = q.gather(1, inputs["ids"].long()).log()
    for rank in vocab_ranks:
        far = listed_distances(rollout.float(), rank["ids"][name, size]["of_ids"])
        assert (far.least_tv <= tv + 1e-5).all() and (tv <= far.most_tv + 1e-5).all()
        assert (far.kl <= kl + 1e-5).all() and far.least_tv.max() > 0.01


def test_cases_then_all_that_were_run(vocab_ranks):
    assert list(vocab_ranks[0]["options"]["ids"]) == CASES


def test_ids_when_of_other_tokens_then_refused():
    with pytest.raises(ValueError, match=r"ids \(3, 1\) do not fit labels of 2"):
        vocab_parallel_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), ids=torch.zeros(3, 1).int())


def test_gradient_when_the_loss_wants_nothing_of_a_token_then_zero_even_of_a_nan():
    logits = torch.tensor([[float("nan"), 0.0, 1.0], [0.0, 0.0, 0.0]]).requires_grad_()
    ids = torch.tensor([[0, 2], [0, 2]])
    logprobs, _, of_ids = vocab_parallel_logprobs(logits, torch.tensor([1, 1]), ids=ids)
    of_ids.backward(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, 0, 0], [2 / 3, -1 / 3, -1 / 3]]))


def test_gradient_in_bfloat16_when_label_is_among_ids_then_rounded_once():
    logits = torch.tensor([[0.5, 0.25, -1.0]], dtype=torch.bfloat16).requires_grad_()
    logprobs, _, of_ids = vocab_parallel_logprobs(logits, torch.tensor([0]), ids=torch.tensor([[2, 0]]))
    torch.autograd.backward([logprobs, of_ids], [torch.tensor([1.0]), torch.tensor([[0.375, -0.75]])])
    p = logits.detach().double().softmax(dim=1)[0]
    exact = torch.tensor([1.0 - 0.75, 0.0, 0.375]).double() - (1.0 - 0.75 + 0.375) * p
    assert torch.equal(logits.grad[0], exact.float().bfloat16())
