"""A loss of the user's own: what it is given, what it may return, and that it equals ours
where it is the same.
"""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.reduce.metrics import Mean

NAN = float("nan")
TRAIN = torch.tensor([-1.0, -0.5, -2.0, -1.5, -0.25, -3.0])
ROLLOUT = torch.tensor([-1.1, -0.5, -1.9, NAN, -0.3, -3.0])
MASK, SEQ_IDS = torch.tensor([1, 1, 1, 1, 1, 0]).bool(), torch.tensor([0, 0, 0, 1, 1, 1])
ADVANTAGES = torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0, NAN])


def made(formula, now=TRAIN + 0.1, **settings):
    """(losses, gradient, metrics) of six tokens: the fourth has no rollout log-prob, the last is
    not in the mask.
    """
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=1.05, **settings)
    correction = compute_correction(TRAIN, ROLLOUT, MASK, SEQ_IDS, num_sequences=2, config=config)
    now, metrics = now.clone().requires_grad_(), {}
    losses = policy_loss(
        formula, now, TRAIN, ADVANTAGES, correction, config, seq_ids=SEQ_IDS, num_sequences=2, metrics=metrics
    )
    losses.sum().backward()
    return losses.detach(), now.grad, {name: metric.value() for name, metric in metrics.items()}


def ppo(inputs, config):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    low, high = config.clip
    clipped = ratio.clamp(1 - low, 1 + high)
    return -inputs.correction.weights * torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def test_loss_when_it_is_ppos_own_formula_then_ours_number_for_number():
    ours, own = made("ppo_clip", clip_ratio_c="none"), made(ppo, loss="own.py:ppo", clip_ratio_c="none")
    assert torch.equal(ours[0], own[0]) and torch.equal(ours[1], own[1])
    # r = e^0.1 inside the clip: -w r A with w = min(rho, 1.05) and rho = e^0.1, 1, e^-0.1.
    r = math.exp(0.1)
    expected = [-1.05 * r * 2, -r * 2, -math.exp(-0.1) * r * 2, 0.0, r * 1.05, 0.0]
    assert own[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert own[2] == {name: ours[2][name] for name in ("policy", "old_new_k3_kl", "old_new_k3_kl_clamped")}


def test_loss_when_it_would_be_nan_outside_the_mask_then_neither_loss_nor_gradient_is():
    seen = {}

    def log_of(inputs, config):
        seen.update(advantages=inputs.advantages, weights=inputs.correction.weights)
        return -inputs.advantages * (inputs.logprobs / (inputs.logprobs + (inputs.logprobs == 0))).exp()

    now = TRAIN.clone()
    now[5] = NAN
    losses, gradient, _ = made(log_of, now=now)
    assert losses.isfinite().all() and gradient.isfinite().all()
    assert losses[[3, 5]].tolist() == [0, 0] and gradient[[3, 5]].tolist() == [0, 0]
    assert seen["advantages"].tolist() == [2, 2, 2, 0, -1, 0] and seen["weights"][5] == 0


def test_loss_when_it_adds_metrics_then_they_stand_beside_the_usual_ones():
    def with_metrics(inputs, config, *, metrics):
        metrics["share"] = Mean(torch.tensor([1.0, 4.0], dtype=torch.float64))
        return -inputs.advantages * inputs.logprobs

    assert made(with_metrics)[2]["share"] == 0.25 and "policy" in made(with_metrics)[2]


def test_loss_when_it_adds_other_metrics_than_at_first_then_refused_since_ranks_would_exchange_unlike_ones():
    names = iter(["share", "share", "other"])

    def fickle(inputs, config, *, metrics):
        # with a gradient, which is cut
        metrics[next(names)] = Mean((inputs.logprobs.sum() * torch.ones(2)).float())
        return -inputs.advantages * inputs.logprobs

    made(fickle), made(fickle)
    with pytest.raises(ValueError, match=r"it added \['share'\] at first, then \['other'\]"):
        made(fickle)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda inputs, config: 3.0, "must return a tensor, got float"),
        (lambda inputs, config: inputs.logprobs.sum(), r"shape \[6\] on cpu, got torch.float32 \[\] on cpu"),
        (
            lambda inputs, config: inputs.mask,
            r"a floating-point tensor of shape \[6\] on cpu, got torch.bool",
        ),
        (
            lambda inputs, config, metrics: metrics.update(share=0.5) or inputs.logprobs,
            "adds 'share' to metrics, .* 0.5",
        ),
        (
            lambda inputs, config, metrics: metrics.update(policy=Mean(TRAIN)) or inputs.logprobs,
            "adds 'policy'",
        ),
    ],
)
def test_loss_when_it_returns_what_is_no_loss_then_refused_with_what_it_should_be(loss, words):
    with pytest.raises(ValueError, match=f"`loss` .*{words}"):
        made(loss)


def test_loss_when_a_sequence_is_rejected_then_its_tokens_have_none():
    rule = RejectionRule("seq_mean", "ratio", 0.999, 1.001)
    losses, gradient, _ = made(
        lambda inputs, config: -inputs.advantages * inputs.logprobs, rollout_rs=(rule,)
    )
    assert losses[4] == 0 and gradient[4] == 0
