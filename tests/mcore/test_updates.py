"""Several updates of a batch on real Megatron: metrics, gradient norms and weights against plain descent in float64."""

import json
from pathlib import Path

import pytest
import torch

from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded

HERE = Path(__file__).resolve().parent
ALL = ["ppo_clip", "gspo", "cispo", "dppo_tv"]
LAYOUTS = {
    1: [{"losses": ALL}, {"packed": 64, "losses": ALL}],
    2: [{"ep": 2, "losses": ["ppo_clip"]}, {"cp": 2, "losses": ["gspo"]}],
    4: [{"tp": 2, "pp": 2, "ep": 2, "sp": True, "losses": ["gspo", "cispo"]},
        {"tp": 2, "pp": 2, "ep": 2, "sp": True, "packed": 64, "losses": ["ppo_clip", "gspo"]}],
}  # fmt: skip
RUNS = [
    (size, at, loss) for size, layouts in LAYOUTS.items() for at, one in enumerate(layouts) for loss in one["losses"]
]


@pytest.fixture(scope="module")
def reference(tiny_moe_dir, hf_reference):
    return hf_reference(tiny_moe_dir)


@pytest.fixture(scope="module")
def expected(tiny_moe_dir, reference, tmp_path_factory):
    """What updates_reference.py saved."""
    out = tmp_path_factory.mktemp("updates") / "expected.pt"
    made = run_preloaded([HERE / "updates_reference.py", tiny_moe_dir, reference, out])
    assert made.returncode == 0, made.stderr
    return torch.load(out)


@pytest.fixture(scope="module")
def results(tiny_moe_dir, reference, tmp_path_factory):
    """Processes -> what updates_worker.py saved."""
    folder = tmp_path_factory.mktemp("updates")

    def of(processes):
        out = folder / f"{processes}.pt"
        layouts = map(json.dumps, LAYOUTS[processes])
        run = run_megatron(HERE / "updates_worker.py", processes, tiny_moe_dir, reference, out, *layouts)
        assert run.returncode == 0, run.stderr[-3000:]
        return torch.load(out)

    return {processes: of(processes) for processes in LAYOUTS}


@pytest.mark.parametrize(("processes", "at", "loss"), RUNS, ids=str)
def test_updates_of_a_batch_when_the_policy_moves_then_they_are_those_of_plain_descent(
    results, expected, processes, at, loss
):
    ranks = results[processes][at]
    wanted = expected[loss, 2 if LAYOUTS[processes][at].get("ep") == processes else 1]
    reports = ranks[-1][loss][0]
    assert [report["update"] for report in reports] == [1, 2, 3, 4]
    assert [report["step"] for report in reports] == [13, 14, 15, 16]
    assert [report["weight_version"] for report in reports] == [3, 3, 3, 4]
    assert [report["weight_lag_updates"] for report in reports] == [4, 5, 6, 7]
    for update, (report, step) in enumerate(zip(reports, wanted["steps"], strict=True)):
        assert report["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-5)
        assert report["loss/policy"] == pytest.approx(step["policy"], rel=2e-5, abs=1e-6)
        assert report["loss/clip_fraction"] == pytest.approx(step["clip_fraction"], abs=1e-9)
        assert report["loss/old_new_k3_kl"] == pytest.approx(step["old_new_k3_kl"], rel=2e-4, abs=1e-9)
        assert (report["loss/clip_fraction"] > 0) == (report["loss/old_new_k3_kl"] > 1e-6) == (update > 0)
        # What is the batch's is reported once.
        assert ("reward/mean" in report) == ("rollout_corr/weight_mean" in report) == (update == 0)
    assert all(rank[loss][1] == [4] for rank in ranks), "weights are pushed once, after the last update"
    weights = {name: tensor for rank in ranks for name, tensor in rank[loss][2].items()}
    assert weights.keys() == wanted["weights"].keys()
    for name, tensor in wanted["weights"].items():
        assert (weights[name].double() - tensor).norm() < 1e-6 * tensor.norm(), name
