"""Whole runs on Transformer Engine's spec: one that goes on from a checkpoint, and one of HybridModel."""

from pathlib import Path

import pytest

from tests.mcore.launched import checksums, launch, replayed, untimed_steps

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
GROUPED = ["--moe-grouped-gemm", "--moe-permute-fusion"]
RUN = ["--global-batch-size", 16, "--train-iters", 4, "--save-interval", 2]
LAYOUT = [
    *GROUPED, "--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2,
    "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1,
]  # fmt: skip
OTHER_LAYOUT = [
    *GROUPED, "--context-parallel-size", 2, "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1,
]  # fmt: skip
HYBRID = ["--hybrid-layer-pattern", "*E*E|*E*E", "--spec", "pretrain_any", "hybrid_spec"]
"""Of four layers, the middle of which is where a stage ends."""
NEAR = 1e-4  # of float32


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """Name -> (exit, folder of the run, the server's checksums after it)."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}
    again = ["--load", folder / "whole/checkpoints", "--ckpt-step", 2]
    wanted = {
        "whole": LAYOUT, "resumed": [*LAYOUT, *again], "elsewhere": [*OTHER_LAYOUT, *again],
        "local": [
            *again, "--transformer-impl", "local", "--pipeline-model-parallel-size", 2, "--rollout-pad-sequences",
        ],
        "hybrid": [*LAYOUT, *HYBRID],
    }  # fmt: skip
    with replayed(sglang_server_fp32, tiny_moe_dir, folder) as door:
        for name, flags in wanted.items():
            door.replay()
            done = launch(folder, name, tiny_moe_dir, door.url, SCRIPT, *RUN, *flags, processes=4)
            assert name == "local" or done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = done, folder / name, checksums(sglang_server_fp32.url), door.sampled
    return found


def test_run_when_resumed_in_the_same_layout_then_its_steps_and_weights_are_those_of_a_run_that_never_ended(runs):
    (_, whole, weights, _), (_, resumed, resumed_weights, sampled) = runs["whole"], runs["resumed"]
    wanted, steps = untimed_steps(whole), untimed_steps(resumed)
    assert [step["step"] for step in steps] == [3, 4] and len(wanted) == 4
    assert sampled == 0, "other samples were asked for"
    for step, expected in zip(steps, wanted[2:], strict=True):
        assert step["grad_norm"] > 0
        assert step == expected
    assert resumed_weights == weights


def test_run_when_resumed_in_another_layout_then_its_steps_are_nearly_those_of_a_run_that_never_ended(runs):
    (_, whole, *_), (_, resumed, _, sampled) = runs["whole"], runs["elsewhere"]
    wanted, steps = untimed_steps(whole)[2:], untimed_steps(resumed)
    assert [step["step"] for step in steps] == [3, 4] and sampled == 0
    for step, expected in zip(steps, wanted, strict=True):
        for name in ("loss/policy", "loss/entropy", "grad_norm", "reward/mean", "rollout_corr/valid_tokens"):
            assert step[name] == pytest.approx(expected[name], rel=NEAR, abs=1e-7), name
        assert step["rollout_corr/k3_kl"] < 1e-6, "other weights than those that were pushed"


def test_run_when_resumed_on_layers_of_other_names_then_refused_with_the_remedy(runs):
    done, folder, *_ = runs["local"]
    saved = folder.parent / "whole/checkpoints/iter_0000002"
    assert done.returncode == 1 and not (folder / "log/metrics.jsonl").exists()
    assert (
        f"megatron_rl_corr: --transformer-impl local: the checkpoint {saved} was saved with transformer_engine, whose "
        "layers have other names"
    ) in done.stderr


def test_hybrid_model_of_the_same_layers_then_its_steps_and_weights_are_those_of_gpt_model(runs):
    (_, gpt, weights, _), (hybrid_run, hybrid, hybrid_weights, sampled) = runs["whole"], runs["hybrid"]
    wanted, steps = untimed_steps(gpt), untimed_steps(hybrid)
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and sampled == 0
    assert hybrid_run.stdout.count("a HybridModel") == 4, "another model was built"
    for step, expected in zip(steps, wanted, strict=True):
        for name in ("loss/policy", "loss/entropy", "grad_norm", "rollout_corr/k3_kl"):
            assert step[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-12), name
    assert hybrid_weights == weights
