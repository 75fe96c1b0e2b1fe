"""What is silence, and what only takes long: real servers whose scheduler is stopped,
slow, paused or full.
"""

import asyncio
import os
import re
import signal
import threading
import time
from contextlib import contextmanager

import aiohttp
import psutil
import pytest
from aiohttp import web

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams, health
from tests.faults.drills import drill
from tests.tiers import in_matrix, long, matrix

pytestmark = matrix

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3, 5]]
VOCAB = 83


@pytest.fixture
def loop():
    with LoopThread() as thread:
        yield thread


@contextmanager
def client_of(loop, *urls, **options):
    client = RolloutClient(urls, vocab_size=VOCAB, **options)
    try:
        yield client
    finally:
        loop.call(client.close())


def scheduler_of(server):
    """The one process of a server that samples; its HTTP process is another."""
    below = psutil.Process(server.pid).children(recursive=True)
    titles = {process.pid: "".join(process.cmdline()) for process in below}
    (scheduler,) = [
        pid for pid, title in titles.items() if "sglang::scheduler" in title or "EngineCore" in title
    ]
    return scheduler


def lengths(trajectories):
    return {(t.finish_reason, t.output_ids.numel()) for t in trajectories}


@drill(
    "SIGSTOP of a server's scheduler, then SIGCONT",
    promised="left out within the bound, nothing lost, taken back",
)
def test_generate_when_the_scheduler_alone_is_stopped_then_left_out_within_the_bound_and_back_when_it_goes_on(
    loop, companion, victim, wait_until_sampling, monkeypatch
):
    monkeypatch.setattr(health, "LONGEST_BACKOFF_S", 1.0)
    bound, url, scheduler = 4.0, victim.server.url, scheduler_of(victim.server)
    with client_of(loop, companion.url, url, engine=victim.engine, read_timeout_s=bound) as client:
        sampling = loop.submit(
            client.generate(PROMPTS, SamplingParams(300, ignore_eos=True), samples_per_prompt=4)
        )
        wait_until_sampling(url)
        os.kill(scheduler, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            # the HTTP process is well
            assert loop.call(client.ask(url, client.engine_of(url).list_models()))["data"]
            while not client.counts()["left_out"]:
                assert time.monotonic() - stopped < 60  # test_client_failover.py has the bound
                time.sleep(0.05)
            (said,) = [str(server.cause) for server in client._pool.left_out]
            silent_s = float(re.search(r"its requests made no progress for (\S+) s", said)[1])
            # more than 1.0 only if this process is kept from looking
            assert 0.7 * bound <= silent_s < 1.15 * bound
            trajectories = sampling.result(120)
        finally:
            os.kill(scheduler, signal.SIGCONT)
        assert lengths(trajectories) == {("length", 300)} and len(trajectories) == 16
        counts = client.counts()
        assert (counts["left_out"], counts["samples"]) == (1, 16) and 1 <= counts["retries"] <= 8
        deadline = time.monotonic() + 60  # it may have been asked for /health just before it went on
        while not client.counts()["rejoined"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        loop.call(client.generate(PROMPTS, SamplingParams(2, ignore_eos=True)), timeout=60)


@contextmanager
def slowed(pid, *, stopped_s, running_s):
    """Let a process run only now and then."""
    end = threading.Event()

    def slow():
        while not end.is_set():
            os.kill(pid, signal.SIGSTOP)
            end.wait(stopped_s)
            os.kill(pid, signal.SIGCONT)
            end.wait(running_s)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@long
def test_generate_when_answers_take_many_times_the_bound_and_wait_in_the_queue_then_they_arrive(loop, victim):
    """As 32 000 tokens at 20 a second do; nothing but silence ends a request, --rollout-timeout-s neither.

    16 or 32 run at a time, so the last begin when the first have ended.
    """
    arrived, bound, tokens = [], 4.0, {"sglang": 240, "vllm": 480}[victim.engine]  # vLLM is that much faster
    options = {"read_timeout_s": bound, "timeout_s": bound, "max_retries": 0, "engine": victim.engine}
    with client_of(loop, victim.server.url, **options) as client:
        started = time.monotonic()
        with slowed(scheduler_of(victim.server), stopped_s=0.3, running_s=0.1):
            sampling = client.generate(
                PROMPTS[:1],
                SamplingParams(tokens, ignore_eos=True),
                samples_per_prompt=36,
                on_progress=lambda *_: arrived.append(time.monotonic() - started),
            )
            trajectories = loop.call(sampling, timeout=200)
        assert lengths(trajectories) == {("length", tokens)} and client.counts()["left_out"] == 0
        assert arrived[0] > bound and arrived[-1] - arrived[0] > 1.0, "the test is too fast to prove anything"


@pytest.mark.parametrize("mode", ["retract", *in_matrix("abort")])
def test_generate_when_a_server_is_paused_for_longer_than_the_bound_then_it_is_not_silent(
    loop, victim, wait_until_sampling, mode
):
    with client_of(loop, victim.server.url, engine=victim.engine, read_timeout_s=6.0) as client:
        sampling = loop.submit(client.generate(PROMPTS, SamplingParams(400, ignore_eos=True)))
        wait_until_sampling(victim.server.url)  # long responses: they must not end before the pause
        loop.call(client.pause_generation(mode))
        try:
            time.sleep(9.0)
            assert not sampling.done()
        finally:
            loop.call(client.continue_generation())
        assert lengths(sampling.result(120)) == {("length", 400)}
        assert client.counts()["left_out"] == 0


@drill("a request is lost on its way", promised="given up within the bound, asked for again")
def test_generate_when_a_request_is_lost_on_its_way_then_given_up_though_the_scheduler_is_well(
    loop, companion, victim, faulty, caplog
):
    """A proxy before a real server, idle and asleep, that hands on all but the requests for samples.

    The bound leaves the proxy, which shares this process, 1.6 s for the answer to each of the
    watch's questions.
    """

    async def proxy(request):
        if request.path == load_engine(victim.engine).generate_endpoint:
            await asyncio.sleep(60)
        async with (
            aiohttp.ClientSession() as session,
            session.get(victim.server.url + request.path_qs) as answer,
        ):
            return web.Response(body=await answer.read(), status=answer.status)

    proxy.shows_loads = True

    async def scenario():
        async with (
            faulty.serving(proxy) as url,
            RolloutClient(
                [companion.url, url], vocab_size=VOCAB, read_timeout_s=8.0, engine=victim.engine
            ) as client,
        ):
            trajectories = await client.generate(PROMPTS, SamplingParams(4, ignore_eos=True))
            return trajectories, client.counts()

    trajectories, counts = loop.call(scenario(), timeout=60)
    assert {t.server for t in trajectories} == {companion.url}
    assert (counts["left_out"], counts["retries"]) == (1, 2)
    assert "it has no request, though this client waits for answers" in caplog.text
