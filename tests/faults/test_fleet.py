"""Servers that join and leave a run by a file, from none to two, to none, to one: nothing is lost."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.drills import drill, long
from tests.matrix.engine_pair import SCRIPT, check_samples, samples_of, steps_of
from tests.mcore.launched import REWARD, launch
from tests.preloaded import PreloadedServer, address
from tools.cpu import environment, sglang_arguments

KILLING = Path(__file__).with_name("server_killed_pretrain.py")
STEPS = 8
DRAIN_S = 5
CHANGING = [
    *("--rollout-servers-poll-s", 0.3),
    *("--rollout-servers-drain-s", DRAIN_S),
    *("--rollout-servers-wait-s", 300),
]


@contextmanager
def fleet(model, folder, *dtypes):
    """A started SGLang server of each number type, in order."""
    address("megatron")
    servers = [
        PreloadedServer(
            model,
            engine="sglang",
            dtype=dtype,
            log_path=folder / f"server{number}.log",
            extra_arguments=[*sglang_arguments(), "--enable-deterministic-inference"],
            environment=environment("sglang"),
        )
        for number, dtype in enumerate(dtypes)
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.stop()


def write_list(path, servers):
    """Replace the list at once, as a fleet's manager should."""
    made = path.with_suffix(".new")
    made.write_text("# the fleet\n" + "".join(f"{server.url}\n" for server in servers))
    os.replace(made, path)


def run(folder, model, *flags, steps=STEPS, script=SCRIPT, **variables):
    """The ended run of two replicas in this folder, which keeps samples, weights and events."""
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    own = [
        ("--rollout-prompts", folder / "prompts.jsonl"),
        ("--rollout-reward-function", f"{folder / 'reward.py'}:reward"),
        ("--rollout-server-check", "semantic"),
        ("--global-batch-size", 16),
        ("--train-iters", steps),
        ("--save-interval", 100),
        ("--rollout-save-trajectories", folder / "run/samples"),
        ("--rollout-save-hf", folder / "run/hf"),
        ("--rollout-save-hf-interval", 1),
        ("--rollout-events", folder / "events.jsonl"),
        ("--rollout-max-concurrency", 2),
    ]
    given = [word for pair in own for word in pair]
    words = ["--moe-grouped-gemm", "--moe-permute-fusion", *given, *flags]
    return launch(folder, "run", model, None, script, *words, processes=2, tokens=8, **variables)


def wait_for(happened, running, seconds=240):
    """Until happened(); the run must not have ended."""
    end = time.monotonic() + seconds
    while not happened():
        assert not running.done(), running.result().stdout[-6000:] + running.result().stderr[-6000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def told(folder, kind, server=None):
    """The events of a kind so far, of one server or of any."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [one for one in map(json.loads, lines) if one["kind"] == kind]
    return [one for one in events if server is None or one["server"] == server.url]


@long
@drill(
    "a fleet of none, then two servers, none, and one again, during a run",
    promised="the run waits and goes on; every sample once, labelled with its weights; rewards of a twin",
)
def test_run_when_servers_come_and_go_then_nothing_is_lost_or_doubled(tiny_moe_dir, tmp_path, seen):
    listed, folder = tmp_path / "servers.txt", tmp_path / "changing"
    transport = ["--rollout-weight-transport", "tensor"]
    with fleet(tiny_moe_dir, tmp_path, "float32", "float32") as servers, ThreadPoolExecutor(1) as thread:
        a, b = servers
        running = thread.submit(
            run, folder, tiny_moe_dir, "--rollout-servers-file", listed, *transport, *CHANGING
        )
        try:
            wait_for(lambda: told(folder, "servers_awaited"), running)
            write_list(listed, [a, b])
            wait_for(lambda: len(steps_of(folder)) >= 2, running)
            write_list(listed, [])
            wait_for(lambda: len(told(folder, "servers_awaited")) >= 2, running)
            time.sleep(DRAIN_S + 2)  # what is in flight may end a step
            stopped = len(steps_of(folder))
            time.sleep(3)
            assert len(steps_of(folder)) == stopped < STEPS
        finally:
            listed_at = time.time()
            write_list(listed, [b])
        done = running.result()
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        check_samples(folder, {"sglang": servers}, tiny_moe_dir, STEPS)
        twin = run(tmp_path / "twin", tiny_moe_dir, "--rollout-url", a.url, b.url, *transport)
        assert twin.returncode == 0, twin.stderr[-6000:]
    samples = samples_of(folder)
    assert {row["server"] for row in samples[1]} == {a.url, b.url}
    assert {row["server"] for row in samples[STEPS]} == {b.url}
    (joined,) = told(folder, "server_joined")
    assert joined["server"] == b.url
    assert sorted(one["server"] for one in told(folder, "server_removed")) == sorted([a.url, b.url])
    own, others = ([step["reward/mean"] for step in steps_of(one)] for one in (folder, tmp_path / "twin"))
    assert own == pytest.approx(others, abs=1e-6)
    seen(
        f"no server after step {stopped}; one joins after {joined['time'] - listed_at:.0f} s; rewards of "
        f"{STEPS} steps as the twin's"
    )


@long
@drill(
    "servers that join a run ahead of its training: one is well, one of another number type; one is killed",
    promised="the well one is sampled from, the other left out by name, the killed one joins anew",
)
def test_run_when_one_that_joins_does_not_fit_then_it_is_left_out_and_named(tiny_moe_dir, tmp_path, seen):
    listed, folder, steps = tmp_path / "servers.txt", tmp_path / "ahead", 14
    transport = ["--rollout-weight-transport", "disk", "--rollout-weight-dir", tmp_path / "weights"]
    flags = ["--rollout-servers-file", listed, *transport, *CHANGING, "--rollout-max-lag", 1]
    with (
        fleet(tiny_moe_dir, tmp_path, "float32", "float32", "bfloat16") as servers,
        ThreadPoolExecutor(1) as thread,
    ):
        a, b, other = servers
        write_list(listed, [a])
        running = thread.submit(run, folder, tiny_moe_dir, *flags, steps=steps)
        wait_for(lambda: len(steps_of(folder)) >= 2, running)
        write_list(listed, [a, b, other])
        wait_for(lambda: told(folder, "server_joined", b) and told(folder, "server_refused", other), running)
        os.killpg(a.pid, signal.SIGKILL)
        a.stop()
        wait_for(lambda: told(folder, "server_removed", a), running)
        a.start().wait_ready()
        wait_for(lambda: told(folder, "server_joined", a), running)
        done = running.result()
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        check_samples(folder, {"sglang": [a, b]}, tiny_moe_dir, steps, lag=1)
    assert "it computes in bfloat16" in told(folder, "server_refused", other)[0]["reason"]
    # what takes a new server seconds is asked before all ranks wait for it to join
    asked = (tmp_path / "server1.log").read_text()
    assert asked.index("/openapi.json") < asked.index("/pause_generation")
    last = {row["server"] for row in samples_of(folder)[steps]}
    assert last and other.url not in last
    seen("joined, left out by name, killed and joined anew")


@long
@drill(
    "the only server of a fleet that changes is killed in a push, then started again at its address",
    promised="the run waits for it, sends it the weights, and goes on",
)
@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_run_when_its_only_server_dies_in_a_push_then_it_waits_and_goes_on(
    transport, tiny_moe_dir, tmp_path, seen
):
    listed, folder = tmp_path / "servers.txt", tmp_path / "killed"
    flags = ["--rollout-servers-file", listed, "--rollout-weight-transport", transport, *CHANGING]
    with fleet(tiny_moe_dir, tmp_path, "float32") as (only,), ThreadPoolExecutor(1) as thread:
        write_list(listed, [only])
        killed = {"KILL_SERVER": f"{only.pid} {only.url} 3:/pause_generation"}
        running = thread.submit(run, folder, tiny_moe_dir, *flags, steps=5, script=KILLING, **killed)
        wait_for(lambda: told(folder, "server_removed", only), running)
        only.stop()
        only.start().wait_ready()
        done = running.result()
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        assert "[killed] /pause_generation" in done.stdout
        check_samples(folder, {"sglang": only}, tiny_moe_dir, 5)
    (joined,) = told(folder, "server_joined")
    assert joined["version"].endswith("-2")  # the third push was of the weights after two steps
    seen("killed in the third push; it joined anew with the weights of that push")


@long
@drill(
    "a server is killed in the push by which it joins a run, then started again at its address",
    promised="it is left out by name, the run goes on with the other, and it joins later",
)
def test_run_when_a_server_dies_as_it_joins_then_the_others_go_on_and_it_joins_later(
    tiny_moe_dir, tmp_path, seen
):
    listed, folder, steps = tmp_path / "servers.txt", tmp_path / "joining", 40
    flags = ["--rollout-servers-file", listed, "--rollout-weight-transport", "distributed", *CHANGING]
    with fleet(tiny_moe_dir, tmp_path, "float32", "float32") as servers, ThreadPoolExecutor(1) as thread:
        stays, joins = servers
        write_list(listed, [stays])
        killed = {"KILL_SERVER": f"{joins.pid} {joins.url} 1:/pause_generation"}
        running = thread.submit(run, folder, tiny_moe_dir, *flags, steps=steps, script=KILLING, **killed)
        wait_for(lambda: len(steps_of(folder)) >= 1, running)
        write_list(listed, servers)
        wait_for(lambda: told(folder, "server_refused", joins), running)
        refused_at = len(steps_of(folder))
        joins.stop()
        joins.start().wait_ready()
        wait_for(lambda: told(folder, "server_joined", joins), running)
        joined_at = len(steps_of(folder))
        done = running.result()
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
        check_samples(folder, {"sglang": servers}, tiny_moe_dir, steps)
    assert "it could not join: " in told(folder, "server_refused", joins)[0]["reason"]
    assert told(folder, "server_removed") == [] and joined_at > refused_at
    assert joins.url in {row["server"] for row in samples_of(folder)[steps]}
    seen(f"left out in step {refused_at + 1}, joined in step {joined_at + 1}")
