"""Samples that a server cuts short: continued from their tokens, bounded, kept; and what is
counted of an answer.
"""

import asyncio
import json

import pytest
import torch
from aiohttp import web

from megatron_rl_corr.rollout import SampleFailure, SamplingParams

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
        assert [(s.version, s.start, s.end) for s in trajectory.weight_versions] == [
            ("v1", 0, 2),
            ("v2", 2, 5),
        ]
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


def test_generate_when_cut_short_then_not_continued_where_it_was_cut_though_the_other_server_is_busier(
    faulty,
):
    asked = []

    async def busy(request):
        body = await request.json()
        asked.append(("busy", body["input_ids"]))
        if len(asked) == 1:
            await asyncio.sleep(0.3)
        tokens = body["sampling_params"]["max_new_tokens"]
        return faulty.answer(len(body["input_ids"]), [5] * tokens, {"type": "length", "length": tokens})

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
            b'{"output_ids": [2, 3, 4], "meta_info": {"finish_reason": {"type": "length"}, "weight_version": '
            b'"v1", '
            b'"output_token_logprobs": [[NaN, 2, null], [-1.0, 3, null], [null, 4, null]]}}'
        )
        return web.Response(body=body, content_type="application/json")

    async def scenario(client):
        (trajectory,) = await client.generate([[1]], SamplingParams(3))
        assert torch.isnan(trajectory.rollout_logprobs).tolist() == [True, False, True]
        assert client.counts()["nonfinite_logprobs"] == 2

    faulty.run(scenario, handle)


def letters(ids):
    """The text of ids, one letter each: 0 is a."""
    return "".join(chr(ord("a") + token) for token in ids)


@pytest.mark.parametrize("truncated", [False, True])
def test_generate_when_a_stop_text_spans_the_cut_then_the_response_ends_with_it(faulty, truncated):
    """The server does not know that "de" was completed: it had sampled "e" alone, and goes on."""
    sets = [[[token, 9] for token in ids] for ids in ([2, 3], [4, 5, 6])]

    def answered(tokens, prompt, reason, kept):
        data = json.loads(faulty.answer(prompt, tokens, reason).body)
        data["meta_info"]["weight_versions"] = [{"version": "v1", "start": 0, "end": len(tokens)}]
        if truncated:
            data["meta_info"] |= {
                "output_token_sampling_mask": kept,
                "output_token_sampling_logprobs": [-float(token) for token in tokens],
            }
        return web.json_response(data)

    answers = iter(
        [
            answered([2, 3], 1, {"type": "abort", "message": "Aborted"}, sets[0]),
            answered([4, 5, 6], 3, {"type": "length", "length": 6}, sets[1]),
        ]
    )

    async def handle(request):
        assert (await request.json())["sampling_params"]["stop"] == ["de"]
        return next(answers)

    async def scenario(client):
        top_k = 5 if truncated else -1
        (trajectory,) = await client.generate([[1]], SamplingParams(5, stop=("de",), top_k=top_k))
        assert trajectory.output_ids.tolist() == [2, 3, 4] and trajectory.finish_reason == "stop"
        assert trajectory.rollout_logprobs.tolist() == [-2, -3, -4]
        assert [(span.start, span.end) for span in trajectory.weight_versions] == [(0, 3)]
        if truncated:
            assert trajectory.support.ids.tolist() == [2, 9, 3, 9, 4, 9]
            assert trajectory.support.lengths.tolist() == [2, 2, 2]
        counts = client.counts()
        assert (counts["stop"], counts["length"], counts["missed_stops"], counts["tokens"]) == (1, 0, 1, 3)

    faulty.run(scenario, handle, decode=letters)


def test_generate_when_the_stop_text_ends_what_was_cut_then_nothing_more_is_asked(faulty):
    async def scenario(client):
        (trajectory,) = await client.generate([[1]], SamplingParams(8, stop=("cd",)))
        assert trajectory.output_ids.tolist() == [2, 3] and trajectory.finish_reason == "stop"
        assert client.counts()["continuations"] == 0

    faulty.run(scenario, always_cut(faulty, [2, 3, 4]), decode=letters)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"stop": ("a",)}, "`stop` .'a'. needs a tokenizer"),
        ({"stop_token_ids": (10,)}, "`stop_token_ids` has 10, outside .0, 10."),
    ],
)
def test_generate_when_what_stops_can_not_be_honoured_then_refused_before_anything_is_sent(
    faulty, sampling, named
):
    async def scenario(client):
        with pytest.raises(ValueError, match=named):
            await client.generate([[1]], SamplingParams(8, **sampling))

    faulty.run(scenario, always_cut(faulty, [2]))


def test_generate_when_a_response_is_cut_before_max_new_tokens_then_refused_and_the_server_stays(faulty):
    """As vLLM does at its --max-model-len, without a word."""

    async def scenario(client):
        with pytest.raises(
            SampleFailure, match="cut to 1 of 2 tokens, behind 1 of prompt; its context"
        ) as error:
            await client.generate([[1]], SamplingParams(2))
        assert error.value.cause == "refused" and client.counts()["left_out"] == 0

    faulty.run(scenario, faulty.good)
