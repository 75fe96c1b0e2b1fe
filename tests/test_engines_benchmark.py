"""What benchmarks/engines.py prints."""

import json
from pathlib import Path

from benchmarks.engine_tables import tables

ROOT = Path(__file__).resolve().parents[1]


def test_tables_then_they_have_the_medians_and_the_median_of_the_ratios():
    push = {"transport": "disk", "seconds": [2.0, 1.0, 4.0], "verify_s": [0.5], "probe_s": [0.02], "probe_max": [2e-7]}
    distance = {"dtype": "float32", "what": "scored", "mean": 1e-7, "max": 5e-7}
    found = json.loads((ROOT / "benchmarks/engines.json").read_text()) | {
        "distance": [distance | {"engine": engine} for engine in ("sglang", "vllm")],
        "speed": [{"dtype": "float32", "concurrency": 16, "sglang": [100, 200, 400], "vllm": [300, 200, 800]}],
        "push": [push | {"engine": "vllm"}],
    }
    found["model"]["bytes"] = 30_000_000
    lines = tables(found)
    assert "| float32 | scored | 1.0e-07, 5.0e-07 | 1.0e-07, 5.0e-07 |" in lines
    assert "| float32 | 16 | 200 | 300 | 2.00 |" in lines  # ratios 3, 1, 2
    assert "| `disk` | vLLM | 30 | 2.00 | 15 | 0.50 | 20 | 2.0e-07 |" in lines
