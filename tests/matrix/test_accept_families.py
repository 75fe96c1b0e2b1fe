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


NUMBER_TYPES = {"float32": [], "bfloat16": ["--bf16"]}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("number_type", NUMBER_TYPES)
def test_family_when_nothing_is_wrong_then_accepted(name, number_type, tiny_moe_dir, tmp_path, monkeypatch):
    # spread: as small as published weights' is, bfloat16's rounding grows in every layer
    narrow = {} if number_type == "float32" else {"spread": 0.05}
    model = made_model(name, tiny_moe_dir, tmp_path, dtype=number_type, **narrow)
    with server_of(name, model, tmp_path, dtype=number_type) as server:
        status, numbers, page = accept(
            name, model, server.url, tmp_path, monkeypatch, *NUMBER_TYPES[number_type]
        )
    print(page)
    assert status == 0, numbers["notes"]
    [weights] = [row["found"] for row in numbers["rows"] if row["what"].startswith("weights that are not")]
    assert weights.startswith("0 of ") and int(weights.rpartition(" ")[2]) > 20
    assert any(row["what"] == "peak memory of a rank on the host" for row in numbers["rows"])
    assert any("keys and values" in row["found"] for row in numbers["rows"])
    folder = RECORDS / number_type
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"name": name, **numbers}))
