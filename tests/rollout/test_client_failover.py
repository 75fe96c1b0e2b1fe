"""Servers that die, fall silent, come back or have old weights while samples are collected: none lost, none doubled."""

import asyncio
import itertools

import pytest
from aiohttp import web

from megatron_rl_corr.rollout import (
    RolloutOutage,
    RolloutServerError,
    SamplingParams,
    StaleWeightsError,
    readmission,
)
from megatron_rl_corr.rollout.counts import Counts
from megatron_rl_corr.rollout.pool import ServerPool
from megatron_rl_corr.rollout.readmission import Readmission
from megatron_rl_corr.rollout.transport import Transport

ONE = SamplingParams(1)
ORDER = [(p, s) for p in range(4) for s in range(3)]
PROMPTS = [[1], [2, 2], [3], [4, 4, 4]]


@pytest.fixture(autouse=True)
def quick_probes(monkeypatch):
    monkeypatch.setattr(readmission, "FIRST_PROBE_S", 0.02)


class Fake:
    """A server whose /generate, /health and /model_info can be told to fail, hang or report a version."""

    def __init__(self, faulty):
        self._faulty = faulty
        self.generate = self.health = "ok"
        self.version, self.asked = "v1", 0
        self.released = None

    async def __call__(self, request):
        if request.path == "/model_info":
            if self.generate == "silent":
                await asyncio.sleep(30)
            return web.json_response({"weight_version": self.version})
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
        if self.generate in ("hangs", "silent"):
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
        transport = Transport(timeout_s=1, connect_timeout_s=1)
        members = Readmission(pool, transport, Counts(), read_timeout_s=1)
        (server,) = pool.servers
        before = server.joined
        late = RolloutServerError(server.url, "/generate", None, "timed out")
        members.leave_out(server, before, late)
        pool.rejoin(server)
        members.leave_out(server, before, late)
        assert pool.left_out == []
        members.leave_out(server, server.joined, late)
        assert pool.left_out == [server]
        await members.close()

    asyncio.run(scenario())


def test_generate_when_servers_are_unequal_then_the_faster_one_gets_more_samples(faulty):
    asked = {"slow": 0, "fast": 0}

    def server(name, seconds):
        async def handle(request):
            asked[name] += 1
            await asyncio.sleep(seconds)
            return await faulty.good(request)

        return handle

    async def scenario(client):
        await client.generate([[1]], ONE, samples_per_prompt=40)

    faulty.run(scenario, server("slow", 0.5), server("fast", 0.02), max_concurrency=4)
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

    faulty.run(scenario, handle, max_per_server=3)
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


def test_generate_when_a_healthy_server_fails_each_time_then_the_sample_fails_after_its_retries(faulty, fakes):
    server, _ = fakes
    server.generate = "fails"

    async def scenario(client):
        with pytest.raises(RolloutServerError, match="HTTP 500: scheduler is gone") as error:
            await client.generate([[1, 2]], ONE)
        assert error.value.__notes__ == ["it was asked 3 times", "it was sample 0 of prompt 0 (2 tokens)"]

    faulty.run(scenario, server, max_retries=2, outage_timeout_s=5)
    assert server.asked == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_generate_when_the_request_itself_is_refused_then_not_asked_again(faulty, status):
    asked = []

    async def refuses(request):
        asked.append(request.path)
        return web.Response(status=status, text="no")

    async def scenario(client):
        with pytest.raises(RolloutServerError, match=f"HTTP {status}: no"):
            await client.generate([[1]], ONE)
        assert client.counts()["left_out"] == 0

    faulty.run(scenario, refuses, refuses)
    assert asked == ["/generate"]


def test_generate_when_every_server_dies_then_one_error_names_all_with_their_causes(faulty, fakes):
    for fake in fakes:
        fake.generate = "dies"

    async def scenario(client):
        with pytest.raises(RolloutOutage, match="none of 2 rollout servers is left") as error:
            await client.generate(PROMPTS, ONE)
        said = str(error.value)
        for url in client.base_urls:
            assert f"SGLang server {url} did not answer POST /generate: it closed the connection" in said
        assert said.count("asked again: SGLang server http") == said.count("answered GET /health with HTTP 503") == 2

    faulty.run(scenario, *fakes, outage_timeout_s=1.0)


def test_generate_when_a_server_falls_silent_then_what_it_had_in_flight_goes_elsewhere(faulty, fakes):
    silent, well = fakes
    silent.generate, silent.health = "silent", "down"

    async def scenario(client):
        await collect(client)
        assert client.counts()["left_out"] == 1 and silent.asked == client.counts()["retries"] == 6

    faulty.run(scenario, silent, well, read_timeout_s=0.4, timeout_s=25)


def test_generate_when_a_server_only_takes_long_then_it_is_not_given_up(faulty, fakes):
    slow, well = fakes
    slow.generate = "hangs"  # and answers /model_info

    async def scenario(client):
        collecting = asyncio.create_task(collect(client))
        await asyncio.sleep(1.0)  # several questions
        assert not collecting.done() and client.counts()["left_out"] == 0
        collecting.cancel()

    faulty.run(scenario, slow, well, read_timeout_s=0.2)


def test_generate_when_a_request_times_out_then_it_is_asked_elsewhere(faulty, fakes):
    slow, well = fakes
    slow.generate = "hangs"

    async def scenario(client):
        trajectories = await collect(client)
        assert {t.server for t in trajectories} == {client.base_urls[1]}

    faulty.run(scenario, slow, well, timeout_s=0.5, max_retries=8)


def test_generate_when_a_server_was_started_anew_then_its_answers_are_refused_until_it_has_the_weights(faulty, fakes):
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

    faulty.run(scenario, anew, right)


def test_expect_version_when_a_server_is_left_out_then_it_is_asked_at_once(faulty, fakes, monkeypatch):
    monkeypatch.setattr(readmission, "FIRST_PROBE_S", 30.0)
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

    faulty.run(scenario, anew, right)


def test_generate_when_every_server_is_stale_then_the_outage_says_which_versions(faulty, fakes):
    async def scenario(client):
        await client.expect_version("7")
        said = "its weights are version 'v1', the trainer's are '7'"
        with pytest.raises(RolloutOutage, match=said) as error:
            await client.generate([[1]], ONE)
        assert isinstance(error.value.causes[0][0], StaleWeightsError)

    faulty.run(scenario, fakes[0])


@pytest.mark.parametrize("before", ["7", None])
def test_generate_when_weights_are_updated_in_mid_request_then_the_answer_of_the_old_ones_is_kept(faulty, before):
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

    faulty.run(scenario, handle)


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

    faulty.run(scenario, handle, outage_timeout_s=10)


def test_generate_when_called_many_times_at_once_then_one_watch_listens_until_the_last_has_ended(faulty, monkeypatch):
    watches = []

    async def watch(self):
        watches.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            watches.append("ended")

    monkeypatch.setattr(Readmission, "_watch", watch)
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
