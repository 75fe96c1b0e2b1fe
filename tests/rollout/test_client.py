"""Sampling from a server that misbehaves: what the caller is told, and what becomes of the other requests."""

import asyncio
import socket

import pytest
from aiohttp import web

from megatron_rl_corr.rollout import (
    RolloutClient,
    RolloutOutage,
    RolloutServerError,
    SampleFailure,
    SamplingParams,
)
from tests.virtual_time import run_client

ONE = SamplingParams(1)


def test_generate_when_the_server_answers_500_then_error_names_url_endpoint_status_and_body(faulty):
    async def handle(request):
        return web.Response(status=500, text="CUDA error:\n  device-side assert")

    error = faulty.failure(handle)
    assert (error.endpoint, error.status, error.method) == ("/generate", 500, "POST")
    said = f"rollout server {error.url} answered POST /generate with HTTP 500: CUDA error: device-side assert"
    assert str(error) == said


def test_generate_when_the_server_hangs_then_left_out_within_the_bound_with_a_remedy():
    async def handle(request):
        await asyncio.sleep(30)

    async def scenario(client):
        now = asyncio.get_running_loop().time
        started = now()
        with pytest.raises(RolloutOutage) as outage:
            await client.generate([[1]], ONE)
        ((cause, _),) = outage.value.causes
        return now() - started, cause

    took, error = run_client(scenario, handle, read_timeout_s=0.8, timeout_s=30)
    assert 0.6 <= took < 1.6  # the pool waits for another 0.1 s
    assert error.status is None
    assert "did not answer POST /generate: its requests made no progress for 0." in str(error)
    assert str(error).endswith("is it stuck? see its log, or give the client a larger read_timeout_s")


def test_pause_when_the_server_hangs_then_times_out_with_the_limit_and_a_remedy(faulty):
    async def handle(request):
        await asyncio.sleep(30)

    async def scenario(client):
        with pytest.raises(
            RolloutServerError, match="POST /pause_generation: timed out after 0.2 s.*larger timeout_s"
        ):
            await client.pause_generation("retract")

    faulty.run(scenario, handle, timeout_s=0.2)


def test_generate_when_the_server_is_not_there_then_connection_refused_with_a_remedy():
    async def scenario():
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            async with RolloutClient([url], vocab_size=10, outage_timeout_s=0.1) as client:
                await client.generate([[1]], ONE)

    with pytest.raises(RolloutOutage, match="generate: connection refused; is the server still running"):
        asyncio.run(scenario())


def test_generate_when_the_connection_closes_before_the_answer_then_error_says_so(faulty):
    async def handle(request):
        request.transport.close()

    said = "closed the connection without an answer; is the server still running"
    assert said in str(faulty.failure(handle))


def test_generate_when_the_connection_closes_in_mid_answer_then_error_says_so(faulty):
    async def handle(request):
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"output_ids": [')
        request.transport.close()
        return response

    assert "the connection broke in the middle of the answer" in str(faulty.failure(handle))


def test_generate_when_redirected_then_not_followed(faulty):
    asked = []

    async def handle(request):
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    assert faulty.failure(handle).status == 307 and asked == ["/generate"]


def test_generate_when_an_answer_is_wrong_then_protocol_error(faulty):
    async def handle(request):
        return faulty.one_token(prompt_tokens=2)

    assert "prompt_tokens is 2 where 1 ids were sent" in str(faulty.failure(handle))


def test_generate_when_an_id_is_outside_the_vocabulary_then_nothing_is_sent(faulty):
    asked = []

    async def handle(request):
        asked.append(request.path)
        return await faulty.good(request)

    async def scenario(client):
        with pytest.raises(ValueError, match="prompt 1 has token id 10 at position 0"):
            await client.generate([[1], [10]], ONE)

    faulty.run(scenario, handle)
    assert asked == []


def test_generate_when_one_request_fails_then_the_others_are_cancelled_at_once(faulty):
    begun, ended, others = [], [], asyncio.Event()

    async def handle(request):
        if (await request.json())["input_ids"] == [2]:
            await others.wait()  # until they are being served
            return web.Response(status=400, text="too long")
        begun.append(1)
        if len(begun) == 2:
            others.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(1)

    async def scenario(client):
        # the scenario may take 20 s, their answers 30
        with pytest.raises(SampleFailure, match="HTTP 400: too long"):
            await client.generate([[1], [2], [3]], ONE, samples_per_prompt=1)

    faulty.run(scenario, handle)
    assert len(ended) <= 2


def test_generate_when_the_caller_cancels_then_the_slots_are_free_again(faulty):
    async def handle(request):
        if (await request.json())["input_ids"] == [1]:
            await asyncio.sleep(30)
        return await faulty.good(request)

    async def scenario(client):
        stuck = asyncio.create_task(client.generate([[1]] * 4, ONE))
        await asyncio.sleep(0.2)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        return await client.generate([[2]], ONE)

    assert len(faulty.run(scenario, handle, max_concurrency=2)) == 1


def test_generate_when_concurrency_is_bounded_then_never_more_and_order_and_turns_are_kept(faulty):
    running, most, per_server = 0, 0, {0: 0, 1: 0}

    def server(number):
        async def handle(request):
            nonlocal running, most
            if request.path != "/generate":  # the watch asks too, where an answer takes long
                return web.Response(status=404)
            running += 1
            most = max(most, running)
            per_server[number] += 1
            ids = (await request.json())["input_ids"]
            await asyncio.sleep(0.05 / ids[0])  # the first prompts take longest
            running -= 1
            return faulty.one_token(len(ids), token=ids[0])

        return handle

    progress = []

    async def scenario(client):
        return await client.generate(
            [[1], [2, 2], [3]], ONE, samples_per_prompt=4, on_progress=lambda *seen: progress.append(seen)
        )

    trajectories = faulty.run(scenario, server(0), server(1), max_concurrency=3)
    assert most == 3 and per_server == {0: 6, 1: 6}
    order = [(p, s) for p in range(3) for s in range(4)]
    assert [(t.prompt_index, t.sample_index) for t in trajectories] == order
    assert [t.output_ids.tolist() for t in trajectories] == [[1]] * 4 + [[2]] * 4 + [[3]] * 4
    assert [(done, of) for done, of, _ in progress] == [(done, 12) for done in range(1, 13)]
    assert all(tokens_per_s > 0 for _, _, tokens_per_s in progress)


@pytest.mark.parametrize(
    ("given", "limit_s"),
    [({}, 7200.0), ({"update_timeout_s": 14400.0}, 28800.0), ({"push_timeout_s": 60.0}, 60.0)],
)
def test_limit_of_a_push_then_twice_that_of_a_request_that_reads_all_weights_or_the_given_one(given, limit_s):
    client = RolloutClient(["http://a:1"], vocab_size=10, **given)
    assert client.push_timeout_s == client.another(["http://b:1"]).push_timeout_s == limit_s
