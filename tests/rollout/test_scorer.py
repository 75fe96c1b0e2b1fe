"""Log-probs of given samples from real servers, some of which are not there."""

import asyncio
import json

import numpy as np
import pytest
import torch
from aiohttp import web

from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory, VersionSpan
from megatron_rl_corr.rollout import RolloutClient
from megatron_rl_corr.rollout.scorer import Scorer
from tools.local_server import free_port


def sample_of(prompt, output):
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=torch.tensor(prompt),
        output_ids=torch.tensor(output),
        rollout_logprobs=torch.zeros(len(output)),
        finish_reason="length",
        weight_versions=(VersionSpan("0", 0, len(output)),),
        cached_tokens=0,
        server="http://none",
    )


def test_scorer_when_a_server_is_gone_then_the_other_scores_what_the_sampler_said(
    engine_server, tiny_moe_dir
):
    engine, server = engine_server
    config = json.loads((tiny_moe_dir / "config.json").read_text())
    vocab_size, context = config["vocab_size"], config["max_position_embeddings"]
    gone = f"http://127.0.0.1:{free_port()}"

    async def run():
        async with RolloutClient([server.url], vocab_size=vocab_size, engine=engine) as client:
            samples = await client.generate(
                [[3, 1, 4], [1, 5, 9, 2]], SamplingParams(6), samples_per_prompt=2
            )
        scorer = Scorer([gone, server.url], vocab_size=vocab_size, max_concurrency=2, engine=engine)
        found = await scorer.score(samples, likeliest=5)
        # One that no server takes has no log-probs, and the others have theirs.
        mixed = await scorer.score([sample_of([3], [4] * (context - 1)), samples[0]])
        most = context - {"sglang": 7, "vllm": 1}[engine]
        assert await scorer.too_short(most + 1) == (server.url, context)
        assert await scorer.too_short(most) is None  # by what the other one tells
        longest = await scorer.score(
            [sample_of([3], [4] * (most - 1)), sample_of([3], [4] * most), samples[0]]
        )
        assert longest[0].logprobs.shape == (most - 1,) and longest[1] is None
        with pytest.raises(RolloutServerError, match=gone):
            await Scorer([gone], vocab_size=vocab_size, max_retries=1).score(samples[:1])
        nothing = await scorer.score([])
        await scorer.close()
        return samples, found, mixed, nothing

    samples, found, mixed, nothing = asyncio.run(run())
    for sample, scores in zip(samples, found, strict=True):
        np.testing.assert_allclose(scores.logprobs, sample.rollout_logprobs.numpy(), atol=2e-5)
        top, ids = scores.top[:, :5], scores.top_ids[:, :5]
        assert top.shape == ids.shape == (len(sample.output_ids), 5) and (np.diff(top) <= 0).all()
        assert all(len(set(row)) == 5 for row in ids.tolist())
        # The sampled token is the likeliest of all, or not above it; in the list it has its log-prob.
        assert (scores.logprobs <= top[:, 0] + 1e-6).all()
        for own, token, row, of_ids in zip(
            scores.logprobs, sample.output_ids.tolist(), top, ids, strict=True
        ):
            assert token not in of_ids or row[of_ids == token] == pytest.approx(own, abs=1e-6)
            assert token in of_ids or own <= row[-1] + 1e-6
    # Not bit for bit: the server batches by what arrives together.
    np.testing.assert_allclose(mixed[1].logprobs, samples[0].rollout_logprobs.numpy(), atol=2e-5)
    assert mixed[0] is None and nothing == []


def test_scorer_when_requests_fail_then_each_that_is_repeated_is_told_and_so_is_a_sample_without_scores(
    monkeypatch, told
):
    # 2 retries: the first sample's first two requests fail, all three of the second do: 2 + 2 are repeated.
    scorer, failures = Scorer(["http://a:1", "http://b:1"], vocab_size=9, max_retries=2), {3: 2, 4: 3}

    async def scored(url, prompt, output, likeliest):
        failures[prompt[0]] -= 1
        if failures[prompt[0]] >= 0:
            raise RolloutServerError(url, "/generate", 500, "scheduler is gone")
        return np.zeros(1)

    monkeypatch.setattr(scorer, "_scored", scored)
    first, second = asyncio.run(scorer.score([sample_of([3], [5]), sample_of([4], [5])]))
    assert first.shape == (1,) and second is None
    assert [kind for kind, _ in told] == ["scoring_retried"] * 4 + ["sample_not_scored"]
    assert told[-1][1]["place"] == 1 and {facts["server"] for _, facts in told[:4]} == {
        "http://a:1",
        "http://b:1",
    }


def test_scorer_when_a_proxy_answers_once_in_the_place_of_its_only_server_then_nothing_is_said_of_its_weights(
    faulty,
):
    names = iter(["v1", None, "v2"])

    async def handle(request):
        if request.path == "/health":
            return web.Response()
        name = next(names)
        return web.Response(text="<html>") if name is None else web.json_response({"weight_version": name})

    async def run():
        async with faulty.serving(handle) as url:
            scorer = Scorer([url], vocab_size=9, engine="sglang")
            await scorer.wait_healthy(30)
            found = [await scorer.changed_weights(), await scorer.changed_weights()]
            await scorer.close()
            return found, url

    found, url = asyncio.run(run())
    assert found == [None, (url, "v1", "v2")]


def test_scorer_when_weights_are_pushed_to_one_of_its_servers_then_the_change_is_found(
    engine_server, tiny_moe_dir
):
    engine, url = engine_server[0], engine_server[1].url
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]

    async def run():
        scorer = Scorer([url], vocab_size=vocab_size, engine=engine)
        await scorer.wait_healthy(30)
        found = [await scorer.changed_weights()]
        async with RolloutClient([url], vocab_size=vocab_size, engine=engine) as client:
            [before] = await client.reported_versions()
            await client.update_weight_version("another")
            found.append(await scorer.changed_weights())
            await client.update_weight_version(before)
        found.append(await scorer.changed_weights())
        await scorer.close()
        return found, before

    found, name = asyncio.run(run())
    assert found == [None, (url, name, "another"), None]
