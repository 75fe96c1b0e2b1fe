"""Corrected steps under the launcher at TP 2 x PP 2 x EP 2, on every release whose wheel has
megatron.training.

The samples of the first step are a real server's, answered again to the other releases: the
loss is one for all.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.observability.catalogue import spec_of
from tests.forked_torchrun import forking
from tests.matrix.patched import cpu_flags, unchanged
from tests.matrix.releases import WITH_TRAINING, checkout, chosen, release_environment
from tests.matrix.replaying_server import ReplayingServer
from tests.preloaded import run_preloaded
from tools.local_server import free_port

HERE = Path(__file__).resolve().parent
RELEASES = [*checkout(), *(release for release in WITH_TRAINING if release in chosen())][::-1]
SAMPLES, STEPS = 16, 2
HELD_OUT = [[5, 9, 2, n] for n in range(3)]
TWICE = [[6, 8, n] for n in range(2)]
LAYOUT = [
    "--tensor-model-parallel-size",
    2,
    "--pipeline-model-parallel-size",
    2,
    "--sequence-parallel",
    "--expert-model-parallel-size",
    2,
    "--expert-tensor-parallel-size",
    1,
    "--global-batch-size",
    SAMPLES,
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--eval-interval",
    STEPS,
]
REWARD = (
    "def reward(prompt, output_ids, finish_reason):\n    return sum(int(i) % 2 for i in output_ids) / 8\n"
)
WANDB = """
# What Megatron uses of Weights & Biases; what is logged goes to a file.
import json, os
class config:
    update = staticmethod(lambda *args, **kwargs: None)
def init(**kwargs): pass
def finish(): pass
def define_metric(*args, **kwargs): pass
def log(values, step=None):
    with open(os.environ["LOGGED_TO_WANDB"], "a") as file:
        file.write(json.dumps([step, {name: float(value) for name, value in values.items()}]) + "\\n")
"""


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """Release -> (folder of the run, what it printed, samples taken and answered again, those of
    held-out prompts).
    """
    found, ids = {}, []
    with unchanged(sglang_server_fp32, tiny_moe_dir), ReplayingServer(sglang_server_fp32.url) as door:
        for release in RELEASES:
            folder = tmp_path_factory.mktemp("launcher")
            door.replay()
            done = launch(release, folder, tiny_moe_dir, door.url)
            assert done.returncode == 0, f"megatron-core {release}:\n{done.stderr[-4000:]}"
            asked = [(json.loads(body), json.loads(answers[-1])) for body, answers in door.samples.items()]
            held_out = [
                [
                    answer["output_ids"]
                    for prompt in prompts
                    for body, answer in asked
                    if body["input_ids"] == prompt
                ]
                for prompts in (HELD_OUT, TWICE)
            ]
            found[release] = folder, done.stdout, door.sampled + door.replayed, door.replayed, held_out
            ids.append(door.run_id)
    assert all(re.fullmatch(rb"[0-9a-f]{8}-", run_id) for run_id in ids) and len(set(ids)) == len(ids)
    return found


def launch(release, folder, model, url):
    (folder / "reward.py").write_text(REWARD)
    (folder / "stand_in").mkdir()
    (folder / "stand_in/wandb.py").write_text(WANDB)
    (folder / "prompts.jsonl").write_text("".join(f'{{"input_ids": [3, 1, 4, {n}]}}\n' for n in range(4, 8)))
    for name, rows in (("held_out", HELD_OUT), ("twice", TWICE)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
    ours = [
        "--rollout-eval-prompts",
        folder / "held_out.jsonl",
        f"twice={folder / 'twice.jsonl'}",
        "--rollout-eval-samples",
        "twice=2",
        "--rollout-eval-pass-reward",
        0.5,
        "--rollout-eval-top-p",
        0.9,
        "--rollout-url",
        url,
        "--rollout-hf-checkpoint",
        model,
        "--rollout-prompts",
        folder / "prompts.jsonl",
        "--rollout-reward-function",
        f"{folder / 'reward.py'}:reward",
        "--rollout-group-size",
        8,
        "--rollout-max-new-tokens",
        8,
        "--rollout-correction-preset",
        "decoupled_token_is",
        "--rollout-server-check",
        "off",
        "--rollout-log-dir",
        folder / "log",
    ]
    logs = [
        "--log-interval",
        1,
        "--tensorboard-dir",
        folder / "tensorboard",
        "--wandb-project",
        "p",
        "--wandb-exp-name",
        "e",
        "--wandb-save-dir",
        folder / "wandb",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "4",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "-m",
        "megatron_rl_corr.launch",
        HERE / "pretrain_any.py",
        *cpu_flags(model),
        *map(str, [*LAYOUT, *logs, *ours]),
    ]
    environment = release_environment(release, folder / "stand_in") | {
        "HF_HUB_OFFLINE": "1",
        "LOGGED_TO_WANDB": str(folder / "wandb.jsonl"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    if release == RELEASES[0]:  # the quickstart shows it under torchrun
        return run_preloaded(forking(command)[1:], env=environment)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def steps_of(folder):
    return [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("release", RELEASES)
def test_launcher_on_a_release_then_corrected_steps_and_the_loss_of_the_newest(release, runs):
    folder, printed, sampled, replayed, _ = runs[release]
    steps, newest = steps_of(folder), steps_of(runs[RELEASES[0]][0])
    assert "lm loss" not in printed, "the script's own step was taken"
    assert printed.count("[rollout] scoring pass: left out (with one update a batch") == 1
    assert [step["weight_version"] for step in steps] == [1, 2]
    assert sampled == SAMPLES * STEPS + len(HELD_OUT) + 2 * len(TWICE)
    for step in steps:
        assert step["skipped"] == 0 and step["grad_norm"] > 0
        # Of the same weights after every push, which the overlapped gather had left in pieces.
        assert 0 <= step["rollout_corr/k3_kl"] < 1e-6
    if release != RELEASES[0]:
        assert replayed >= SAMPLES, "the first step has the same samples"
    names = [name for name in newest[0] if not name.startswith("time/") and name != "tokens_per_s"]
    assert len(names) > 30
    for name in names:
        assert steps[0][name] == pytest.approx(newest[0][name], rel=1e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("release", RELEASES)
def test_metrics_when_megatron_logs_then_they_are_on_its_console_in_its_tensorboard_and_in_wandb(
    release, runs
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, printed, *_ = runs[release]
    steps = steps_of(folder)
    lines = [line for line in printed.splitlines() if " iteration " in line and "consumed samples" in line]
    # Megatron tells the first step's losses at once, and then once more in the first interval's average.
    rewards = [steps[0]["reward/mean"], sum(step["reward/mean"] for step in steps) / 2]
    shown = [float(re.search(r" rollout reward: (\S+) \|", line).group(1)) for line in lines]
    assert shown == pytest.approx(rewards, rel=1e-6)
    assert all(" rollout kept fraction: 1.000000E+00 |" in line for line in lines)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    logged = [json.loads(line) for line in (folder / "wandb.jsonl").read_text().splitlines()]
    for name in ("reward/mean", "loss/policy", "rollout_corr/k3_kl", "time/push_s"):
        assert spec_of(name) is not None
        told = [step[name] for step in steps]
        assert [event.value for event in events.Scalars(name)] == pytest.approx(told, rel=1e-6), name
        assert [(at, values[name]) for at, values in logged if name in values] == list(
            zip([1, 2], told, strict=True)
        ), name
    assert [event.value for event in events.Scalars("rollout reward")] == pytest.approx(
        [step["reward/mean"] for step in steps]
    )
    # What Megatron logs itself goes on.
    assert len(events.Scalars("learning-rate")) == 2 and any(
        "learning-rate" in values for _, values in logged
    )


@pytest.mark.parametrize("release", RELEASES)
def test_evaluation_when_its_interval_is_over_then_held_out_prompts_are_sampled_and_their_reward_is_logged(
    release, runs
):
    folder, printed, _, _, (outputs, twice) = runs[release]
    first, second = steps_of(folder)
    told = [line for line in printed.splitlines() if "held-out reward" in line]
    assert told == [
        f"[rollout] held-out reward after step {STEPS}: {second['eval/reward']:.4f}",
        f"[rollout] held-out reward of twice after step {STEPS}: {second['eval/twice/reward']:.4f}, "
        f"pass@2 {second['eval/twice/pass@2']:.4f}",
    ]
    assert not [name for name in first if name.startswith("eval/")]
    scores = [sum(token % 2 for token in output) / 8 for output in twice]
    assert len(scores) == 4 and second["eval/twice/mean@2"] == pytest.approx(sum(scores) / 4)
    passed = [score >= 0.5 for score in scores]
    assert second["eval/twice/pass@1"] == sum(passed) / 4
    assert second["eval/twice/pass@2"] == (any(passed[:2]) + any(passed[2:])) / 2
    assert (
        second["eval/samples"] == 3 and second["eval/twice/samples"] == 4 and second["eval/twice/failed"] == 0
    )
    assert len(outputs) == len(HELD_OUT)
    rewards = [sum(token % 2 for token in output) / 8 for output in outputs]
    assert second["eval/reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert second["eval/response_length"] == pytest.approx(sum(map(len, outputs)) / len(outputs))
    assert 0 <= second["eval/length_fraction"] <= 1


@pytest.mark.parametrize("release", RELEASES)
def test_describe_when_asked_then_the_release_and_every_place_are_told_and_nothing_is_run(release, tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text("raise SystemExit('the script ran')\n")
    (tmp_path / "holder.py").write_text("from megatron.training.training import train_step as step_of_mine\n")
    code = "import holder, sys; from megatron_rl_corr.launch import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, script, "--rollout-corr-describe"],
        env=release_environment(release, tmp_path) | {"RANK": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *lines = done.stdout.splitlines()
    assert first.startswith(f"megatron-core {release} in {os.sep}")
    at = {line.split("(")[0]: lines[i + 2] for i, line in enumerate(lines) if not line.startswith(" ")}
    assert at == {
        "megatron.training.arguments.add_megatron_arguments": "    at: megatron.training.arguments."
        "add_megatron_arguments",
        "megatron.training.training.setup_model_and_optimizer": "    at: megatron.training.training."
        "setup_model_and_optimizer",
        "megatron.training.training.train_step": "    at: holder.step_of_mine, "
        "megatron.training.training.train_step",
        "megatron.training.checkpointing.save_checkpoint": "    at: "
        "megatron.training.checkpointing.save_checkpoint, "
        "megatron.training.training.save_checkpoint",
        "megatron.training.checkpointing.get_checkpoint_tracker_filename": "    at: "
        "megatron.training.checkpointing.get_checkpoint_tracker_filename",
        "megatron.training.training.checkpoint_and_decide_exit": "    at: megatron.training.training."
        "checkpoint_and_decide_exit",
    }
