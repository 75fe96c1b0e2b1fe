"""A checkout's own train_rl.py with our correction: against its own weights, and under
context parallelism.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.matrix.patched import cpu_flags
from tests.matrix.releases import CHECKOUT, checkout, release_environment

pytestmark = pytest.mark.skipif(not checkout(), reason=f"make test-matrix runs it where {CHECKOUT} is given")
HERE = Path(__file__).resolve().parent
# float32; of a tiny gradient Adam makes a whole step, so the second update has rounding of the first
TOLERANCE = 1e-4
RL = [
    "--perform-rl-step",
    "--rl-inference-logprobs-is-correction",
    "--grpo-prompts-per-step",
    2,
    "--grpo-group-size",
    4,
    "--grpo-kl-beta",
    0.01,
    "--grpo-entropy-term-weight",
    0.01,
    "--rl-skip-bos-token",
    "--micro-batch-size",
    1,
    "--global-batch-size",
    4,
    "--clip-grad",
    1e6,
]
BOUND = ["--rl-importance-sampling-truncation-coef", 1.1]
SAME_BOUND = ["--rollout-is", "token", "--rollout-is-threshold", 1.1]
OURS = [*SAME_BOUND, "--rollout-rs", "seq_mean_ratio", "--rollout-rs-threshold", "0.9_1.1"]
PACKED = ["--rl-use-sequence-packing"]
CP, PP = ["--context-parallel-size", 2], ["--pipeline-model-parallel-size", 2]
# 128 again
TP = ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--make-vocab-size-divisible-by", 64]
RUNS = {
    "rows": (1, [*OURS]),
    "rows, cp 2": (2, [*OURS, *CP]),
    "packed, dp 2": (2, [*OURS, *PACKED]),
    "packed, dp 2, cp 2": (4, [*OURS, *PACKED, *CP]),
    "packed, pp 2": (2, [*OURS, *PACKED, *PP]),
    "packed, pp 2, cp 2": (4, [*OURS, *PACKED, *PP, *CP]),
    "packed, tp 2": (2, [*OURS, *PACKED, *TP, "--calculate-per-token-loss"]),
    "packed, tp 2, cp 2": (4, [*OURS, *PACKED, *TP, *CP, "--calculate-per-token-loss"]),
    "Megatron's weights": (2, [*BOUND, *PACKED, *CP]),
    "our weights": (2, [*SAME_BOUND, *PACKED, *CP]),
}


@pytest.fixture(scope="module")
def runs(tiny_moe_dir, tmp_path_factory):
    """Name -> (each update's gradients and norm, each update's metrics)."""
    folder = tmp_path_factory.mktemp("train_rl")
    # megatron.rl imports it, wanted or not
    (folder / "wandb.py").write_text("class wandb_run:\n    Run = object\n")
    specs = []
    for name, (processes, flags) in RUNS.items():
        corrected = BOUND[0] not in flags
        log = ["--rollout-log-dir", folder / name] if corrected else []
        words = [*cpu_flags(tiny_moe_dir), *map(str, [*RL, *flags, *log])]
        specs.append({"name": name, "processes": processes, "flags": words, "corrected": corrected})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "train_rl_worker.py", folder, *map(json.dumps, specs)],
        env=release_environment(*checkout(), folder) | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for name in RUNS:
        log = folder / name / "metrics.jsonl"
        metrics = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
        found[name] = torch.load(folder / f"{name}.pt"), metrics
    return found


def check_gradients(found, expected):
    """Those of both updates, of rank 0's parameters, as far from each other as TOLERANCE times
    the largest entry.
    """
    for update, wanted in zip(found, expected, strict=True):
        assert update["norm"] == pytest.approx(wanted["norm"], rel=TOLERANCE) and update["norm"] > 0.1
        assert update["gradients"].keys() == wanted["gradients"].keys()
        largest = max(float(gradient.abs().max()) for gradient in wanted["gradients"].values())
        for name, gradient in update["gradients"].items():
            torch.testing.assert_close(
                gradient,
                wanted["gradients"][name],
                rtol=0,
                atol=TOLERANCE * largest,
                msg=lambda said, name=name: f"{name}: {said}",
            )


@pytest.mark.parametrize("name", [name for name in RUNS if ", cp 2" in name])
def test_context_parallelism_in_megatrons_rl_then_gradients_and_metrics_are_those_without(name, runs):
    without = name.replace(", cp 2", "")
    check_gradients(runs[name][0], runs[without][0])
    steps, expected = runs[name][1], runs[without][1]
    assert [step["step"] for step in steps] == [1, 2]
    for step, wanted in zip(steps, expected, strict=True):
        assert step.keys() == wanted.keys()
        for metric, value in wanted.items():
            is_number = isinstance(value, (int, float))  # else it is not finite
            assert step[metric] == (
                pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE) if is_number else value
            ), metric
    assert 0 < min(step["rollout_corr/kept_sequence_fraction"] for step in steps) < 1


@pytest.mark.parametrize("name", ["rows", "packed, dp 2, cp 2"])
def test_tokens_in_megatrons_rl_then_each_is_counted_once(name, runs):
    # 13 + 7 + 11 + 12 + 7 + 10 + 8 + 11, of both updates
    assert sum(step["rollout_corr/valid_tokens"] for step in runs[name][1]) == 79


def test_bounded_token_weights_when_megatrons_are_bounded_alike_then_gradients_are_the_same(runs):
    check_gradients(runs["our weights"][0], runs["Megatron's weights"][0])
    first = runs["our weights"][1][0]
    assert first["rollout_corr/weight_max"] == pytest.approx(1.1) and first["rollout_corr/weight_min"] < 0.9
