"""Weights and masks as a whole: published numbers, NaN in and outside the mask, nothing left, all counts."""

import dataclasses
import math

import pytest
import torch

from megatron_rl_corr import Correction, compute_correction, flatten_padded
from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.losses import policy_loss

NAN, INF = float("nan"), float("inf")
TOKEN_IS = PRESETS["decoupled_token_is"]
ICEPOP = PRESETS["decoupled_token_icepop"]
EVERY_PART = RolloutCorrectionConfig(
    rollout_is="sequence",
    rollout_is_mode="clip",
    rollout_is_lower=0.5,
    rollout_is_upper=2.0,
    rollout_is_batch_normalize=True,
    rollout_rs=(
        RejectionRule("token", "ratio", 0.25, 4.0),
        RejectionRule("seq_mean", "k3", upper=0.6),
        RejectionRule("seq_max", "k2", upper=2.0),
    ),
)

EVERY_NEW_RULE = RolloutCorrectionConfig(
    rollout_is="turn",
    rollout_is_upper=2.0,
    rollout_m2_threshold=2.0,
    rollout_batch_filter_kl=0.5,
    rollout_rs=(
        RejectionRule("seq_max", "ratio", 0.02, 50.0),
        RejectionRule("turn_mean", "ratio", 0.3, 3.0),
        RejectionRule("turn_mean", "k3", upper=2.0),
        RejectionRule("seq_mean", "abs_diff", upper=0.5),
        RejectionRule("seq_mean", "exp_abs", upper=4.0),
        RejectionRule("token", "rollout_prob", lower=1e-2),
        RejectionRule("seq_mean", "opsm", upper=0.2),
    ),
)


def correct(log_ratio: list[float], *, mask=None, seq_ids=None, config=TOKEN_IS) -> Correction:
    count = len(log_ratio)
    seq_ids = [0] * count if seq_ids is None else seq_ids
    return compute_correction(
        torch.tensor(log_ratio) - 1,
        torch.full((count,), -1.0),
        torch.ones(count) if mask is None else torch.tensor(mask),
        torch.tensor(seq_ids, dtype=torch.int64),
        num_sequences=3,
        config=config,
    )


# Weights


def test_weights_when_truncated_at_2_then_the_published_numbers():
    # old [-1, -1.5, -0.5] against rollout [-1.5, -1, -1.5]: e^0.5, e^-0.5, e^1 = 2.718 -> 2.
    correction = compute_correction(
        torch.tensor([-1.0, -1.5, -0.5]),
        torch.tensor([-1.5, -1.0, -1.5]),
        torch.ones(3),
        torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        config=TOKEN_IS,
    )
    assert correction.weights.tolist() == pytest.approx([1.6487, 0.6065, 2.0], abs=1e-4)


def test_weights_when_icepop_zeroes_them_then_the_tokens_are_not_rejected():
    # Raw weights 0.4, 0.8, 6.0.
    correction = correct([math.log(0.4), math.log(0.8), math.log(6.0)], config=ICEPOP)
    assert correction.weights.tolist() == pytest.approx([0.0, 0.8, 0.0], abs=1e-6)
    assert correction.mask.tolist() == [True, True, True]
    assert correction.kept_tokens.item() == 3


@pytest.mark.parametrize(
    "level, expected",
    [
        # Sequence 0: D = 0.1, (masked 5), 0.3; sequence 2: D = -0.2.
        ("token", [math.exp(0.1), 0.0, math.exp(-0.2), math.exp(0.3)]),
        ("sequence", [math.exp(0.4), 0.0, math.exp(-0.2), math.exp(0.4)]),
        ("geometric", [math.exp(0.2), 0.0, math.exp(-0.2), math.exp(0.2)]),
    ],
)
def test_weights_when_a_sequence_has_a_hole_then_it_counts_for_nothing(level, expected):
    config = dataclasses.replace(TOKEN_IS, rollout_is=level)
    correction = correct([0.1, 5.0, -0.2, 0.3], mask=[1, 0, 1, 1], seq_ids=[0, 0, 2, 0], config=config)
    assert correction.weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert correction.mask.tolist() == [True, False, True, True]


def test_weights_when_off_then_one_at_valid_tokens_and_zero_elsewhere():
    correction = correct([0.1, NAN, 0.3], mask=[1, 1, 0], config=PRESETS["disabled"])
    assert correction.weights.tolist() == [1.0, 0.0, 0.0]


def test_batch_normalize_when_a_token_is_masked_then_the_mean_is_over_valid_tokens():
    # w = 0.5, 2 (truncated from 4), masked; mean 1.25: 0.4, 1.6.
    config = dataclasses.replace(TOKEN_IS, rollout_is_batch_normalize=True)
    correction = correct([math.log(0.5), math.log(4), 0.7], mask=[1, 1, 0], config=config)
    assert correction.weights.tolist() == pytest.approx([0.4, 1.6, 0.0], rel=1e-6)
    # The metrics are of the weights that the loss uses.
    assert correction.metrics["weight_mean"].value() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    "level, weights, mean",
    [
        # rho of sequence 0: 1.5 in turn 0, 0.8 and one without a log-prob in turn 1; of 2: 2, 2; of 3:
        # 0.5; 1 is empty.
        ("token", [1.5, 0.8, 2.0, 2.0, 0.5], 6.8 / 5),
        ("sequence", [1.2, 1.2, 2.0, 2.0, 0.5], (1.2 + 2.0 + 0.5) / 3),  # 1.5 * 0.8, 2 (of 4), 0.5
        ("geometric", [1.2**0.5, 1.2**0.5, 2.0, 2.0, 0.5], (1.2**0.5 + 2.0 + 0.5) / 3),
        ("turn", [1.5, 0.8, 2.0, 2.0, 0.5], (1.5 + 0.8 + 2.0 + 0.5) / 4),
    ],
)
@pytest.mark.parametrize("rejects", [False, True])
def test_batch_normalize_when_of_a_level_then_the_mean_is_over_its_units_before_rejection(
    level, weights, mean, rejects
):
    # As verl's rollout_is_batch_normalize: bounded weights, each unit with a valid token once,
    # rejected ones too.
    rule = RejectionRule("seq_sum", "ratio", 0.6, 10.0)
    config = dataclasses.replace(
        TOKEN_IS, rollout_is=level, rollout_is_batch_normalize=True, rollout_rs=(rule,) * rejects
    )
    rho = [1.5, 0.8, NAN, 2.0, 2.0, 0.5]
    train = torch.tensor(rho).log() - 1
    correction = compute_correction(
        train,
        torch.full((6,), -1.0),
        torch.ones(6),
        torch.tensor([0, 0, 0, 2, 2, 3]),
        num_sequences=4,
        config=config,
        turn_ids=torch.tensor([0, 1, 1, 0, 0, 0]),
        num_turns=2,
    )
    expected = [weight / mean for weight in weights[:2]] + [0.0] + [weight / mean for weight in weights[2:]]
    assert correction.weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert correction.mask.tolist() == [True, True, False, True, True, not rejects]
    # The metrics are over tokens, of the weights that the loss uses.
    assert correction.metrics["weight_mean"].value() == pytest.approx(sum(expected) / 5, rel=1e-6)
    assert correction.metrics["weight_max"].value() == pytest.approx(max(expected), rel=1e-6)
    assert correction.metrics["weight_min"].value() == pytest.approx(0.5 / mean, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_batch_normalize_when_every_weight_is_zero_then_they_stay_zero(level):
    config = dataclasses.replace(ICEPOP, rollout_is=level, rollout_is_batch_normalize=True)
    correction = correct([3.0, -3.0, 4.0], seq_ids=[0, 1, 2], config=config)
    assert correction.weights.tolist() == [0.0, 0.0, 0.0]
    assert correction.mask.all() and correction.metrics["weight_mean"].value() == 0


def test_outputs_when_inputs_carry_a_gradient_then_they_do_not():
    train = torch.tensor([-1.0, -2.0], requires_grad=True)
    correction = compute_correction(
        train,
        torch.tensor([-1.5, -1.0]),
        torch.ones(2),
        torch.tensor([0, 1]),
        num_sequences=2,
        config=EVERY_PART,
    )
    tensors = [correction.weights, correction.valid_tokens, correction.kept_tokens]
    tensors += [metric.values for metric in correction.metrics.values()]
    assert not any(tensor.requires_grad for tensor in tensors)


def test_log_probs_when_in_bfloat16_then_subtracted_in_float32():
    # 2.0 and 2.015625 are bfloat16 numbers; their difference as rho is e^0.015625.
    train = torch.tensor([-2.0], dtype=torch.bfloat16)
    rollout = torch.tensor([-2.015625], dtype=torch.bfloat16)
    correction = compute_correction(
        train, rollout, torch.ones(1), torch.zeros(1, dtype=torch.int64), num_sequences=1, config=TOKEN_IS
    )
    assert correction.weights.dtype == torch.float32
    assert correction.weights.item() == pytest.approx(math.exp(0.015625), rel=1e-6)


# NaN and infinities


@pytest.mark.parametrize("config", [EVERY_PART, EVERY_NEW_RULE], ids=["every part", "every new rule"])
def test_nan_when_outside_the_mask_then_every_bit_is_as_without_it(config):
    generator = torch.Generator().manual_seed(1)
    train = -torch.rand(40, generator=generator) * 4
    rollout = train + torch.randn(40, generator=generator)
    mask = torch.rand(40, generator=generator) < 0.6
    seq_ids = torch.randint(0, 5, (40,), generator=generator)
    advantages = (seq_ids % 3 - 1).float()
    garbage = torch.tensor([NAN, INF, -INF, 1e30]).repeat(10)

    def everything(train, rollout, advantages) -> list[torch.Tensor]:
        c = compute_correction(
            train,
            rollout,
            mask,
            seq_ids,
            num_sequences=6,
            config=config,
            turn_ids=torch.arange(40) % 3,
            num_turns=3,
            advantages=advantages,
        )
        fields = [c.weights, c.mask, c.valid, c.kept_sequences, c.valid_tokens, c.kept_tokens]
        return fields + [metric.values for metric in c.metrics.values()]

    clean = everything(*(torch.where(mask, side, 0.0) for side in (train, rollout, advantages)))
    dirty = everything(
        torch.where(mask, train, garbage),
        torch.where(mask, rollout, garbage.flip(0)),
        torch.where(mask, advantages, garbage),
    )
    for left, right in zip(clean, dirty, strict=True):
        assert torch.equal(left, right)
    assert clean[0].isfinite().all() and 0 < clean[1].sum() < mask.sum()  # the rules did reject some


@pytest.mark.parametrize("side", ["train", "rollout"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "level, weight",
    [
        # Without the token D = 0.1, 0.3 are left of sequence 0.
        ("token", [math.exp(0.1), 0.0, math.exp(-0.2), math.exp(0.3)]),
        ("sequence", [math.exp(0.4), 0.0, math.exp(-0.2), math.exp(0.4)]),
        ("geometric", [math.exp(0.2), 0.0, math.exp(-0.2), math.exp(0.2)]),
    ],
)
def test_token_when_a_log_prob_inside_the_mask_is_not_finite_then_dropped_and_counted(
    side, value, level, weight
):
    train, rollout = torch.tensor([0.1, 0.0, -0.2, 0.3]) - 1, torch.full((4,), -1.0)
    {"train": train, "rollout": rollout}[side][1] = value
    rule = RejectionRule("seq_mean", "ratio", 0.5, 2.0)
    config = dataclasses.replace(TOKEN_IS, rollout_is=level, rollout_rs=(rule,))
    correction = compute_correction(
        train, rollout, torch.ones(4), torch.tensor([0, 0, 2, 0]), num_sequences=3, config=config
    )
    assert correction.weights.tolist() == pytest.approx(weight, rel=1e-6)
    assert correction.mask.tolist() == correction.valid.tolist() == [True, False, True, True]
    assert correction.metrics["nonfinite_tokens"].value() == 1
    assert correction.metrics["valid_tokens"].value() == correction.valid_tokens.item() == 3
    # mean(-D) of 0.1, -0.2, 0.3
    assert correction.metrics["kl"].value() == pytest.approx(-0.2 / 3, rel=1e-5)


@pytest.mark.parametrize(
    "config", [EVERY_PART, EVERY_NEW_RULE, dataclasses.replace(EVERY_PART, rollout_is="geometric")]
)
@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_log_prob_when_finite_but_huge_then_weights_and_metrics_stay_finite(config, size):
    # The second token of sequence 0 and the first of 1 are impossible on one side; their squares
    # are 1e8 to 9e76.
    correction = compute_correction(
        torch.tensor([-1.0, -size, -1.0, -0.5, -2.0]),
        torch.tensor([-1.1, -1.0, -size, -0.6, -2.2]),
        torch.ones(5),
        torch.tensor([0, 0, 1, 1, 2]),
        num_sequences=3,
        config=config,
        turn_ids=torch.tensor([0, 0, 0, 0, 1]),
        num_turns=2,
        advantages=torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0]),
    )
    assert (
        correction.mask.tolist() == [False, False, False, False, True] and correction.weights.isfinite().all()
    )
    bad = [name for name, metric in correction.metrics.items() if not math.isfinite(metric.value())]
    assert [name for name in bad if not name.startswith(("by_prob/", "by_turn/"))] == []


def test_gradient_when_a_rollout_log_prob_is_nan_then_finite_and_nothing_from_its_token():
    train = torch.tensor([-1.0, -2.0, -0.5])
    correction = compute_correction(
        train,
        torch.tensor([-1.2, NAN, -0.4]),
        torch.ones(3),
        torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        config=dataclasses.replace(TOKEN_IS, rollout_is="sequence"),
    )
    now = train.clone().requires_grad_()
    policy_loss("ppo_clip", now, train, torch.ones(3), correction, TOKEN_IS).sum().backward()
    # w = e^(0.2 - 0.1), A = 1, ratio 1: the gradient of -w r A is -w.
    weight = math.exp(0.1)
    assert now.grad.tolist() == pytest.approx([-weight, 0.0, -weight], rel=1e-6)


# Nothing left


def test_everything_when_rejected_then_zero_loss_zero_gradient_and_no_nan():
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_upper=2.0,
        rollout_is_batch_normalize=True,
        rollout_rs=(RejectionRule("seq_mean", "ratio", 0.999, 1.001),),
    )
    correction = correct([0.5, 0.25, -0.5], seq_ids=[0, 0, 2], config=config)
    assert correction.mask.tolist() == [False] * 3 and correction.kept_sequences.tolist() == [False] * 3
    assert (correction.valid_tokens.item(), correction.kept_tokens.item()) == (3, 0)
    assert correction.denominator("valid").item() == 3 and correction.denominator("kept").item() == 1
    now = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss = policy_loss("ppo_clip", now, now.detach() - 0.1, torch.ones(3), correction, config)
    (loss.sum() / correction.denominator("kept")).backward()
    assert loss.tolist() == [0.0] * 3 and now.grad.tolist() == [0.0] * 3
    assert correction.metrics["kept_fraction"].value() == 0
    # One pi_rollout everywhere correlates with nothing and lies in one band; every other metric is a number.
    nan = [n for n, m in correction.metrics.items() if not math.isfinite(m.value())]
    assert [name for name in nan if not name.startswith("by_prob/")] == ["pearson"]
    assert not any(name.startswith("by_prob/above_1e-1") for name in nan)


@pytest.mark.parametrize(
    "config", [TOKEN_IS, EVERY_PART, EVERY_NEW_RULE, dataclasses.replace(EVERY_PART, rollout_is="geometric")]
)
@pytest.mark.parametrize("tokens, sequences", [(5, 2), (0, 2), (0, 0)])
def test_everything_when_padding_or_absent_then_zero_weights_and_no_nan(config, tokens, sequences):
    correction = compute_correction(
        torch.full((tokens,), NAN),
        torch.full((tokens,), -INF),
        torch.zeros(tokens),
        torch.zeros(tokens, dtype=torch.int64),
        num_sequences=sequences,
        config=config,
        turn_ids=torch.zeros(tokens, dtype=torch.int64),
        num_turns=1,
        advantages=torch.full((tokens,), NAN),
    )
    assert correction.weights.tolist() == [0.0] * tokens
    assert not correction.mask.any() and correction.kept_sequences.tolist() == [False] * sequences
    assert correction.denominator("valid").item() == correction.denominator("kept").item() == 1
    now = torch.full((tokens,), NAN, requires_grad=True)
    policy_loss("ppo_clip", now, now.detach(), now.detach(), correction, config).sum().backward()
    assert now.grad.tolist() == [0.0] * tokens


# Shapes and slices


def test_at_when_a_microbatch_is_cut_then_its_tokens_and_the_global_counts():
    config = dataclasses.replace(TOKEN_IS, rollout_rs=(RejectionRule("token", "ratio", 0.5, 9.0),))
    correction = correct([0.1, 3.0, -0.2, 2.0], mask=[1, 1, 0, 1], seq_ids=[0, 0, 1, 2], config=config)
    part = correction.at(torch.tensor([1, 2, 3]), 1)
    assert part.weights.tolist() == [2.0, 0.0, 2.0, 0.0]
    assert part.mask.tolist() == [False, False, True, False]  # e^3 = 20 is rejected
    assert part.valid.tolist() == [True, False, True, False]
    assert part.denominator("valid").item() == 3 and part.denominator("kept").item() == 2
    assert part.metrics == {}


def test_denominator_when_a_rule_rejects_then_valid_counts_before_it_and_kept_after():
    config = RolloutCorrectionConfig(rollout_rs=(RejectionRule("token", "ratio", 0.5, 2.0),))
    correction = correct([0.1, 3.0, -0.2, 0.3], mask=[1, 1, 1, 0], config=config)
    assert correction.denominator("valid").item() == 3
    assert correction.denominator("kept").item() == 2
    with pytest.raises(ValueError, match="loss_denominator must be valid or kept, got 'all'"):
        correction.denominator("all")


def test_padded_rows_when_flattened_then_as_packed():
    # Row 0 has three tokens, row 1 one, padded to three.
    log_ratio = torch.tensor([[0.1, -0.2, 0.4], [0.3, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    values, flat_mask, seq_ids, rows = flatten_padded(log_ratio, mask)
    config = dataclasses.replace(TOKEN_IS, rollout_is="geometric")
    padded = compute_correction(values, torch.zeros(6), flat_mask, seq_ids, num_sequences=rows, config=config)
    packed = compute_correction(
        torch.tensor([0.1, -0.2, 0.4, 0.3]),
        torch.zeros(4),
        torch.ones(4),
        torch.tensor([0, 0, 0, 1]),
        num_sequences=2,
        config=config,
    )
    assert padded.weights[padded.mask].tolist() == packed.weights.tolist()
    assert packed.weights.tolist() == pytest.approx([math.exp(0.1)] * 3 + [math.exp(0.3)], rel=1e-6)


def test_inputs_when_of_unlike_lengths_then_all_shapes_are_named():
    with pytest.raises(ValueError) as raised:
        compute_correction(
            torch.zeros(3),
            torch.zeros(2),
            torch.ones(3),
            torch.zeros(3, dtype=torch.int64),
            num_sequences=1,
            config=TOKEN_IS,
        )
    assert str(raised.value) == (
        "compute_correction takes train_logprobs, rollout_logprobs, loss_mask and seq_ids (turn_ids, "
        "advantages, routing) of one shape [T], got (3,), (2,), (3,), (3,); flatten_padded turns rows [B, "
        "L] into [T]"
    )
    with pytest.raises(ValueError, match="of one shape"):
        rows = torch.zeros(2, 2)
        compute_correction(rows, rows, rows, rows.long(), num_sequences=2, config=TOKEN_IS)
