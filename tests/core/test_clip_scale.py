"""SAT's narrower clip: its factor by hand, against plain Python, within PPO's interval, over ranks."""

import math
import random
from dataclasses import replace

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.reduce.collectives import ParallelGroups

NAN = float("nan")
PPO = RolloutCorrectionConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=None)
SAT = replace(PPO, clip_sat_tail=2.0)
# Mean |D| of the five valid ones: (0 + 0.25 + 0.25 + 0.5 + 4) / 5 = 1; the tail begins at 2.
D = [0.0, 0.25, -0.25, 0.5, NAN, -4.0, 9.0]
MASK = [1, 1, 1, 1, 1, 1, 0]


def correct(d, config, mask=None, groups=None):
    rollout = torch.full((len(d),), -32.0)
    mask = torch.ones(len(d)) if mask is None else torch.tensor(mask)
    ids = torch.zeros(len(d), dtype=torch.int64)
    return compute_correction(
        rollout + torch.tensor(d), rollout, mask, ids, num_sequences=1, config=config, groups=groups
    )


def losses_of(correction, ratios, advantages, config, metrics=None):
    """Losses and their gradients in log pi_theta, with pi_old = e^-2."""
    logprobs = (torch.tensor(ratios).log() - 2).requires_grad_()
    old = torch.full((len(ratios),), -2.0)
    losses = policy_loss(
        "ppo_clip", logprobs, old, torch.tensor(advantages), correction, config, metrics=metrics
    )
    losses.sum().backward()
    return losses.tolist(), logprobs.grad.tolist()


def test_scale_when_of_a_batch_then_by_hand():
    # 2 / 4 for D = -4; a token without a log-prob, and one outside of the mask, are in no mean.
    assert correct(D, SAT, MASK).clip_scale.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0]
    assert correct(D, PPO, MASK).clip_scale is None


@pytest.mark.parametrize(
    ("d", "scale"),
    [
        ([0.0, 0.0], [1.0, 1.0]),  # no mismatch
        ([0.5, -0.5], [1.0, 1.0]),  # no tail: all are alike
        ([1.0, 0.0, 0.0], [2 / 3, 1.0, 1.0]),
        ([1e-6, 0.0, 0.0], [2 / 3, 1.0, 1.0]),  # relative to the batch
        ([1e30, 1.0, 1.0], [44 / 60, 1.0, 1.0]),  # |D| counts for 20 at most, and the tail begins at 44 / 3
        ([NAN], [1.0]),
    ],
)
def test_scale_when_the_batch_is_special_then_by_hand(d, scale):
    rollout = torch.zeros(len(d)) if max(map(abs, d)) < 1e-3 else torch.full((len(d),), -1.0)
    ids = torch.zeros(len(d), dtype=torch.int64)
    made = compute_correction(
        rollout + torch.tensor(d), rollout, torch.ones(len(d)), ids, num_sequences=1, config=SAT
    )
    assert made.clip_scale.tolist() == pytest.approx(scale, rel=1e-6)


def test_scale_when_only_measured_then_none():
    assert correct(D, replace(SAT, diagnostics_only=True), MASK).clip_scale is None


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "by_sat"),
    [
        # kappa = 0.5: the bounds 0.8 and 1.3 become 0.9 and 1.15.
        (1.2, 2.0, -2.3, 0.0, True, True),
        (1.5, 2.0, -2.3, 0.0, True, False),
        (1.1, 2.0, -2.2, -2.2, False, False),
        (0.85, -2.0, 1.8, 0.0, True, True),
        (0.5, -2.0, 1.8, 0.0, True, False),
        (0.95, -2.0, 1.9, 1.9, False, False),
        # The other end never acts.
        (0.5, 2.0, -1.0, -1.0, False, False),
        (1.5, -2.0, 3.0, 3.0, False, False),
        (1.2, 0.0, 0.0, 0.0, False, False),
        (1.0, 2.0, -2.0, -2.0, False, False),
    ],
)
def test_clip_when_a_token_is_in_the_tail_then_its_bound_is_nearer(
    ratio, advantage, loss, gradient, clipped, by_sat
):
    metrics = {}
    correction = correct([0.0, 0.0, 0.0, 4.0], SAT)  # mean 1
    found = losses_of(correction, [1.0, 1.0, 1.0, ratio], [0.0, 0.0, 0.0, advantage], SAT, metrics)
    assert (found[0][3], found[1][3]) == pytest.approx((loss, gradient), rel=1e-6)
    assert metrics["clip_fraction"].value() == clipped / 4
    assert metrics["sat_clip_fraction"].value() == by_sat / 4
    assert metrics["sat_tail_fraction"].value() == 1 / 4


@pytest.mark.parametrize("seed", range(20))
def test_loss_when_of_random_tokens_then_as_plain_python_and_at_most_ppos_surrogate(seed):
    generator = random.Random(seed)
    count, tail = 60, generator.choice([0.3, 1.0])
    d = [generator.gauss(0, 1) ** 3 * 0.1 for _ in range(count)]
    ratios = [math.exp(generator.gauss(0, 0.3)) for _ in range(count)]
    advantages = [generator.gauss(0, 1) for _ in range(count)]
    config = replace(SAT, clip_sat_tail=tail)
    correction = correct([x + 1e-9 for x in d], config)
    losses, gradients = losses_of(correction, ratios, advantages, config)
    ppo, of_ppo = losses_of(correct(d, PPO), ratios, advantages, PPO)
    mean = sum(map(abs, d)) / count
    narrowed = 0
    for t in range(count):
        kappa = min(1.0, tail * mean / abs(d[t]))
        r, a = ratios[t], advantages[t]
        # Only the end that the sign selects.
        outside = r > 1 + 0.3 * kappa if a > 0 else r < 1 - 0.2 * kappa
        bound = 1 + 0.3 * kappa if a > 0 else 1 - 0.2 * kappa
        assert losses[t] == pytest.approx(-(bound if outside else r) * a, rel=2e-5, abs=1e-6)
        assert gradients[t] == pytest.approx(0.0 if outside else -r * a, rel=2e-5, abs=1e-6)
        assert losses[t] >= ppo[t] - 1e-6
        assert gradients[t] in (0.0, pytest.approx(of_ppo[t]))
        narrowed += outside and of_ppo[t] != 0
    assert narrowed > 0


def test_scale_when_tokens_are_on_two_ranks_then_of_their_common_mean():
    # Alone rank 0 has no tail (1, 1), and rank 1 none (3, 3); together the mean is 2.
    halves, totals = [[1.0, -1.0], [3.0, -3.0]], []

    class Recording(ParallelGroups):
        def all_reduce_dp_cp(self, values):
            totals.append(values.clone())
            return values

    class Summed(ParallelGroups):
        def all_reduce_dp_cp(self, values):
            return totals[0] + totals[1]

    config = replace(SAT, clip_sat_tail=1.0)
    alone = [correct(half, config, groups=Recording()).clip_scale.tolist() for half in halves]
    assert alone == [[1.0, 1.0], [1.0, 1.0]]
    together = [correct(half, config, groups=Summed()).clip_scale.tolist() for half in halves]
    assert together == [[1.0, 1.0], pytest.approx([2 / 3, 2 / 3])]


def test_correction_when_a_microbatch_takes_its_tokens_then_their_scales_are_the_batchs():
    correction = correct(D, SAT, MASK)
    part = correction.at(torch.tensor([5, 0]), 1)
    assert part.clip_scale.tolist() == [0.5, 1.0, 0.0] and part.mask.tolist() == [True, True, False]
    assert correct(D, PPO, MASK).at(torch.tensor([5]), 0).clip_scale is None
