"""Servers that die, fall silent, come back or have old weights while samples are collected: none
lost, none doubled.
"""

import asyncio
import itertools
import json
import re

import pytest
from aiohttp import web

from megatron_rl_corr.engines.fleet import Fleet
from megatron_rl_corr.rollout import (
    RolloutOutage,
    RolloutServerError,
    SampleFailure,
    SamplingParams,
    StaleWeightsError,
    health,
    versions,
)
from megatron_rl_corr.rollout.health import ServerHealth
from megatron_rl_corr.rollout.server_pool import Counts, ServerPool
from tests.faults.drills import drill
from tests.virtual_time import run_client

ONE = SamplingParams(1)
ORDER = [(p, s) for p in range(4) for s in range(3)]
PROMPTS = [[1], [2, 2], [3], [4, 4, 4]]


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch):
    monkeypatch.setattr(health, "FIRST_PROBE_S", 0.02)


class Fake:
    """A server whose /generate, /health and /model_info can be told to fail, hang or report a version."""

    shows_loads = True

    def __init__(self, faulty):
        self._faulty = faulty
        self.generate = self.health = "ok"
        self.version, self.asked = "v1", 0
        self.flags = {}
        self.released = None
        self.scheduler = "runs"
        """Or: `queues`, `paused`, `stopped`, `stuck` (answers, and its batch stays as it is), `empty`;
        `held`, the same while its HTTP process is paused; or `old`, which has no /v1/loads.
        """
        self._tokens, self._written = 0, 1.0

    async def __call__(self, request):
        if request.path == "/v1/loads":
            if self.scheduler == "old":
                return web.Response(status=404)
            self._tokens += self.scheduler == "runs"
            self._written += self.scheduler not in ("paused", "stopped")
            requests = {
                "num_running_reqs": int(self.scheduler not in ("queues", "empty", "held")),
                "num_waiting_reqs": int(self.scheduler == "queues"),
            }
            rank = {"dp_rank": 0, "timestamp": self._written, "num_used_tokens": self._tokens, **requests}
            return web.json_response({"loads": [rank]})
        if request.path == "/server_info" and self.scheduler == "stopped":
            await asyncio.sleep(30)
        if request.path in ("/model_info", "/server_info"):
            return web.json_response({"weight_version": self.version} | self.flags)
        if request.path == "/ready":
            return web.Response(status=503 if self.scheduler == "held" else 200)
        if request.path == "/health":
            return web.Response(status=200 if self.health == "ok" else 503)
        body = await request.json()
        self.asked += 1
        if self.generate == "dies":
            self.health = "down"
            request.transport.close()
            return web.Response()
        if self.generate == "fails":
            return web.Response(status=500, text="scheduler is gone")
        if self.generate == "hangs":
            await asyncio.sleep(30)
        await asyncio.sleep(0.02)
        return self._faulty.one_token(len(body["input_ids"]), version=self.version)


@pytest.fixture
def fakes(faulty):
    return Fake(faulty), Fake(faulty)


async def collect(client):
    trajectories = await client.generate(PROMPTS, ONE, samples_per_prompt=3)
    assert [(t.prompt_index, t.sample_index) for t in trajectories] == ORDER
    assert [t.prompt_ids.tolist() for t in trajectories] == [p for p in PROMPTS for _ in range(3)]
    assert client.counts()["samples"] == client.counts()["tokens"] == 12
    return trajectories


def test_generate_when_a_server_dies_then_its_samples_are_asked_for_elsewhere_and_counted(faulty, fakes):
    dying, well = fakes
    dying.generate = "dies"

    async def scenario(client):
        trajectories = await collect(client)
        assert {t.server for t in trajectories} == {client.base_urls[1]}
        # Of 4 in flight the dying one has 2: both are asked again, and it is left out once.
        assert (dying.asked, well.asked) == (2, 12)
        counts = client.counts()
        assert (counts["retries"], counts["left_out"], counts["rejoined"]) == (2, 1, 0)
        assert (counts["length"], counts["stop"], counts["abort"]) == (12, 0, 0)

    faulty.run(scenario, dying, well, max_concurrency=4)


def test_generate_when_a_server_was_left_out_then_it_takes_samples_again_once_healthy(faulty, fakes):
    flaky, well = fakes
    flaky.generate = "dies"

    async def scenario(client):
        await collect(client)
        before = flaky.asked
        flaky.generate = flaky.health = "ok"
        async with asyncio.timeout(5):
            while not client.counts()["rejoined"]:
                await asyncio.sleep(0.02)
        await client.generate(PROMPTS, ONE, samples_per_prompt=3)
        assert flaky.asked > before and client.counts()["left_out"] == 1

    faulty.run(scenario, flaky, well)


def test_close_when_a_server_is_left_out_then_forgotten_and_the_next_call_asks_it_again(faulty, fakes):
    flaky, well = fakes
    flaky.generate = "dies"

    async def scenario(client):
        await collect(client)
        await client.close()
        flaky.generate = "ok"
        assert {t.server for t in await client.generate(PROMPTS, ONE)} == set(client.base_urls)

    faulty.run(scenario, flaky, well)


def test_failure_when_the_server_has_come_back_since_then_it_does_not_count_against_it():
    async def scenario():
        pool = ServerPool(["http://a:1"], max_outstanding=1, max_per_server=None, outage_timeout_s=5)
        fleet = Fleet(["http://a:1"], engine="sglang", timeout_s=1, connect_timeout_s=1)
        health_ = ServerHealth(fleet, pool, Counts(), read_timeout_s=1)
        (server,) = pool.servers
        before = server.joined
        late = RolloutServerError(server.url, "/generate", None, "timed out")
        health_.leave_out(server, before, late)
        pool.rejoin(server)
        health_.leave_out(server, before, late)
        assert pool.left_out == []
        server.flaps = 5000  # a server that fails for days
        health_.leave_out(server, server.joined, late)
        assert pool.left_out == [server]
        await health_.close()

    asyncio.run(scenario())


def test_generate_when_servers_are_unequal_then_the_faster_one_gets_more_samples(faulty):
    asked = {"slow": 0, "fast": 0}

    def server(name, seconds):
        async def handle(request):
            asked[name] += request.path == "/generate"
            await asyncio.sleep(seconds)
            return await faulty.good(request)

        return handle

    async def scenario(client):
        await client.generate([[1]], ONE, samples_per_prompt=40)

    run_client(scenario, server("slow", 0.5), server("fast", 0.02), max_concurrency=4)
    assert sum(asked.values()) == 40 and asked["slow"] <= 12  # 20 in turn


def test_generate_when_each_server_is_bounded_then_never_more_there(faulty):
    most, running = 0, 0

    async def handle(request):
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return await faulty.good(request)

    async def scenario(client):
        await client.generate([[1]], ONE, samples_per_prompt=12)

    run_client(scenario, handle, max_per_server=3)
    assert most == 3


def test_generate_when_a_single_server_fails_once_then_it_is_waited_for(faulty, fakes):
    server, _ = fakes
    server.generate = "fails"

    async def heal():
        while not server.asked:
            await asyncio.sleep(0.005)
        server.generate = "ok"

    async def scenario(client):
        healing = asyncio.create_task(heal())
        await collect(client)
        await healing
        assert client.counts()["rejoined"] == 1

    faulty.run(scenario, server, outage_timeout_s=5)


def test_generate_when_a_healthy_server_fails_each_time_then_the_sample_fails_after_its_retries(
    faulty, fakes, told
):
    server, _ = fakes
    server.generate = "fails"

    async def scenario(client):
        with pytest.raises(SampleFailure, match="HTTP 500: scheduler is gone") as error:
            await client.generate([[1, 2]], ONE)
        assert error.value.cause == "retries" and error.value.__cause__.status == 500
        assert error.value.__notes__ == ["it was asked 3 times", "it was sample 0 of prompt 0 (2 tokens)"]

    faulty.run(scenario, server, max_retries=2, outage_timeout_s=5)
    assert server.asked == 3
    kinds = [kind for kind, _ in told]  # that the sample failed tells who counts it
    assert kinds.count("request_retried") == 2 and "sample_failed" not in kinds


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
def test_generate_when_each_server_refuses_the_request_then_asked_twice_at_most(faulty, status):
    """A wrong key or address is no sample's fault: it is raised as the server's own error."""
    asked = []

    async def refuses(request):
        asked.append(request.path)
        return web.Response(status=status, text="no")

    async def scenario(client):
        of_the_sample = status in (400, 413)
        with pytest.raises(
            SampleFailure if of_the_sample else RolloutServerError, match=f"HTTP {status}: no"
        ) as error:
            await client.generate([[1]], ONE)
        assert getattr(error.value, "cause", None) == ("refused" if of_the_sample else None)
        assert client.counts()["left_out"] == 0

    faulty.run(scenario, refuses)
    assert asked.count("/generate") == 1
    faulty.run(scenario, refuses, refuses)
    assert asked.count("/generate") == 3


@drill(
    "one of two servers refuses every request, by HTTP 4xx or a redirect",
    promised="its samples are asked for at the other, and it is left out",
)
@pytest.mark.parametrize("status", [302, 400, 404, 413, 422])
def test_generate_when_one_server_refuses_what_another_takes_then_the_first_is_left_out(faulty, status, seen):
    asked = []

    async def refuses(request):
        asked.append(request.path)
        return web.Response(status=status, text="no")

    async def scenario(client):
        samples = await client.generate([[1], [2, 3]], ONE, samples_per_prompt=4)
        return samples, client.counts(), client.left_out

    samples, counts, left_out = faulty.run(scenario, refuses, faulty.good)
    assert len(samples) == 8 and all(sample.output_ids.tolist() == [5] for sample in samples)
    refused = asked.count("/generate")
    assert 1 <= refused == counts["retries"] <= 4 and counts["left_out"] == 1 and len(left_out) == 1
    seen(f"HTTP {status}: {refused} of 8 samples were asked for elsewhere, 1 server left out")


@drill("every server dies", promised="one error names all with their causes")
def test_generate_when_every_server_dies_then_one_error_names_all_with_their_causes(faulty, fakes):
    for fake in fakes:
        fake.generate = "dies"

    async def scenario(client):
        with pytest.raises(RolloutOutage, match="none of 2 rollout servers is left") as error:
            await client.generate(PROMPTS, ONE)
        said = str(error.value)
        for url in client.base_urls:
            assert f"rollout server {url} did not answer POST /generate: it closed the connection" in said
        assert (
            said.count("asked again: rollout server http")
            == said.count("answered GET /health with HTTP 503")
            == 2
        )

    run_client(scenario, *fakes, outage_timeout_s=1.0)


@drill("a server falls silent", promised="what it had in flight goes elsewhere")
@pytest.mark.parametrize(
    "scheduler, said",
    [
        ("stopped", "timed out"),
        ("stuck", "the requests in its batch make no progress"),
        ("empty", "it has no request, though this client waits for answers"),
    ],
)
def test_generate_when_a_server_falls_silent_then_what_it_had_in_flight_goes_elsewhere(
    faulty, fakes, scheduler, said
):
    """Its HTTP process answers in each case."""
    silent, well = fakes
    silent.generate, silent.health, silent.scheduler = "hangs", "down", scheduler

    async def scenario(client):
        now = asyncio.get_running_loop().time
        started = now()
        await collect(client)
        assert 0.8 <= now() - started < 1.2 + 0.2
        assert client.counts()["left_out"] == 1 and silent.asked == client.counts()["retries"] == 6
        (left_out,) = client._pool.left_out
        assert re.search(rf"its requests made no progress for \S+ s \({said}", str(left_out.cause))

    run_client(scenario, silent, well, read_timeout_s=1.2, timeout_s=25)


def test_generate_when_one_request_fails_and_then_the_server_hangs_then_its_others_go_elsewhere_too(
    faulty, fakes
):
    """It is left out for the one; the others are in flight there, and nobody else would end them."""
    hanging, well = fakes
    hanging.generate, hanging.health = "hangs", "down"
    asked = itertools.count()

    async def first_fails(request):
        if request.path == "/generate" and next(asked) == 0:
            return web.Response(status=502)
        return await hanging(request)

    first_fails.shows_loads = True

    async def scenario(client):
        await asyncio.sleep(0)
        hanging.scheduler = "stopped"
        trajectories = await collect(client)
        assert {t.server for t in trajectories} == {client.base_urls[1]}
        assert client.counts()["left_out"] == 1 and client.counts()["retries"] == 6

    run_client(scenario, first_fails, well, read_timeout_s=0.4)


@pytest.mark.parametrize("scheduler", ["runs", "paused", "queues", "held", "old"])
def test_generate_when_a_server_only_takes_long_then_it_is_not_given_up(faulty, fakes, scheduler):
    slow, well = fakes
    slow.generate, slow.scheduler = "hangs", scheduler

    async def scenario(client):
        collecting = asyncio.create_task(collect(client))
        # fifty bounds; for a request as long as it was --rollout-timeout-s that ended it
        await asyncio.sleep(20.0)
        assert not collecting.done() and client.counts()["left_out"] == 0
        collecting.cancel()

    run_client(scenario, slow, well, read_timeout_s=0.4, timeout_s=0.5)


def test_generate_when_answers_wait_here_to_be_read_then_their_server_is_not_given_up(faulty, fakes):
    """It has no request any more: all its answers are here, or on their way, and are read one by one."""
    done, _ = fakes
    done.scheduler = "empty"

    async def scenario(client):
        answer, reading = client._retries._ingest.answer, asyncio.Lock()

        async def slowly(url, asked):
            found = await answer(url, asked)
            async with reading:
                await asyncio.sleep(0.2)
            return found

        client._retries._ingest.answer = slowly
        assert len(await collect(client)) == len(ORDER)
        assert client.counts()["left_out"] == 0 and done.asked == len(ORDER)

    run_client(scenario, done, read_timeout_s=0.4)


def test_generate_when_weights_are_sent_then_a_scheduler_that_is_busy_with_them_is_not_given_up(
    faulty, fakes
):
    updated, well = fakes
    updated.generate, updated.scheduler = "hangs", "stopped"

    async def scenario(client):
        await client.expect_pause()
        collecting = asyncio.create_task(collect(client))
        await asyncio.sleep(1.0)
        assert client.counts()["left_out"] == 0
        await client.expect_version("v1")
        await collecting  # the time of the update does not count, and afterwards it does
        assert client.counts()["left_out"] == 1

    run_client(scenario, updated, well, read_timeout_s=0.4)


@pytest.mark.parametrize("sent_in_the_push", [False, True])
def test_generate_when_weights_are_sent_longer_than_an_answer_may_take_then_nobody_is_given_up_for_it(
    faulty, fakes, sent_in_the_push
):
    slow, well = fakes
    slow.generate, slow.scheduler = (
        "hangs",
        "runs",
    )  # its counters feign progress, so that the limit alone ends it

    async def scenario(client):
        if sent_in_the_push:
            await client.expect_pause()
        collecting = asyncio.create_task(collect(client))
        await asyncio.sleep(2.0)
        await client.expect_pause()
        await asyncio.sleep(20.0)
        assert client.counts()["left_out"] == 0
        await client.expect_version("v1")
        await asyncio.sleep(2.0)
        assert client.counts()["left_out"] == 0
        await asyncio.sleep(5.0)  # 5 s of its own have passed by now
        assert client.counts()["left_out"] >= 1  # it is well, and comes back
        collecting.cancel()

    run_client(scenario, slow, well, answer_timeout_s=5.0, read_timeout_s=60.0)


def test_generate_when_the_loop_was_blocked_then_no_server_is_taken_for_silent(faulty, fakes):
    async def scenario(client):
        collecting = asyncio.create_task(collect(client))
        for _ in range(4):
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().block(1.0)  # by an environment's step that is no coroutine
        assert not collecting.done() and client.counts()["left_out"] == 0
        collecting.cancel()

    for fake in fakes:
        fake.generate = "hangs"
    run_client(scenario, *fakes, read_timeout_s=0.4)


def test_generate_when_a_server_fails_fast_and_is_healthy_in_between_then_it_does_not_use_up_the_retries(
    faulty, fakes
):
    failing, well = fakes
    failing.generate = "fails"

    async def scenario(client):
        for _ in range(3):
            await collect(client)  # 12 samples, one at a time
            client._counts.samples = client._counts.tokens = 0
        assert failing.asked <= 7  # after 0.02, 0.04, 0.08, 0.16, 0.32 s and so on; it took a sixth of all

    run_client(scenario, failing, well, max_concurrency=1, max_retries=1)


@drill("a server started anew with old weights", promised="its answers are refused until it has the weights")
def test_generate_when_a_server_was_started_anew_then_its_answers_are_refused_until_it_has_the_weights(
    faulty, fakes
):
    anew, right = fakes
    anew.version, right.version = "default", "7"

    async def scenario(client):
        await client.expect_version("7")
        trajectories = await collect(client)
        assert {t.oldest_version for t in trajectories} == {"7"}
        counts = client.counts()
        assert (counts["stale"], counts["left_out"], counts["rejoined"]) == (1, 1, 0)
        await asyncio.sleep(0.2)
        assert client.counts()["stale"] == 1 and client.counts()["rejoined"] == 0  # healthy, and refused
        anew.version = right.version = "8"
        await client.expect_version("8")
        async with asyncio.timeout(5):
            while not client.counts()["rejoined"]:
                await asyncio.sleep(0.02)
        assert {t.server for t in await client.generate(PROMPTS, ONE)} == set(client.base_urls)

    run_client(scenario, anew, right)


@drill("a server started anew with flags that the run can't use", promised="left out with the remedy")
def test_server_when_started_anew_with_flags_that_the_run_cannot_use_then_left_out_until_it_has_others(
    faulty, fakes, caplog
):
    anew, right = fakes
    anew.version, right.version = "7", "7"
    hot = SamplingParams(1, min_p=0.1)

    async def scenario(client):
        client.require_sampling([ONE, hot])
        anew.flags = {"enable_deterministic_inference": True}  # with which SGLang ends at min_p
        await client.expect_version("7", restarted=client.base_urls[:1])
        await asyncio.sleep(0.2)
        assert client.left_out == [client.base_urls[0]] and client.counts()["rejoined"] == 0
        assert {t.server for t in await client.generate(PROMPTS, ONE)} == {client.base_urls[1]}
        assert (
            caplog.text.count("is not taken back: ") == 1
            and "start it without, or drop `min_p`" in caplog.text
        )
        anew.flags = {}
        async with asyncio.timeout(5):
            while client.left_out:
                await asyncio.sleep(0.02)

    run_client(scenario, anew, right)


def test_generate_when_a_server_holds_the_step_of_an_attempt_before_then_it_is_not_taken_for_fresh(
    faulty, fakes
):
    """The run reached 50, was started again from 40 and is at 50 once more; one server has
    missed its pushes.
    """
    first, second = versions.new_run_id(), versions.new_run_id()
    old, fresh = fakes
    old.version = versions.name(first, 50)

    async def scenario(client):
        for step in range(40, 51):
            fresh.version = versions.name(second, step)
            await client.expect_version(fresh.version)
        trajectories = await collect(client)
        assert {t.server for t in trajectories} == {client.base_urls[1]} and client.counts()["stale"] == 1
        assert {versions.number(t.oldest_version) for t in trajectories} == {50}

    faulty.run(scenario, old, fresh)


def test_expect_version_when_a_server_is_left_out_then_it_is_asked_at_once(faulty, fakes, monkeypatch):
    monkeypatch.setattr(health, "FIRST_PROBE_S", 30.0)
    anew, right = fakes
    anew.version, right.version = "default", "7"

    async def scenario(client):
        await client.expect_version("7")
        await collect(client)
        anew.version = "7"
        await client.expect_version("7")
        async with asyncio.timeout(5):
            while not client.counts()["rejoined"]:
                await asyncio.sleep(0.02)

    run_client(scenario, anew, right)


def test_expect_version_when_a_push_names_a_servers_weights_late_then_it_is_asked_again_soon(
    faulty, fakes, monkeypatch
):
    monkeypatch.setattr(health, "FIRST_PROBE_S", 0.4)
    anew, right = fakes
    anew.version, right.version, asked = "unfinished 7", "7", []

    async def handle(request):
        asked.append(request.path)
        anew.version = "7" if asked.count("/model_info") > 5 else "unfinished 7"
        return await anew(request)

    async def scenario(client):
        await client.expect_version("7", restarted=client.base_urls[:1])
        async with asyncio.timeout(2.5):  # 2 s; were each wait twice the one before, 6 s
            while not client.counts()["rejoined"]:
                await asyncio.sleep(0.02)

    run_client(scenario, handle, right)


def test_expect_version_when_a_restarted_server_has_taken_the_update_then_it_is_not_asked_whether_it_lives(
    faulty, fakes
):
    """SGLang takes a second for that answer, and may have none while it is paused: the step has
    sampled by then.
    """
    anew, other = fakes
    anew.version, other.version, asked = "7", "old", {"anew": [], "other": []}

    async def handle(request):
        asked["anew"].append(request.path)
        return await anew(request)

    async def handle_other(request):
        asked["other"].append(request.path)
        return await other(request)

    async def scenario(client):
        await client.expect_version("7", restarted=client.base_urls[:1])
        async with asyncio.timeout(5):
            while client.left_out:
                await asyncio.sleep(0.02)
        # the other is stale
        assert {t.server for t in await client.generate(PROMPTS, ONE)} == {client.base_urls[0]}
        other.version = "8"
        anew.version = "8"
        await client.expect_version("8")
        async with asyncio.timeout(5):
            while client.left_out:
                await asyncio.sleep(0.02)

    run_client(scenario, handle, handle_other)
    assert "/health" not in asked["anew"] and "/health" in asked["other"]


def test_server_when_its_weights_are_others_and_it_falls_ill_then_it_is_asked_less_and_less_often(
    faulty, fakes, monkeypatch
):
    anew, right = fakes
    anew.version, right.version, asked = "default", "7", []

    async def handle(request):
        asked.append(request.path)
        anew.health = "ok" if asked.count("/model_info") < 2 else "down"
        return await anew(request)

    async def scenario(client):
        await client.expect_version("7", restarted=client.base_urls[:1])
        await asyncio.sleep(2.0)
        assert asked.count("/model_info") == 2 and 2 < asked.count("/health") < 15  # every 0.02 s: up to 100

    run_client(scenario, handle, right)


def test_expect_version_when_a_server_fell_out_at_the_updates_end_then_it_waits_for_the_next_one(
    faulty, fakes, caplog
):
    """Its weights have the right name, and it is healthy; but it may be paused still, and nobody
    has compared them.
    """
    fallen, right = fakes
    fallen.version, right.version = "7", "7"

    async def scenario(client):
        await client.expect_version("7", missed=client.base_urls[:1])
        await asyncio.sleep(0.3)
        assert {t.server for t in await collect(client)} == {client.base_urls[1]}
        assert "it fell out of the update to '7' before its end" in caplog.text
        fallen.version = right.version = "8"
        await client.expect_version("8")
        async with asyncio.timeout(5):
            while client.left_out:
                await asyncio.sleep(0.02)

    run_client(scenario, fallen, right)


def test_expect_version_when_the_server_that_missed_it_was_left_out_before_then_its_requests_end(
    faulty, fakes
):
    fallen, right = fakes
    fallen.generate, fallen.scheduler = "hangs", "runs"
    right.version = "7"

    async def scenario(client):
        collecting = asyncio.create_task(collect(client))
        await asyncio.sleep(0.2)
        server = client._pool.servers[0]
        client._health.leave_out(
            server, server.joined, RolloutServerError(server.url, "/generate", 502, "a proxy")
        )
        await client.expect_version("7", missed=client.base_urls[:1])
        await collecting

    run_client(scenario, fallen, right)


def test_expect_version_when_a_server_missed_the_update_then_it_is_told_once_that_it_is_left_out(
    faulty, fakes, told
):
    missing, right = fakes
    missing.version, right.version = "6", "7"

    async def scenario(client):
        for _ in range(2):  # the second time it is left out already
            await client.expect_version("7", missed=client.base_urls[:1])
        assert client.left_out == [client.base_urls[0]] and client.counts()["left_out"] == 1
        return client.base_urls[0]

    url = faulty.run(scenario, missing, right)
    [(kind, facts)] = told
    assert (
        kind == "server_left_out"
        and facts["server"] == url
        and "it missed a weight update" in facts["reason"]
    )


def test_generate_when_every_server_is_stale_then_the_outage_says_which_versions(faulty, fakes):
    async def scenario(client):
        await client.expect_version("7")
        said = "its weights are version 'v1', the trainer's are '7'"
        with pytest.raises(RolloutOutage, match=said) as error:
            await client.generate([[1]], ONE)
        assert isinstance(error.value.causes[0][0], StaleWeightsError)

    faulty.run(scenario, fakes[0])


@pytest.mark.parametrize("before", ["7", None])
def test_generate_when_weights_are_updated_in_mid_request_then_the_answer_of_the_old_ones_is_kept(
    faulty, before
):
    async def handle(request):
        await asyncio.sleep(0.2)
        return faulty.one_token(1, version="7")

    async def scenario(client):
        if before is not None:
            await client.expect_version(before)
        sampling = asyncio.create_task(client.generate([[1]], ONE))
        await asyncio.sleep(0.1)
        await client.expect_version("8")
        (trajectory,) = await sampling
        assert trajectory.oldest_version == "7" and client.counts()["stale"] == 0

    run_client(scenario, handle)


@pytest.mark.parametrize("sampled_by, stale", [("7", 0), ("8", 0), ("9", 0), ("6", 1)])
def test_generate_when_weights_are_updated_twice_in_mid_request_then_any_version_since_it_was_sent_is_kept(
    faulty, sampled_by, stale
):
    answers = iter([sampled_by])

    async def handle(request):
        if request.path != "/generate":
            return web.json_response({"weight_version": "9"})
        await asyncio.sleep(0.2)
        return faulty.one_token(1, version=next(answers, "9"))

    async def scenario(client):
        for version in ("6", "7"):
            await client.expect_version(version)
        sampling = asyncio.create_task(client.generate([[1]], ONE))
        for version in ("8", "9"):
            await asyncio.sleep(0.05)
            await client.expect_version(version)
        (trajectory,) = await sampling
        assert trajectory.oldest_version == ("9" if stale else sampled_by)
        assert client.counts()["stale"] == stale

    run_client(scenario, handle, outage_timeout_s=10)


def test_generate_when_another_trainer_pushes_in_mid_request_then_its_part_is_not_taken_for_this_trainers(
    faulty,
):
    parts = iter([("7", 0, 1), ("other-3", 1, 2)])

    async def handle(request):
        if request.path != "/generate":
            return web.json_response({"weight_version": "7"})
        spans = [{"version": version, "start": start, "end": end} for version, start, end in parts]
        body = json.loads(faulty.answer(1, [5, 6], {"type": "length", "length": 2}, version="7").body)
        body["meta_info"]["weight_versions"] = spans or [{"version": "7", "start": 0, "end": 2}]
        return web.json_response(body)

    async def scenario(client):
        await client.expect_version("7")
        (trajectory,) = await client.generate([[1]], SamplingParams(2))
        assert [span.version for span in trajectory.weight_versions] == ["7"] and client.counts()[
            "stale"
        ] == 1

    faulty.run(scenario, handle, outage_timeout_s=10)


@pytest.mark.parametrize("order, right", [("78", True), ("88", True), ("87", False), ("787", False)])
def test_generate_when_the_weights_of_an_answer_go_back_and_forth_then_it_is_refused_and_asked_for_again(
    faulty, order, right
):
    answers, begun, updated = iter([order]), asyncio.Event(), asyncio.Event()

    async def handle(request):
        if request.path != "/generate":
            return web.json_response({"weight_version": "8"})
        begun.set()
        await updated.wait()
        names = next(answers, "8" * len(order))
        body = json.loads(faulty.answer(1, [*range(5, 5 + len(names))], {"type": "length"}, version="8").body)
        spans = [{"version": name, "start": place, "end": place + 1} for place, name in enumerate(names)]
        body["meta_info"]["weight_versions"] = spans
        return web.json_response(body)

    async def scenario(client):
        await client.expect_version("7")
        sampling = asyncio.create_task(client.generate([[1]], SamplingParams(len(order))))
        await begun.wait()
        await client.expect_version("8")
        updated.set()
        (trajectory,) = await sampling
        used = "".join(span.version for span in trajectory.weight_versions)
        assert used == (order if right else "8" * len(order)) and client.counts()["retries"] == (not right)

    faulty.run(scenario, handle, outage_timeout_s=10)


@pytest.mark.parametrize("then", ["answers", "hangs"])
def test_generate_when_what_a_watched_server_tells_of_itself_can_not_be_read_then_no_sample_is_lost(
    faulty, then
):
    asked = []

    async def handle(request):
        if request.path == "/server_info":  # asked by the watch, as this server has no /v1/loads
            asked.append(request.path)
            return web.Response(body=b"{}", headers={"Content-Encoding": "gzip"})
        if request.path != "/generate":
            return web.json_response({"weight_version": "v1"})
        await asyncio.sleep(60 if then == "hangs" else 1.5)
        return faulty.one_token(1)

    async def scenario(client):
        trajectories = await client.generate([[1]], ONE, samples_per_prompt=8)
        assert len(trajectories) == 8 and asked
        assert (client.counts()["left_out"] > 0) == (then == "hangs")

    handlers = [handle, faulty.good] if then == "hangs" else [handle]
    faulty.run(scenario, *handlers, read_timeout_s=1.5 if then == "hangs" else 5.0)


def test_generate_when_called_many_times_at_once_then_one_watch_listens_until_the_last_has_ended(
    faulty, monkeypatch
):
    watches = []

    async def watch(self):
        watches.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            watches.append("ended")

    monkeypatch.setattr(ServerHealth, "_watch", watch)
    answers = itertools.count()

    async def handle(request):
        if next(answers) == 1:  # one of the eight is slow
            await asyncio.sleep(0.1)
            assert watches == ["begun"]
        return faulty.one_token(1)

    async def scenario(client):
        await asyncio.gather(*(client.generate([[1]], ONE) for _ in range(8)))
        assert watches == ["begun", "ended"]

    faulty.run(scenario, handle)
