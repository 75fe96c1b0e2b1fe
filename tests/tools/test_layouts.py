"""Real Megatron over gloo: a tiny MoE has one loss and one gradient norm in every two-process layout."""

import json
from pathlib import Path

import pytest

from tests.megatron_forks import run_megatron
from tools.cpu import gpu_available

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

WORKER = Path(__file__).with_name("gpt_worker.py")

LAYOUTS = [
    {},  # two data-parallel processes
    {"tp": 2, "sp": True},
    {"tp": 2, "sp": True, "ep": 2},
    {"tp": 2, "sp": True, "etp": 2},
    {"pp": 2},
    {"ep": 2},
    {"cp": 2},
    {"cp": 2, "ep": 2, "recompute": True},
]
PACKED = [{"packed": True}, {"cp": 2, "packed": True}]


def results(processes: int, layouts: list[dict]) -> list[dict]:
    answer = run_megatron(WORKER, *map(json.dumps, layouts), ranks=processes)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith('{"layout"')]


@pytest.fixture(scope="module")
def alone() -> dict[bool, dict]:
    """What one process computes, of whole rows and of packed ones."""
    plain, packed = results(1, [{}, {"packed": True}])
    return {False: plain, True: packed}


def test_moe_when_laid_out_over_two_processes_then_loss_and_gradients_are_those_of_one(alone):
    for found in results(2, LAYOUTS + PACKED):
        expected = alone["packed" in found["layout"]]
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-6), found["layout"]
        assert found["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=2e-6), found["layout"]


def test_moe_when_sequences_are_packed_then_they_do_not_see_each_other(alone):
    # The second sequence's first tokens have no past: another loss than that of one long row.
    assert abs(alone[True]["loss"] - alone[False]["loss"]) > 1.0
