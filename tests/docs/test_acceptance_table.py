"""The table of accepted families: made of what accept measured, a row or a reason for every tiny model."""

import copy
import importlib.util
import re
from pathlib import Path

import pytest

from tests.matrix.accepted import ACCEPTED, NOT_SERVED
from tests.mcore.tiny_models import MODELS

ROOT = Path(__file__).resolve().parents[2]
FOUND = {
    "date": "2026-11-30",
    "versions": {"torch": "2.14.1", "sglang": "0.5.23"},
    "numbers": {
        "own": {"d_max": 0.2, "k3": 1e-6, "exact": 0.5, "disagreement": 0.002},
        "replayed": {"d_max": 1.38e-5, "k3": 2.41e-12, "exact": 0.054, "disagreement": 0.001},
    },
    "rows": [
        {"what": "peak memory of a rank on the host", "found": "0.89 GiB (rank 1), 0.88 GiB (rank 0)"},
        {"what": "weights that are not the checkpoint's after the pushes", "found": "0 of 55"},
    ],
    "notes": [
        "own: mismatch: routing; 95 tokens, parts: routing 28 %, head 2 %, rest 65 %, decode 5 %",
        "replayed: mismatch: rounding; 119 tokens, parts: head 6 %, rest 68 %, decode 26 %",
        "replayed: another note",
    ],
}


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("acceptance_table", ROOT / "scripts/acceptance_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_row_then_the_trial_with_the_servers_experts_and_the_most_that_differed_in_any(script):
    assert script.row("mixtral", FOUND) == (
        "| `mixtral` | 1.4e-05 | 2.4e-12 | 5% | 0.2% | 55 of 55 are the checkpoint's | 0.9 GiB |"
    )
    dense = copy.deepcopy(FOUND)
    dense["numbers"] = {"own": {"d_max": 3e-6, "k3": 1e-12, "exact": 0.1}}
    assert script.row("llama", dense).startswith("| `llama` | 3.0e-06 | 1.0e-12 | 10% |  | 55 of 55")


def test_table_then_its_date_and_every_release(script):
    other = FOUND | {"date": "2026-12-01"}
    lines = script.table("bfloat16", {"a": FOUND, "b": other})
    assert lines[1] == (
        "Measured 2026-11-30 to 2026-12-01 with torch 2.14.1, sglang 0.5.23, in bfloat16 on a CPU, 2 tiny "
        "models:"
    )


@pytest.mark.parametrize("number_type", ["float32", "bfloat16"])
def test_page_then_a_row_for_each_tiny_model_that_a_server_on_a_cpu_has(number_type, script):
    page = (ROOT / "docs/reference/models.md").read_text()
    begin, end = (mark.format(number_type) for mark in (script.BEGIN, script.END))
    table = page.partition(begin)[2].partition(end)[0]
    assert sorted(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == sorted(ACCEPTED)
    assert {*ACCEPTED} | {*NOT_SERVED} == {*MODELS} and all(NOT_SERVED.values())


def test_row_of_what_replay_leaves_then_both_trials_and_the_ledgers_terms(script):
    assert script.left_row("mixtral", FOUND) == "| `mixtral` | 1.0e-06 | 2.4e-12 | 28% | 6% | 68% | 26% |"


def test_page_of_experts_then_a_row_for_each_family_that_has_some(script):
    page = (ROOT / "docs/guides/moe.md").read_text()
    table = page.partition(script.LEFT_BEGIN)[2].partition(script.LEFT_END)[0]
    with_experts = [name for name in ACCEPTED if "num_experts_per_tok" in MODELS[name]]
    assert sorted(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == sorted(with_experts)
