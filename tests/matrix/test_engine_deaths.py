"""A run with an SGLang and a vLLM server, of which one is killed and started again: nothing is lost."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.drills import drill
from tests.matrix.engine_pair import ARGUMENTS, check_samples, pair, run, samples_of, steps_of
from tests.server_load import wait_until_sampling
from tests.tiers import long

pytestmark = long
STEPS = 10
FLAGS = [
    "--rollout-max-concurrency",
    2,  # a step's sampling takes long enough to be met
    "--rollout-bucket-mib",
    0.02,
    "--rollout-reward-timeout-s",
    600,
]
TENSOR = ["--rollout-weight-transport", "tensor"]
TWO_SENDERS = ["--rollout-weight-transport", "distributed", "--pipeline-model-parallel-size", 2]
REWARD = """
import pathlib, time

def reward(prompt, output_ids, finish_reason):
    while pathlib.Path("{held}").exists():
        time.sleep(0.1)
    return sum(int(i) % 2 for i in output_ids) / 24
"""


def wait_for(happened, running):
    """Until happened(); the run must not have ended."""
    while not happened():
        assert not running.done(), running.result().stderr[-4000:]
        time.sleep(0.005)


def buckets(server):
    """How many requests with weights an SGLang server has answered; of a vLLM server, how
    many of an update.
    """
    log = server.log_path.read_bytes()
    return log.count(b"POST /update_weights_from") + log.count(b"POST /collective_rpc")


def kill_in_push(server, running):
    before = buckets(server)
    wait_for(lambda: buckets(server) > before + 3, running)
    os.killpg(server.pid, signal.SIGKILL)


def kill_while_sampling(server, running):
    wait_until_sampling(server.url)
    os.killpg(server.pid, signal.SIGKILL)


@drill(
    "a server is killed while it samples, or in a push; SGLang and vLLM, two senders",
    promised="nothing is lost, and a new one at its address is taken in",
)
@pytest.mark.parametrize(
    ("kill", "transport"),
    [(kill_while_sampling, TENSOR), (kill_in_push, TENSOR), (kill_in_push, TWO_SENDERS)],
)
@pytest.mark.parametrize("engine", ARGUMENTS)
def test_server_when_killed_then_nothing_is_lost_and_a_new_one_at_its_address_is_taken_in(
    engine, kill, transport, tiny_moe_dir, tmp_path
):
    held, flags = tmp_path / "held", [*FLAGS, *transport]
    with pair(tiny_moe_dir, tmp_path) as servers, ThreadPoolExecutor(1) as thread:
        victim = servers[engine]
        reward = REWARD.format(held=held)
        running = thread.submit(
            run, tmp_path, servers, tiny_moe_dir, *flags, steps=STEPS, tokens=24, reward=reward
        )
        try:
            wait_for(lambda: len(steps_of(tmp_path)) >= 2, running)
            kill(victim, running)
            wait_for(lambda: len(steps_of(tmp_path)) >= 4, running)  # the other one goes on alone
            held.touch()
            victim.stop()
            victim.start().wait_ready()
        finally:
            held.unlink(missing_ok=True)
        done = running.result()
        assert done.returncode == 0, done.stderr[-6000:]
        check_samples(tmp_path, servers, tiny_moe_dir, STEPS)
    samples, (other,) = samples_of(tmp_path), set(servers) - {engine}
    assert {row["engine"] for row in samples[4]} == {other}
    assert {row["engine"] for row in samples[STEPS]} == set(servers)
    name = {"sglang": "SGLang", "vllm": "vLLM"}[engine]
    for words in (
        "does not answer and misses a weight update",
        "has weights 'default' instead of",
        "is back",
    ):
        assert f"{name} server {victim.url} {words}" in done.stdout, words  # where Megatron's own log goes
    if kill is kill_in_push:
        assert f"sending the weights again to {servers[other].url}: " in done.stdout
    else:
        assert f"{name} server left out: " in done.stdout
