"""A real server behind a proxy that spoils its answers, beside a well one: every sample comes
back whole, once.
"""

import asyncio
import contextlib
from collections import Counter

import pytest
from aiohttp import web

from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout import RolloutClient, SampleFailure, SamplingParams, health
from tests.faults import oracle
from tests.faults.drills import drill, long
from tests.faults.proxy import spoiling

PROMPTS, TOKENS, VOCAB_SIZE = [[3, 1, 4], [1, 5], [9]], 4, 83


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch):
    monkeypatch.setattr(health, "FIRST_PROBE_S", 0.001)
    monkeypatch.setattr(health, "LONGEST_BACKOFF_S", 0.01)


async def sampled(url, seed, rounds, samples):
    """(the proxy's record, the samples, retries)"""
    before = EVENTS.counts["request_retried"]
    async with spoiling(url, seed) as proxy:
        options = {"vocab_size": VOCAB_SIZE, "max_retries": 50, "outage_timeout_s": 60.0}
        async with RolloutClient([proxy.url, url], **options) as client:
            found = []
            for _ in range(rounds):
                found += await client.generate(
                    PROMPTS, SamplingParams(TOKENS, ignore_eos=True), samples_per_prompt=samples
                )
            retries = client.counts()["retries"]
        assert EVENTS.counts["request_retried"] - before == retries
        return proxy, found, retries


def judged(proxy, found, retries):
    """The share of each wrapping, after every sample was held against what was sent for it.

    A sample whose last part is the proxy's ends as one answer to its tokens before that part, which no
    other sample has used: the request's ids and the answer's, one behind the other, are the whole sample.
    """
    wholes, counts = Counter(), Counter()
    for request, wrapping, body in proxy.sent:
        before, right = request["input_ids"], None
        if wrapping == "well":
            asked = oracle.Asked(len(before), request["sampling_params"]["max_new_tokens"], VOCAB_SIZE)
            with contextlib.suppress(oracle.Refused, oracle.Failed):
                right = oracle.sglang(body, asked)
        if right is not None and right.ids:
            wholes[*before, *right.ids] += 1
        counts[f"{wrapping}, {'right' if right else 'wrong'}"] += 1
    for sample in found:
        assert sample.output_ids.numel() == TOKENS and sample.finish_reason in ("length", "stop")
    used = Counter(
        (*sample.prompt_ids.tolist(), *sample.output_ids.tolist())
        for sample in found
        if sample.server == proxy.url
    )
    assert used and used <= wholes, used - wholes
    wrong = sum(count for kind, count in counts.items() if kind.endswith("wrong"))
    # A request that says that it failed may end its sample, which ends the test; each other wrong
    # answer is a retry.
    assert wrong > 0 and retries >= 0.9 * wrong
    return dict(sorted(counts.items()))


PROMISED = "a retry at another server each, not the run; every sample whole, once"


@drill("a server whose answers are spoiled, JSON and HTTP, beside a well one", promised=PROMISED)
def test_samples_when_a_server_answers_nonsense_then_each_is_whole_and_once(sglang_server_fp32, seen):
    proxy, found, retries = asyncio.run(asyncio.wait_for(sampled(sglang_server_fp32.url, 0, 6, 8), 120))
    assert [(s.prompt_index, s.sample_index) for s in found] == [
        (p, n) for p in range(3) for n in range(8)
    ] * 6
    seen(f"{len(found)} samples, {retries} retries; {judged(proxy, found, retries)}")


@long
@drill("the same, of thousands of answers", promised=PROMISED)
def test_samples_when_a_server_answers_nonsense_for_long_then_each_is_whole_and_once(
    sglang_server_fp32, seen
):
    proxy, found, retries = asyncio.run(asyncio.wait_for(sampled(sglang_server_fp32.url, 1, 60, 20), 500))
    assert len(found) == 3600
    seen(f"{len(found)} samples, {retries} retries; {judged(proxy, found, retries)}")


@drill(
    "the only server always answers nonsense",
    promised="`max_retries` requests, then the sample fails by name",
)
def test_sample_when_the_only_server_answers_nonsense_then_it_fails_after_max_retries(faulty, seen):
    asked = 0

    async def handle(request):
        nonlocal asked
        if request.path != "/generate":
            return web.Response()
        asked += 1
        return web.Response(text="<html>bad gateway</html>")

    async def scenario(client):
        with pytest.raises(SampleFailure, match="/generate: not JSON .*bad gateway") as error:
            await client.generate([[1]], SamplingParams(1))
        return error.value

    error = faulty.run(scenario, handle, outage_timeout_s=10.0, max_retries=3)
    assert asked == 4 and error.cause == "protocol" and error.__notes__[0] == "it was asked 4 times"
    seen(f"asked {asked} times, then {error}")


@drill("one malformed answer with HTTP 200", promised="a retry at another server, not the run or its group")
def test_sample_when_one_answer_is_malformed_then_asked_elsewhere(faulty, seen):
    asked = []

    async def broken(request):
        asked.append(request.path)
        return web.Response(text='{"output_ids": [5]}')

    async def scenario(client):
        return await client.generate([[1]], SamplingParams(1)), client.counts()

    (sample,), counts = faulty.run(scenario, broken, faulty.good)
    assert asked.count("/generate") == 1 and counts["retries"] == counts["left_out"] == 1
    assert sample.output_ids.tolist() == [5]
    seen("1 retry, 1 server left out, the sample is there")
