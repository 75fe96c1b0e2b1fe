"""Rejection rules by hand: every divergence at every level, closed bounds, one decision per sequence."""

import math

import pytest
import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.rules import DIVERGENCES, RULE_INPUTS
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.ratios import TokenRatios
from megatron_rl_corr.core.rejection import within

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # D = [0, -15, -30] - (-1) = 1, -14, -29, so that k1 = -D = -1, 14, 29; k2 = D^2 / 2.
        ("k2", [0.5, 98.0, 420.5]),
        # e^D - 1 - D: e - 2, and e^D is nothing beside 1 for the others; its clamp at e^-20
        # is nothing either.
        ("k3", [0.7182818, 13.0, 28.0]),
        # |1 - e^-1|, |e^-15 - e^-1|, e^-1
        ("abs_diff", [0.6321206, 0.3678791, 0.3678794]),
        # mu = e^-1: p = 1 is taken as 1 - 2^-24: -e^-1 + 0.6321206 (ln 0.6321206 + 24 ln 2) = 9.8578445;
        # 14 e^-1 + 0.6321206 (ln 0.6321206 - ln(1 - e^-15)) = 5.1503120 - 0.2899245, and 29 e^-1 - 0.2899245.
        ("binary_kl", [9.8578446, 4.8603875, 10.3785798]),
    ],
)
def test_token_divergence_when_the_bound_is_at_it_then_kept_and_below_it_dropped(name, values):
    train = torch.tensor([0.0, -15.0, -30.0])  # the published numbers: rollout -1 against train 0, -15, -30
    for i, value in enumerate(values):
        for bound, kept in ((value * 1.0001, True), (value * 0.9999, False)):
            config = RolloutCorrectionConfig(rollout_rs=(RejectionRule("token", name, upper=bound),))
            found = compute_correction(
                train,
                torch.full((3,), -1.0),
                torch.ones(3),
                torch.tensor([0, 1, 1]),
                num_sequences=2,
                config=config,
            )
            assert found.mask[i].item() is kept, (name, bound)


# Sequence 0: D = 0.1, -0.2, 0.4 around a masked token with D = 9; sequence 1: nothing but a masked token;
# sequence 2: D = 0.01. Packed 0 0 2 0 1 0.
SEQ_IDS = torch.tensor([0, 0, 2, 0, 1, 0])
LOG_RATIO = torch.tensor([0.1, -0.2, 0.01, 9.0, NAN, 0.4])
MASK = torch.tensor([True, True, True, False, False, True])


def correct(*rules: RejectionRule):
    config = RolloutCorrectionConfig(rollout_rs=rules)
    return compute_correction(
        LOG_RATIO - 1, torch.full((6,), -1.0), MASK, SEQ_IDS, num_sequences=3, config=config
    )


@pytest.mark.parametrize(
    "level, name, value",
    [
        # 0.1 - 0.2 + 0.4 = 0.3; e^0.3, and e^0.1 for the mean of three.
        ("seq_sum", "ratio", 1.3498588),
        ("seq_mean", "ratio", 1.1051709),
        # (0.01 + 0.04 + 0.16) / 2, a third of it, and its largest term.
        ("seq_sum", "k2", 0.105),
        ("seq_mean", "k2", 0.035),
        ("seq_max", "k2", 0.08),
        # e^D - 1 - D: 0.0051709 + 0.0187308 + 0.0918247.
        ("seq_sum", "k3", 0.1157264),
        ("seq_mean", "k3", 0.0385755),
        ("seq_max", "k3", 0.0918247),
        # pi_rollout = e^-1 = 0.3678794, pi_train = e^(D - 1) = 0.4065697, 0.3011942, 0.5488116.
        ("seq_sum", "abs_diff", 0.2863077),
        ("seq_mean", "abs_diff", 0.0954359),
        ("seq_max", "abs_diff", 0.1809322),
        # mu = 0.3678794, 1 - mu = 0.6321206. mu (-D) + (1 - mu) ln((1 - mu) / (1 - p)):
        # -0.0367879 + 0.0399249, 0.0735759 - 0.0633971, -0.1471518 + 0.2131480
        ("seq_mean", "binary_kl", 0.0264373),
        ("seq_max", "binary_kl", 0.0659962),
        # e^|D| = 1.1051709, 1.2214028, 1.4918247
        ("seq_mean", "exp_abs", 1.2727995),
        # The veto, from above: e^0.4. The masked token, e^9, vetoes nothing.
        ("seq_max", "ratio", 1.4918247),
    ],
)
def test_sequence_rule_when_its_bound_passes_the_value_then_the_whole_sequence_goes(level, name, value):
    kept = correct(RejectionRule(level, name, upper=value * 1.0001))
    assert kept.mask.tolist() == MASK.tolist()
    assert kept.kept_sequences.tolist() == [True, False, True]  # a sequence without tokens is not kept
    rejected = correct(RejectionRule(level, name, upper=value * 0.9999))
    assert rejected.mask.tolist() == [False, False, True, False, False, False]
    assert rejected.kept_sequences.tolist() == [False, False, True]
    # Three of the four valid tokens.
    assert rejected.metrics[f"rejected_fraction/{level}_{name}"].value() == 0.75
    assert rejected.metrics["kept_fraction"].value() == 0.25
    assert rejected.metrics["kept_sequence_fraction"].value() == 0.5
    assert (rejected.valid_tokens.item(), rejected.kept_tokens.item()) == (4.0, 1.0)


@pytest.mark.parametrize(
    "lower, upper, kept",
    [
        # rho = 1.105, 0.8187, 1.4918 at the valid tokens of sequence 0.
        (0.81, None, True),
        (0.82, None, False),
        (None, 1.5, True),
        (None, 1.49, False),
        (0.81, 1.5, True),
        (0.82, 1.5, False),
        (0.81, 1.49, False),
    ],
)
def test_veto_when_one_token_is_outside_on_either_side_then_its_sequence_goes(lower, upper, kept):
    correction = correct(RejectionRule("seq_max", "ratio", lower, upper))
    assert correction.mask.tolist() == [kept, kept, True, False, False, kept]
    assert correction.kept_sequences.tolist() == [kept, False, True]


def test_veto_when_one_token_in_a_thousand_is_catastrophic_then_the_mean_does_not_see_it_but_the_veto_does():
    # D = -10 once: the geometric mean is e^-0.01, rho of the token 4.5e-5.
    log_ratio = torch.zeros(2000)
    log_ratio[400] = -10
    seq_ids = torch.arange(2).repeat_interleave(1000)
    for rule, kept in [
        (RejectionRule("seq_mean", "ratio", 0.98, 1.02), [True, True]),
        (RejectionRule("seq_max", "ratio", lower=1e-4), [False, True]),
        (RejectionRule("seq_max", "ratio", lower=4e-5), [True, True]),
    ]:
        correction = compute_correction(
            log_ratio - 11,
            torch.full((2000,), -11.0),
            torch.ones(2000),
            seq_ids,
            num_sequences=2,
            config=RolloutCorrectionConfig(rollout_rs=(rule,)),
        )
        assert correction.kept_sequences.tolist() == kept, rule
        assert correction.kept_tokens.item() == 1000 * sum(kept)


def test_low_probability_rule_when_a_token_is_below_the_bound_then_masked_and_on_it_kept():
    # pi_train is 0.5 everywhere: it does not matter. The last token has no pi_rollout.
    rollout = torch.tensor([0.5, 1e-3, 0.999e-3, 1e-5, NAN]).log()
    config = RolloutCorrectionConfig(rollout_rs=(RejectionRule("token", "rollout_prob", lower=1e-3),))
    correction = compute_correction(
        torch.full((5,), 0.5).log(),
        rollout,
        torch.ones(5),
        torch.zeros(5, dtype=torch.int64),
        num_sequences=1,
        config=config,
    )
    assert correction.mask.tolist() == [True, True, False, False, False]
    assert correction.metrics["rejected_fraction/token_rollout_prob"].value() == 0.5
    assert correction.kept_sequences.tolist() == [True]


@pytest.mark.parametrize(
    "level, kept",
    [("token", [1, 0, 1, 1, 0, 0, 1]), ("seq_mean", [1, 1, 1, 1, 1, 0, 1])],
    ids=["token", "seq_mean"],
)
def test_routing_when_above_the_bound_then_the_token_or_its_sequence_is_rejected(level, kept):
    # Means of sequences 0, 1, 2, 3: 0.25, 0, 0.375 of valid tokens, 0.75; the bound of 0.4 is on
    # shares of experts.
    routing = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.5, 0.75, NAN])
    seq_ids, mask = torch.tensor([0, 0, 1, 2, 2, 3, 2]), torch.tensor([1, 1, 1, 1, 1, 1, 0])
    config = RolloutCorrectionConfig(rollout_rs=(RejectionRule(level, "routing", upper=0.4),))
    logprobs = torch.full((7,), -1.0)
    correction = compute_correction(
        logprobs, logprobs, mask, seq_ids, num_sequences=4, config=config, routing=routing
    )
    assert correction.mask.int().tolist() == [*kept[:6], 0]
    rejected = 6 - sum(kept[:6])
    assert correction.metrics[f"rejected_fraction/{level}_routing"].value() == pytest.approx(rejected / 6)
    with pytest.raises(ValueError, match=f"{level}_routing needs routing, the share of .*; pass routing"):
        compute_correction(logprobs, logprobs, mask, seq_ids, num_sequences=4, config=config)


# rho = 1.5, 0.5, 2 and a hole in sequence 0, 3 in sequence 1, 1.01 and 0.99 in sequence 2, 0.4 in 3,
# which has A = 0.
# |rho - 1|: means 2/3, 2, 0.01, 0.6.
VACO_RHO = torch.tensor([1.5, 0.5, NAN, 2.0, 3.0, 1.01, 0.99, 0.4])
VACO_IDS = torch.tensor([0, 0, 0, 0, 1, 2, 2, 3])


@pytest.mark.parametrize(
    "advantage, bound, kept",
    [
        (1.0, 0.5, [0, 1, 0, 0, 0, 1, 1, 1]),  # more probable already, and the update would make them more so
        (-1.0, 0.5, [1, 0, 0, 1, 1, 1, 1, 1]),
        (1.0, 0.6668, [1, 1, 0, 1, 0, 1, 1, 1]),
        (1.0, 0.6665, [0, 1, 0, 0, 0, 1, 1, 1]),
        (1.0, 2.01, [1, 1, 0, 1, 1, 1, 1, 1]),
        (1.0, 0.005, [0, 1, 0, 0, 0, 0, 1, 1]),
    ],
)
@pytest.mark.parametrize("denominator", ["valid", "kept"])
def test_vaco_when_a_sequence_is_far_then_it_loses_the_tokens_that_move_further_and_stays_itself(
    advantage, bound, kept, denominator
):
    config = RolloutCorrectionConfig(
        rollout_rs=(RejectionRule("seq_mean", "vaco", upper=bound),),
        loss="grpo",
        loss_denominator=denominator,
    )
    logprobs, rollout, mask = VACO_RHO.log() - 2, torch.full((8,), -2.0), torch.ones(8)
    advantages = torch.where(VACO_IDS == 3, 0.0, advantage)
    correction = compute_correction(
        logprobs, rollout, mask, VACO_IDS, num_sequences=5, config=config, advantages=advantages
    )
    assert correction.mask.int().tolist() == kept
    # No sequence is rejected, even one that has lost all of its tokens; one that never had any is none.
    assert correction.kept_sequences.tolist() == [True, True, True, True, False]
    assert correction.metrics["kept_sequence_fraction"].value() == 1
    assert correction.metrics["rejected_fraction/seq_mean_vaco"].value() == pytest.approx(1 - sum(kept) / 7)
    assert (correction.valid_tokens, correction.kept_tokens) == (7, sum(kept))
    lengths = (
        [sum(kept[:4]), kept[4], kept[5] + kept[6], kept[7], 0] if denominator == "kept" else [3, 1, 2, 1, 0]
    )
    assert correction.lengths.tokens.tolist() == lengths
    assert correction.lengths.sequences == sum(length > 0 for length in lengths)
    assert correction.valid_lengths.tolist() == [3, 1, 2, 1, 0]  # by which advantages are weighed


def test_vaco_when_other_rules_reject_too_then_lengths_count_what_all_of_them_keep():
    # The token rule drops rho 2 and 3; the sequence rule rejects sequence 3; vaco then drops
    # 1.5 of sequence 0.
    config = RolloutCorrectionConfig(
        rollout_rs=(
            RejectionRule("token", "ratio", 0.3, 1.9),
            RejectionRule("seq_mean", "vaco", upper=0.5),
            RejectionRule("seq_sum", "ratio", 0.5, 9.0),
        ),
        loss="grpo",
        loss_denominator="kept",
    )
    correction = compute_correction(
        VACO_RHO.log() - 2,
        torch.full((8,), -2.0),
        torch.ones(8),
        VACO_IDS,
        num_sequences=5,
        config=config,
        advantages=torch.ones(8),
    )
    assert correction.mask.int().tolist() == [0, 1, 0, 0, 0, 1, 1, 0]
    assert correction.kept_sequences.tolist() == [True, True, True, False, False]
    assert correction.lengths.tokens.tolist() == [1, 0, 2, 0, 0] and correction.lengths.sequences == 2


def test_vaco_when_advantages_are_missing_then_it_asks_for_them():
    config = RolloutCorrectionConfig(rollout_rs=(RejectionRule("seq_mean", "vaco", upper=0.5),))
    with pytest.raises(
        ValueError, match="seq_mean_vaco needs advantages, the advantage of .*; pass advantages"
    ):
        compute_correction(VACO_RHO, VACO_RHO, VACO_RHO, VACO_IDS, num_sequences=4, config=config)


def test_rules_that_drop_some_tokens_when_counted_then_one_at_one_level_of_sequences():
    # Kept lengths are summed for one such rule: with two, the tokens that either drops would
    # be counted twice.
    [row] = [row for row in DIVERGENCES.values() if row.drops is not None]
    assert row.levels == ("seq_mean",)


def test_off_policy_sequence_mask_when_far_and_bad_then_rejected_whole_and_else_kept():
    # mean(-D) of sequences 0, 1, 3: (0.5 - 0.1) / 2 = 0.2, over the bound of 0.1; of sequence 2: 0.05.
    # Sequence 0 is bad, 1 good, 2 bad but near, 3 neither good nor bad, 4 empty.
    log_ratio = torch.tensor([-0.5, 0.1, -0.5, 0.1, -0.05, -0.5, 0.1, -9.0])
    seq_ids = torch.tensor([0, 0, 1, 1, 2, 3, 3, 2])
    advantages = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, 0.0, 0.0, NAN])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0])
    config = RolloutCorrectionConfig(rollout_rs=(RejectionRule("seq_mean", "opsm", upper=0.1),))
    correction = compute_correction(
        log_ratio - 1,
        torch.full((8,), -1.0),
        mask,
        seq_ids,
        num_sequences=5,
        config=config,
        advantages=advantages,
    )
    # Its second token, more probable in training, goes with the first: one decision per sequence.
    assert correction.mask.tolist() == [False, False, True, True, True, True, True, False]
    assert correction.kept_sequences.tolist() == [False, True, True, True, False]
    assert correction.metrics["rejected_fraction/seq_mean_opsm"].value() == pytest.approx(2 / 7)
    with pytest.raises(
        ValueError, match="seq_mean_opsm needs advantages, the advantage of .*; pass advantages"
    ):
        compute_correction(log_ratio, log_ratio, mask, seq_ids, num_sequences=5, config=config)


@pytest.mark.parametrize(
    "name, lower, upper, expected",
    [
        # rho = 1.105, 0.819, 1.010, 1.492 at the valid tokens.
        ("ratio", 0.9, 1.2, [True, False, True, False, False, False]),
        ("ratio", None, 1.2, [True, True, True, False, False, False]),
        ("ratio", 1.05, None, [True, False, False, False, False, True]),
        # 0.005, 0.02, 0.00005, 0.08
        ("k2", None, 0.03, [True, True, True, False, False, False]),
        # 0.0052, 0.0187, 0.00005, 0.0918
        ("k3", None, 0.01, [True, False, True, False, False, False]),
    ],
)
def test_token_rule_when_tokens_of_a_sequence_differ_then_each_its_own(name, lower, upper, expected):
    correction = correct(RejectionRule("token", name, lower, upper))
    assert correction.mask.tolist() == expected
    # A token-level rule takes no sequence away, even from the baseline.
    assert correction.kept_sequences.tolist() == [True, False, True]


def test_rules_when_one_divergence_is_summed_averaged_and_maximised_then_each_has_its_own_value():
    # k2 of sequence 0: sum 0.105, mean 0.035, maximum 0.08; each bound lets one of them pass only.
    for level, upper, kept in [
        ("seq_sum", 0.104, False),
        ("seq_mean", 0.036, True),
        ("seq_max", 0.081, True),
        ("seq_max", 0.079, False),
    ]:
        others = [RejectionRule(o, "k2", upper=9.0) for o in ("seq_sum", "seq_mean", "seq_max") if o != level]
        correction = correct(*others, RejectionRule(level, "k2", upper=upper))
        assert correction.kept_sequences.tolist() == [kept, False, True]


def test_rules_when_there_are_several_then_a_token_must_pass_all_and_each_counts_its_own():
    token, largest = RejectionRule("token", "ratio", 0.9, 1.2), RejectionRule("seq_max", "k2", upper=0.081)
    correction = correct(token, largest)
    assert correction.mask.tolist() == [True, False, True, False, False, False]
    assert correction.metrics["rejected_fraction/token_ratio"].value() == 0.5
    assert correction.metrics["rejected_fraction/seq_max_k2"].value() == 0.0


def step(value: float, towards: float) -> float:
    return torch.nextafter(torch.tensor(value), torch.tensor(towards)).item()


ON_THE_BOUND = [
    (level, *rest)
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for rest in [
        ("ratio", "upper", 2.0),
        ("ratio", "upper", 1.001),
        ("ratio", "lower", 0.5),
        ("ratio", "lower", 0.999),
        ("k2", "upper", 0.125),
        ("k3", "upper", 0.08),
    ]
    if (level, rest[0]) != ("seq_max", "ratio")
]


@pytest.mark.parametrize("level, name, side, bound", ON_THE_BOUND)
def test_rule_when_a_value_is_on_its_bound_then_kept_one_outside_not(level, name, side, bound):
    # The float32 that is nearest to the bound; log-probs come in float32.
    on = torch.tensor({"ratio": math.log(bound), "k2": bound, "k3": bound}[name]).item()
    outside = step(on, math.inf if side == "upper" else -math.inf)
    inside = step(on, -math.inf if side == "upper" else math.inf)
    rule = RejectionRule(level, name, **{side: bound})
    values = torch.tensor([inside, on, outside], dtype=torch.float64)
    assert within(rule, values).tolist() == [True, True, False]


def test_sequence_rule_when_one_token_is_the_sequence_then_it_decides_as_the_token_rule_does():
    # D = ln 2 in float32, which is a little more than ln 2.
    train, rollout = torch.tensor([math.log(2.0)]), torch.zeros(1)
    for level in ("token", "seq_sum", "seq_mean"):
        config = RolloutCorrectionConfig(rollout_rs=(RejectionRule(level, "ratio", 0.5, 2.0),))
        correction = compute_correction(
            train, rollout, torch.ones(1), torch.zeros(1, dtype=torch.int64), num_sequences=1, config=config
        )
        assert correction.mask.tolist() == [True]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence_when_all_is_zero_then_zero(name):
    # What is summed over sequences is not masked again: tokens that are not valid must add nothing.
    nan, inputs = torch.full((3,), NAN), {key: torch.full((3,), NAN) for key in RULE_INPUTS}
    ratios = TokenRatios.of(nan, nan, torch.ones(3), inputs)
    assert DIVERGENCES[name].value(ratios).tolist() == [0.0] * 3
