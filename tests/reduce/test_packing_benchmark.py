"""benchmarks/packing.py: packed sequences take fewer operations, and dealt out they leave ranks
nearly equal work.
"""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from benchmarks.packing import imbalance, some_lengths
from megatron_rl_corr.mcore.batch.packing import PackLimits
from tests.tiers import long, matrix

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]


@long
def test_packing_when_lengths_are_log_normal_then_at_least_three_times_fewer_operations():
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "benchmarks/packing.py",
            "--samples",
            "16",
            "--length",
            "128",
            "--hidden",
            "64",
            "--layers",
            "1",
            "--repeats",
            "1",
            "--ranks",
            "2",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [line.strip("| ").split(" | ") for line in run.stdout.splitlines() if line.startswith("| p")]
    assert [row[0] for row in rows] == ["padded", "packed"]
    assert float(rows[0][3]) == 1 and float(rows[1][3]) > 3


def test_ranks_when_64_samples_are_dealt_out_then_less_than_five_percent_apart():
    lengths = some_lengths(Namespace(samples=64, length=4096))
    assert abs(sum(lengths) / 64 - 4096 / 5) < 50 and max(lengths) == 4096
    found = imbalance(lengths, PackLimits(8192, attention_share=1e-4), 8)
    assert found["as dealt out"] < 0.05 < found["as collected"]
