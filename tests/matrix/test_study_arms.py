"""Every arm of the study for two steps, as `make study` runs it: all train, and all are in the table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.observability.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[2]
ARMS = (
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geo_rs_token_tis", "r3", "twin"
)  # fmt: skip


@pytest.mark.skipif(
    os.environ.get("MEGATRON_RELEASES") != "all", reason="make test-matrix runs it; test_study.py has two arms"
)
def test_study_when_two_steps_an_arm_then_every_arm_trains_and_is_in_the_table(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples/study/run.py", "--out", tmp_path / "study", "--seeds", "0", "--steps", "2",
         "--response-length", "8"], capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    table = (tmp_path / "study/study.md").read_text()
    for arm in ARMS:
        rows = read_metrics(tmp_path / "study/runs" / arm / "seed0/metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2] and all(row["grad_norm"] > 0 for row in rows), arm
        assert f"\n| {arm} | " in table
        assert ("router_replay/bytes_per_token" in rows[0]) == (arm == "r3")
        weighed = arm not in ("none", "r3", "twin")
        assert ("rollout_corr/ess" in rows[1]) == weighed, arm
