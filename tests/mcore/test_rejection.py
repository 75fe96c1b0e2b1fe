"""All of a microbatch, of a rank or of the batch rejected, on real Megatron: gradients, auxiliary losses, the skip."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl_corr.cpu import environment

HERE = Path(__file__).resolve().parent
LAYOUTS = [{"ep": 2}, {"cp": 2}, {"pp": 2}]


@pytest.fixture(scope="module")
def reference(tiny_moe_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("rejection") / "reference.pt"
    subprocess.run([sys.executable, HERE / "hf_reference.py", tiny_moe_dir, path], check=True)
    return path


@pytest.fixture(scope="module")
def results(tiny_moe_dir, reference):
    """What rejection_worker.py saved for each rank: of one process, then of each layout of two."""

    def of(processes, layouts):
        out = reference.with_name(f"{processes}.pt")
        command = [sys.executable, HERE / "rejection_worker.py", str(processes), tiny_moe_dir, reference, out]
        run = subprocess.run(
            [*command, *map(json.dumps, layouts)], env=environment("megatron"), capture_output=True, text=True,
            timeout=600,
        )
        assert run.returncode == 0, run.stderr[-3000:]
        return torch.load(out)

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
        error = (gradients[name].double() - gradient.double()).norm() / gradient.double().norm().clamp(min=1e-6)
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("at", range(3), ids=map(json.dumps, LAYOUTS))
@pytest.mark.parametrize(("rows", "left"), [("one microbatch", range(4, 16)), ("one rank", range(8)), ("all", ())])
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
        assert {"policy", "clip_fraction"} <= of_nothing


@pytest.mark.parametrize("at", range(4), ids=map(json.dumps, [{}, *LAYOUTS]))
def test_moe_auxiliary_losses_when_half_is_rejected_then_their_gradients_stay_in_both_normalisations(results, at):
    # Equal rewards: the policy's gradient is 0, what is left is load balancing and the router's z-loss.
    expected, _ = whole(results[at], "auxiliary", ("none", False))
    assert expected["model.layers.0.mlp.gate.weight"].norm() > 0.01
    for rows in ("none", "one rank"):
        for per_token in (False, True):
            gradients, numbers = whole(results[at], "auxiliary", (rows, per_token))
            assert_same(gradients, expected, 1e-5)
        assert (numbers["rollout_corr/kept_fraction"] < 0.5) == (rows == "one rank")


@pytest.mark.parametrize("bypass", [False, True], ids=["three-policy", "bypass"])
@pytest.mark.parametrize("at", range(4), ids=map(json.dumps, [{}, *LAYOUTS]))
def test_step_when_all_is_rejected_then_weights_and_moments_stay_and_it_is_reported_as_skipped(results, at, bypass):
    for rank in results[at]:
        (before, trained, after), _ = rank["skipped"][bypass]
        # An ordinary step first, so that there is momentum that would move the weights.
        assert (trained[: len(before)] - before).abs().max() > 1e-3
        assert torch.equal(after, trained)
    _, reports = results[at][-1]["skipped"][bypass]
    assert [report["skipped"] for report in reports] == [0, 1]
    assert reports[0]["rollout_corr/kept_fraction"] > 0.5 and reports[1]["rollout_corr/kept_fraction"] == 0.0
