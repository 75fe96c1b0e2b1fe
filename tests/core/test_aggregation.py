"""Token coefficients by hand: every aggregation, both denominators, holes, empty and rejected sequences."""

import dataclasses
from fractions import Fraction

import pytest
import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import Correction, Lengths, compute_correction

# Sequence 0: valid tokens 0, 2, 5 of which 2 is rejected; sequence 1: none; sequence 2: token 1, rejected;
# sequence 3: tokens 4 and 6. Token 3 (of sequence 0) is a hole.
SEQ_IDS = torch.tensor([0, 2, 0, 0, 3, 0, 3])
VALID = torch.tensor([True, True, True, False, True, True, True])
KEPT = torch.tensor([True, False, False, False, True, True, True])
LENGTHS = {
    "valid": Lengths("valid", torch.tensor([3.0, 0, 1, 2], dtype=torch.float64), torch.tensor(3.0).double()),
    "kept": Lengths("kept", torch.tensor([2.0, 0, 0, 2], dtype=torch.float64), torch.tensor(2.0).double()),
}


def correction_of(denominator: str = "valid") -> Correction:
    kept_sequences = torch.tensor([True, False, False, True])
    counts = VALID.sum().double(), KEPT.sum().double()
    products = kept_sequences.double()
    return Correction(VALID.float(), KEPT, VALID, kept_sequences, *counts, LENGTHS[denominator], products)


def config_of(aggregation: str, denominator: str = "valid") -> RolloutCorrectionConfig:
    length = 8 if aggregation.endswith("norm") else None
    return RolloutCorrectionConfig(
        loss_aggregation=aggregation, loss_denominator=denominator, loss_scale_length=length
    )


@pytest.mark.parametrize(
    "aggregation, denominator, first, last",
    [
        # first: of sequence 0's kept tokens; last: of sequence 3's. 6 valid tokens, 4 kept; 3 sequences have
        # valid tokens (3, 1 and 2 of them), 2 have kept ones (2 each).
        ("token-mean", "valid", "1/6", "1/6"),
        ("token-mean", "kept", "1/4", "1/4"),
        ("seq-mean-token-mean", "valid", "1/9", "1/6"),
        ("seq-mean-token-mean", "kept", "1/4", "1/4"),
        ("seq-mean-token-sum", "valid", "1/3", "1/3"),
        ("seq-mean-token-sum", "kept", "1/2", "1/2"),
        ("seq-mean-token-sum-norm", "valid", "1/24", "1/24"),
        ("seq-mean-token-sum-norm", "kept", "1/16", "1/16"),
    ],
)
def test_coefficients_when_sequences_are_of_unlike_length_then_by_hand(aggregation, denominator, first, last):
    coefficients = token_coefficients(
        correction_of(denominator), SEQ_IDS, config_of(aggregation, denominator)
    )
    first, last = float(Fraction(first)), float(Fraction(last))
    assert coefficients.tolist() == pytest.approx([first, 0, 0, 0, last, first, last])
    assert coefficients.dtype == torch.float32 and not coefficients.requires_grad


@pytest.mark.parametrize("denominator", ["valid", "kept"])
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_coefficients_when_nothing_is_kept_or_there_is_no_token_then_zero(aggregation, denominator):
    none = torch.zeros(7, dtype=torch.bool)
    zero = torch.zeros((), dtype=torch.float64)
    for valid in (VALID, none):
        nothing = Lengths(denominator, torch.zeros(4, dtype=torch.float64), zero)
        lengths = LENGTHS["valid"] if denominator == "valid" and valid.any() else nothing
        kept, products = none[:4], none[:4].double()
        rejected = Correction(valid.float(), none, valid, kept, valid.sum().double(), zero, lengths, products)
        config = config_of(aggregation, denominator)
        assert token_coefficients(rejected, SEQ_IDS, config).tolist() == [0.0] * 7
    empty = Correction(
        torch.zeros(0),
        none[:0],
        none[:0],
        none[:0],
        zero,
        zero,
        Lengths(denominator, zero.expand(0), zero),
        zero.expand(0),
    )
    assert token_coefficients(empty, SEQ_IDS[:0], config_of(aggregation, denominator)).tolist() == []


def test_coefficients_when_sequences_are_split_over_cp_then_lengths_of_the_whole():
    # The other half holds 2 more tokens of sequence 0, 1 of sequence 2; the other replica 5 sequences.
    lengths = Lengths("valid", torch.tensor([5.0, 0, 2, 2], dtype=torch.float64), torch.tensor(8.0).double())
    correction = dataclasses.replace(correction_of(), lengths=lengths)
    coefficients = token_coefficients(correction, SEQ_IDS, config_of("seq-mean-token-mean"))
    assert coefficients.tolist() == pytest.approx([1 / 40, 0, 0, 0, 1 / 16, 1 / 40, 1 / 16])


def test_coefficients_when_the_correction_counted_the_other_tokens_then_refused():
    for made, asked in (("valid", "kept"), ("kept", "valid")):
        with pytest.raises(
            ValueError, match=f"denominator` {asked} with .* the correction counted {made} tokens"
        ):
            token_coefficients(correction_of(made), SEQ_IDS, config_of("seq-mean-token-sum", asked))
        # The mean over tokens has both counts.
        token_coefficients(correction_of(made), SEQ_IDS, config_of("token-mean", asked))


# Sequence 0: D = 0.1, 3, 0.2 and a hole; 1: only a hole; 2: 3; 3: 0.2, -0.1, of which -0.1 in
# turn 1; 4: -2, -2.
LOG_RATIO = torch.tensor([0.1, 3.0, 9.0, 0.2, 9.0, 3.0, 0.2, -0.1, -2.0, -2.0])
IDS = torch.tensor([0, 0, 0, 0, 1, 2, 3, 3, 4, 4])
TURNS = torch.tensor([0, 0, 0, 1, 0, 0, 0, 1, 0, 0])
MASK = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 1, 1])
BY_TOKEN = RejectionRule("token", "ratio", upper=9.0)  # e^3 = 20
BY_SEQUENCE = RejectionRule("seq_mean", "ratio", lower=0.5)  # e^-2 = 0.14
BY_TURN = RejectionRule("turn_mean", "ratio", lower=0.95)  # e^-0.1 = 0.905, e^-2


@pytest.mark.parametrize(
    "rules, m2, tokens, sequences",
    [
        ((), None, [3, 0, 1, 2, 2], 4),
        ((BY_TOKEN,), None, [2, 0, 0, 2, 2], 3),
        ((BY_SEQUENCE,), None, [3, 0, 1, 2, 0], 3),
        ((BY_TURN,), None, [3, 0, 1, 1, 0], 3),
        ((BY_TOKEN, BY_SEQUENCE, BY_TURN), None, [2, 0, 0, 1, 0], 2),
        # Means of D^2 from the smallest: 0.01, 0.01, 0.02, 0.025, and 0.82 with the next, 4.
        ((), 0.03, [2, 0, 0, 2, 0], 2),
        ((BY_TURN,), 0.03, [2, 0, 0, 1, 0], 2),
    ],
)
@pytest.mark.parametrize("denominator", ["valid", "kept"])
def test_lengths_when_rules_of_every_level_reject_then_what_is_left_of_each_sequence(
    denominator, rules, m2, tokens, sequences
):
    config = RolloutCorrectionConfig(
        rollout_rs=rules,
        rollout_m2_threshold=m2,
        loss_denominator=denominator,
        loss_aggregation="seq-mean-token-sum",
    )
    found = compute_correction(
        LOG_RATIO - 1,
        torch.full((10,), -1.0),
        MASK,
        IDS,
        num_sequences=5,
        config=config,
        turn_ids=TURNS,
        num_turns=2,
    ).lengths
    if denominator == "valid":
        tokens, sequences = [3, 0, 1, 2, 2], 4
    assert (found.kind, found.tokens.tolist(), found.sequences.item()) == (denominator, tokens, sequences)


def test_coefficients_when_a_loss_names_no_aggregation_then_its_own():
    for loss, first in [("grpo", 1 / 9), ("gspo", 1 / 9), ("dapo", 1 / 6), ("rloo", 1 / 3)]:
        assert token_coefficients(correction_of(), SEQ_IDS, RolloutCorrectionConfig(loss=loss))[0].item() == (
            pytest.approx(first)
        )
