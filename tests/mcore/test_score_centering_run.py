"""A whole run with score centering: on a real server, and replayed from its samples."""

import math

import pytest

from megatron_rl_corr.rollout.sample_file import read_sampling, read_trajectories
from tests.mcore.launched import launch, replayed, untimed_steps
from tests.mcore.test_runs import GROUPED, RUN, SCRIPT, assert_same_weights, replay
from tests.tiers import long, matrix

pytestmark = matrix

LAYOUT = [*GROUPED, "--tensor-model-parallel-size", 2, "--sequence-parallel"]
CENTERED = ["--rollout-score-centering", 8]
OF_SAMPLING = ("packing/moved_bytes", "rollout/skipped_prompts/long")


@pytest.fixture(scope="module")
def run(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("centered")
    saves = ["--rollout-save-hf", folder / "run/hf", "--rollout-save-trajectories", folder / "run/samples"]
    with replayed(sglang_server_fp32, tiny_moe_dir, folder) as door:
        flags = [*RUN, *saves, *LAYOUT, *CENTERED]
        done = launch(folder, "run", tiny_moe_dir, door.url, SCRIPT, *flags, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_run_when_centered_then_the_policies_agree_and_their_tails_are_logged(run):
    steps = untimed_steps(run / "run")
    assert len(steps) == 4
    for step in steps:
        assert step["grad_norm"] > 0
        # The server has the weights that train: only rounding is centered away.
        assert 0 < step["loss/centering_drift"] < 1e-4
        assert 0 < step["loss/centering_train_tail"] < 1
        assert math.isclose(
            step["loss/centering_train_tail"], step["loss/centering_rollout_tail"], rel_tol=1e-4
        )
    for path in (run / "run/samples").iterdir():
        assert read_sampling(path).top_logprobs == 8
        for sample in read_trajectories(path):
            top, output = sample.trajectory.top_logprobs, sample.trajectory.output_ids
            assert top.ids.shape == (len(output), 8)


def test_run_when_replayed_then_steps_weights_and_files_bit_for_bit(run, tiny_moe_dir):
    saves = ["--rollout-save-trajectories", run / "again/samples"]
    done = replay(run, "run", "again", tiny_moe_dir, *LAYOUT, *CENTERED, *saves, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    for step, expected in zip(untimed_steps(run / "again"), untimed_steps(run / "run"), strict=True):
        differ = {key: (step.get(key), one) for key, one in expected.items() if step.get(key) != one}
        assert {key: pair for key, pair in differ.items() if key not in OF_SAMPLING} == {}
    assert_same_weights(run / "again/hf/iter_0000004", run / "run/hf/iter_0000004")
    for path in (run / "run/samples").iterdir():
        assert (run / "again/samples" / path.name).read_bytes() == path.read_bytes(), path.name


@long
@pytest.mark.parametrize("centered", [(), ("--rollout-score-centering", 4)])
def test_run_when_replayed_with_fewer_ids_or_without_then_it_runs(centered, run, tiny_moe_dir):
    name = f"with {len(centered)}"
    done = replay(run, "run", name, tiny_moe_dir, *LAYOUT, *centered, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    steps, wanted = untimed_steps(run / name), untimed_steps(run / "run")
    assert ("loss/centering_drift" in steps[0]) == bool(centered)
    # The server has the weights of the trainer: what is centered is rounding.
    assert steps[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=1e-3)
    if centered:
        assert steps[0]["loss/centering_train_tail"] > wanted[0]["loss/centering_train_tail"]


def test_run_when_replayed_with_more_ids_than_there_are_then_refused_with_both(run, tiny_moe_dir):
    done = replay(run, "run", "more", tiny_moe_dir, *LAYOUT, "--rollout-score-centering", 9, processes=2)
    assert done.returncode == 1
    assert "--rollout-score-centering 9 needs the log-probs of so many ids at each token" in done.stderr
