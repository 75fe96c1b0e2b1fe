"""Two real servers of an engine, of which one is paused, killed and started anew while samples are collected.

P prompt tokens, R response tokens.
"""

import json
import time

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams, health
from megatron_rl_corr.weight_sync.servers import ABSENT, READY, RESTARTED, WeightServers
from megatron_rl_corr.weight_sync.transports.broadcast import DistributedTransport
from tests.faults.drills import drill
from tests.hf_truth import assert_is_truth

PROMPTS = [
    [(p + 7 * i) % 80 for i in range(length)] for p, length in enumerate((2, 300, 5, 64, 3, 400, 9, 150))
]
SAMPLES, LONG, SHORT = 4, SamplingParams(96, ignore_eos=True), SamplingParams(8, ignore_eos=True)
NORM = "model.norm.weight"
TIMEOUT_S = 120


@pytest.fixture
def loop():
    with LoopThread() as thread:
        yield thread


@pytest.fixture
def client(companion, victim, tiny_moe_dir, loop, monkeypatch):
    """Both servers with weights named "1"; the shared one gets its name back."""
    monkeypatch.setattr(health, "LONGEST_BACKOFF_S", 1.0)
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    urls = [companion.url, victim.server.url]
    client = RolloutClient(
        urls, vocab_size=vocab_size, max_concurrency=16, timeout_s=TIMEOUT_S, engine=victim.engine
    )
    before = loop.call(client.reported_versions())[0]
    loop.call(client.update_weight_version("1"))
    yield client
    loop.call(client.control(urls[:1]).update_weight_version(before))
    loop.call(client.close())


@pytest.fixture(scope="module")
def model(tiny_moe_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()


def collecting(client, loop, progress):
    return loop.submit(
        client.generate(
            PROMPTS, LONG, samples_per_prompt=SAMPLES, on_progress=lambda *seen: progress.append(seen)
        )
    )


def assert_whole(trajectories, progress, model):
    """Every sample once, whole and in its place; no two are one; their log-probs are the model's."""
    total = len(PROMPTS) * SAMPLES
    order = [(p, s) for p in range(len(PROMPTS)) for s in range(SAMPLES)]
    assert [(t.prompt_index, t.sample_index) for t in trajectories] == order
    assert [t.prompt_ids.tolist() for t in trajectories] == [p for p in PROMPTS for _ in range(SAMPLES)]
    assert [(done, of) for done, of, _ in progress] == [(done, total) for done in range(1, total + 1)]
    assert {(t.finish_reason, t.output_ids.numel()) for t in trajectories} == {("length", 96)}
    assert len({tuple(t.output_ids.tolist()) for t in trajectories}) == total
    for t in trajectories:
        assert_is_truth(t, model, atol=5e-5)


def spread(trajectories):
    return {t.server for t in trajectories}


def wait_for(reached):
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_collect_when_one_server_pauses_then_what_it_cut_is_continued_on_the_other(
    client, loop, model, victim, wait_until_sampling
):
    other, url = client.base_urls
    progress = []
    loop.call(client.control([url]).update_weight_version("paused"))  # the same weights, to tell whose tokens
    future = collecting(client, loop, progress)
    wait_until_sampling(url)
    try:
        loop.call(client.control([url]).pause_generation("abort"))
        time.sleep(2.0)  # the other one goes on
        # vLLM may be so fast that the other has ended all by now.
        assert not future.done() or victim.engine == "vllm", future.exception()
    finally:
        loop.call(client.control([url]).continue_generation())
    trajectories = future.result(TIMEOUT_S)
    assert_whole(trajectories, progress, model)
    continued = [t for t in trajectories if [s.version for s in t.weight_versions] == ["paused", "1"]]
    assert continued and {t.server for t in continued} == {other}
    assert url in spread(trajectories)  # it has sampled before or after its pause
    counts = client.counts()
    assert len(continued) <= counts["continuations"] <= 16
    assert (counts["samples"], counts["abort"], counts["left_out"], counts["retries"]) == (32, 0, 0, 0)


@pytest.fixture
def push(client, loop, tiny_moe_dir):
    """push(version, norm): the model with a final norm, and so logits, of `norm` times the
    size. Puts it back.
    """
    weights = load_file(tiny_moe_dir / "model.safetensors")
    servers = WeightServers(client, loop, DistributedTransport(client.control, loop, backend="gloo"))
    before = loop.call(client.reported_versions())[0]

    def send(version, norm=1.0):
        states = servers.find()
        servers.use(states)
        servers.begin()
        servers.send(list((weights | {NORM: norm * weights[NORM]}).items()), version)
        servers.end(version)
        servers.expect(version)
        servers.resume()
        return states

    yield send
    send(before)
    servers.close()


@drill(
    "SIGKILL of a server while it samples, then a new one at its address",
    promised="no sample lost; stale weights are not sampled from; back after the next push",
)
def test_collect_when_one_server_is_killed_then_none_is_lost_and_it_returns_with_the_right_weights(
    client, loop, model, victim, push, wait_until_sampling
):
    survivor, url = client.base_urls
    progress = []
    assert push("1") == [READY, READY]
    future = collecting(client, loop, progress)
    wait_until_sampling(url)
    victim.kill()
    assert_whole(future.result(TIMEOUT_S), progress, model)
    counts = client.counts()
    assert (counts["left_out"], counts["rejoined"], counts["samples"]) == (1, 0, 32)
    assert 1 <= counts["retries"] <= 8  # as many as it had in flight, of 16

    assert push("2", norm=2.0) == [READY, ABSENT]
    victim.start_again()  # with the weights of its folder, which it calls "default"
    wait_for(lambda: client.counts()["stale"] == 1)
    assert spread(loop.call(client.generate(PROMPTS, SHORT))) == {survivor}
    assert client.counts()["rejoined"] == 0

    assert push("3", norm=2.0) == [READY, RESTARTED]
    wait_for(lambda: client.counts()["rejoined"] == 1)
    trajectories = loop.call(client.generate(PROMPTS, SHORT, samples_per_prompt=SAMPLES))
    assert spread(trajectories) == {survivor, url} and client.counts()["left_out"] == 1
    for t in trajectories:
        assert t.oldest_version == "3"
        assert_is_truth(t, model, atol=1e-4, temperature=0.5)  # logits of twice the size
