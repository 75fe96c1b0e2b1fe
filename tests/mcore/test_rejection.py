"""Rejection of a microbatch, a rank or the batch, on real Megatron: gradients, auxiliary losses, steps
without update; and the first step's bound.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from tests import tensor_files
from tests.megatron_forks import run_megatron
from tests.tiers import in_matrix, matrix

pytestmark = matrix

HERE = Path(__file__).resolve().parent
LAYOUTS = [{"ep": 2}, *in_matrix({"cp": 2}, {"pp": 2})]
ALL = range(1 + len(LAYOUTS))


@pytest.fixture(scope="module")
def reference(tiny_moe_dir, hf_reference):
    return hf_reference(tiny_moe_dir)


@pytest.fixture(scope="module")
def results(tiny_moe_dir, reference, tmp_path_factory):
    """What rejection_worker.py saved for each rank: of one process, then of each layout of two."""

    folder = tmp_path_factory.mktemp("rejection")

    def of(processes, layouts):
        out = folder / f"{processes}.pt"
        arguments = [processes, tiny_moe_dir, reference, out, *map(json.dumps, layouts)]
        run = run_megatron(HERE / "rejection_worker.py", *arguments, timeout=600)
        assert run.returncode == 0, run.stderr[-3000:]
        return tensor_files.load(out)

    return of(1, [{}]) + of(2, LAYOUTS)


@pytest.fixture(scope="module")
def lengths(reference):
    """Tokens of each of the 16 responses; of them as they are, the rule rejects none."""
    samples = torch.load(reference, weights_only=True)["samples"]
    assert all(0.8 < (s["old"] - s["rollout"]).mean().exp() < 1.25 for s in samples)
    return [len(s["output"]) for s in samples]


def whole(ranks, part, key):
    """Gradients and metrics of all ranks together."""
    gradients, numbers = {}, {}
    for rank in ranks:
        gradients |= rank[part][key][0]
        numbers |= rank[part][key][1]
    return gradients, numbers


def assert_same(gradients, expected, tolerance):
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (gradients[name].double() - gradient.double()).norm() / gradient.double().norm().clamp(
            min=1e-6
        )
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("at", range(len(LAYOUTS)), ids=map(json.dumps, LAYOUTS))
@pytest.mark.parametrize(
    ("rows", "left"), [("one microbatch", range(4, 16)), ("one rank", range(8)), ("all", ())]
)
def test_step_when_all_of_a_part_is_rejected_then_gradients_are_those_of_one_process(
    results, lengths, at, rows, left
):
    kept = sum(lengths[row] for row in left)
    alone, expected = whole(results[0], "gradients", rows)
    gradients, numbers = whole(results[1 + at], "gradients", rows)
    assert_same(gradients, alone, 1e-5)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert any(gradient.any() for gradient in gradients.values()) == (rows != "all")
    assert numbers["rollout_corr/valid_tokens"] == sum(lengths)
    assert numbers["rollout_corr/kept_fraction"] == kept / sum(lengths)
    # Of no token there is no mean; everything else is a number.
    of_nothing = {name for name, value in numbers.items() if not math.isfinite(value)}
    assert of_nothing == {name for name, value in expected.items() if not math.isfinite(value)}
    if rows == "all":
        assert {"loss/policy", "loss/clip_fraction"} <= of_nothing


@pytest.mark.parametrize("at", ALL, ids=map(json.dumps, [{}, *LAYOUTS]))
def test_moe_auxiliary_losses_when_half_is_rejected_then_their_gradients_stay_in_both_normalisations(
    results, at
):
    # Equal rewards: the policy's gradient is 0, what is left is load balancing and the router's z-loss.
    expected, _ = whole(results[at], "auxiliary", ("none", False))
    assert expected["model.layers.0.mlp.gate.weight"].norm() > 0.01
    for rows in ("none", "one rank"):
        for per_token in (False, True):
            gradients, numbers = whole(results[at], "auxiliary", (rows, per_token))
            assert_same(gradients, expected, 1e-5)
        assert (numbers["rollout_corr/kept_fraction"] < 0.5) == (rows == "one rank")


SKIPPED = ("rejected", "rejected in the loss", "no log-probs", "equal rewards", "equal rewards, scored")


@pytest.mark.parametrize("case", [*SKIPPED, "leaving"])
@pytest.mark.parametrize("at", ALL, ids=map(json.dumps, [{}, *LAYOUTS]))
def test_step_when_it_makes_no_update_then_weights_moments_and_balancing_biases_stay(results, at, case):
    for rank in results[at]:
        (before, trained, after), _, _ = rank["skipped"][case]
        # An ordinary step first, so that there is momentum that would move the weights.
        assert (trained[0] - before[0]).abs().max() > 1e-3
        assert (trained[2] - before[2]).abs().max() == pytest.approx(1e-3), (
            "the bias moves in an ordinary step"
        )
        assert all(torch.equal(now, then) for now, then in zip(after, trained, strict=True))


@pytest.mark.parametrize("case", SKIPPED)
@pytest.mark.parametrize("at", ALL, ids=map(json.dumps, [{}, *LAYOUTS]))
def test_step_when_it_makes_no_update_then_it_is_reported_as_skipped_and_the_same_weights_are_pushed(
    results, at, case
):
    _, reports, leaving = results[at][-1]["skipped"][case]
    assert [report["pushed"] for report in reports if "pushed" in report] == [1, 2] and not leaving
    steps = [report for report in reports if "skipped" in report]
    assert [report["skipped"] for report in steps] == [0, 1]
    assert steps[0]["rollout_corr/kept_fraction"] > 0.5
    if case.startswith("rejected"):
        assert steps[1]["rollout_corr/kept_fraction"] == 0.0
    elif case.startswith("equal"):
        assert steps[1]["rollout_corr/kept_fraction"] > 0.5
    else:
        assert steps[1]["rollout_corr/nonfinite_tokens"] == steps[0]["rollout_corr/valid_tokens"]
    # Of a band of probabilities without a token nothing is told.
    told, told_then = ({name for name in step if "/by_" not in name} for step in steps)
    assert told - told_then == {"grad_norm"} and told_then <= told


@pytest.mark.parametrize("at", ALL, ids=map(json.dumps, [{}, *LAYOUTS]))
def test_step_when_megatron_leaves_before_its_update_then_nothing_is_pushed_or_reported(results, at):
    for rank in results[at]:
        _, reports, leaving = rank["skipped"]["leaving"]
        assert leaving and [report["pushed"] for report in reports if "pushed" in report] == [1]
        assert [report["step"] for report in reports if "step" in report] in ([1], [])


@pytest.mark.parametrize("how", ["scored", "in the loss"])
@pytest.mark.parametrize(
    "fault", ["dropout", "shift", "shift of cut ones", "checkpoint", "nan", "no own token"]
)
@pytest.mark.parametrize("at", ALL, ids=map(json.dumps, [{}, *LAYOUTS]))
def test_first_step_when_what_is_trained_is_not_what_was_sampled_then_all_ranks_end_before_an_update(
    results, at, fault, how
):
    found = [rank["first"][fault, how] for rank in results[at]]
    [said] = [error for error, _, _ in found if error != "another rank"]
    assert said.startswith(
        "--rollout-max-first-step-kl 0.0001: in the first step the servers sampled with the weights"
    )
    assert ("not a number" in said) == (fault in ("nan", "no own token"))
    assert all(updates == 0 and pushed == [] for _, updates, pushed in found)


@pytest.mark.parametrize("how", ["scored", "in the loss"])
@pytest.mark.parametrize("at", ALL, ids=map(json.dumps, [{}, *LAYOUTS]))
def test_first_step_when_own_samples_agree_then_it_is_taken_whatever_older_or_few_ones_say(results, at, how):
    for fault in ("right", "other tokens are old", "few tokens are absurd"):
        assert [rank["first"][fault, how] for rank in results[at]] == [(None, 1, [6])] * len(results[at])
    # Nothing is trained where every sample was cut, and that is no disagreement.
    assert [rank["first"]["all are cut", how] for rank in results[at]] == [(None, 0, [6])] * len(results[at])


@pytest.mark.parametrize("at", ALL, ids=map(json.dumps, [{}, *LAYOUTS]))
def test_ratio_when_training_mode_is_another_policy_than_the_scoring_passs_then_it_is_1_all_the_same(
    results, at
):
    step = results[at][-1]["dropout"]
    assert step["skipped"] == 0 and step["rollout_corr/kept_fraction"] > 0.5
    for name in ("old_new_k3_kl", "old_new_k3_kl_clamped", "clip_fraction", "dual_clip_fraction"):
        assert step[f"loss/{name}"] == 0.0
