"""Samples that a server cuts short: continued from their tokens, bounded, kept; and what is counted of an answer."""

import asyncio

import torch
from aiohttp import web

from megatron_rl_corr.rollout import SamplingParams

ONE = SamplingParams(1)


def cut(faulty, prompt_tokens, tokens, *, version):
    """An aborted answer with these tokens so far."""
    return faulty.answer(prompt_tokens, tokens, {"type": "abort", "message": "Aborted"}, version)


def test_generate_when_cut_short_then_continued_elsewhere_from_its_tokens_with_its_logprobs(faulty):
    asked = []

    async def pausing(request):
        body = await request.json()
        asked.append(("pausing", body["input_ids"], body["sampling_params"]["max_new_tokens"]))
        return cut(faulty, 2, [3, 4], version="v1")

    async def well(request):
        body = await request.json()
        asked.append(("well", body["input_ids"], body["sampling_params"]["max_new_tokens"]))
        return faulty.answer(len(body["input_ids"]), [5, 6, 7], {"type": "stop", "matched": 7}, "v2")

    async def scenario(client):
        (trajectory,) = await client.generate([[1, 2]], SamplingParams(8))
        assert asked == [("pausing", [1, 2], 8), ("well", [1, 2, 3, 4], 6)]
        assert trajectory.prompt_ids.tolist() == [1, 2] and trajectory.output_ids.tolist() == [3, 4, 5, 6, 7]
        assert trajectory.rollout_logprobs.tolist() == [-3, -4, -5, -6, -7]
        assert [(s.version, s.start, s.end) for s in trajectory.weight_versions] == [("v1", 0, 2), ("v2", 2, 5)]
        assert trajectory.sampled_by("v2").tolist() == [False, False, True, True, True]
        assert trajectory.finish_reason == "stop" and trajectory.server == client.base_urls[1]
        counts = client.counts()
        assert (counts["samples"], counts["continuations"], counts["stop"]) == (1, 1, 1)
        assert (counts["tokens"], counts["retries"], counts["left_out"]) == (5, 0, 0)

    faulty.run(scenario, pausing, well)


def always_cut(faulty, tokens, version="v1"):
    async def handle(request):
        return cut(faulty, len((await request.json())["input_ids"]), tokens, version=version)

    return handle


def test_generate_when_cut_short_then_not_continued_where_it_was_cut_though_the_other_server_is_busier(faulty):
    asked = []

    async def busy(request):
        body = await request.json()
        asked.append(("busy", body["input_ids"]))
        if len(asked) == 1:
            await asyncio.sleep(0.3)
        return faulty.one_token(len(body["input_ids"]))

    async def pausing(request):
        body = await request.json()
        asked.append(("pausing", body["input_ids"]))
        await asyncio.sleep(0.1)
        return cut(faulty, len(body["input_ids"]), [2], version="v1")

    async def scenario(client):
        await client.generate([[1], [3]], SamplingParams(2))
        assert asked == [("busy", [1]), ("pausing", [3]), ("busy", [3, 2])]

    faulty.run(scenario, busy, pausing)


def test_generate_when_cut_short_before_the_first_token_then_its_version_says_nothing_of_the_server(faulty):
    handlers = iter([always_cut(faulty, [], version="unknown"), faulty.good])

    async def handle(request):
        return await next(handlers)(request)

    async def scenario(client):
        await client.expect_version("v1")
        (trajectory,) = await client.generate([[1]], ONE)
        assert trajectory.oldest_version == "v1" and client.counts()["stale"] == 0

    faulty.run(scenario, handle)


def test_generate_when_always_cut_short_then_bounded_and_returned_as_aborted(faulty):
    async def scenario(client):
        (trajectory,) = await client.generate([[1]], SamplingParams(9))
        assert trajectory.output_ids.tolist() == [2, 2, 2, 2] and trajectory.finish_reason == "abort"
        assert client.counts()["abort"] == 1 and client.counts()["continuations"] == 3

    faulty.run(scenario, always_cut(faulty, [2]), max_continuations=3)


def test_generate_when_cut_short_before_the_first_token_then_asked_from_the_prompt_again(faulty):
    handlers = iter([always_cut(faulty, []), faulty.good])

    async def handle(request):
        return await next(handlers)(request)

    async def scenario(client):
        (trajectory,) = await client.generate([[1]], ONE)
        assert trajectory.output_ids.tolist() == [5] and trajectory.finish_reason == "length"

    faulty.run(scenario, handle)


def test_generate_when_cut_short_at_the_last_token_then_it_is_whole(faulty):
    async def scenario(client):
        (trajectory,) = await client.generate([[1]], SamplingParams(2))
        assert trajectory.finish_reason == "length" and client.counts()["continuations"] == 0

    faulty.run(scenario, always_cut(faulty, [2, 3]))


def test_generate_when_no_continuation_is_wanted_then_what_there_is(faulty):
    async def scenario(client):
        (trajectory,) = await client.generate([[1]], SamplingParams(9))
        assert trajectory.output_ids.tolist() == [2] and trajectory.finish_reason == "abort"

    faulty.run(scenario, always_cut(faulty, [2]), max_continuations=0)


def test_counts_when_logprobs_are_not_finite_then_they_are_nan_and_counted(faulty):
    async def handle(request):
        body = (
            b'{"output_ids": [2, 3, 4], "meta_info": {"finish_reason": {"type": "length"}, "weight_version": "v1", '
            b'"output_token_logprobs": [[NaN, 2, null], [-1.0, 3, null], [null, 4, null]]}}'
        )
        return web.Response(body=body, content_type="application/json")

    async def scenario(client):
        (trajectory,) = await client.generate([[1]], SamplingParams(3))
        assert torch.isnan(trajectory.rollout_logprobs).tolist() == [True, False, True]
        assert client.counts()["nonfinite_logprobs"] == 2

    faulty.run(scenario, handle)
