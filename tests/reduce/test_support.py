"""Log-prob and entropy on the support the server sampled from, sharded, against float64 on the
whole vocabulary.
"""

import numpy as np
import pytest
import torch

from benchmarks.correction import peak_bytes
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks, sampling_mask_logprobs

CASES = ["plain", "temperature and chunks", "no entropy", "collision"]


def reference(logits, labels, support, grads, *, temperature=1.0, with_entropy=True):
    """In float64, one token after the other: softmax over its ids alone."""
    exact = logits.double().requires_grad_()
    total, logprobs, entropies = 0.0, [], []
    for token in range(1, len(labels) - 1):
        ids = support[token][support[token] >= 0].long()
        log_p = (exact[token, ids] / temperature).log_softmax(0)
        logprobs.append(log_p[ids == labels[token]][0])
        entropies.append(-(log_p.exp() * log_p).sum())
        total = (
            total
            + grads[0, token] * logprobs[-1]
            + (grads[1, token] * entropies[-1] if with_entropy else 0.0)
        )
    total.backward()
    return torch.stack(logprobs).detach(), torch.stack(entropies).detach(), exact.grad


def collisions(logits, support, temperature):
    """In float64: sum p^2 over each token's ids; 0 without any."""
    found = []
    for row, ids in zip(logits.double(), support.long(), strict=True):
        found.append((row[ids[ids >= 0]] / temperature).softmax(0).square().sum())
    return torch.stack(found)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_support_when_sharded_then_value_gradient_and_one_collective(vocab_ranks, name, size):
    inputs, options = (
        vocab_ranks[0]["inputs"]["support"][name],
        dict(vocab_ranks[0]["options"]["support"][name]),
    )
    options.pop("chunk_ids", None)
    with_collision = options.pop("with_collision", False)
    with_entropy = name != "no entropy"
    logprobs, entropy, gradient = reference(**inputs, **options, with_entropy=with_entropy)
    results = [rank["support"][name, size] for rank in vocab_ranks]
    for result in results:
        torch.testing.assert_close(result["logprobs"][1:-1].double(), logprobs, rtol=2e-6, atol=2e-6)
        assert result["logprobs"][[0, -1]].tolist() == [-torch.inf] * 2  # drawn from nothing that is known
        assert torch.equal(result["logprobs"], results[0]["logprobs"])
        if with_entropy:
            torch.testing.assert_close(result["entropy"][1:-1].double(), entropy, rtol=3e-6, atol=3e-6)
        assert (result["collision"] is not None) == with_collision
        if with_collision:
            expected = collisions(inputs["logits"], inputs["support"], options["temperature"])
            torch.testing.assert_close(result["collision"].double(), expected, rtol=3e-6, atol=3e-6)
        assert result["untouched"] and len(result["forward"]) == (size > 1) and result["backward"] == []
    merged = torch.cat([result["gradients"][0] for result in results[:size]], dim=1).double()
    torch.testing.assert_close(merged, gradient, rtol=5e-6, atol=5e-6)
    assert merged[[0, -1]].count_nonzero() == 0


def test_support_of_the_whole_vocabulary_then_the_plain_log_softmax():
    logits, labels = torch.randn(4, 6), torch.tensor([0, 5, 2, 3])
    everything = SamplingMasks.of(torch.arange(6, dtype=torch.int32).repeat(4), np.full(4, 6))
    logprobs, _ = sampling_mask_logprobs(logits, labels, everything)
    expected = logits.double().log_softmax(1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("logits", [torch.randn(3, 8), torch.randn(8, 3).T, torch.randn(3, 8).bfloat16()])
def test_support_when_the_label_is_not_in_it_or_it_is_one_id_then_minus_inf_or_zero_and_no_gradient(logits):
    logits = logits.requires_grad_()
    sampling_masks = SamplingMasks.of(torch.tensor([4, 7, 1, 2, 5], dtype=torch.int32), np.array([1, 2, 2]))
    logprobs, entropy = sampling_mask_logprobs(
        logits, torch.tensor([4, 3, 5]), sampling_masks, with_entropy=True
    )
    (logprobs[[0, 2]].sum() + 0 * entropy.sum() + logprobs[1]).backward()
    assert logprobs[:2].tolist() == [0.0, -torch.inf] and entropy[0] == 0
    # The last one alone, among 2 and 5: p of either.
    p = logits.detach()[2, [2, 5]].float().softmax(0)
    assert logprobs[2].item() == pytest.approx(p[1].log().item(), rel=1e-4)
    assert logits.grad[:2].count_nonzero() == 0 and logits.grad[2].count_nonzero() == 2
    assert logits.grad[2, 5].item() == pytest.approx(1 - p[1].item(), rel=1e-2)


def test_support_when_nobody_has_ids_or_there_are_no_tokens_then_minus_inf():
    for tokens in (0, 3):
        none = SamplingMasks.of(torch.empty(0, dtype=torch.int32), np.zeros(tokens, dtype=np.int32))
        logits = torch.randn(tokens, 5, requires_grad=True)
        logprobs, entropy = sampling_mask_logprobs(
            logits, torch.zeros(tokens).long(), none, with_entropy=True
        )
        logprobs.sum().backward()
        assert logprobs.tolist() == [-torch.inf] * tokens and entropy.tolist() == [0.0] * tokens
        assert logits.grad.count_nonzero() == 0


def test_supports_when_cut_into_microbatches_and_chunks_then_every_id_once_and_no_chunk_too_large():
    lengths = np.array([0, 3, 0, 0, 5, 1, 1, 0, 2, 0, 0, 0])
    whole = SamplingMasks.of(torch.arange(12, dtype=torch.int32), lengths)
    parts = [whole.at(np.arange(start, start + 4)) for start in (0, 4, 8)]
    assert [part.ids.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5, 6, 7, 8, 9], [10, 11]]
    assert [part.offsets.tolist() for part in parts] == [[0, 0, 3, 3, 3], [0, 5, 6, 7, 7], [0, 2, 2, 2, 2]]
    assert [part.offsets.tolist() for part in parts] == [part.host_offsets.tolist() for part in parts]
    for most in (1, 2, 4, 100):
        cut = list(whole.chunks(most))
        assert [t for rows, _ in cut for t in range(rows.start, rows.stop)] == list(range(12))
        assert [i for _, among in cut for i in range(among.start, among.stop)] == list(range(12))
        assert all(
            (among.stop - among.start <= most and rows.stop - rows.start <= most)
            or rows.stop - rows.start == 1
            for rows, among in cut
        )


def test_support_when_of_another_length_then_named():
    three = SamplingMasks.of(torch.zeros(3, dtype=torch.int32), np.ones(3))
    with pytest.raises(ValueError, match=r"sampling masks of 3 tokens do not fit labels of 4"):
        sampling_mask_logprobs(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64), three)
    with pytest.raises(ValueError, match=r"lengths of sampling masks sum to 4, but there are 3 ids"):
        SamplingMasks.of(torch.zeros(3, dtype=torch.int32), np.array([2, 2]))


def test_support_when_sets_are_ragged_then_the_memory_is_that_of_the_ids_not_of_the_longest_set():
    # 4096 tokens of 8 ids, one of 4096: 16 MB as a table of int32; in float32 and int64 a chunk
    # of 1024 is 50 MB.
    lengths = np.full(4096, 8)
    lengths[7] = 4096
    ids = torch.arange(lengths.sum(), dtype=torch.int32) % 4096
    sampling_masks, logits = SamplingMasks.of(ids, lengths), torch.randn(4096, 4096, requires_grad=True)
    labels = ids[sampling_masks.offsets[:-1]].long()

    def work():
        logits.grad = None
        logprobs, _ = sampling_mask_logprobs(logits, labels, sampling_masks, chunk_ids=4096)
        logprobs.sum().backward()
        return {}

    gradient = logits.numel() * 4
    extra = peak_bytes(work, "cpu") - gradient
    # about 60 bytes an id of a chunk, and some numbers a token
    assert extra <= 4096 * 100 + 4096 * 100, extra
