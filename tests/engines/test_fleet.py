"""Which engine answers at an address, and that each server is spoken to in the words of its own."""

import asyncio
import math
import time

import pytest
from aiohttp import web

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.fleet import PAUSED_POLL_S, Fleet
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.client import RolloutClient


def sglang(request):
    return web.json_response({"weight_version": "1"}, status=200 if request.path == "/model_info" else 404)


def vllm(request):
    return web.json_response({"version": "0.32.0"}, status=200 if request.path == "/version" else 404)


def neither(request):
    return web.Response(status=404)


def served(handler, failures=0):
    """A server that answers as this engine's, after some answers as of one that starts."""
    left = [failures]

    async def handle(request):
        if left[0]:
            left[0] -= 1
            return web.Response(status=503)
        return handler(request)

    return handle


def found(faulty, *handlers, engine="auto", timeout_s=5.0):
    async def scenario():
        async with faulty.serving(handlers[0]) as first, faulty.serving(handlers[-1]) as last:
            urls = [first, last][: len(handlers)]
            fleet = Fleet(urls, engine=engine, timeout_s=5, connect_timeout_s=5)
            try:
                await fleet.find(timeout_s)
                return [fleet.name_of(url) for url in urls], fleet
            finally:
                await fleet.close()

    return asyncio.run(scenario())


def test_engine_when_auto_then_each_server_is_asked_and_both_kinds_may_be_in_one_run(faulty):
    names, fleet = found(faulty, served(vllm), served(sglang))
    assert names == ["vllm", "sglang"] and list(fleet.engines) == ["vllm", "sglang"]
    assert [fleet.engine_of(url).name for url in fleet.urls] == ["vLLM", "SGLang"]


def test_engine_when_a_server_starts_then_waited_for(faulty):
    assert found(faulty, served(vllm, failures=2))[0] == ["vllm"]


def test_engine_when_given_then_not_asked(faulty):
    assert found(faulty, served(neither), engine="vllm")[0] == ["vllm"]


def test_engine_when_none_answers_then_error_names_them_and_does_not_wait(faulty):
    with pytest.raises(
        RolloutProtocolError, match="none of SGLang, vLLM; is this the address of a rollout server"
    ):
        found(faulty, served(neither), timeout_s=60)


def test_engine_when_the_key_is_wrong_then_raised_at_once(faulty):
    with pytest.raises(RolloutServerError, match="HTTP 401"):
        found(faulty, lambda request: asyncio.sleep(0, web.Response(status=401)), timeout_s=60)


def test_engine_when_not_known_yet_then_error_says_what_to_call():
    client = RolloutClient(["http://127.0.0.1:1"], vocab_size=8, engine="auto")
    with pytest.raises(RuntimeError, match="call find_servers first"):
        client.engine_of("http://127.0.0.1:1")


# Requests that a server refuses because it is paused


PAUSED = {
    "error": {
        "message": "Generation is paused. Please retry after it resumes.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}
"""As vLLM 0.33.0 answers a new request while it is paused by `abort` or `wait`."""


def sent(faulty, request, refusals, *, engine="vllm", answer=PAUSED, timeout_s=None, own_timeout_s=5.0):
    """How a request ends that is refused so often before it is answered, how often it was sent,
    and its seconds.
    """
    times = []

    async def handle(asked):
        times.append(await asked.json())
        if len(times) > refusals:
            return web.json_response({"tokens": [4]})
        return web.json_response(answer, status=503)

    async def scenario():
        async with faulty.serving(handle) as url:
            fleet = Fleet([url], engine=engine, timeout_s=own_timeout_s, connect_timeout_s=5)
            begun = time.monotonic()
            try:
                ended = await fleet.send(url, request, timeout_s=timeout_s)
            except RolloutServerError as error:
                ended = error
            finally:
                await fleet.close()
            return ended, times, time.monotonic() - begun

    return asyncio.run(scenario())


GENERATE = load_engine("vllm").generate([1, 2], SamplingParams(4), "r1", seed=3)


@pytest.mark.parametrize("timeout_s", [None, 3.0, math.inf])
def test_send_when_a_paused_server_refuses_then_the_same_request_is_sent_until_it_goes_on(faulty, timeout_s):
    (status, body), times, seconds = sent(faulty, GENERATE, refusals=2, timeout_s=timeout_s)
    assert (status, body) == (200, b'{"tokens": [4]}') and times == 3 * [GENERATE.json]
    assert seconds > 2 * PAUSED_POLL_S


@pytest.mark.parametrize("limit", [{"timeout_s": 0.6}, {"own_timeout_s": 0.6}])
def test_send_when_the_pause_is_longer_than_the_limit_then_the_refusal_is_raised_in_time(faulty, limit):
    error, times, seconds = sent(faulty, GENERATE, refusals=1000, **limit)
    assert error.status == 503 and "whoever paused it must POST /resume" in str(error)
    assert len(times) == 2 and seconds < 0.6  # at 0 and 0.25 s; a third would leave no time for an answer


@pytest.mark.parametrize(
    "case",
    [
        {"answer": {"error": {"message": "upstream connect error"}}},
        {"engine": "sglang"},
        {"request": load_engine("vllm").update_weight_version("7")},
    ],
)
def test_send_when_the_refusal_is_no_pause_of_sampling_then_raised_at_once(faulty, case):
    error, times, _ = sent(faulty, **{"request": GENERATE, "refusals": 1000} | case)
    assert error.status == 503 and len(times) == 1


def test_sampling_when_engines_are_unknown_then_refused_now_if_none_and_later_if_one_cannot():
    client = RolloutClient(["http://127.0.0.1:1", "http://127.0.0.1:2"], vocab_size=8, engine="auto")
    truncated = SamplingParams(1, top_k=5000)  # SGLang returns no sampling mask for so many
    client.check_sampling(truncated)
    client.use_servers({"http://127.0.0.1:1": "vllm", "http://127.0.0.1:2": "sglang"})
    with pytest.raises(ValueError, match="for which SGLang returns the sampling mask"):
        client.check_sampling(truncated)
    client = RolloutClient(["http://127.0.0.1:1"], vocab_size=8, engine="auto")
    with pytest.raises(ValueError, match="`temperature` must be 0"):
        client.check_sampling(SamplingParams(1, temperature=1e-9))


def test_control_when_servers_run_two_engines_then_each_is_asked_in_its_own_words(faulty):
    asked = []

    def answering(name):
        async def handle(request):
            asked.append((name, request.path))
            return web.json_response({"status": "ok" if name == "sglang" else "paused"})

        return handle

    async def scenario():
        async with faulty.serving(answering("sglang")) as first, faulty.serving(answering("vllm")) as last:
            client = RolloutClient([first, last], vocab_size=8, engine="auto")
            client.use_servers({first: "sglang", last: "vllm"})
            await client.wait_healthy(5)
            await client.pause_generation("retract")
            parts = client.by_engine()
            assert {name: part.base_urls for name, part in parts.items()} == {
                "sglang": (first,),
                "vllm": (last,),
            }
            await client.close()

    asyncio.run(scenario())
    assert ("sglang", "/pause_generation") in asked and not {("vllm", "/pause_generation")} & set(asked)
    assert {path for name, path in asked if name == "vllm"} == {"/health", "/pause"}


def test_reopen_when_a_session_stayed_open_then_only_servers_of_that_engine_are_asked_to_close_it(faulty):
    asked = []

    def answering(name, refusals):
        async def handle(request):
            body = await request.json()
            asked.append((name, body.get("method", request.path)))
            if asked[-1] in refusals:
                return web.json_response({"error": {"message": refusals.pop(asked[-1])}}, status=400)
            return web.json_response({"results": [None], "success": True})

        return handle

    left_open = {("sglang", "/begin_weight_update"): "a weight update session is already open"}
    sglang, vllm = answering("sglang", left_open), answering("vllm", {})

    async def scenario():
        async with faulty.serving(sglang) as first, faulty.serving(vllm) as last:
            client = RolloutClient([first, last], vocab_size=8, engine="auto")
            client.use_servers({first: "sglang", last: "vllm"})
            assert await client.reopen_weight_update()
            await client.close()

    asyncio.run(scenario())
    begin, end = ("sglang", "/begin_weight_update"), ("sglang", "/end_weight_update")
    assert [one for one in asked if one[0] == "sglang"] == [begin, end, begin]
    # which breaks off what was open
    assert [one for one in asked if one[0] == "vllm"] == [("vllm", "rl_corr_begin")]


def gone(request):
    return web.Response(status=502)


def refusing_router(request):
    return web.Response(status=200 if request.path == "/health" else 500)


@pytest.mark.parametrize("engine", ["auto", "sglang"])
@pytest.mark.parametrize(("other", "is_left_out"), [(gone, True), (refusing_router, False)])
def test_drop_silent_when_a_proxy_answers_for_a_server_that_is_gone_then_it_is_left_out(
    faulty, other, is_left_out, engine
):
    async def scenario():
        async with faulty.serving(served(other)) as first, faulty.serving(served(sglang)) as last:
            fleet = Fleet([first, last], engine=engine, timeout_s=5, connect_timeout_s=5)
            try:
                return await fleet.drop_silent(0.5), first, last, fleet.urls, fleet.dropped
            finally:
                await fleet.close()

    causes, first, last, urls, dropped = asyncio.run(scenario())
    assert dropped == tuple(causes)
    # What a router is can't be asked here by "auto": it would be left out as what is not recognized.
    if is_left_out or engine == "auto":
        assert list(causes) == [first] and urls == (last,)
    else:
        assert causes == {} and urls == (first, last)
