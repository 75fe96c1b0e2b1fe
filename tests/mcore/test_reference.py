"""KL penalties against a reference policy on the trainer's ranks, against Hugging Face autograd in float64."""

import json
from pathlib import Path

import pytest
import torch

from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5  # of float32 Megatron against float64

LAYOUTS = {
    1: [{}, {"packed": 64}, {"truncated": True}],
    2: [{"tp": 2, "sp": True, "ep": 2}, {"pp": 2, "packed": 64}, {"cp": 2}],
}
"""Rows, packed sequences, and samples whose tokens were drawn from a few ids each."""
MORE = {
    2: [{"pp": 2, "vpp": 2}, {"cp": 2, "packed": 64, "hidden": True}, {"cp": 2, "truncated": True}, {"ep": 2}],
    4: [{"tp": 2, "pp": 2, "ep": 2, "sp": True, "packed": 64}, {"cp": 2, "pp": 2},
        {"tp": 2, "cp": 2, "ep": 2, "sp": True}],
}
"""Those of `make test-matrix`."""


@pytest.fixture(scope="session")
def kl_reference(tiny_moe_dir, tmp_path_factory):
    """(the other model's folder, the file of what hf_kl.py found)."""
    folder = tmp_path_factory.mktemp("hf_kl")
    made = run_preloaded([HERE / "hf_kl.py", tiny_moe_dir, folder / "other", folder / "kl.pt"])
    assert made.returncode == 0, made.stderr
    return folder / "other", folder / "kl.pt"


def check(processes, specs, tiny_moe_dir, kl_reference):
    other, path = kl_reference
    run = run_megatron(
        HERE / "reference_worker.py", processes, tiny_moe_dir, other, path, *map(json.dumps, specs), timeout=600
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    reference = torch.load(path, weights_only=True)
    of = {bool(spec.get("truncated")): spec for spec in specs}
    expected = {kind: (reference["truncated"] if kind else reference)["cases"] for kind in of}
    wanted = [[spec, name] for spec in specs for name in expected[bool(spec.get("truncated"))]]
    assert [[one["layout"], one["case"]] for one in found] == wanted, run.stderr[-3000:]
    for one in found:
        where = (one["layout"], one["case"])
        assert all(all(left.values()) for left in one["left"]), (where, one["left"])
        assert one["gradient"] < TOLERANCE, (where, one["gradient"], one["worst"])
        metrics = expected[bool(one["layout"].get("truncated"))][one["case"]]["metrics"]
        for name, value in metrics.items():
            assert one["metrics"][name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), (where, name)


@pytest.mark.parametrize("processes", [1, 2])
def test_kl_penalties_in_every_layout_then_gradients_equal_hf_autograd_and_weights_are_untouched(
    processes, tiny_moe_dir, kl_reference
):
    check(processes, LAYOUTS[processes], tiny_moe_dir, kl_reference)
