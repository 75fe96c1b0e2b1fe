"""On-policy distillation against enumeration of all that could be sampled, autograd and numbers by hand."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.distillation import TeacherScores, distill

V = 7
X = 0.7
UNBOUNDED = {"rollout_is": "token", "rollout_is_upper": 1e9}
"""Weights of tokens that correct the drawing of a token wholly."""


def corrected(train, rollout, config, mask=None, seq_ids=None):
    count = len(train)
    kept = torch.ones(count, dtype=torch.bool) if mask is None else mask
    ids = torch.arange(count) if seq_ids is None else seq_ids
    return compute_correction(train, rollout, kept, ids, num_sequences=int(ids.max()) + 1, config=config)


@pytest.fixture
def policies():
    """(logits of the policy, log-probs of the teacher and of the policy that sampled) of one prefix."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(V, generator=generator, dtype=torch.float64)
    teacher = (1.5 * torch.randn(V, generator=generator, dtype=torch.float64)).log_softmax(dim=0)
    rollout = (logits + 0.6 * torch.randn(V, generator=generator, dtype=torch.float64)).log_softmax(dim=0)
    return logits, teacher, rollout


def of_every_draw(policies, k, *, loss="reinforce", old=None, correction=UNBOUNDED, advantage=0.0):
    """Gradient in the V logits for each of V ids that may be drawn: [V, V] float64."""
    logits, teacher, rollout = policies
    config = RolloutCorrectionConfig(loss=loss, distill_coef=X, distill_top_k=k, **correction)
    rows = logits.repeat(V, 1).requires_grad_()
    log_p = rows.log_softmax(dim=1)
    own, labels = log_p.diagonal(), torch.arange(V)
    scores, top = TeacherScores(teacher), None
    if k is not None:
        ids = teacher.topk(k).indices.repeat(V, 1)
        scores, top = TeacherScores(teacher, ids, teacher[ids]), log_p.gather(1, ids)
    distilled = distill(own, scores, X, labels=labels, top_logprobs=top)
    old = own.detach() if old is None else old
    made = corrected(own.detach() if config.bypass_mode else old, rollout, config)
    advantages = torch.full((V,), advantage)
    losses = policy_loss(loss, own, old, advantages, made, config, distilled=distilled)
    (gradient,) = torch.autograd.grad(losses.sum(), rows)
    return gradient


def gradient_of_kl(logits, teacher):
    """By autograd of sum p (log p - log t)."""
    leaf = logits.clone().requires_grad_()
    log_p = leaf.log_softmax(dim=0)
    (gradient,) = torch.autograd.grad((log_p.exp() * (log_p - teacher)).sum(), leaf)
    return gradient


@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "cispo", "sapo"])
@pytest.mark.parametrize("k", [None, 1, 3, V - 1, V])
def test_distillation_when_all_draws_are_enumerated_then_the_mean_gradient_is_that_of_the_whole_kl(
    k, loss, policies
):
    logits, teacher, rollout = policies
    found = rollout.exp() @ of_every_draw(policies, k, loss=loss)
    wanted = X * gradient_of_kl(logits, teacher)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    assert wanted.abs().max() > 0.1


def test_distillation_when_h_is_the_vocabulary_then_no_draw_has_noise_and_more_ids_leave_less(policies):
    logits, teacher, rollout = policies
    wanted = X * gradient_of_kl(logits, teacher)
    noise = []
    for k in (None, 1, 3, 5, V):
        gradients = of_every_draw(policies, k)
        noise.append(float(rollout.exp() @ (gradients - wanted).square().sum(dim=1)))
    assert noise == sorted(noise, reverse=True) and noise[0] > 0.5
    assert noise[-1] < 1e-10


@pytest.mark.parametrize("k", [None, 2])
def test_distillation_when_the_policy_has_moved_from_pi_old_then_the_gradient_is_that_of_its_own_kl(
    k, policies
):
    """A later update of a batch: samples of pi_old, the ratio to it, and no clip in the way."""
    logits, teacher, rollout = policies
    old = (logits + torch.linspace(-0.4, 0.4, V, dtype=torch.float64)).log_softmax(dim=0)
    free = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e6, "clip_ratio_c": None, **UNBOUNDED}
    found = rollout.exp() @ of_every_draw(policies, k, loss="ppo_clip", old=old, correction=free)
    torch.testing.assert_close(found, X * gradient_of_kl(logits, teacher), rtol=0, atol=2e-6)
    # With pi_old in the advantage it would be that of KL(p || t) - KL(p || pi_old), which is another one.
    assert gradient_of_kl(logits, old).abs().max() > 0.05


def test_distillation_in_bypass_mode_then_the_same(policies):
    logits, teacher, rollout = policies
    bypass = {"bypass_mode": True, **UNBOUNDED}
    found = rollout.exp() @ of_every_draw(policies, 2, old=rollout, correction=bypass)
    torch.testing.assert_close(found, X * gradient_of_kl(logits, teacher), rtol=0, atol=2e-6)


def test_distillation_beside_a_reward_then_both_advantages_add_up(policies):
    alone = of_every_draw(policies, 3)
    both = of_every_draw(policies, 3, advantage=1.3)
    logits, _, rollout = policies
    p = logits.softmax(dim=0)
    reward = -1.3 * (p / rollout.exp())[:, None] * (torch.eye(V, dtype=torch.float64) - p)
    torch.testing.assert_close(both, alone + reward, rtol=0, atol=2e-6)


def test_advantages_without_h_then_by_hand():
    # Three tokens of different differences, one that the teacher does not know, one absurd.
    own = torch.tensor([-1.0, -2.0, -0.5, -1.0, -1.0])
    teacher = torch.tensor([-0.5, -3.0, -0.5, math.nan, -1e30])
    made = distill(own, TeacherScores(teacher), 2.0)
    assert made.known.tolist() == [True, True, True, False, True] and made.top is None
    assert made.kl.tolist() == [-0.5, 1.0, 0.0, 0.0, 20.0]
    assert made.advantages.tolist() == [1.0, -2.0, 0.0, 0.0, -40.0]


HALVES = [0.5, 0.25, 0.125, 0.125]
"""p of four ids; the teacher has t of them, and its two likeliest are 1 and 0."""
OTHERS = [0.25, 0.5, 0.0625, 0.1875]


def of_two_ids(labels, teacher=None, mask=None, config=None, metrics=None, weights=None, seq_ids=None):
    """(what `distill` makes, the losses, their gradients in the log-probs of H)."""
    count = len(labels)
    log_p, log_t = (torch.tensor(values, dtype=torch.float64).log() for values in (HALVES, OTHERS))
    ids = torch.tensor([[1, 0]] * count)
    labels = torch.tensor(labels)
    top = log_p[ids].requires_grad_()
    own = log_p[labels]
    teacher = log_t[labels] if teacher is None else torch.tensor(teacher, dtype=torch.float64)
    made = distill(own, TeacherScores(teacher, ids, log_t[ids]), 2.0, labels=labels, top_logprobs=top)
    config = config or RolloutCorrectionConfig(loss="reinforce", distill_coef=2.0, distill_top_k=2)
    rollout = own if weights is None else own - torch.tensor(weights).double().log()
    correction = corrected(own, rollout, config, mask, seq_ids)
    losses = policy_loss(
        "reinforce", own, own, torch.zeros(count), correction, config, distilled=made, metrics=metrics
    )
    return made, losses, torch.autograd.grad(losses.sum(), top)[0]


LN2 = math.log(2)
# Of both parts: 1/4 log(1/2) + 1/2 log 2 of H, and both rests are 1/4, so that c = 0.
TOP_KL = 0.25 * LN2


def test_kl_of_h_then_by_hand():
    made, losses, gradient = of_two_ids([0, 2, 3])
    assert made.top.masses.tolist() == [[0.75] * 3, [0.75] * 3]
    assert made.top.kl.tolist() == pytest.approx([TOP_KL] * 3, abs=1e-7)
    # A label of H has no advantage; p = 1/8 against 1/16 and 3/16 outside of it.
    assert made.advantages.tolist() == pytest.approx([0.0, -2 * LN2, -2 * math.log(2 / 3)], abs=1e-6)
    policy = [0.0, 2 * LN2 * math.log(1 / 8), 2 * math.log(2 / 3) * math.log(1 / 8)]
    assert losses.tolist() == pytest.approx([one + 2 * TOP_KL for one in policy], abs=1e-6)
    # 2 p (l - c) of ids 1 and 0.
    assert gradient.flatten().tolist() == pytest.approx([-0.5 * LN2, LN2] * 3, abs=1e-6)


def test_kl_of_h_when_the_rests_differ_then_the_rest_is_one_outcome(policies):
    logits, teacher, _ = policies
    log_p = logits.log_softmax(dim=0)
    ids = teacher.topk(2).indices
    scores = TeacherScores(teacher[:1], ids[None], teacher[ids][None])
    made = distill(log_p[:1], scores, 1.0, labels=torch.tensor([0]), top_logprobs=log_p[ids][None])
    p, t = log_p.exp().tolist(), teacher.exp().tolist()
    inside = ids.tolist()
    rests = [sum(one[v] for v in range(V) if v not in inside) for one in (p, t)]
    wanted = sum(p[v] * math.log(p[v] / t[v]) for v in inside) + rests[0] * math.log(rests[0] / rests[1])
    assert float(made.top.kl) == pytest.approx(wanted, abs=1e-6) and abs(rests[0] - rests[1]) > 0.1


def test_metrics_and_tokens_that_are_rejected_or_not_known_then_only_kept_ones_count():
    metrics = {}
    mask = torch.tensor([True, True, False, True])
    made, losses, gradient = of_two_ids(
        [0, 2, 2, 1], [math.log(0.25), math.log(0.0625), -1.0, math.nan], mask, metrics=metrics
    )
    assert losses[2:].tolist() == [0.0, 0.0] and not gradient[2:].any() and gradient[:2].all()
    assert made.advantages[3] == 0
    found = {name: one.value() for name, one in metrics.items() if name.startswith("distill")}
    assert found == pytest.approx(
        {
            "distill_kl": TOP_KL + LN2 / 2,  # the second label is outside of H, where l - c = log 2
            "distill_top_kl": TOP_KL,
            "distill_student_mass": 0.75,
            "distill_teacher_mass": 0.75,
            "distill_missing": 1.0,
        },
        abs=1e-6,
    )


def test_weights_when_of_whole_sequences_then_the_exact_part_has_them_and_those_of_tokens_only_the_drawn():
    shared = {"loss": "reinforce", "distill_coef": 2.0, "distill_top_k": 2, "rollout_is_upper": 10.0}
    plain = of_two_ids([0, 2])
    for level, factor, drawn in (("token", 1.0, 3.0), ("sequence", 6.0, 6.0)):
        config = RolloutCorrectionConfig(rollout_is=level, **shared)
        _, losses, gradient = of_two_ids(
            [0, 2], config=config, weights=[2.0, 3.0], seq_ids=torch.tensor([0, 0])
        )
        torch.testing.assert_close(gradient, factor * plain[2], rtol=1e-5, atol=1e-6)
        policy = float(plain[1][1].detach()) - 2 * TOP_KL
        assert float(losses[1].detach()) == pytest.approx(drawn * policy + factor * 2 * TOP_KL, rel=1e-5)


def test_log_probs_when_infinite_then_the_id_is_a_constant_and_nothing_is_nan():
    ids = torch.tensor([[9, 0]])  # an id beyond the policy's vocabulary
    top = torch.tensor([[-math.inf, -0.1]]).requires_grad_()
    scores = TeacherScores(torch.tensor([-2.0]), ids, torch.tensor([[-0.5, -math.inf]]))
    made = distill(torch.tensor([-3.0]), scores, 1.0, labels=torch.tensor([4]), top_logprobs=top)
    (gradient,) = torch.autograd.grad(made.top.kl.sum(), top)
    assert gradient[0, 0] == 0 and gradient[0, 1] > 0 and gradient.isfinite().all()
    assert made.advantages.isfinite().all() and made.top.kl.isfinite().all()


def test_teacher_when_missing_then_errors_name_what_is_to_be_passed():
    row = torch.zeros(1)
    config = RolloutCorrectionConfig(loss="reinforce", distill_coef=1.0)
    with pytest.raises(ValueError, match="`distill_coef` needs the log-probs of a teacher; pass distilled"):
        policy_loss("reinforce", row, row, row, corrected(row, row, config), config)
    with pytest.raises(ValueError, match="pass labels, top_logprobs"):
        distill(row, TeacherScores(row, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1)), 1.0)
