"""Answers of a real server that come byte by byte without end, and counters that feign progress, end within a
bound: while it samples, in a push, when it is asked for its health, and at the start.
"""

import time

import pytest

from megatron_rl_corr.engines import http
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams, health
from tests.faults.door import Door
from tests.faults.drills import RUNS_ALL, drill, long
from tests.faults.pushing_trainer import Trainer

VOCAB, TOKENS = 83, 4
BOUND_S = 4.0
"""Of a body, or of a whole answer, here."""
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3, 5]]


@pytest.fixture
def door(sglang_server_fp32):
    door = Door(sglang_server_fp32.url)
    yield door
    door.dripping, door.feigns = {}, False
    door.close()


@pytest.fixture
def loop():
    with LoopThread() as thread:
        yield thread


def sampled(loop, client):
    """The servers of two samples of each prompt, and the seconds that all took."""
    begun = time.monotonic()
    sampling = client.generate(PROMPTS, SamplingParams(TOKENS, ignore_eos=True), samples_per_prompt=2)
    samples = loop.call(sampling, timeout=120)
    assert {(one.finish_reason, one.output_ids.numel()) for one in samples} == {("length", TOKENS)}
    return [one.server for one in samples], time.monotonic() - begun


SAMPLING = {
    "a body that drips": ({"/generate": "body"}, False, "its answer comes too slowly"),
    "headers that drip": ({"/generate": "head"}, False, "did not come within 4 s"),
    "headers that drip, and counters that feign progress": (
        {"/generate": "head"},
        True,
        "did not come within",
    ),
}


@drill(
    "a server's answers to samples come byte by byte without end, in the body or in the headers, or its load "
    "counters change for ever beside; another server is well",
    promised="each ends within its bound (here 4 s); the server is left out with an event, its samples are "
    "asked for elsewhere",
)
@pytest.mark.parametrize("what", list(SAMPLING))
def test_samples_when_a_server_drips_without_end_then_they_come_from_the_other_within_the_bound(
    door, companion, loop, monkeypatch, told, seen, what
):
    dripping, door.feigns, words = SAMPLING[what]
    monkeypatch.setattr(http, "SLOW_S", BOUND_S)
    limit_s = None if "body" in dripping.values() else BOUND_S
    client = RolloutClient(
        [door.url, companion.url], vocab_size=VOCAB, read_timeout_s=60.0, answer_timeout_s=limit_s
    )
    try:
        sampled(loop, client)
        door.dripping = dripping
        servers, took = sampled(loop, client)
    finally:
        loop.call(client.close())
    assert set(servers) == {companion.url}
    left_out = [facts for kind, facts in told if kind == "server_left_out"]
    assert {facts["server"] for facts in left_out} == {door.url} and words in left_out[0]["reason"]
    assert BOUND_S <= took < BOUND_S + 20 and client.counts()["retries"] >= 4
    seen(f"{what}: all samples were there after {took:.1f} s")


@drill(
    "a server's counters feign progress while it answers no sample, and the bound on silence is short",
    promised="nothing but the bound on the whole answer ends its requests",
)
def test_samples_when_counters_feign_progress_then_the_bound_on_silence_does_not_end_them(
    door, companion, loop, seen, told
):
    door.feigns = True
    client = RolloutClient(
        [door.url, companion.url], vocab_size=VOCAB, read_timeout_s=1.0, answer_timeout_s=BOUND_S
    )
    try:
        door.dripping = {"/generate": "head"}
        servers, took = sampled(loop, client)
    finally:
        loop.call(client.close())
    assert set(servers) == {companion.url} and took >= BOUND_S
    (left_out,) = [facts for kind, facts in told if kind == "server_left_out"]
    assert "though it seemed to make progress" in left_out["reason"]
    seen(f"after {took:.1f} s")


@drill(
    "/health of a server that was left out comes byte by byte",
    promised="each question ends within its limit; the server is taken back once it is well",
)
@pytest.mark.parametrize(("part", "words"), [("body", "comes too slowly"), ("head", "timed out after 8 s")])
def test_server_when_its_health_drips_then_it_stays_out_until_it_is_well(
    door, companion, loop, monkeypatch, seen, part, words
):
    monkeypatch.setattr(http, "SLOW_S", BOUND_S)
    monkeypatch.setattr(health, "HEALTH_PROBE_TIMEOUT_S", 8.0)
    monkeypatch.setattr(health, "LONGEST_BACKOFF_S", 1.0)
    client = RolloutClient([door.url, companion.url], vocab_size=VOCAB)
    try:
        door.dripping = {"/generate": "body", "/health": part}
        sampled(loop, client)
        end = time.monotonic() + 60
        while not (refused := [one.refused for one in client._pool.left_out if one.refused is not None]):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert "GET /health: " in str(refused[0]) and words in str(refused[0])
        door.dripping = {}
        well = time.monotonic()
        while client.left_out:
            assert time.monotonic() < end
            time.sleep(0.1)
        seen(f"back {time.monotonic() - well:.1f} s after it was well")
    finally:
        loop.call(client.close())


@drill(
    "at the start a server's answers come byte by byte, in headers or body",
    promised="the start ends within its limit (here 3 s), with the server's name",
)
@pytest.mark.parametrize("part", ["head", "body"])
def test_start_when_a_server_drips_then_it_ends_within_its_limit_by_name(door, loop, part, seen):
    door.dripping = dict.fromkeys(("/model_info", "/server_info", "/health", "/version", "/v1/models"), part)
    client = RolloutClient([door.url], vocab_size=VOCAB, engine="auto")
    begun = time.monotonic()
    try:
        with pytest.raises(RolloutServerError) as raised:
            loop.call(client.find_servers(3.0))
    finally:
        loop.call(client.close())
    took = time.monotonic() - begun
    assert raised.value.url == door.url and took < 3.0 + 5
    seen(f"after {took:.1f} s: {str(raised.value)[:90]}")


PUSH_S = 60.0
IN_A_PUSH = [("/update_weights_from_distributed", "body")]
if RUNS_ALL:
    IN_A_PUSH += [
        ("/update_weights_from_distributed", "head"),
        ("/pause_generation", "head"),
        ("/end_weight_update", "body"),
        ("/weights_checker", "head"),
        ("/continue_generation", "body"),
    ]


@pytest.mark.usefixtures("one_rank")
@drill(
    "a server's answer to a request of a push comes byte by byte, in headers or body; another one is well",
    promised="it is left out within half of --rollout-push-timeout-s, and the other has the new weights",
)
@pytest.mark.parametrize(("path", "part"), IN_A_PUSH)
def test_push_when_an_answer_drips_then_the_server_is_left_out_within_the_bound(
    door, vllm_server_fp32, tiny_moe_dir, seen, told, path, part
):
    trainer = Trainer([door.url, vllm_server_fp32.url], tiny_moe_dir, push_timeout_s=PUSH_S)
    try:
        trainer.push()  # vLLM takes long to tell of itself for the first time
        usual = trainer.push()
        assert trainer.servers.urls == (door.url, vllm_server_fp32.url)
        told.clear()
        door.dripping = {path: part}
        took = trainer.push()
        assert trainer.servers.urls == (vllm_server_fp32.url,) and took < PUSH_S
        trainer.check(vllm_server_fp32.url)
        assert [facts["server"] for kind, facts in told if kind == "server_missed_update"] == [door.url]
        door.dripping = {}
        end = time.monotonic() + 60
        while door.url not in trainer.servers.urls:
            assert time.monotonic() < end
            trainer.push()
        trainer.check(door.url, vllm_server_fp32.url)
    finally:
        door.dripping = {}
        trainer.close()
    seen(f"{path}, {part}: a push took {usual:.1f} s, the struck one {took:.1f} s of {PUSH_S:g}")


@long
@drill(
    "a response that is sampled slowly, for many times the bound on a dripping body",
    promised="it lives: its body comes at once, when it is whole",
)
def test_sample_when_it_takes_many_times_the_bounds_on_silence_and_bodies_then_it_arrives(
    victim, loop, monkeypatch, seen
):
    from tests.rollout.test_silence_real_servers import scheduler_of, slowed

    monkeypatch.setattr(http, "SLOW_S", 1.0)
    client = RolloutClient([victim.server.url], vocab_size=VOCAB, read_timeout_s=4.0, max_retries=0)
    begun = time.monotonic()
    try:
        with slowed(scheduler_of(victim.server), stopped_s=0.3, running_s=0.1):
            sampling = client.generate([[3, 1, 4]], SamplingParams(240, ignore_eos=True))
            (sample,) = loop.call(sampling, timeout=300)
    finally:
        loop.call(client.close())
    assert sample.output_ids.numel() == 240 and client.counts()["left_out"] == 0
    seen(f"240 tokens in {time.monotonic() - begun:.0f} s")
