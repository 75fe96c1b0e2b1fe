"""VCPO's step scale: by hand, and on real Megatron in several layouts against the same
rates given by hand.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.mcore.decision import Decision
from megatron_rl_corr.mcore.step_scale import scaled_learning_rates, sequences_ess
from megatron_rl_corr.reduce.collectives import ParallelGroups
from megatron_rl_corr.reduce.metrics import EffectiveSampleSize
from tests import tensor_files
from tests.mcore.updates_cases import BYPASS
from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded
from tests.tiers import in_matrix, matrix

pytestmark = matrix

HERE = Path(__file__).resolve().parent
LAYOUTS = {
    1: [{"losses": ["ppo_clip", "ppo_clip adam", BYPASS]}, {"packed": 64, "losses": ["ppo_clip", BYPASS]}],
    2: [
        {"cp": 2, "losses": ["ppo_clip"]},
        *in_matrix(
            {"pp": 2, "vpp": 2, "packed": 64, "losses": [BYPASS]},
            {"ep": 2, "losses": ["ppo_clip"]},
            {"tp": 2, "ep": 2, "sp": True, "losses": ["ppo_clip adam"]},
        ),
    ],
}
RUNS = [
    (size, at, case)
    for size, layouts in LAYOUTS.items()
    for at, one in enumerate(layouts)
    for case in one["losses"]
]


@pytest.fixture(scope="module")
def reference(tiny_moe_dir, hf_reference):
    return hf_reference(tiny_moe_dir)


@pytest.fixture(scope="module")
def expected(tiny_moe_dir, reference, tmp_path_factory):
    """What step_scale_reference.py saved."""
    out = tmp_path_factory.mktemp("step_scale") / "expected.pt"
    made = run_preloaded([HERE / "step_scale_reference.py", tiny_moe_dir, reference, out])
    assert made.returncode == 0, made.stderr
    return tensor_files.load(out)


@pytest.fixture(scope="module")
def results(tiny_moe_dir, reference, tmp_path_factory):
    """Processes -> what step_scale_worker.py saved."""
    folder = tmp_path_factory.mktemp("step_scale")

    def of(processes):
        out, layouts = folder / f"{processes}.pt", map(json.dumps, LAYOUTS[processes])
        run = run_megatron(HERE / "step_scale_worker.py", processes, tiny_moe_dir, reference, out, *layouts)
        assert run.returncode == 0, run.stderr[-3000:]
        return tensor_files.load(out)

    return {processes: of(processes) for processes in LAYOUTS}


def weights_of(ranks, case, run):
    return {name: tensor for rank in ranks for name, tensor in rank[case][run][2].items()}


@pytest.mark.parametrize(("processes", "at", "case"), RUNS, ids=str)
def test_updates_when_scaled_then_those_of_rates_that_were_scaled_by_hand(results, processes, at, case):
    ranks = results[processes][at]
    scaled, by_hand, plain = (weights_of(ranks, case, run) for run in ("scaled", "by hand", "plain"))
    assert scaled.keys() == by_hand.keys() and scaled
    for name, tensor in by_hand.items():
        torch.testing.assert_close(scaled[name], tensor, rtol=1e-6, atol=1e-8, msg=name)
    assert any(
        not torch.allclose(scaled[name], tensor, rtol=1e-6, atol=1e-8) for name, tensor in plain.items()
    )
    for rank in ranks:  # no group of any rank keeps a scaled rate for the next step, a log or a checkpoint
        assert [rate for rates in rank[case]["rates"] for rate in rates] == pytest.approx(
            [rank[case]["rate"]] * sum(map(len, rank[case]["rates"])), rel=0, abs=0
        )
    reports = ranks[-1][case]["scaled"][0]
    assert all(0.25 < report["step_scale"] < 0.98 and not report["skipped"] for report in reports)
    assert not [report for report in ranks[-1][case]["plain"][0] if "step_scale" in report]


@pytest.mark.parametrize(("processes", "at", "case"), RUNS, ids=str)
def test_scale_when_each_update_has_its_own_samples_then_that_of_the_reference(
    results, expected, processes, at, case
):
    reports = results[processes][at][-1][case]["scaled"][0]
    scales = [report["step_scale"] for report in reports]
    layout = LAYOUTS[processes][at]
    wanted = expected[2 if "ep" in layout and "tp" not in layout else 1]  # replicas draw samples of their own
    if case == BYPASS:  # of the policy as it is: the start's in the first update alone
        scales, wanted = scales[:1], wanted[:1]
        assert reports[1]["step_scale"] ** 2 == pytest.approx(reports[1]["rollout_corr/ess_sequences"])
    assert scales == pytest.approx(wanted, rel=1e-4)


def test_scale_when_worked_out_by_hand_then_the_root_of_ess_over_n():
    # Sequences of sum D = ln 2, -ln 4, and one without a valid token: (2 + 1/4)^2 / (2 (4 + 1/16)) = 0.623.
    train, ids = torch.tensor([2.0, 1.0, 0.25, 9.0]).log(), torch.tensor([0, 0, 1, 2])
    for level in (None, "sequence", "token"):
        bounds = {"rollout_is": level, "rollout_is_upper": None if level is None else 1.5}
        correction = compute_correction(
            train,
            torch.zeros(4),
            torch.tensor([1, 1, 1, 0]),
            ids,
            num_sequences=3,
            config=RolloutCorrectionConfig(**bounds),
        )
        assert correction.sequence_ratios.tolist() == pytest.approx([2, 0.25, 0])
        metric = sequences_ess(correction, ParallelGroups())
        assert metric.values.tolist() == pytest.approx([2.25, 4.0625, 2])
        assert Decision(ess=metric.value()).step_scale == pytest.approx(math.sqrt(2.25**2 / 8.125))
    # What a rule rejects is not in the loss, and counts neither in ESS nor in n: sqrt(2) is above 1.2.
    correction = compute_correction(
        train,
        torch.zeros(4),
        torch.tensor([1, 1, 1, 0]),
        ids,
        num_sequences=3,
        config=RolloutCorrectionConfig(rollout_rs=(RejectionRule("seq_mean", "ratio", 0.1, 1.2),)),
    )
    assert sequences_ess(correction, ParallelGroups()).values.tolist() == pytest.approx([0.25, 0.0625, 1])
    second = SimpleNamespace(cp_rank=1)  # it holds the same sequences, and counts none
    assert sequences_ess(correction, second).values.tolist() == [0, 0, 0]
    assert EffectiveSampleSize.finish([3.0, 3.0, 3.0]) == 1


def test_decision_when_taken_out_of_the_numbers_then_the_updates_own_ess_before_the_batchs():
    numbers = {
        "rollout_corr/ess_sequences": 0.5,
        "decision/kept": 3.0,
        "decision/pulling": 2.0,
        "decision/ess": 0.25,
    }
    assert Decision.pop_from(numbers) == Decision(kept=3.0, pulling=2.0, ess=0.25)
    assert numbers == {"rollout_corr/ess_sequences": 0.5}
    # Without a scoring pass the loss has measured the update's samples.
    assert Decision.pop_from(numbers | {"decision/kept": 3.0}) == Decision(kept=3.0, ess=0.5)
    assert Decision.pop_from({}) == Decision()


def test_rates_when_scaled_then_each_groups_own_and_back_again_even_after_an_error():
    # A schedule's 1e-3, a tenth of it by lr_mult, and one that a graph of the optimizer reads,
    # shared by two groups.
    shared = torch.tensor(2e-3)
    optimizer = SimpleNamespace(param_groups=[{"lr": 1e-3}, {"lr": 1e-4}, {"lr": shared}, {"lr": shared}])

    def rates():
        return [float(group["lr"]) for group in optimizer.param_groups]

    with pytest.raises(ArithmeticError), scaled_learning_rates(optimizer, 0.5):
        assert rates() == pytest.approx([5e-4, 5e-5, 1e-3, 1e-3])
        assert optimizer.param_groups[2]["lr"] is shared
        raise ArithmeticError
    assert (
        rates() == pytest.approx([1e-3, 1e-4, 2e-3, 2e-3], rel=1e-7)
        and optimizer.param_groups[0]["lr"] == 1e-3
    )
