"""Replayed runs: bit for bit those that were saved in the same layout, nearly in others; what is
refused by name.
"""

import shutil

import pytest

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import untimed_steps
from tests.mcore.test_runs import (
    GROUPED,
    LAYOUT,
    NEAR,
    assert_nearly_same_weights,
    assert_same_weights,
    made,
    replay,
)

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; test_runs.py has one layout"
)
REPLICAS = [
    *GROUPED,
    "--expert-model-parallel-size",
    2,
    "--expert-tensor-parallel-size",
    1,
    "--tensor-model-parallel-size",
    2,
    "--sequence-parallel",
]
"""Two replicas of two tensor-parallel ranks, whose samples are dealt out."""
SEVERAL = ["--rollout-updates-per-batch", 2, "--router-replay", "R3"]
ROUTED = [*REPLICAS, *SEVERAL, "--rollout-save-routed-experts"]
FILTERED = ["--rollout-temperature", 0.8, "--rollout-top-p", 0.95, "--rollout-top-k", 20]

OF_SAMPLING = ("packing/moved_bytes", "rollout/skipped_prompts/long")
"""What rows were left out; and the size of samples on their way, which share their prompt's ids as
they are sampled.
"""


@pytest.fixture(scope="module")
def runs(keeping_server, tiny_moe_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    wanted = {"whole": LAYOUT, "replicas": ROUTED, "filtered": [*REPLICAS, *FILTERED]}
    return made(folder, keeping_server, tiny_moe_dir, wanted)


def folder_of(runs):
    return runs["whole"][1].parent


@pytest.mark.parametrize(
    "name, flags",
    [("whole", LAYOUT), ("replicas", ROUTED), ("filtered", [*REPLICAS, *FILTERED])],
)
def test_run_when_replayed_in_its_layout_then_its_steps_and_weights_bit_for_bit(
    name, flags, runs, tiny_moe_dir
):
    folder, again = folder_of(runs), f"{name}-again"
    saves = ["--rollout-save-trajectories", folder / again / "samples"]
    done = replay(folder, name, again, tiny_moe_dir, *flags, *saves, processes=4)
    assert done.returncode == 0, done.stderr[-4000:]
    for step, expected in zip(untimed_steps(folder / again), untimed_steps(folder / name), strict=True):
        differ = {key: (step.get(key), one) for key, one in expected.items() if step.get(key) != one}
        assert {key: pair for key, pair in differ.items() if key not in OF_SAMPLING} == {}
    assert_same_weights(folder / again / "hf/iter_0000004", folder / name / "hf/iter_0000004")
    # What a replay saves can be replayed itself.
    for path in (folder / name / "samples").iterdir():
        assert (folder / again / "samples" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    "name, flags, processes",
    [
        ("filtered", [*GROUPED, *FILTERED], 1),
        ("filtered", [*GROUPED, *FILTERED, "--rollout-pad-sequences"], 4),
    ],
)
def test_run_when_replayed_in_another_layout_then_nearly_the_same(name, flags, processes, runs, tiny_moe_dir):
    folder, other = folder_of(runs), f"{name}-{processes}"
    done = replay(folder, name, other, tiny_moe_dir, *flags, processes=processes)
    assert done.returncode == 0, done.stderr[-4000:]
    for step, expected in zip(untimed_steps(folder / other), untimed_steps(folder / name), strict=True):
        for metric in (
            "loss/policy",
            "loss/entropy",
            "grad_norm",
            "reward/mean",
            "rollout_corr/valid_tokens",
        ):
            if metric in expected:
                assert step[metric] == pytest.approx(expected[metric], rel=NEAR, abs=1e-7), metric
    weights = [HFCheckpoint(folder / one / "hf/iter_0000004") for one in (other, name)]
    assert_nearly_same_weights(*weights)


def test_run_when_the_files_do_not_fit_then_refused_with_the_file_and_the_flag(runs, tiny_moe_dir):
    folder = folder_of(runs)
    for name, change, words in (
        (
            "longer",
            ["--train-iters", 6],
            "has no samples of 2 of this run's 6 batches; the first is step_000005",
        ),
        ("warmer", ["--rollout-temperature", 0.5], "was sampled with --rollout-temperature 1.0, got 0.5"),
        ("smaller", ["--global-batch-size", 8], "16 samples, and a batch of this run 8"),
        ("routed", ["--router-replay", "R3"], "has no routed experts"),
        ("several", ["--rollout-updates-per-batch", 2], "was made with --rollout-updates-per-batch x"),
    ):
        done = replay(folder, "whole", name, tiny_moe_dir, *GROUPED, *change)
        assert done.returncode == 1 and words in done.stderr, (name, done.stderr[-3000:])
    partly = folder / "partly/samples"
    shutil.copytree(folder / "replicas/samples", partly)
    (partly / "step_000003_replica1.parquet").unlink()
    done = replay(folder, "replicas", "other replicas", tiny_moe_dir, *GROUPED, *SEVERAL)
    assert "which samples an update takes depends on it" in done.stderr
    done = replay(folder, "partly", "missing", tiny_moe_dir, *REPLICAS, *SEVERAL, processes=4)
    assert "partly/samples has 1 files of step 3, whose batch has 2" in done.stderr
