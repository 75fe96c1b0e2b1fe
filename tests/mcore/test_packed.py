"""Packed sequences against padded rows in one run, and each against Hugging Face in float64.

tests/matrix/test_packed_table.py runs every layout in every way; here are a few.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.megatron_forks import run_megatron

HERE = Path(__file__).resolve().parent
LOGPROBS, GRADIENT, METRIC, REFERENCE = 5e-6, 5e-6, 1e-5, 1e-5
"""Absolute, relative, relative; and of float32 Megatron against float64."""
COUNTS = ("tokens", "/sequences")
"""How the names of metrics end that must be equal."""
SOME = {
    1: [
        {"packed": 64, "runs": ["token", "bypass", "once plus plus", "once own"]},
        {"packed": 24, "replay": True, "runs": ["once token"]},
        {"packed": 24, "odd": True, "runs": ["sequence"]},
        {"packed": 64, "masked": True, "runs": ["token", "once otb"]},
        {"packed": 64, "truncated": True, "runs": ["once otb"]},
        {"packed": 64, "hidden": True, "runs": ["once otb"]},
    ],
    4: [
        {
            "packed": 48,
            "tp": 2,
            "cp": 2,
            "ep": 2,
            "sp": True,
            "per_token": True,
            "recompute": True,
            "replay": True,
            "runs": ["sequence"],
        },
        {"packed": 64, "cp": 2, "masked": True, "runs": ["once sequence"]},
        # Advantages of the global batch, and the user's: packed, groups are parted over replicas.
        {"packed": 48, "cp": 2, "runs": ["once plus plus", "once own", "once otb"]},
        {"packed": 64, "tp": 2, "ep": 2, "sp": True, "runs": ["once otb"]},
        {"packed": 64, "cp": 2, "pp": 2, "masked": True, "runs": ["once otb"]},
    ],
}


def compared(processes, model_dir, reference, specs):
    """What packed_worker.py says of each run."""
    run = run_megatron(
        HERE / "packed_worker.py", processes, model_dir, reference, *map(json.dumps, specs), timeout=900
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    expected = [(spec, case) for spec in specs for case in spec["runs"]]
    assert [(one["layout"], one["case"]) for one in found] == expected, run.stderr[-3000:]
    return found


def check(one):
    """One run: packed is rows, and both are the reference, which knows nothing of replayed experts."""
    where = {name: value for name, value in one["layout"].items() if name != "runs"}, one["case"]
    assert one["logprobs"] < LOGPROBS, where
    assert one["gradient"][0] < GRADIENT and one["size"] > 0.1, (where, one["gradient"], one["size"])
    if "replay" not in one["layout"]:
        for kind, (logprobs, gradient, worst) in one["reference"].items():
            assert logprobs < REFERENCE and gradient < REFERENCE, (where, kind, logprobs, gradient, worst)
    rows, packed = one["metrics"]
    assert rows.keys() == packed.keys() and len(rows) > 15
    # Positions outside the loss mask: the one count that is of the layout, and not of the samples.
    assert packed.pop("rollout_corr/padded_tokens") < rows.pop("rollout_corr/padded_tokens")
    for name, value in rows.items():
        near = value if name.endswith(COUNTS) else pytest.approx(value, rel=METRIC, abs=METRIC, nan_ok=True)
        assert packed[name] == near, (where, name)


def line(one):
    """The run's worst distances, for a log."""
    layout = {name: value for name, value in one["layout"].items() if name != "runs"}
    rows, packed = one["metrics"]
    metric = max(
        abs(packed[name] - value) / max(abs(value), 1)
        for name, value in rows.items()
        if value == value and name != "rollout_corr/padded_tokens"
    )
    hf = (
        ""
        if "replay" in layout
        else " ".join(
            f"{kind} from HF {logprobs:.1e} {gradient:.1e}"
            for kind, (logprobs, gradient, _) in one["reference"].items()
        )
    )
    return (
        f"{json.dumps(layout)} {one['case']}: log-probs {one['logprobs']:.1e}, gradient "
        f"{one['gradient'][0]:.1e}, metrics {metric:.1e}; {hf}"
    )


@pytest.mark.parametrize("processes", SOME)
def test_step_when_packed_then_that_of_padded_rows_and_of_hugging_face(processes, tiny_moe_dir, hf_reference):
    reference = hf_reference(tiny_moe_dir)
    for one in compared(processes, tiny_moe_dir, reference, SOME[processes]):
        print(line(one))
        check(one)
        assert one["parameters"] == 135 and torch.isfinite(torch.tensor(one["gradient"][0]))
