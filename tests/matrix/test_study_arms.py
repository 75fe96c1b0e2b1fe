"""Every arm of the study for two steps, as `make study` runs it, and the calibration: all of them
are in the tables.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.observability.metrics_file import read_metrics
from tests.tiers import long

ROOT = Path(__file__).resolve().parents[2]
ARMS = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geo_rs_token_tis",
    "centering",
    "auto",
    "r3",
    "twin",
)


@pytest.mark.skipif(
    os.environ.get("MEGATRON_RELEASES") != "all",
    reason="make test-matrix runs it; test_study.py has two arms",
)
def test_study_when_two_steps_an_arm_then_every_arm_trains_and_is_in_the_table(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples/study/run.py",
            "--out",
            tmp_path / "study",
            "--seeds",
            "0",
            "--steps",
            "2",
            "--response-length",
            "8",
        ],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    table = (tmp_path / "study/study.md").read_text()
    for arm in ARMS:
        rows = read_metrics(tmp_path / "study/runs" / arm / "seed0/metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2] and all(row["grad_norm"] > 0 for row in rows), arm
        assert f"\n| {arm} | " in table
        assert ("router_replay/bytes_per_token" in rows[0]) == (arm == "r3")
        weighed = arm not in ("none", "centering", "r3", "twin")
        assert ("loss/centering_drift" in rows[0]) == (arm == "centering")
        assert ("rollout_corr/ess" in rows[1]) == weighed, arm


@long
def test_study_of_a_task_with_turns_when_one_arm_cannot_start_then_the_others_are_reported(tmp_path):
    """--router-replay-effect-every is refused without R3, so by every arm but one."""
    out, example = tmp_path / "study", ROOT / "examples/tool_use"
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples/study/run.py",
            "--out",
            out,
            "--seeds",
            "0",
            "--steps",
            "2",
            "--response-length",
            "24",
            "--arms",
            "none,r3",
            "--",
            "--router-replay-effect-every",
            "1",
            "--rollout-environment",
            f"{example / 'calculator.py'}:Calculator",
            "--rollout-max-turns",
            "4",
            "--rollout-prompts",
            example / "prompts.jsonl",
            "--rollout-reward-function",
            "none",
        ],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 1 and "not finished: none of seed 0; the same command" in done.stdout, (
        done.stdout[-4000:]
    )
    found = json.loads((out / "study.json").read_text())["arms"]
    assert list(found) == ["r3"] and found["r3"]["steps"] == {"0": 2}
    assert all(mean > 0 for mean in found["r3"]["log_ratio_abs_mean"]["by_turn"])


@long
def test_calibration_when_one_batch_a_serving_then_numerics_grow_with_rounding(tmp_path):
    out = tmp_path / "calibration"
    done = subprocess.run(
        [sys.executable, ROOT / "examples/study/calibrate.py", "--out", out, "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads((out / "calibration.json").read_text())
    k3 = [found[name]["k3"] for name in ("float32", "bf16", "FP8 weights", "4-bit weights")]
    assert k3[0] < 1e-9 < 1e-6 < k3[1] < k3[2] < k3[3] < 1e-2
    assert (out / "calibration.md").read_text() in done.stdout and (out / "calibration.png").exists()
