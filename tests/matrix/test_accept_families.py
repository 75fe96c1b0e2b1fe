"""`megatron-rl-corr accept` of a tiny random model of every family, on real ranks and a real server.

What a model measured stays in runs/accepted, of which scripts/acceptance_table.py makes the table in
docs/reference/models.md.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.matrix.accepted import ACCEPTED, accept, made_model, server_of
from tests.tiers import long
from tools.cpu import gpu_available

pytestmark = [
    long,
    pytest.mark.skipif(gpu_available(), reason="without a GPU only"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
RECORDS = Path(__file__).resolve().parents[2] / "runs/accepted"


@pytest.mark.parametrize("name", ACCEPTED)
def test_family_when_nothing_is_wrong_then_accepted(name, tiny_moe_dir, tmp_path, monkeypatch):
    model = made_model(name, tiny_moe_dir, tmp_path)
    with server_of(name, model, tmp_path) as server:
        status, numbers, page = accept(name, model, server.url, tmp_path, monkeypatch)
    print(page)
    assert status == 0, numbers["notes"]
    [weights] = [row["found"] for row in numbers["rows"] if row["what"].startswith("weights that are not")]
    assert weights.startswith("0 of ") and int(weights.rpartition(" ")[2]) > 20
    assert any(row["what"] == "peak memory of a rank on the host" for row in numbers["rows"])
    assert any("keys and values" in row["found"] for row in numbers["rows"])
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps({"name": name, **numbers}))
