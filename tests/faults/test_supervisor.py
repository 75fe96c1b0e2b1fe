"""torchrun starts a run again whose rank was killed: it goes on at its checkpoint, with fewer servers too."""

import contextlib
import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from torch.distributed import TCPStore
from torch.distributed.rendezvous import rendezvous

from megatron_rl_corr.events import read_events
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.reduce import restarts
from tests.faults.drills import drill, long
from tests.mcore.launched import REWARD, launch
from tests.preloaded import PreloadedServer, address
from tools.cpu import environment, sglang_arguments
from tools.local_server import free_port

SCRIPT = Path(__file__).with_name("rank_killed_pretrain.py")
TWICE = SCRIPT.with_name("pretrain_twice.py")
OF_THE_RUN = ("run_started", "run_restarted", "run_ended")
STEPS, GROUPS_OF_STEP, GROUP_SIZE = 8, 2, 4


@pytest.fixture
def prefixes(monkeypatch):
    """The handlers of rendezvous as they were before."""
    handlers = rendezvous.__globals__["_rendezvous_handlers"]
    monkeypatch.setitem(handlers, "env", handlers["env"])


@drill("torchrun's store has addresses of the attempt before", promised="the next attempt does not find them")
def test_store_when_torchrun_starts_the_job_again_then_keys_of_the_attempt_before_are_not_found(
    prefixes, monkeypatch
):
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = []
    for attempt in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        restarts.part_attempts()
        store, _, _ = next(rendezvous("env://"))
        found.append(store.check(["address"]))
        store.set("address", attempt)
    assert found == [False, False, False]


def server_of(model, folder, name):
    return PreloadedServer(
        model,
        dtype="float32",
        log_path=folder / f"{name}.log",
        extra_arguments=sglang_arguments(),
        environment=environment("sglang"),
    )


def run(folder, model, urls, kill, *flags, script=SCRIPT, processes=2, **variables):
    """The ended run under `torchrun --standalone --max-restarts 2`; kill: as
    rank_killed_pretrain.py's KILL; variables: of its environment, too.
    """
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12)))
    return launch(
        folder,
        "run",
        model,
        urls,
        script,
        "--train-iters",
        STEPS,
        "--save-interval",
        2,
        "--load",
        folder / "run/checkpoints",
        "--rollout-events",
        folder / "run/events.jsonl",
        "--rollout-metrics-port",
        free_port(),
        "--rollout-save-trajectories",
        folder / "run/samples",
        *flags,
        processes=processes,
        torchrun=["--standalone", "--max-restarts", "2"],
        KILL=kill,
        **variables,
    )


def check_whole(folder):
    """Every step once, every group of the run trained once and whole."""
    assert [row["step"] for row in read_metrics(folder / "run/log/metrics.jsonl")] == list(
        range(1, STEPS + 1)
    )
    files = sorted((folder / "run/samples").glob("step_*.parquet"))
    groups = Counter(row["group"] for file in files for row in pq.read_table(file).to_pylist())
    assert groups == dict.fromkeys(range(STEPS * GROUPS_OF_STEP), GROUP_SIZE)


def kinds(folder):
    return [event["kind"] for event in read_events(folder / "run/events.jsonl")]


@long
@drill(
    "SIGKILL of a rank under torchrun --max-restarts",
    promised="it comes back by itself at the last checkpoint",
)
def test_run_when_rank_0_is_killed_then_torchrun_brings_it_back_at_a_checkpoint(
    trained_server, tiny_moe_dir, tmp_path, seen
):
    done = run(tmp_path, tiny_moe_dir, trained_server.url, "0:6")
    assert done.returncode == 0, done.stderr[-4000:]
    check_whole(tmp_path)
    told = read_events(tmp_path / "run/events.jsonl")
    [restarted] = [event for event in told if event["kind"] == "run_restarted"]
    assert restarted["step"] == 5 and restarted["restarts"] == 1
    assert kinds(tmp_path)[0] == "run_started" and kinds(tmp_path)[-1] == "run_ended"
    seen(f"killed in step 6; goes on {restarted['reason']}")


@long
@drill(
    "SIGKILL of a rank, or a step that fails, and one of two servers is gone when torchrun, or Megatron "
    "within the process, starts the run again",
    promised="it goes on with the other server",
)
@pytest.mark.parametrize("within", [False, True])
def test_run_when_it_fails_and_a_server_is_killed_then_it_comes_back_with_the_other_server(
    trained_server, tiny_moe_dir, tmp_path, seen, within
):
    kill, how = ("", {"script": TWICE, "processes": 1}) if within else ("1:6", {})
    log = tmp_path / "run/log/metrics.jsonl"
    # not on the thread below, with which the process that all runs are forks of would end
    address("megatron")
    with server_of(tiny_moe_dir, tmp_path, "victim") as victim, ThreadPoolExecutor(1) as thread:
        urls = [trained_server.url, victim.url]
        running = thread.submit(
            run, tmp_path, tiny_moe_dir, urls, kill, "--rollout-outage-timeout-s", 60, **how
        )
        while not (log.exists() and len(log.read_text().splitlines()) >= 5):
            assert not running.done(), running.result().stderr[-4000:]
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(victim.pid, signal.SIGKILL)
        done = running.result()  # rank 1 is killed in step 6, or the step fails
        assert done.returncode == 0, done.stderr[-4000:]
        check_whole(tmp_path)
        told = read_events(tmp_path / "run/events.jsonl")
        at_restart = [event for event in told if "does not answer at a restart" in event["reason"]]
        assert [event["server"] for event in at_restart] == [victim.url]
        assert "run_restarted" in kinds(tmp_path)
        seen(f"all {STEPS} steps; the server that is gone is left out until the next start")


@long
@drill(
    "a step fails, and train() is entered again in the same process, as Megatron's in-process restart does",
    promised="servers are left and reached anew, and it goes on at the last checkpoint",
)
def test_run_when_it_is_set_up_again_in_the_same_process_then_it_goes_on_at_a_checkpoint(
    trained_server, tiny_moe_dir, tmp_path, seen
):
    done = run(tmp_path, tiny_moe_dir, trained_server.url, "", script=TWICE, processes=1)
    assert done.returncode == 0, done.stderr[-4000:]
    check_whole(tmp_path)
    told = [event for event in read_events(tmp_path / "run/events.jsonl") if event["kind"] in OF_THE_RUN]
    assert [event["kind"] for event in told] == list(OF_THE_RUN)
    seen(told[1]["reason"])
