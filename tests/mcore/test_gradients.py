"""The corrected step on real Megatron-core over gloo, in every layout, against Hugging Face autograd.

The reference is float64 and shares no code with the package; compared are the loss, every parameter's
gradient, and the metrics.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.cpu import environment
from megatron_rl_corr.rollout.local_server import free_port

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5  # of float32 Megatron against float64; measured 1e-6

LAYOUTS = {
    1: [{}, {"per_token": True, "micro": 4}, {"micro": 1}],
    2: [
        {"tp": 2, "sp": True},
        {"pp": 2},
        {"pp": 2, "per_token": True, "micro": 1},
        {"ep": 2},
        {"ep": 2, "per_token": True, "micro": 4},
        {},
    ],
    4: [
        {"tp": 2, "pp": 2, "ep": 2, "sp": True},
        {"tp": 2, "pp": 2, "ep": 2, "sp": True, "per_token": True, "micro": 1},
        {"tp": 2, "ep": 2, "sp": True},
        {"tp": 2, "ep": 2, "etp": 2, "sp": True},
        {"pp": 2, "ep": 2, "micro": 1},
        {"ep": 4},
    ],
}


@pytest.fixture(scope="module")
def reference(tiny_moe_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "reference.pt"
    subprocess.run([sys.executable, HERE / "hf_reference.py", tiny_moe_dir, path], check=True)
    return path


@pytest.mark.parametrize("processes", sorted(LAYOUTS))
def test_corrected_step_in_every_layout_then_loss_gradients_and_metrics_equal_hf_autograd(
    processes, tiny_moe_dir, reference
):
    run = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes),
            "--master-addr", "127.0.0.1", "--master-port", str(free_port()),
            str(HERE / "layout_worker.py"), str(tiny_moe_dir), str(reference),
            *map(json.dumps, LAYOUTS[processes]),
        ],
        env=environment("megatron"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    assert [result["layout"] for result in results] == LAYOUTS[processes], run.stderr[-3000:]
    for result in results:
        assert result["parameters"] == 135  # 3 outside the layers; 4 x (9 + 8 experts x 3) inside
        assert result["gradient"] < TOLERANCE, result
        for name, error in result["metrics"].items():
            assert error < TOLERANCE, (result["layout"], name, error)
