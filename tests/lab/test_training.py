"""Trainings of the laboratory: their samples, their step, what counts as a collapse, and the intervals."""

import math

import pytest
import torch

from lab.collapses import SETTINGS, bootstrap, table_of_collapses, wilson
from lab.estimators import all_arms
from lab.mismatch import Noise, sampler_conditionals
from lab.policies import TASKS, World, random_tables
from lab.run import make_training
from lab.training import CLIP_GRAD, Runs, SeedwiseAdam, Setting, gradient_of_step, sample, train

SHORT = Setting("outcome", "rounding", 1.0, length=3, batch=16, steps=30, start=4)
WORLD = World(4, 3)


def drawn(setting, seed=0):
    theta, noise = random_tables(WORLD, 2, spread=1.0, seed=5), Noise.drawn(WORLD, 2, 6)
    return theta, noise, sample(WORLD, theta, noise, setting, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["rounding", "relative", "tail", "routing", "top_p", "turns"])
def test_samples_when_drawn_then_as_likely_as_the_listed_sampler_says(kind):
    setting = Setting("outcome", kind, 0.5, length=3, batch=4000)
    theta, noise, (tokens, logprobs, prefixes) = drawn(setting)
    mu = sampler_conditionals(WORLD, theta, noise, kind, 0.5)
    who = torch.arange(2)[:, None, None]
    assert torch.equal(prefixes, WORLD.prefixes_of(tokens))
    assert (mu[who, prefixes, tokens] - logprobs).abs().max() < 1e-12
    first = torch.stack([torch.bincount(one, minlength=4) for one in tokens[:, :, 0]]) / 4000
    assert (first - mu[:, 0].exp()).abs().max() < 0.04  # five standard errors of a share


def test_step_when_taken_then_the_mean_of_weighed_scores():
    setting = Setting("dense", "rounding", 1.0, length=3, batch=16, advantage="raw", shift=-2.0)
    theta, noise, samples = drawn(setting)
    found = gradient_of_step(WORLD, theta, samples, noise, all_arms()["sequence_unbounded"], setting)
    tokens, rollout, _ = samples
    leaf = theta.clone().requires_grad_()
    logp = leaf.log_softmax(-1)[torch.arange(2)[:, None, None], WORLD.contexts_of(tokens), tokens]
    weights = (logp.detach() - rollout).sum(-1).exp()
    advantages = TASKS["dense"](tokens, 4) - 2.0
    (weights * advantages * logp.sum(-1)).mean(dim=1).sum().backward()
    assert (found - leaf.grad).abs().max() < 1e-5 * leaf.grad.abs().max()


def test_step_when_responses_are_rejected_then_they_leave_the_baseline():
    setting = Setting("dense", "rounding", 1.0, length=3, batch=16)
    theta, noise, samples = drawn(setting)
    arm = all_arms()["rule:seq_sum_ratio"]
    found = gradient_of_step(WORLD, theta, samples, noise, arm, setting)
    tokens, rollout, _ = samples
    leaf = theta.clone().requires_grad_()
    logp = leaf.log_softmax(-1)[torch.arange(2)[:, None, None], WORLD.contexts_of(tokens), tokens]
    products = (logp.detach() - rollout).sum(-1).exp()
    kept = ((products >= 0.5) & (products <= 2)).double()
    assert 0 < kept.sum() < kept.numel()
    rewards = TASKS["dense"](tokens, 4)
    baseline = (rewards * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True)
    (kept * (rewards - baseline) * logp.sum(-1)).mean(dim=1).sum().backward()
    assert (found - leaf.grad).abs().max() < 1e-5


def test_adam_when_compared_then_torchs_for_each_seed_alone():
    theta = random_tables(WORLD, 2, spread=1.0, seed=1)
    ours, alone = SeedwiseAdam(theta, 0.1), theta.clone().requires_grad_()
    theirs = torch.optim.Adam([alone], lr=0.1, betas=(0.9, 0.95), maximize=True)
    for seed in range(3):
        gradient = 0.1 * random_tables(WORLD, 2, spread=1.0, seed=seed)
        assert gradient.flatten(1).norm(dim=1).max() < CLIP_GRAD
        alone.grad = gradient.clone()
        theirs.step()
        ours.ascend(gradient)
    assert (ours.theta - alone).abs().max() < 1e-9
    before = ours.theta
    ours.ascend(torch.cat([torch.zeros_like(gradient[:1]), gradient[1:]]))
    assert torch.equal(ours.theta[0], before[0]) and not torch.equal(ours.theta[1], before[1])


def test_seeds_when_trained_together_then_as_with_others_beside_them():
    # draws are one stream for all, so a seed's start and noise are its own, its samples are not
    one, two = (train(SHORT, all_arms()["none"], seeds=seeds) for seeds in (range(7, 8), range(7, 9)))
    assert one.rewards[0, 0] == two.rewards[0, 0] and one.rewards.shape == (31, 1)
    again = train(SHORT, all_arms()["none"], seeds=range(7, 9))
    assert torch.equal(again.rewards, two.rewards)


def test_lag_when_trained_then_samples_are_of_older_weights():
    lagging = Setting("outcome", "lag", 4, length=3, batch=16, steps=12, start=4)
    gap = train(lagging, all_arms()["none"], seeds=range(2)).gap
    assert gap[0].max() < 1e-12 < gap[5].min()


def test_runs_when_judged_then_a_fall_that_stays_is_a_collapse():
    steps = torch.linspace(0, 1, 61)[:, None].double()
    fallen, short = steps.clone(), steps.clone()
    fallen[41:], short[42:] = 0.3, 0.3  # best 0.667 and 0.683: for 20 steps, and for 19
    runs = Runs(torch.cat([steps, fallen, short], dim=1), torch.zeros(60, 3))
    assert runs.collapsed.tolist() == [False, True, False]
    assert runs.steps_to(0.51) == [31, 31, 31] and runs.steps_to(0.91) == [55, math.inf, math.inf]


def test_wilson_when_of_100_then_the_textbooks():
    assert wilson(0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)
    assert wilson(88, 100) == pytest.approx((0.8019, 0.9300), abs=1e-3)
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_bootstrap_when_values_are_known_then_near_the_normal_interval():
    values = torch.linspace(0, 1, 101).double()
    half = 1.96 * values.std(unbiased=False).item() / math.sqrt(101)
    assert bootstrap(values) == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)
    low, high = bootstrap(values, median=True)
    assert 0.35 < low < 0.5 < high < 0.65


def test_arm_when_it_couples_samples_then_training_refuses_it():
    with pytest.raises(ValueError, match="m2po.*couples"):
        train(SHORT, all_arms()["preset:m2po"], seeds=range(1))


def test_training_when_run_then_a_row_an_arm(tmp_path):
    make_training(tmp_path, [SHORT], ["none", "token_truncate"], range(3), 1)
    text = (tmp_path / "collapse.md").read_text(encoding="utf-8")
    assert text.count(f"| {SHORT.name} |") == 2 and "of 3 (" in text
    assert {path.name for path in tmp_path.iterdir()} == {"collapse.md", "training.json", "training.svg"}


def test_settings_when_listed_then_each_has_a_name_of_its_own():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


def test_table_when_no_seed_learns_then_never():
    runs = Runs(torch.full((30, 4), 0.1, dtype=torch.float64), torch.zeros(29, 4))
    assert "| never (never to never) |" in table_of_collapses({"s": {"none": runs}})
