"""KL penalties against a reference policy on the trainer's ranks, against Hugging Face
autograd in float64.
"""

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
    2: [
        {"pp": 2, "vpp": 2},
        {"cp": 2, "packed": 64, "hidden": True},
        {"cp": 2, "truncated": True},
        {"ep": 2},
    ],
    4: [
        {"tp": 2, "pp": 2, "ep": 2, "sp": True, "packed": 64},
        {"cp": 2, "pp": 2},
        {"tp": 2, "cp": 2, "ep": 2, "sp": True},
    ],
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
        HERE / "reference_worker.py",
        processes,
        tiny_moe_dir,
        other,
        path,
        *map(json.dumps, specs),
        timeout=600,
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


UNKNOWN = """
import dataclasses, json, torch
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.loss import make_loss_inputs
from megatron_rl_corr.mcore.scoring import OldPass
from megatron_rl_corr.mcore.reference.policy import less_reference_kl
from megatron_rl_corr.reduce.collectives import ParallelGroups

# A group of three samples of two tokens. What the reference has of the last one is not known.
batch = dataclasses.replace(
    RolloutBatch.empty([2, 2, 2], 2),
    loss_mask=torch.ones(6, dtype=torch.bool),
    rewards=torch.tensor([1.0, 0.0, 1.0]),
    rollout_logprobs=torch.full((6,), -1.0),
)
config = RolloutCorrectionConfig(kl_reward_coef=0.5, kl_reward_type="k1", advantage="group_mean")
old, reference = torch.full((6,), -1.0), torch.tensor([-1.5, -1.5, -1.0, -1.0, torch.nan, torch.nan])
lowered, metrics = less_reference_kl(batch, old, reference, config, ParallelGroups())
inputs = make_loss_inputs(lowered, OldPass(old), config, ParallelGroups(), group_size=3)
print(
    "RESULT",
    json.dumps(
        {
            "advantages": inputs.advantages.tolist(),
            "mask": inputs.correction.mask.tolist(),
            "missing": inputs.correction.metrics["nonfinite_tokens"].value(),
        }
    ),
)
"""


def test_reward_kl_when_a_samples_is_not_known_then_it_is_left_out_of_loss_and_baseline_and_counted(tmp_path):
    (tmp_path / "unknown.py").write_text(UNKNOWN)
    run = run_preloaded([tmp_path / "unknown.py"])
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1].removeprefix("RESULT "))
    # 1 - 0.5 x (0.5 + 0.5) = 0.5 and 0, of mean 0.25; the third sample's 1 would have made it 0.5.
    assert found["advantages"][:4] == [0.25, 0.25, -0.25, -0.25]
    assert found["mask"] == [True] * 4 + [False] * 2 and found["missing"] == 2


EPISODES = """
import dataclasses, json, numpy, torch
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.reference.policy import less_reference_kl
from megatron_rl_corr.mcore.loss import make_loss_inputs
from megatron_rl_corr.mcore.scoring import OldPass
from megatron_rl_corr.mcore.step_metrics import batch_metrics
from megatron_rl_corr.reduce.collectives import ParallelGroups, all_reduce_metrics

# A group of two samples, the first of two sequences; two tokens each.
batch = dataclasses.replace(
    RolloutBatch.empty([2, 2, 2], 2).of_episodes(numpy.array([0, 0, 1])),
    loss_mask=torch.ones(6, dtype=torch.bool),
    rewards=torch.tensor([2.0, 4.0, 1.0]),
    version_lags=torch.tensor([0.0, 4.0, 1.0]),
    rollout_logprobs=torch.full((6,), -1.0),
)
config = RolloutCorrectionConfig(kl_reward_coef=0.5, kl_reward_type="k1", advantage="group_mean")
old, reference = torch.full((6,), -1.0), torch.tensor([-1.5, -1.5, -1.0, -2.0, -3.0, -1.0])
lowered, metrics = less_reference_kl(batch, old, reference, config, ParallelGroups())
inputs = make_loss_inputs(lowered, OldPass(old), config, ParallelGroups(), group_size=2)
metrics |= batch_metrics(batch, inputs.correction, None, ParallelGroups())
print(
    "RESULT",
    json.dumps(
        {
            "rewards": lowered.rewards.tolist(),
            "advantages": inputs.advantages[::2].tolist(),
            "metrics": all_reduce_metrics(metrics, None),
        }
    ),
)
"""


def test_reward_kl_when_a_sample_has_two_sequences_then_both_pay_for_all_its_tokens(tmp_path):
    (tmp_path / "episodes.py").write_text(EPISODES)
    run = run_preloaded([tmp_path / "episodes.py"])
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1].removeprefix("RESULT "))
    # KL of the sequences: 1, 1 and 2. The first sample pays 0.5 x 2 in both, the second 0.5 x 2 too.
    assert found["rewards"] == [1.0, 3.0, 0.0]
    assert found["advantages"] == [0.0, 2.0, -1.0]  # of the samples' mean (2 + 0) / 2
    expected = {
        "reward/reference_kl": 1.0,
        "reward/mean": 2.0,
        "reward/std": 1.0,
        "reward/max": 3.0,
        "reward/min": 1.0,
        "response_length/mean": 3.0,
        "weight_lag": 4.0,
        "weight_lag_mean": 1.5,
    }
    assert {name: found["metrics"][name] for name in expected} == pytest.approx(expected)
