"""On-policy distillation in every layout, against Hugging Face autograd in float64."""

import json
from pathlib import Path

import pytest
import torch

from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded
from tests.tiers import long

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5  # of float32 Megatron against float64

LAYOUTS = {
    1: [{}, {"packed": 64}],
    2: [{"tp": 2, "sp": True, "ep": 2}, {"cp": 2, "packed": 64}, {"pp": 2}, {"packed": 64, "ep": 2}],
}
"""Rows and packs; the last has two replicas, over which samples are dealt out."""
MORE = {
    2: [{"cp": 2}, {"ep": 2}, {"pp": 2, "vpp": 2}],
    4: [{"tp": 2, "pp": 2, "ep": 2, "sp": True, "packed": 64}, {"cp": 2, "pp": 2}],
}


@pytest.fixture(scope="module")
def hf_distill(tiny_moe_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf_distill") / "distill.pt"
    made = run_preloaded([HERE / "hf_distill.py", tiny_moe_dir, path])
    assert made.returncode == 0, made.stderr
    return path


def check(processes, specs, tiny_moe_dir, path):
    run = run_megatron(
        HERE / "distill_worker.py", processes, tiny_moe_dir, path, *map(json.dumps, specs), timeout=600
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    expected = torch.load(path, weights_only=True)["cases"]
    wanted = [[spec, name] for spec in specs for name in expected]
    assert [[one["layout"], one["case"]] for one in found] == wanted, run.stderr[-3000:]
    for one in found:
        where = (one["layout"], one["case"])
        assert one["gradient"] < TOLERANCE, (where, one["gradient"], one["worst"])
        for name, value in expected[one["case"]]["metrics"].items():
            assert one["metrics"][name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), (where, name)


@pytest.mark.parametrize("processes", LAYOUTS)
def test_distillation_in_every_layout_then_gradients_and_metrics_equal_hf_autograd(
    processes, tiny_moe_dir, hf_distill
):
    check(processes, LAYOUTS[processes], tiny_moe_dir, hf_distill)


@long
@pytest.mark.parametrize("processes", MORE)
def test_distillation_in_more_layouts_then_gradients_and_metrics_equal_hf_autograd(
    processes, tiny_moe_dir, hf_distill
):
    check(processes, MORE[processes], tiny_moe_dir, hf_distill)
