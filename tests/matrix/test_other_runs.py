"""Whole runs that equal one of GPTModel: resumed in another layout, and of a HybridModel of
the same layers.
"""

import pytest

from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import untimed_steps
from tests.mcore.test_runs import GROUPED, LAYOUT, again, assert_same_weights, exported, made

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; test_runs.py has one layout"
)
OTHER_LAYOUT = [
    *GROUPED,
    "--context-parallel-size",
    2,
    "--expert-model-parallel-size",
    2,
    "--expert-tensor-parallel-size",
    1,
]
HYBRID = ["--hybrid-layer-pattern", "*E*E|*E*E", "--spec", "pretrain_any", "hybrid_spec"]
"""Of four layers, the middle of which is where a stage ends."""
NEAR = 1e-4  # of float32


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    wanted = {"whole": LAYOUT, "elsewhere": [*OTHER_LAYOUT, *again(folder)], "hybrid": [*LAYOUT, *HYBRID]}
    return made(folder, sglang_server_fp32, tiny_moe_dir, wanted)


def test_run_when_resumed_in_another_layout_then_its_steps_are_nearly_those_of_a_run_that_never_ended(runs):
    (_, whole, *_), (_, resumed, _, sampled) = runs["whole"], runs["elsewhere"]
    wanted, steps = untimed_steps(whole)[2:], untimed_steps(resumed)
    assert [step["step"] for step in steps] == [3, 4] and sampled == 0
    for step, expected in zip(steps, wanted, strict=True):
        for name in ("loss/policy", "loss/entropy", "grad_norm", "reward/mean", "rollout_corr/valid_tokens"):
            assert step[name] == pytest.approx(expected[name], rel=NEAR, abs=1e-7), name
        assert step["rollout_corr/k3_kl"] < 1e-6, "other weights than those that were pushed"


def test_hybrid_model_of_the_same_layers_then_its_steps_and_weights_are_those_of_gpt_model(runs):
    (_, gpt, weights, _), (hybrid_run, hybrid, hybrid_weights, sampled) = runs["whole"], runs["hybrid"]
    wanted, steps = untimed_steps(gpt), untimed_steps(hybrid)
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and sampled == 0
    assert hybrid_run.stdout.count("a HybridModel") == 4, "another model was built"
    for step, expected in zip(steps, wanted, strict=True):
        for name in ("loss/policy", "loss/entropy", "grad_norm", "rollout_corr/k3_kl"):
            assert step[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-12), name
    assert hybrid_weights == weights


@pytest.mark.parametrize("name", ["elsewhere", "hybrid"])
def test_checkpoint_when_exported_then_the_weights_are_those_that_the_run_wrote(
    name, runs, tiny_moe_dir, tmp_path
):
    _, folder, *_ = runs[name]
    assert exported(folder / "checkpoints", tiny_moe_dir, tmp_path / "out") == 0
    assert_same_weights(tmp_path / "out", folder / "hf/iter_0000004")
