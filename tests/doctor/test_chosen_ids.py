"""Log-probs of chosen ids from a real server: of the whole vocabulary, and those that its lists have."""

import asyncio
import json

import numpy as np
import pytest

from megatron_rl_corr.doctor.probe import Probe
from megatron_rl_corr.rollout import RolloutClient


def test_chosen_ids_when_they_are_the_whole_vocabulary_then_its_softmax_and_the_lists_own(
    sglang_server_fp32, tiny_moe_dir
):
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]

    async def scenario():
        async with RolloutClient([sglang_server_fp32.url], vocab_size=vocab_size, timeout_s=60) as client:
            probe = Probe(client, sglang_server_fp32.url)
            every = await probe.score_ids([3, 1, 4], list(range(vocab_size)))
            few = await probe.score_ids([3, 1, 4], [vocab_size - 1, 0, 17])
            return every, few, await probe.score([3, 1, 4], [1], likeliest=vocab_size)

    every, few, scores = asyncio.run(scenario())
    assert np.exp(every).sum() == pytest.approx(1, abs=1e-5)
    assert few == pytest.approx(every[[vocab_size - 1, 0, 17]], abs=1e-5)
    assert scores.top.shape == scores.top_ids.shape == (1, vocab_size)
    assert every[scores.top_ids[0]] == pytest.approx(scores.top[0], abs=1e-5)
