"""Log-probs by log-softmax of whole rows: the bits that torch.log_softmax has, on one rank and on two."""

import threading

import pytest
import torch

from megatron_rl_corr.logprobs import vocab
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs

TOKENS, VOCABULARY, PADDED = 37, 83, 96


def inputs(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, PADDED, generator=generator).mul(4).to(dtype)
    return logits, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def expected(logits, labels, temperature=1.0):
    return torch.log_softmax(logits[:, :VOCABULARY].float() / temperature, dim=1)[range(TOKENS), labels]


def made(logits, labels, **settings):
    return vocab_parallel_logprobs(logits, labels, vocab_size=VOCABULARY, whole_rows=True, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 1024])
def test_rows_then_the_bits_of_torchs_log_softmax(dtype, temperature, chunk_tokens):
    logits, labels = inputs(dtype)
    found, _ = made(logits, labels, temperature=temperature, chunk_tokens=chunk_tokens)
    assert torch.equal(found, expected(logits, labels, temperature))


def test_rows_then_other_bits_than_those_of_parts_of_the_vocabulary():
    logits, labels = inputs()
    parts, _ = vocab_parallel_logprobs(logits, labels, vocab_size=VOCABULARY)
    whole, _ = made(logits, labels)
    assert not torch.equal(parts, whole)
    torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)


def test_gradient_of_whole_rows_then_that_of_parts():
    gradients = []
    for whole in (False, True):
        logits, labels = inputs()
        logits.requires_grad_()
        found, entropy = vocab_parallel_logprobs(
            logits, labels, vocab_size=VOCABULARY, whole_rows=whole, with_entropy=True
        )
        (found.sum() + entropy.sum()).backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)


def test_rows_that_were_sampled_then_theirs_alone_and_no_other_is_read():
    logits, labels = inputs()
    kept = torch.arange(TOKENS) % 3 == 0
    logits[~kept] = torch.nan
    found, _ = made(logits, labels, sampled=SampledRows.of(kept))
    assert torch.equal(found[kept], expected(logits, labels)[kept]) and not found[~kept].any()


def test_label_without_a_probability_then_minus_infinity():
    logits, labels = inputs()
    labels[0], labels[1] = VOCABULARY, 5
    logits[1, 5], logits[2] = -torch.inf, -torch.inf
    found, _ = made(logits, labels)
    assert found[:3].tolist() == [-torch.inf] * 3 and found[3:].isfinite().all()


class TwoRanks:
    """A group of two threads of this process."""

    def __init__(self):
        self.barrier, self.given, self.own = threading.Barrier(2, timeout=60), {}, threading.local()

    def rank(self):
        return self.own.rank

    def size(self):
        return 2

    def stacked(self, tensor):
        self.barrier.wait()
        self.given[self.rank()] = tensor
        self.barrier.wait()
        return torch.stack([self.given[0], self.given[1]])


def test_two_ranks_then_the_bits_of_one(monkeypatch):
    group, found = TwoRanks(), {}
    monkeypatch.setattr(
        vocab,
        "all_gather_stacked",
        lambda tensor, group: tensor[None] if group is None else group.stacked(tensor),
    )
    logits, labels = inputs()

    def run(rank):
        group.own.rank = rank
        part = logits[:, rank * PADDED // 2 : (rank + 1) * PADDED // 2]
        found[rank] = made(part, labels, tp_group=group, chunk_tokens=8)[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], expected(logits, labels))
