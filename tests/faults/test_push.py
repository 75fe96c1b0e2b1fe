"""A server dies or hangs at every request of a push by broadcast, and the push goes on with the others."""

import os
import signal
import time

import pytest

from megatron_rl_corr.engines.control import ServerControl
from tests.faults.drills import RUNS_ALL, drill
from tests.faults.pushing_trainer import SILENCE_S, Trainer

MOMENTS = [
    ("pause_generation", 1),
    ("update_weight_version", 1),
    ("reopen_weight_update", 1),
    ("server_info", 1),
    ("init_weights_update_group", 2),
    ("update_weights_from_distributed", 1),
    ("update_weights_from_distributed", 7),
    ("end_weight_update", 1),
    ("update_weight_version", 2),
    ("model_info", 1),
    ("flush_cache", 1),
    ("weights_checker", 1),
    ("continue_generation", 1),
]
"""A method of ServerControl, and which call of it in the push: right before it the victim dies or hangs.

Of three servers with a group each, the second is the victim: its group is the second one, and a
bucket is three calls.
"""
BLOWS = {signal.SIGKILL: "dies", signal.SIGSTOP: "hangs"}
STOPPED_S = 1.6
"""Silence of a server that is stopped, in place of SILENCE_S: it would not answer later either."""
CASES = [(blow, *MOMENTS[6]) for blow in BLOWS]  # between two buckets
if RUNS_ALL:
    CASES += [(blow, *moment) for moment in MOMENTS if moment != MOMENTS[6] for blow in BLOWS]


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def trainer(sglang_server_fp32, any_victim, vllm_server_fp32, tiny_moe_dir):
    any_victim.revive()
    trainer = Trainer([sglang_server_fp32.url, any_victim.server.url, vllm_server_fp32.url], tiny_moe_dir)
    yield trainer
    trainer.close()


@pytest.fixture
def victim(any_victim):
    any_victim.revive()
    yield any_victim
    if not any_victim.killed:
        os.killpg(any_victim.server.pid, signal.SIGCONT)


def limits_of(monkeypatch, url):
    """The limits of control requests to a server from now on, in seconds; None: the transport's."""
    limits, ask = [], ServerControl.ask

    async def noted(self, asked, request, *, timeout_s=None):
        if asked == url:
            limits.append(timeout_s)
        return await ask(self, asked, request, timeout_s=timeout_s)

    monkeypatch.setattr(ServerControl, "ask", noted)
    return limits


def strike(monkeypatch, victim, fleet, request, number, blow):
    """At the number-th such request of the coming push the victim gets a signal."""
    calls, original, send = 0, getattr(ServerControl, request), fleet.send

    async def struck(self, *arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number:
            victim.kill() if blow == signal.SIGKILL else os.killpg(victim.server.pid, blow)
        return await original(self, *arguments, **options)

    async def sent(url, asked, *, timeout_s=None):
        is_stopped = calls >= number and url == victim.server.url
        return await send(
            url, asked, timeout_s=STOPPED_S if is_stopped and timeout_s == SILENCE_S else timeout_s
        )

    monkeypatch.setattr(ServerControl, request, struck)
    monkeypatch.setattr(fleet, "send", sent)


@drill(
    "a server is killed or stopped at a request of a distributed push; two others (SGLang, vLLM) take part",
    promised="it is left out, the push goes on with the others, the next one waits 0.3 s for it at most; it "
    "is taken back with the next push after it is well",
)
@pytest.mark.parametrize(
    ("blow", "request_name", "number"), CASES, ids=[f"{BLOWS[b]}-{r}-{n}" for b, r, n in CASES]
)
def test_push_when_a_server_dies_or_hangs_in_a_broadcast_push_then_it_goes_on_with_the_others(
    trainer, victim, monkeypatch, seen, blow, request_name, number
):
    first, dead, last = trainer.client.base_urls
    usual = trainer.push()
    trainer.check(first, dead, last)
    if request_name == "init_weights_update_group":
        trainer.servers.close()  # else there is a group already
    with monkeypatch.context() as patch:
        strike(patch, victim, trainer.client.fleet, request_name, number, blow)
        struck = trainer.push()
    trainer.check(first, last)
    with monkeypatch.context() as patch:
        limits = limits_of(patch, dead)
        after = trainer.push()
    assert limits == [0.3]  # all that it waits for this server, whatever the machine takes beside
    trainer.check(first, last)
    if blow == signal.SIGKILL:
        victim.start_again()
    else:
        os.killpg(victim.server.pid, signal.SIGCONT)
    deadline = time.monotonic() + 120
    while trainer.loop.call(trainer.client.versions_for_update())[1] is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    trainer.push()
    trainer.check(first, dead, last)
    seen(f"a push took {usual:.1f} s, the struck one {struck:.1f} s, the next {after:.1f} s")
