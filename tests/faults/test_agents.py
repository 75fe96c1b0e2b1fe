"""Runs on agents' episodes of which a harness, a server or the trainer is killed: no episode is trained
twice, or by halves.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.conftest import running_victim
from tests.faults.drills import drill, long
from tests.matrix.agent_truth import (
    BATCH,
    GROUP,
    check_episodes,
    model_with_template,
    noted,
    run_agents,
    steps_of,
    write_agent_rows,
)
from tests.matrix.patched import unchanged
from tests.preloaded import address
from tests.server_load import wait_until_sampling
from tools.local_server import free_port

SCRIPT = Path(__file__).with_name("agent_killed_pretrain.py")
STEPS, SAVED, KILLED = 6, 2, 4
ALWAYS = ["--rollout-max-failed-fraction", 1]


def wait_for(found, running):
    """What found() gives, once it is something; the run must not have ended."""
    end = time.monotonic() + 240
    while not (what := found()):
        assert not running.done(), running.result().stderr[-4000:]
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
    return what


def under_way(folder, steps=0):
    """An episode that has an answer, and a turn before it."""
    if len(steps_of(folder)) < steps:
        return None
    return next((one for one in noted(folder).values() if len(one.answers) == 1), None)


@drill("SIGKILL of a harness in the middle of its episode", promised="its group is replaced; the run goes on")
def test_run_when_a_harness_is_killed_then_its_group_is_replaced_and_no_half_is_trained(
    trained_server, tiny_moe_dir, tmp_path, seen
):
    write_agent_rows(tmp_path, 32, turns=2, pause_s=0.3)
    model = model_with_template(tiny_moe_dir, tmp_path)
    address("megatron")  # what forks runs must not end with a thread that waits for one
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_agents, tmp_path, trained_server.url, model, *ALWAYS, steps=2, tokens=16)
        victim = wait_for(lambda: under_way(tmp_path), running)
        os.kill(victim.pid, signal.SIGKILL)
        done = running.result()
    assert done.returncode == 0, done.stderr[-6000:]
    assert "ended by SIGKILL before it returned" in done.stdout + done.stderr
    trained, _ = check_episodes(tmp_path, model, steps=2)
    steps = steps_of(tmp_path)
    assert sum(step["rollout/failed/agent"] for step in steps) == 1
    assert sum(step["rollout/groups_replaced"] for step in steps) == 1
    assert victim.row not in {samples[0].origin.row for samples in trained.values()}
    [left] = [one for one in noted(tmp_path).values() if one.pid == victim.pid]
    assert left.reward is None
    seen(f"{len(trained)} episodes trained, each whole; one failed under agent")


@pytest.fixture(params=["sglang", "vllm"])
def two_servers(request, tiny_moe_dir, tmp_path):
    """(a shared server, which gets its weights back, and a victim) of each engine."""
    if request.param == "sglang":
        yield request.getfixturevalue("trained_server"), request.getfixturevalue("victim")
        return
    with unchanged(request.getfixturevalue("vllm_server_fp32"), tiny_moe_dir) as server:
        for victim in running_victim("vllm", tiny_moe_dir, tmp_path):
            yield server, victim


@long
@drill(
    "one of two servers is killed in the middle of episodes, lag 2; SGLang, vLLM",
    promised="episodes go on at the other, token by token",
)
def test_run_when_a_server_of_two_is_killed_then_episodes_go_on_at_the_other(
    two_servers, tiny_moe_dir, tmp_path, seen
):
    write_agent_rows(tmp_path, 64)
    model = model_with_template(tiny_moe_dir, tmp_path)
    address("megatron")
    other, victim = two_servers
    urls, flags = [other.url, victim.server.url], ["--rollout-max-lag", 2, *ALWAYS]
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_agents, tmp_path, urls, model, *flags, steps=STEPS, tokens=90)
        wait_for(lambda: under_way(tmp_path, steps=2), running)
        wait_until_sampling(victim.server.url)
        victim.kill()
        before = {name for name, one in noted(tmp_path).items() if one.answers and one.reward is None}
        done = running.result()
    assert done.returncode == 0, done.stderr[-6000:]
    trained, changed = check_episodes(tmp_path, model, steps=STEPS, lag=2)
    servers = [
        {sample.trajectory.server for sample in samples}
        for (step, _, _), samples in trained.items()
        if step == STEPS
    ]
    assert set().union(*servers) == {other.url}
    ended = sum(noted(tmp_path)[name].reward is not None for name in before)
    assert before and ended == len(before)  # none of them began anew
    steps = steps_of(tmp_path)
    assert sum(step["rollout/failed/agent"] for step in steps) == 0
    assert sum(step["rollout/retries"] for step in steps) > 0
    seen(f"{ended} episodes under way ended at the other server; {changed} answers saw a push")


def of_the_run(mark):
    """Processes that inherit this variable and run agents."""
    found = []
    for process in psutil.process_iter():
        try:
            runs = any("agents.starter" in word for word in process.cmdline())
            if runs and mark.items() <= process.environ().items():
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@long
@pytest.mark.parametrize(("moment", "lag"), [("collect", 0), ("train", 2)])
@drill(
    "SIGKILL of all ranks and torchrun while agents run, then --load; lag 0 and 2",
    promised="no harness is left, each row is trained once, at the gateway's old port",
)
def test_run_when_the_trainer_is_killed_and_loaded_then_no_episode_is_trained_twice(
    moment, lag, trained_server, tiny_moe_dir, tmp_path, seen
):
    write_agent_rows(tmp_path, 64, pause_s=0.2)
    model, mark = model_with_template(tiny_moe_dir, tmp_path), {"AGENT_DRILL": str(tmp_path)}
    flags = ["--rollout-max-lag", lag] if lag else []
    flags += ["--save-interval", SAVED, "--rollout-gateway-port", free_port()]
    how = {"steps": STEPS, "script": SCRIPT, **mark}
    killed = run_agents(tmp_path, trained_server.url, model, *flags, KILL_AT=f"{moment}:{KILLED}", **how)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    begun, cut = time.monotonic(), [one for one in noted(tmp_path).values() if one.reward is None]
    while left := of_the_run(mark):
        assert time.monotonic() < begun + 30, left
        time.sleep(0.05)
    assert cut and not any(psutil.pid_exists(one.pid) for one in cut)
    load = ["--load", tmp_path / "run/checkpoints"]
    done = run_agents(tmp_path, trained_server.url, model, *flags, *load, KILL_AT="none:0", **how)
    assert done.returncode == 0, done.stderr[-6000:]
    trained, _ = check_episodes(tmp_path, model, steps=STEPS, lag=lag)
    assert {group for _, group, _ in trained} == set(range(STEPS * BATCH // GROUP))
    assert of_the_run(mark) == []
    seen(f"{len(cut)} harnesses were cut; each of {STEPS * BATCH} episodes trained once")
