"""Servers that join and leave a run by a file, from none to two, to none, to one: nothing is lost."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from megatron_rl_corr.observability.metrics_file import read_metrics
from tests.faults.drills import drill, long
from tests.matrix.engine_pair import SCRIPT, check_samples, samples_of, steps_of
from tests.mcore.launched import REWARD, launch
from tests.preloaded import PreloadedServer, address
from tools.cpu import environment, sglang_arguments

STEPS = 8


@contextmanager
def fleet(model, folder, count):
    """So many SGLang servers, which a test may stop and start."""
    address("megatron")
    servers = {
        str(number): PreloadedServer(
            model,
            engine="sglang",
            dtype="float32",
            log_path=folder / f"server{number}.log",
            extra_arguments=sglang_arguments(),
            environment=environment("sglang"),
        )
        for number in range(count)
    }
    try:
        for server in servers.values():
            server.start()
        for server in servers.values():
            server.wait_ready()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def write_list(path, servers):
    """Replace the list at once, as a fleet's manager should."""
    made = path.with_suffix(".new")
    made.write_text("# the fleet\n" + "".join(f"{server.url}\n" for server in servers))
    os.replace(made, path)


def run(folder, model, *flags, steps=STEPS, processes=2, tokens=8):
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
    return launch(folder, "run", model, None, SCRIPT, *words, processes=processes, tokens=tokens)


def wait_for(happened, running, seconds=240):
    """Until happened(); the run must not have ended."""
    end = time.monotonic() + seconds
    while not happened():
        assert not running.done(), running.result().stdout[-6000:] + running.result().stderr[-6000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def told(folder, kind):
    path = folder / "events.jsonl"
    return (
        [] if not path.exists() else [line for line in path.read_text().splitlines() if f'"{kind}"' in line]
    )


CHANGING = ["--rollout-servers-poll-s", 0.3, "--rollout-servers-drain-s", 5, "--rollout-servers-wait-s", 300]


@long
@drill(
    "a fleet of none, then two servers, none, and one again, during a run",
    promised="the run waits and goes on; every sample once, labelled with its weights; rewards of a twin",
)
@pytest.mark.parametrize("transport", ["tensor"])
def test_run_when_servers_come_and_go_then_nothing_is_lost_or_doubled(
    transport, tiny_moe_dir, tmp_path, seen
):
    listed = tmp_path / "servers.txt"
    flags = ["--rollout-servers-file", listed, "--rollout-weight-transport", transport, *CHANGING]
    with fleet(tiny_moe_dir, tmp_path, 2) as servers, ThreadPoolExecutor(1) as thread:
        a, b = servers.values()
        running = thread.submit(run, tmp_path, tiny_moe_dir, *flags)
        wait_for(lambda: told(tmp_path, "servers_awaited"), running)
        write_list(listed, [a, b])
        wait_for(lambda: len(steps_of(tmp_path)) >= 2, running)
        write_list(listed, [])
        wait_for(lambda: len(told(tmp_path, "servers_awaited")) >= 2, running)
        stopped = len(steps_of(tmp_path))
        a.stop()
        time.sleep(3)
        assert len(steps_of(tmp_path)) == stopped
        write_list(listed, [b])
        done = running.result()
        print(done.stdout[-8000:], done.stderr[-3000:])
        assert done.returncode == 0, done.stderr[-6000:]
        check_samples(tmp_path, servers, tiny_moe_dir, STEPS)
    samples = samples_of(tmp_path)
    assert {row["server"] for row in samples[1]} == {a.url, b.url}
    assert {row["server"] for row in samples[STEPS]} == {b.url}
    joined, removed = told(tmp_path, "server_joined"), told(tmp_path, "server_removed")
    assert len(joined) == 1 and len(removed) == 2
    read_metrics(tmp_path / "run/log/metrics.jsonl")
    seen(f"{len(joined)} joined, {len(removed)} left; none for a while after step {stopped}")
