"""Runs whose trainer and server take turns on the same GPUs: the order of requests, and that
nothing else changes.

The memory saver of the server is tools/cpu/sglang_memory.py: what is sampled from memory of before
shows, or ends it.
"""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_rl_corr.rollout import RolloutClient, SamplingParams
from tests.mcore.launched import REWARD, launch, replayed, untimed_steps
from tests.preloaded import PreloadedServer, address, run_preloaded
from tests.tiers import long, matrix
from tools.cpu import environment, sglang_arguments

pytestmark = matrix

SCRIPT = Path(__file__).with_name("colocated_pretrain.py")
TENSOR = ["--rollout-weight-transport", "tensor"]
COLOCATED = [*TENSOR, "--rollout-colocate"]
RUN = [
    "--global-batch-size",
    16,
    "--train-iters",
    4,
    "--save-interval",
    2,
    "--moe-grouped-gemm",
    "--moe-permute-fusion",
    "--rollout-updates-per-batch",
    2,
    "--eval-interval",
    2,
    "--router-replay",
    "R3",
    "--rollout-max-probe-log-ratio",
    1e-4,
]
"""Two batches of two updates each."""


@pytest.fixture(scope="module")
def server(tiny_moe_dir, tmp_path_factory):
    address("megatron")  # what forks runs must not end with a thread that waits for a server
    with PreloadedServer(
        tiny_moe_dir,
        dtype="float32",
        log_path=tmp_path_factory.mktemp("colocated") / "server.log",
        extra_arguments=[*sglang_arguments(), "--enable-memory-saver", "--enable-return-routed-experts"],
        environment=environment("sglang"),
    ) as server:
        yield server


@pytest.fixture(scope="module")
def runs(server, tiny_moe_dir, tmp_path_factory):
    """Name -> (the ended run, its folder): of the same samples, each on a server that the one
    before has left.
    """
    folder, found = tmp_path_factory.mktemp("runs"), {}
    with replayed(server, tiny_moe_dir, folder) as door:
        held_out = folder / "held_out.jsonl"
        held_out.write_text("".join(f'{{"input_ids": [7, 7, {n}]}}\n' for n in range(3)))
        wanted = {"apart": TENSOR, "colocated": COLOCATED}
        for name, flags in wanted.items():
            door.replay()
            more = ["--rollout-eval-prompts", held_out, "--rollout-events", folder / f"{name}.jsonl"]
            done = launch(
                folder, name, tiny_moe_dir, door.url, SCRIPT, *RUN, *more, *flags, processes=2, checks="all"
            )
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = done, folder / name, asyncio.run(sampled(server.url))
    return found


async def sampled(url):
    """A response, whatever the weights are called."""
    async with RolloutClient([url], vocab_size=83, timeout_s=60) as client:
        [sample] = await client.generate([[3, 1, 4]], SamplingParams(4, ignore_eos=True))
        return sample


def test_steps_when_colocated_then_their_numbers_are_those_of_a_run_apart(runs):
    apart, colocated = (untimed_steps(runs[name][1]) for name in ("apart", "colocated"))
    assert len(apart) == 4 and [set(step) for step in apart] == [set(step) for step in colocated]
    for one, other in zip(apart, colocated, strict=True):
        for name in one.keys() - {"packing/moved_bytes"}:
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
    rows = [
        json.loads(line) for line in (runs["colocated"][1] / "log/metrics.jsonl").read_text().splitlines()
    ]
    assert all(row["rollout/probe_max_abs_log_ratio"] < 1e-5 for row in rows[1::2])
    assert [row["step"] for row in rows if "time/release_s" in row] == [1, 3]
    assert [row["step"] for row in rows if "time/resume_s" in row] == [2, 4]
    assert all(0 < row["time/resume_s"] < row["time/push_s"] for row in rows[1::2])


def test_trainer_when_it_frees_memory_then_it_trains_the_same_in_each_precision_with_each_optimizer():
    done = run_preloaded([Path(__file__).with_name("colocation_worker.py")])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"fp32", "fp32 distributed", "bf16", "bf16 distributed"}
    assert all(case["left"] == 0 and case["same"] and case["same_as_a_gpu"] for case in found.values()), found
    # Refused on a GPU: the weights themselves would go to the host.
    assert [name for name, case in found.items() if case["leave"]] == ["fp32"]


RELEASE = ["pause_generation", "flush_cache", "release_memory_occupation weights,kv_cache,cuda_graph"]
TAKE_BACK = [*RELEASE, "trainer takes back, some gradients"]
PUSH = [
    "trainer frees, no gradients",
    "pause_generation",
    "resume_memory_occupation weights",
    "begin_weight_update",
    "update_weights_from_tensor",
    "trainer frees cached blocks",
    "end_weight_update",
    "resume_memory_occupation kv_cache,cuda_graph",
    "flush_cache",
    "continue_generation",
    "trainer frees cached blocks",
]
"""The last line is after the probe."""
BATCH = ["collected", *TAKE_BACK, *PUSH]
SAVE = [*TAKE_BACK, *PUSH]


def memory_lines(done):
    """What changed hands, in order; buckets of one push are one line."""
    lines = [
        line.removeprefix("[memory] ") for line in done.stdout.splitlines() if line.startswith("[memory] ")
    ]
    return [line for before, line in pairwise(["", *lines]) if line != before]


def test_memory_when_colocated_then_it_changes_hands_in_this_order(runs):
    done, *_ = runs["colocated"]
    healthy = ["continue_generation"]  # harmless, to whoever has been left paused
    evaluated = [*BATCH, "evaluates", *SAVE]
    assert memory_lines(done) == [*healthy, *RELEASE, *PUSH, *evaluated, *evaluated]
    assert "servers that have released their memory to the trainer: 1" in done.stdout


def test_server_when_the_run_has_ended_then_it_samples_with_the_last_weights(runs):
    _, folder, sample = runs["colocated"]
    [span] = sample.weight_versions
    assert span.version.endswith("-2") and bool(sample.rollout_logprobs.isfinite().all())
    events = [
        json.loads(line)["kind"] for line in (folder.parent / "colocated.jsonl").read_text().splitlines()
    ]
    assert events == ["run_started", "run_ended"]


@long
def test_run_when_killed_in_the_trainers_turn_then_the_next_start_goes_on(server, tiny_moe_dir, tmp_path):
    """And one that is killed between two states of the server's memory is followed by a
    start that says so.
    """
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 12))
    )
    (tmp_path / "reward.py").write_text(REWARD)
    load = ["--load", tmp_path / "run/checkpoints"]

    def run(steps, *flags, **variables):
        return launch(
            tmp_path,
            "run",
            tiny_moe_dir,
            server.url,
            SCRIPT,
            "--global-batch-size",
            16,
            "--train-iters",
            steps,
            "--save-interval",
            1,
            "--moe-grouped-gemm",
            "--moe-permute-fusion",
            "--rollout-events",
            tmp_path / "events.jsonl",
            *COLOCATED,
            *flags,
            processes=2,
            **variables,
        )

    # of the first batch, its checkpoint, the second
    killed = run(2, KILL_AT="3:trainer takes back, some gradients")
    assert "SIGKILL" in killed.stderr, killed.stderr[-3000:]
    done = run(2, *load)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "run/log/metrics.jsonl").read_text().splitlines()
    ]
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    [taken_over] = [event for event in told if event["kind"] == "server_taken_over"]
    assert steps == [1, 2] and taken_over["version"].startswith("released ")
    more = [*load, "--override-opt_param-scheduler"]  # of more steps than the checkpoint's
    killed = run(3, *more, KILL_AT="1:resume_memory_occupation weights")  # before it is asked
    assert "SIGKILL" in killed.stderr, killed.stderr[-3000:]
    refused = run(3, *more)
    assert refused.returncode == 1 and "nobody knows which it has; restart the server" in refused.stderr
