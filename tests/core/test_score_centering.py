"""Score centering against enumeration of all that could be sampled, autograd and numbers by hand."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.presets import PRESET_FIELDS
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.core.losses.ratio import PolicyLossInputs
from megatron_rl_corr.core.losses.score_centering import TopPolicies, score_centering

WEIGHTS = {
    "none": {},
    "truncate": {"rollout_is": "token", "rollout_is_upper": 1.3},
    "clip": {
        "rollout_is": "token",
        "rollout_is_mode": "clip",
        "rollout_is_lower": 0.8,
        "rollout_is_upper": 1.3,
    },
    "mask": {
        "rollout_is": "token",
        "rollout_is_mode": "mask",
        "rollout_is_lower": 0.8,
        "rollout_is_upper": 1.3,
    },
    "unbounded": {"rollout_is": "token", "rollout_is_upper": 1e9},
}


def corrected(train, rollout, config, mask=None):
    count = len(train)
    kept = torch.ones(count, dtype=torch.bool) if mask is None else mask
    return compute_correction(train, rollout, kept, torch.arange(count), num_sequences=count, config=config)


def estimates(logits, q, top_ids, config, advantage=1.0, loss="reinforce", top=True):
    """Gradient of the loss with respect to the V logits for each of V ids that may be sampled: [V, V]."""
    size = len(logits)
    rows = logits.repeat(size, 1).requires_grad_()
    log_p = rows.log_softmax(dim=1)
    own = log_p.diagonal()
    correction = corrected(own.detach(), q.log(), config)
    given = None
    if top:
        ids = torch.tensor(top_ids)
        given = TopPolicies(log_p[:, ids], q.log()[ids].repeat(size, 1))
    losses = policy_loss(
        loss, own, own.detach(), torch.full((size,), advantage), correction, config, top=given
    )
    (gradient,) = torch.autograd.grad(losses.sum(), rows)
    return gradient.double()


@pytest.fixture
def policies():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator)
    q = (logits + 0.6 * torch.randn(7, generator=generator)).softmax(dim=0)
    return logits, q


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", ["reinforce", "ppo_clip", "cispo", "sapo"])
def test_centering_when_all_ids_are_in_h_then_mean_gradient_is_0(weights, loss, policies):
    logits, q = policies
    config = RolloutCorrectionConfig(**WEIGHTS[weights])
    for advantage in (1.7, -0.4):
        given = {"advantage": advantage, "loss": loss}
        plain = q.double() @ estimates(logits, q, list(range(7)), config, **given, top=False)
        centered = q.double() @ estimates(logits, q, list(range(7)), config, **given)
        assert centered.abs().max() < 2e-7
        assert (plain.abs().max() > 1e-2) == (weights != "unbounded")


@pytest.mark.parametrize("weights", WEIGHTS)
def test_centering_when_ratio_of_tail_is_one_then_mean_gradient_is_0(weights):
    # q = p / 2 on the tail, so that the model of the tail is exact: id 0 has what it lost.
    p = torch.tensor([0.2, 0.3, 0.1, 0.25, 0.15])
    q = torch.tensor([0.4, 0.35, 0.05, 0.125, 0.075])
    config = RolloutCorrectionConfig(**WEIGHTS[weights])
    mean = q.double() @ estimates(p.log(), q, [0, 1], config)
    assert mean.abs().max() < 2e-7


def test_centering_when_one_id_then_error_of_mean_is_below_that_without(policies):
    logits, q = policies
    config = RolloutCorrectionConfig()
    order = q.argsort(descending=True).tolist()
    errors = [(q.double() @ estimates(logits, q, order[:k], config)).abs().sum().item() for k in range(1, 8)]
    plain = (q.double() @ estimates(logits, q, [0], config, top=False)).abs().sum().item()
    assert max(errors) < plain
    assert errors[-1] < 1e-6 and errors[-2] < 1e-6  # a tail of one id has one ratio


BY_HAND = {
    # p = (0.5, 0.3, 0.2), q = (0.6, 0.1, 0.3), H = {0}: rho = 0.4 / 0.5 = 0.8. The factor of log p_0:
    "none": 0.6 - 0.8 * 0.5,
    # m = min(0.5, 1.3 x 0.6), alpha = min(1, 1.3 x 0.8) = 1
    "truncate": 0.5 - 1.0 * 0.5,
    # p / q = 0.833 is in [0.8, 1.3], 1 / rho = 1.25 too
    "clip": 0.5 - 0.5,
    "mask": 0.5 - 0.5,
}


@pytest.mark.parametrize("weights", BY_HAND)
def test_term_when_three_ids_then_as_by_hand(weights):
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.6, 0.1, 0.3]])
    found = factors(p, q, [0], WEIGHTS[weights], advantage=2.0)
    assert found.tolist() == [pytest.approx(2 * BY_HAND[weights], abs=3e-7)]


def test_term_when_tail_is_out_of_bounds_then_alpha_is_bounded_as_by_hand():
    # p = (0.2, 0.5, 0.3), q = (0.6, 0.3, 0.1), H = {0}: rho = 0.4 / 0.8 = 0.5, p / q of id 0 is 1/3.
    p, q = torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([[0.6, 0.3, 0.1]])
    for name, expected in {
        "none": 0.6 - 0.5 * 0.2,
        "truncate": 0.2 - 1.3 * 0.5 * 0.2,
        "clip": 0.8 * 0.6 - 1.3 * 0.5 * 0.2,
        "mask": 0.0,
    }.items():
        found = factors(p, q, [0], WEIGHTS[name], advantage=1.0)
        assert found.tolist() == [pytest.approx(expected, abs=1e-7)], name


PRESET_FACTORS = {
    # p = (0.1, 0.8, 0.1), q = (0.7, 0.2, 0.1), H = {0, 1}: rho = 0.1 / 0.1 = 1, p / q = 1/7 and 4.
    "disabled": (0.7 - 0.1, 0.2 - 0.8),
    "nemo_rl_tis": (0.1 - 0.1, 2 * 0.2 - 0.8),  # min(p, 2 q)
    "nemo_rl_icepop": (0.0 - 0.1, 0.8 - 0.8),  # 1/7 is below 0.5, 4 is in [0.5, 5]
}


@pytest.mark.parametrize("preset", PRESET_FACTORS)
def test_term_when_of_a_preset_then_as_by_hand(preset):
    p, q = torch.tensor([[0.1, 0.8, 0.1]]), torch.tensor([[0.7, 0.2, 0.1]])
    settings = PRESET_FIELDS[preset]
    found = factors(p, q, [0, 1], settings, advantage=-2.0)
    assert found.tolist() == pytest.approx([-2 * one for one in PRESET_FACTORS[preset]], abs=1e-6)


def test_term_when_the_sampler_has_a_larger_tail_then_its_ratio_multiplies_unless_weights_bound_it():
    # p = (0.999, 0.001), q = (0.9, 0.1), H = {0}: rho = 0.1 / 0.001 = 100.
    p, q = torch.tensor([[0.999, 0.001]]), torch.tensor([[0.9, 0.1]])
    alone = factors(p, q, [0], PRESET_FIELDS["disabled"], advantage=1.0)
    assert alone.tolist() == [pytest.approx(0.9 - 100 * 0.999, rel=1e-4)]
    # m = p, alpha = min(1, 2 x 100) = 1; IcePop: 1 / 100 is out of bounds, so that alpha is 0.
    assert factors(p, q, [0], PRESET_FIELDS["nemo_rl_tis"], advantage=1.0).abs().max() < 1e-6
    masked = factors(p, q, [0], PRESET_FIELDS["nemo_rl_icepop"], advantage=1.0)
    assert masked.tolist() == [pytest.approx(0.999)]


def plain_factors(p, q, ids, mode, low, high):
    """m_v - alpha p_v of each id of H, in Python's floats, as the paper's formulas are written."""
    rho = (1 - sum(q[v] for v in ids)) / max(1 - sum(p[v] for v in ids), 1e-6)

    def weighed(of_p, of_q):
        if mode == "none":
            return of_q
        if mode == "mask":
            return of_p if low * of_q <= of_p <= high * of_q else 0.0
        return min(max(of_p, (low if mode == "clip" else 0.0) * of_q), high * of_q)

    alpha = weighed(1.0, rho)
    return [weighed(p[v], q[v]) - alpha * p[v] for v in ids]


@pytest.mark.parametrize("mode", ["none", "truncate", "clip", "mask"])
def test_term_when_policies_are_random_then_as_plain_formula_and_whole_h_is_exact(mode):
    generator = torch.Generator().manual_seed(11)
    for size in [5] * 40 + [8] * 40:
        logits = 1.5 * torch.randn(2, size, generator=generator, dtype=torch.float64)
        p, q = logits.softmax(dim=1)
        ids = torch.randperm(size, generator=generator)[: 1 + size // 2].tolist()
        found = factors(p[None].float(), q[None].float(), ids, WEIGHTS[mode], advantage=1.0)
        expected = plain_factors(p.tolist(), q.tolist(), ids, mode, 0.8, 1.3)
        assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        # The plain formula with all ids in H, enumerated in float64: E_q[w (grad log p(y) - grad C)] = 0.
        whole = torch.tensor(
            plain_factors(p.tolist(), q.tolist(), range(size), mode, 0.8, 1.3), dtype=torch.float64
        )
        score = torch.eye(size, dtype=torch.float64) - p  # row v: grad log p_v
        weight = {"none": torch.ones_like(p), "truncate": (p / q).clamp(max=1.3)}.get(mode)
        if weight is None:
            weight = (p / q).clamp(0.8, 1.3)
            weight = weight if mode == "clip" else torch.where(weight == p / q, weight, 0.0)
        assert ((q * weight) @ score - whole @ score).abs().max() < 1e-14


def factors(p, q, ids, weights, advantage):
    """d term / d log p of each id of H, of one token."""
    log_p = p[:, ids].log().requires_grad_()
    config = RolloutCorrectionConfig(**weights)
    correction = corrected(p[:, 0].log(), q[:, 0].log(), config)
    inputs = PolicyLossInputs(p[:, 0].log(), p[:, 0].log(), torch.tensor([advantage]), correction)
    term = score_centering(TopPolicies(log_p, q[:, ids].log()), inputs, config)
    (found,) = torch.autograd.grad(term.sum(), log_p)
    return found[0]


def test_term_when_tokens_are_masked_or_impossible_then_0_and_no_nan():
    nan, inf = float("nan"), float("inf")
    log_p = torch.tensor([[-0.1, -2.5], [nan, nan], [-0.1, -inf], [-0.4, -2.5]]).requires_grad_()
    log_q = torch.tensor([[-0.2, -2.0], [nan, 0.0], [-0.2, -2.0], [-0.2, -2.0]])
    config = RolloutCorrectionConfig()
    mask = torch.tensor([True, False, True, False])
    own = torch.tensor([-0.1, nan, -0.1, -0.4])
    correction = corrected(own, own, config, mask)
    inputs = PolicyLossInputs(own, own, torch.tensor([1.0, nan, 2.0, 1.0]), correction)
    metrics = {}
    term = score_centering(TopPolicies(log_p, log_q), inputs, config, metrics=metrics)
    (gradient,) = torch.autograd.grad(term.sum(), log_p)
    assert term[[1, 3]].tolist() == [0, 0] and term.isfinite().all()
    assert gradient[[1, 3]].count_nonzero() == 0 and gradient[2, 1] == 0
    assert gradient[0].ne(0).all() and gradient[2, 0] != 0
    means = {name: metric.finish(metric.values.tolist()) for name, metric in metrics.items()}
    tails = [1 - math.exp(-0.1) - math.exp(-2.5), 1 - math.exp(-0.1)]
    assert means["centering_train_tail"] == pytest.approx(sum(tails) / 2, rel=1e-6)
    assert means["centering_rollout_tail"] == pytest.approx(1 - math.exp(-0.2) - math.exp(-2), rel=1e-6)
    assert means["centering_drift"] > 0
