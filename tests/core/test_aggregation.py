"""Token coefficients by hand: every aggregation, both denominators, holes, empty and rejected sequences."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from megatron_rl_corr.config import RolloutCorrectionConfig
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import Correction

# Sequence 0: valid tokens 0, 2, 5 of which 2 is rejected; sequence 1: none; sequence 2: token 1, rejected;
# sequence 3: tokens 4 and 6. Token 3 (of sequence 0) is a hole.
SEQ_IDS = torch.tensor([0, 2, 0, 0, 3, 0, 3])
VALID = torch.tensor([True, True, True, False, True, True, True])
KEPT = torch.tensor([True, False, False, False, True, True, True])
CORRECTION = Correction(
    VALID.float(), KEPT, VALID, torch.tensor([True, False, False, True]), VALID.sum().double(), KEPT.sum().double()
)


def config_of(aggregation: str, denominator: str = "valid") -> RolloutCorrectionConfig:
    length = 8 if aggregation.endswith("norm") else None
    return RolloutCorrectionConfig(
        loss_aggregation=aggregation, loss_denominator=denominator, loss_scale_length=length
    )


@pytest.mark.parametrize(
    "aggregation, denominator, first, last",
    [
        # first: of sequence 0's kept tokens; last: of sequence 3's. 6 valid tokens, 4 kept; 3 sequences have valid
        # tokens (3, 1 and 2 of them), 2 have kept ones (2 each).
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
    coefficients = token_coefficients(CORRECTION, SEQ_IDS, 4, config_of(aggregation, denominator))
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
        rejected = Correction(valid.float(), none, valid, none[:4], valid.sum().double(), zero)
        config = config_of(aggregation, denominator)
        assert token_coefficients(rejected, SEQ_IDS, 4, config).tolist() == [0.0] * 7
    empty = Correction(torch.zeros(0), none[:0], none[:0], none[:0], zero, zero)
    assert token_coefficients(empty, SEQ_IDS[:0], 0, config_of(aggregation, denominator)).tolist() == []


class TwoByTwo:
    """Stands in for the groups of two cp ranks in two replicas: what the other ranks hold is added by hand."""

    def __init__(self, cp_rank: int, other_half: torch.Tensor, other_replica_sequences: float):
        self.cp_rank, self.other_half, self.others = cp_rank, other_half, other_replica_sequences

    def all_gather_cp_partials(self, sums, maxima):
        return sums + self.other_half, maxima

    def all_reduce_dp_cp(self, total):
        # The owner's cp partner adds nothing; the partner gets the owner's 3.
        return total + self.others + (0 if self.cp_rank == 0 else 3)


@pytest.mark.parametrize("cp_rank", [0, 1])
def test_coefficients_when_sequences_are_split_over_cp_then_lengths_of_the_whole(cp_rank):
    # The other half holds 2 more tokens of sequence 0, 1 of sequence 2; the other replica 5 sequences.
    other = torch.tensor([[2.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    groups = TwoByTwo(cp_rank, other, 5.0)
    coefficients = token_coefficients(CORRECTION, SEQ_IDS, 4, config_of("seq-mean-token-mean"), groups)
    # Sequences of 5, 2 and 2 tokens here, 8 in all.
    assert coefficients.tolist() == pytest.approx([1 / 40, 0, 0, 0, 1 / 16, 1 / 40, 1 / 16])


def test_coefficients_when_a_loss_names_no_aggregation_then_its_own():
    alone = SimpleNamespace(**vars(CORRECTION), denominator=CORRECTION.denominator)
    for loss, first in [("grpo", 1 / 9), ("gspo", 1 / 9), ("dapo", 1 / 6), ("rloo", 1 / 3)]:
        assert token_coefficients(alone, SEQ_IDS, 4, RolloutCorrectionConfig(loss=loss))[0].item() == (
            pytest.approx(first)
        )
