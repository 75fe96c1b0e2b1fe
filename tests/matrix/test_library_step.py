"""The same corrected step on every supported release of megatron-core, through the library, at TP
2 x PP 2 x EP 2.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.matrix.releases import checkout, chosen, release_environment
from tests.preloaded import run_preloaded

HERE = Path(__file__).resolve().parent
MCORE = HERE.parent / "mcore"
RELEASES = (*checkout(), *chosen())
AGAINST_HF = 1e-5  # float32 Megatron against float64; measured 1.3e-6
AGAINST_NEWEST = 1e-6  # float32 against float32


@pytest.fixture(scope="module")
def reference(tiny_moe_dir, hf_reference):
    """hf_reference.py's results, which share no code with the package: their path."""
    return hf_reference(tiny_moe_dir)


@pytest.fixture(scope="module")
def steps(tiny_moe_dir, reference):
    """Release -> what step_worker.py printed."""
    found = {}
    for release in RELEASES:
        words, variables = (
            [HERE / "step_worker.py", tiny_moe_dir, reference],
            release_environment(release, MCORE),
        )
        if release == RELEASES[-1]:  # that of the environment
            run = run_preloaded(words, env=variables)
        else:
            run = subprocess.run(
                [sys.executable, "-W", "ignore", *words],
                env=variables,
                capture_output=True,
                text=True,
                timeout=300,
            )
        lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
        assert len(lines) == 1, f"megatron-core {release}:\n{run.stderr[-3000:]}"
        found[release] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_corrected_step_on_a_release_then_gradients_are_hugging_faces_and_loss_is_that_of_the_newest(
    release, steps, reference
):
    step, newest = steps[release], steps[RELEASES[-1]]
    assert step["release"] == release, "another release was imported"
    assert step["gradient"] < AGAINST_HF, step["worst"]
    expected = torch.load(reference, weights_only=True)["cases"]["token"]["metrics"]["policy"]
    assert step["metrics"]["loss/policy"] == pytest.approx(expected, rel=AGAINST_HF, abs=1e-8)
    assert step["metrics"].keys() == newest["metrics"].keys()
    for name, value in newest["metrics"].items():
        near = pytest.approx(value, rel=AGAINST_NEWEST, abs=AGAINST_NEWEST, nan_ok=True)
        assert step["metrics"][name] == near, name
    for name in ("grad_norm", "before", "after"):
        assert step[name] == pytest.approx(newest[name], rel=AGAINST_NEWEST), name
    assert abs(step["after"] - step["before"]) > 1e-3, "the update moved nothing"
