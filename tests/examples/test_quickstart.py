"""The quickstart as a user starts it: a real server, real Megatron, four processes; and what
it leaves behind.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from megatron_rl_corr.observability.catalogue import catalogue, spec_of
from megatron_rl_corr.observability.metrics_file import read_metrics
from megatron_rl_corr.rollout.sample_file import read_sampling, read_trajectories
from tests.preloaded import PreloadedPopen, preload_all
from tests.router_process import RouterProcess
from tests.tiers import long, matrix
from tools.cpu import environment
from tools.process_group import group_members

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "examples/quickstart/run.py"
FORKED = ROOT / "tests/examples/forked_quickstart.py"
"""Where only what is trained matters: how torchrun starts and ends ranks, the other tests show."""
PRELOADED = [FORKED, "--torchrun"]
"""Where it does not matter how the server starts."""
IN_FLOAT32 = ["--server-dtype", "float32", "--"]
MARK = "TEST_QUICKSTART_OUT"
STEPS = 28
LEARNS_FASTER = ["--", "--lr", "4e-3"]
"""Twice the quickstart's rate: the reward rises as far in two thirds of the steps."""
FEW = 5


class Quickstart:
    """A running quickstart whose output is read line by line; ended, with all it started, when
    the test leaves.
    """

    def __init__(self, out, *options, program=(RUN,)):
        self.out = out
        self.lines = []
        if forked := program == [FORKED]:
            preload_all()
        self.process = (PreloadedPopen if forked else subprocess.Popen)(
            [sys.executable, *program, "--out", out, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**(environment("megatron") if forked else os.environ), MARK: str(out)},
            # A shell gives what it starts in the background an ignored SIGINT, and it is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self.process.stdout.close()

    def read_until(self, text):
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        pytest.fail(f"{text!r} never came:\n{self.text}")

    def finish(self):
        self.lines += self.process.stdout.readlines()
        return self.process.wait(60)

    @property
    def text(self):
        return "".join(self.lines)

    def groups(self):
        """The process groups it has started so far: the server's, then torchrun's."""
        path = ROOT / "runs/quickstart" / f"running-{self.process.pid}.json"
        return [group["pid"] for group in json.loads(path.read_text())["groups"]]


def left_of(out):
    """Command lines of living processes that inherited the run's mark, in whatever group or
    session they are.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(out):
                found.append(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended meanwhile, or belongs to another user
    return found


def saved_samples(folder, steps, temperature=1.0):
    """All samples of these steps on disk; they tell the same mismatch, reward and
    rejection as the metrics.
    """
    everything = []
    for step in steps:
        paths = sorted(folder.glob(f"step_{step['step']:06d}_replica*.parquet"))
        samples = [sample for path in paths for sample in read_trajectories(path)]
        assert len(samples) == 64
        assert {read_sampling(path).temperature for path in paths} == {temperature}
        d = torch.cat([log_ratios(sample) for sample in samples])
        kept = torch.cat([s.loss_mask for s in samples])
        assert step["rollout_corr/valid_tokens"] == len(d)
        assert step["rollout_corr/log_ratio_abs_max"] == pytest.approx(d.abs().max().item(), rel=1e-5)
        assert step["rollout_corr/kl"] == pytest.approx(-d.double().mean().item(), rel=1e-3, abs=1e-9)
        assert step["rollout_corr/kept_fraction"] == pytest.approx(kept.double().mean().item())
        assert step["reward/mean"] == pytest.approx(sum(s.reward for s in samples) / 64)
        assert all((s.advantages == s.advantages[:1]).all() for s in samples)
        everything += samples
    return everything


def log_ratios(sample):
    return sample.train_logprobs - sample.trajectory.rollout_logprobs


def assert_no_mismatch(samples, ties=1):
    """Both engines in float32 agree to 1e-4 on every sample, but for one whose router came too near a tie.

    Two experts whose router logits are nearer than float32 rounds: each engine takes another one, and is
    right. That befalls one sample in some ten thousand; a push that went wrong would move them all.
    Replayed routes leave no tie.
    """
    apart = [sample for sample in samples if log_ratios(sample).abs().max() > 1e-4]
    assert len(apart) <= ties, [log_ratios(sample).abs().max().item() for sample in apart]


@long
def test_quickstart_then_reward_is_learned(tmp_path):
    with Quickstart(tmp_path / "run", "--steps", str(STEPS), *LEARNS_FASTER) as quickstart:
        assert quickstart.finish() == 0, quickstart.text
    assert_learned(read_metrics(quickstart.out / "metrics.jsonl"))
    assert_sampled_and_drawn(quickstart, [quickstart.out])


def test_quickstart_of_a_few_steps_then_the_mismatch_is_seen_and_drawn(tmp_path):
    with Quickstart(tmp_path / "run", "--steps", str(FEW), program=[FORKED]) as quickstart:
        assert quickstart.finish() == 0, quickstart.text
    steps = read_metrics(quickstart.out / "metrics.jsonl")
    assert len(steps) == FEW
    assert_mismatch_seen(steps)
    # What is logged is explained, and what is explained is logged.
    assert {name for name in steps[0] if spec_of(name) is None} == set()
    always = {name for name, spec in catalogue().items() if not spec.only_with and not name.endswith("/")}
    assert always - set(steps[0]) == set()
    assert_sampled_and_drawn(quickstart, [quickstart.out], FEW)


def assert_learned(steps):
    rewards = [step["reward/mean"] for step in steps]
    assert len(steps) == STEPS
    assert sum(rewards[:5]) / 5 < 0.35
    assert sum(rewards[-5:]) / 5 >= 0.8
    assert any(step["rollout_corr/kept_fraction"] < 1 for step in steps)
    assert_mismatch_seen(steps)


def assert_mismatch_seen(steps):
    for number, step in enumerate(steps, start=1):
        assert step["weight_version"] == number and step["weight_lag"] == 0
        assert step["rollout_corr/k3_kl"] > 1e-7 and step["rollout_corr/log_ratio_abs_max"] > 1e-3
        assert 0 < step["rollout_corr/kept_fraction"] <= 1 and step["skipped"] == 0
    assert all(
        step["rollout/groups_running"] == 0 == step["rollout/mixed_version_fraction"] for step in steps
    )


def assert_sampled_and_drawn(quickstart, runs, steps=STEPS):
    """What the server was asked for by trainings of so many steps, and what each of them
    leaves in its folder.
    """
    # Every sample was requested over HTTP: each step's 64, and 17 to check the server first. One push before
    # the first step, one after each; the probe's 5 texts are scored after every push, and before the first,
    # and one response is sampled and scored. A further round has 8 texts and 8 such responses.
    log = (quickstart.out / "server.log").read_text()
    further = log.count("POST /generate HTTP/1.1") - len(runs) * (steps * 64 + 17 + (steps + 1) * 7 + 5)
    assert further >= 0 and further % 24 == 0, further
    assert log.count("POST /update_weights_from_distributed") >= len(runs) * (steps + 1)
    assert log.count("POST /end_weight_update") == len(runs) * (steps + 1)
    for run in runs:
        assert f"the run, drawn: {run / 'report.html'}" in quickstart.text
        assert (run / "report.html").stat().st_size > 50_000
        assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert quickstart.text.count("[rl-corr]") >= len(runs) * steps
    assert left_of(quickstart.out) == []


@long
def test_quickstart_when_asynchronous_then_trained_twice_and_the_second_run_is_ahead(tmp_path):
    with Quickstart(tmp_path / "run", "--steps", "2", "--asynchronous", program=[FORKED]) as quickstart:
        assert quickstart.finish() == 0, quickstart.text
    assert_ahead(read_metrics(quickstart.out / "asynchronous/metrics.jsonl"), steps_wanted=2)
    assert "asynchronous sampled and trained " in quickstart.text
    assert (quickstart.out / "comparison.png").stat().st_size > 10_000


@long
def test_quickstart_when_colocated_then_the_server_gets_its_memory_back_for_every_step(tmp_path):
    given = ["--steps", "3", "--colocate", "--router-replay", "R3", *IN_FLOAT32]
    saves = ["--rollout-save-trajectories", str(tmp_path / "samples")]
    with Quickstart(tmp_path / "run", *given, *saves, program=[FORKED]) as quickstart:
        assert quickstart.finish() == 0, quickstart.text
    assert "servers that have released their memory to the trainer: 1" in quickstart.text
    steps = read_metrics(quickstart.out / "metrics.jsonl")
    assert [step["weight_version"] for step in steps] == [1, 2, 3]
    assert_no_mismatch(saved_samples(tmp_path / "samples", steps), ties=0)
    assert all(
        step["time/release_s"] > 0 and 0 < step["time/resume_s"] < step["time/push_s"] for step in steps
    )


def assert_ahead(steps, *, steps_wanted):
    """With samples made during the step before: of weights that are mostly one version old."""
    assert [step["weight_version"] for step in steps] == list(range(1, steps_wanted + 1))
    assert steps[0]["weight_lag"] == 0 and all(step["weight_lag"] >= 1 for step in steps[1:])
    assert all(0 < step["weight_lag_token_mean"] <= step["weight_lag"] for step in steps[1:])
    # A step's 8 groups are taken while up to 8 more are begun, but for the last step, which needs no more.
    assert all(step["rollout/groups_running"] + step["rollout/groups_ready"] == 8 for step in steps[:-1])
    assert steps[-1]["rollout/groups_running"] == steps[-1]["rollout/groups_ready"] == 0
    assert all(step["rollout/groups_dropped"] == 0 for step in steps)
    assert all(step["skipped"] == 0 for step in steps)


@long
def test_server_killed_in_mid_run_then_training_ends_naming_it_and_a_new_run_goes_on_from_the_checkpoint(
    tmp_path,
):
    # Truncated sampling: both sides renormalise on the ids that the server kept.
    sampling = ["--rollout-temperature", "0.8", "--rollout-top-p", "0.9", "--rollout-top-k", "40"]
    save = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1"]
    save += ["--rollout-save-trajectories", str(tmp_path / "samples")]
    with Quickstart(tmp_path / "run", *IN_FLOAT32, *sampling, *save, program=PRELOADED) as quickstart:
        quickstart.read_until("[rl-corr]      3 ")
        groups = quickstart.groups()
        os.killpg(groups[0], signal.SIGKILL)
        killed = time.monotonic()
        assert quickstart.finish() == 1
        assert time.monotonic() - killed < 60
    told = [line for line in quickstart.lines if line.startswith("megatron_rl_corr: ")]
    [message] = [line for line in told if " failed: " not in line]
    # Those that torchrun had not ended yet name the rank that knows.
    assert all(message.partition(": ")[2].strip() in line for line in told)
    assert "rollout server http://127.0.0.1:" in message and " POST /" in message
    assert "Traceback" not in quickstart.text
    assert [group_members(group) for group in groups] == [[], []]
    assert left_of(quickstart.out) == []

    before = read_metrics(quickstart.out / "metrics.jsonl")
    assert len(before) >= 3
    assert_no_mismatch(saved_samples(tmp_path / "samples", before, temperature=0.8))
    # The weights did move, so it was the push that kept the two together.
    assert all(step["grad_norm"] > 0 for step in before) and before[0]["rollout_corr/valid_tokens"] > 300
    saved = int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert saved >= 2
    cursor = json.loads((tmp_path / f"checkpoints/iter_{saved:07d}/rollout_cursor.json").read_text())
    assert (cursor["next"], cursor["again"]) == (8 * saved, [])  # 8 groups a step, none of which was replaced

    # In another layout: two replicas, whose weights are gathered late, between the optimizer's step and
    # the next forward pass. Megatron can't load such an optimizer's state where neither Apex nor
    # Transformer Engine is.
    load = [
        "--load",
        str(tmp_path / "checkpoints"),
        "--no-load-optim",
        "--rollout-save-trajectories",
        str(tmp_path / "later"),
        "--tensor-model-parallel-size",
        "1",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--calculate-per-token-loss",
    ]
    with RouterProcess(tmp_path / "router.log") as router:  # the new run knows the server by its router alone
        load += ["--rollout-url", router.url]
        with Quickstart(tmp_path / "again", *IN_FLOAT32, *sampling, *load, program=[FORKED]) as quickstart:
            quickstart.read_until("is ready after")
            router.add(re.search(r"(http://127.0.0.1:\d+) is ready", quickstart.text)[1])
            quickstart.read_until(f"[rl-corr] {saved + 2:6} ")
            end_by_ctrl_c(quickstart)
    after = read_metrics(quickstart.out / "metrics.jsonl")[:2]
    # The new server started from the first weights: only a push of the loaded ones makes the two agree.
    assert (
        [step["step"] for step in after]
        == [saved + 1, saved + 2]
        == [step["weight_version"] for step in after]
    )
    assert f"prompts go on at place {8 * saved} of their sequence" in quickstart.text
    assert_no_mismatch(saved_samples(tmp_path / "later", after, temperature=0.8))
    assert after[0]["loss/entropy"] < before[0]["loss/entropy"]


def end_by_ctrl_c(quickstart):
    """Nothing is left of it."""
    groups = quickstart.groups()
    assert all(group_members(group) for group in groups)
    quickstart.process.send_signal(signal.SIGINT)
    assert quickstart.finish() == 130, quickstart.text
    assert [group_members(group) for group in groups] == [[], []]
    assert left_of(quickstart.out) == []


@long
def test_quickstart_when_replayed_without_logits_over_cp_and_vpp_then_no_mismatch(
    tmp_path,
):
    # Each row cut over two ranks, each stage's layers in two parts, no logits, and the server's
    # experts in training.
    layout = [
        "--tensor-model-parallel-size",
        "1",
        "--context-parallel-size",
        "2",
        "--num-layers-per-virtual-pipeline-stage",
        "1",
        "--rollout-linear-logprobs",
        "--rollout-fp32-lm-head",
        "--rollout-save-trajectories",
        str(tmp_path / "samples"),
    ]
    with Quickstart(
        tmp_path / "run", "--steps", "4", "--router-replay", "R3", *IN_FLOAT32, *layout, program=[FORKED]
    ) as quickstart:
        assert quickstart.finish() == 0, quickstart.text
    steps = read_metrics(quickstart.out / "metrics.jsonl")
    assert [step["weight_version"] for step in steps] == [1, 2, 3, 4]
    assert_no_mismatch(saved_samples(tmp_path / "samples", steps), ties=0)
    assert all(step["grad_norm"] > 0 for step in steps) and steps[0]["rollout_corr/valid_tokens"] > 300


def test_stop_while_the_server_starts_then_no_process_is_left(tmp_path):
    out = tmp_path / "run"
    with Quickstart(out) as quickstart:
        quickstart.read_until("2/4 starting SGLang")
        quickstart.read_until("waiting for the server")
        [server] = quickstart.groups()
        # Only this one: another test's quickstart may be running in the same checkout.
        stop = [sys.executable, RUN, "--stop", "--out"]
        elsewhere = subprocess.run([*stop, tmp_path], capture_output=True, text=True, timeout=60)
        assert elsewhere.stdout == f"[quickstart] no quickstart is running that writes to {tmp_path}\n"
        assert quickstart.process.poll() is None
        subprocess.run([*stop, out], check=True, timeout=60)
        assert quickstart.finish() == 143
        assert "stopped by SIGTERM" in quickstart.text
    assert group_members(server) == []
    assert left_of(tmp_path / "run") == []
