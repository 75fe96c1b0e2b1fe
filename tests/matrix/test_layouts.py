"""Interleaved stages, context parallelism and --calculate-per-token-loss on every release,
against Hugging Face.

The layouts that the installed release runs in tests/mcore are far more; these are the ones that differ
in what they call.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix.releases import OVERLAID, checkout, chosen, release_environment
from tests.mcore.test_packed import check, line

MCORE = Path(__file__).resolve().parents[1] / "mcore"
TOLERANCE = 1e-5  # of float32 Megatron against float64; measured 2e-6
LAYOUTS = [
    {"tp": 2, "pp": 2, "vpp": 2, "sp": True, "ep": 2, "runs": [["token", 4]]},
    {"tp": 2, "cp": 2, "sp": True, "ep": 2, "per_token": True, "runs": [["sequence", 4]]},
    {"pp": 2, "cp": 2, "runs": [["bypass", 4]]},
    {"packed": 64, "tp": 2, "pp": 2, "vpp": 2, "sp": True, "ep": 2, "runs": [["token", 4]]},
    {"packed": 64, "tp": 2, "cp": 2, "sp": True, "ep": 2, "per_token": True, "runs": [["sequence", 4]]},
    {"packed": 64, "pp": 2, "cp": 2, "runs": [["bypass", 4]]},
]
PACKED = {
    "packed": 48,
    "tp": 2,
    "cp": 2,
    "ep": 2,
    "sp": True,
    "per_token": True,
    "recompute": True,
    "runs": ["token"],
}
"""Beside padded rows in the same run; from 0.16 on also with replayed experts."""
OTHERS = [*OVERLAID[:-1], *checkout()] if len(chosen()) == len(OVERLAID) else []


@pytest.fixture(scope="module")
def reference(tiny_moe_dir, hf_reference):
    return hf_reference(tiny_moe_dir)


@pytest.mark.parametrize("release", OTHERS)
def test_layout_on_another_release_then_every_gradient_is_hugging_faces(release, tiny_moe_dir, reference):
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            MCORE / "layout_worker.py",
            "4",
            tiny_moe_dir,
            reference,
            *map(json.dumps, LAYOUTS),
        ],
        env=release_environment(release),
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line.removeprefix("RESULT ") for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line) for line in lines]
    assert [one["layout"] for one in found] == LAYOUTS, run.stderr[-3000:]
    for one in found:
        assert one["gradient"] < TOLERANCE, (one["layout"], one["worst"])


@pytest.mark.parametrize("release", OTHERS)
def test_packed_on_another_release_then_log_probs_gradients_and_metrics_are_those_of_rows(
    release, tiny_moe_dir, reference
):
    replays = [PACKED | {"replay": True}] if release >= "0.16" else []
    specs = [PACKED, *replays, {"packed": 64, "pp": 2, "vpp": 2, "ep": 2, "runs": ["bypass"]}]
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            MCORE / "packed_worker.py",
            "4",
            tiny_moe_dir,
            reference,
            *map(json.dumps, specs),
        ],
        env=release_environment(release),
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [
        json.loads(line.removeprefix("RESULT "))
        for line in run.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    assert [one["layout"] for one in found] == specs, run.stderr[-3000:]
    for one in found:
        print(release, line(one))
        check(one)
