"""The ratio rho = pi_train / pi_rollout of each token, and its sums over whole sequences and turns.

T tokens (this context-parallel rank's), S sequences, U units: sequences, or their turns where turns
decide something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megatron_rl_corr.core.segments import Columns, constant, segment_sums, turn_segments
from megatron_rl_corr.reduce.collectives import ParallelGroups, collective

LOG_CLAMP = 20.0
"""exp(+-20) = 4.9e8 and 2.1e-9: beyond it float32 sums lose every other token (verl's bound too)."""
PRODUCT_LOG_CLAMP = 340.0
"""Bound of a product's logarithm where it is compared with others of the batch, by an effective sample
size, which sums up squares, or by batch normalisation: e^(+-680) fits into float64.
"""


LARGEST_LESS = 1e8
"""What e^20 = 4.9e8 is lessened by at most in k3: a finite but absurd D (1e30, of a server's log-prob of
-1e30) would make it -1e30, below every bound.
"""


def k3(log_ratio: Tensor) -> Tensor:
    """e^D - 1 - D, elementwise, at least 0: D is clamped to +-20 in the exponent, and to at
    most 1e8 behind it.

    Args:
        log_ratio: D, any shape.
    """
    return log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP).expm1_() - log_ratio.clamp(max=LARGEST_LESS)


NEAREST_TO_1 = 1.0 - 2.0**-24
"""Half a step of float32 below 1: a probability of which its log-prob tells no more."""


def binary_kl(log_mu: Tensor, log_p: Tensor) -> Tensor:
    """KL of "this token or another": mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p)), elementwise, float64.

    At least 0. Both logarithms of 1 - x are log1p, and all is in float64, as terms of order D leave a KL of
    order D^2. mu and p are at most 1 - 2^-24. Source: DPPO, arXiv:2602.04879 (binary KL).

    Args:
        log_mu, log_p: of the sampled token, any shape, float32.
    """
    mu, p = (logprobs.double().exp_().clamp_(max=NEAREST_TO_1) for logprobs in (log_mu, log_p))
    others_fall = mu.neg().log1p_().sub_(p.neg_().log1p_())  # log((1 - mu) / (1 - p))
    del p  # no more than three rows at a time
    kl = others_fall.mul_(1.0 - mu)
    kl.addcmul_(mu, log_mu.double())
    return kl.addcmul_(mu, log_p.double(), value=-1.0).clamp_(min=0.0)


@dataclass(frozen=True)
class TokenRatios:
    """Log-probs of both policies and how far they are apart, [T] each; 0 outside the valid tokens.

    Example: pi_train = 0.5 and pi_rollout = 0.25 give log_ratio = ln 2 = 0.693 and rho_less_one = 1.
    """

    train_logprobs: Tensor
    """float32 log pi_train."""
    rollout_logprobs: Tensor
    """float32 log pi_rollout."""
    log_ratio: Tensor
    """float64 D = log pi_train - log pi_rollout, subtracted in float32."""
    in_mask: Tensor
    """bool: in the loss mask."""
    valid: Tensor
    """bool: in the loss mask, and finite under both policies."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Inputs of rejection rules by name (config/rules.RULE_INPUTS); float32."""

    @classmethod
    def of(
        cls, train_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, inputs: Mapping[str, Tensor]
    ) -> TokenRatios:
        """The ratios of log-probs under a loss mask; values outside the mask never matter.

        Args:
            train_logprobs, rollout_logprobs: [T] float.
            loss_mask: [T], nonzero for the tokens that are trained.
            inputs: [T] each, by their names in config/rules.RULE_INPUTS.
        """
        train, rollout, in_mask = train_logprobs.float(), rollout_logprobs.float(), loss_mask.bool()
        difference = train - rollout
        valid = in_mask & (difference.abs() < torch.inf)  # inf - inf is NaN, which is no smaller
        # A select, not a product: a NaN outside of the mask must not survive.
        zero = constant(0.0, torch.float32, train.device)
        train, rollout = torch.where(valid, train, zero), torch.where(valid, rollout, zero)
        log_ratio = torch.where(valid, difference, zero).double()
        inputs = {name: torch.where(valid, values.float(), zero) for name, values in inputs.items()}
        return cls(train, rollout, log_ratio, in_mask, valid, inputs)

    @cached_property
    def rho_less_one(self) -> Tensor:
        """rho - 1 = e^D - 1 with D clamped to +-20: float64. Less one, because that keeps the
        digits of a small D.
        """
        return self.log_ratio.clamp(-LOG_CLAMP, LOG_CLAMP).expm1_()

    @property
    def k3(self) -> Tensor:
        """rho - 1 - D, at least 0: float64; as the function k3, from the row that is there."""
        return self.rho_less_one - self.log_ratio.clamp(max=LARGEST_LESS)

    @cached_property
    def one(self) -> Tensor:
        """float64 [T]: 1 for a valid token, else 0."""
        return self.valid.double()

    @cached_property
    def valid_tokens(self) -> Tensor:
        """How many are valid: float64 scalar."""
        return self.one.sum()

    @cached_property
    def tokens_in_mask(self) -> Tensor:
        """How many are in the loss mask, finite or not: float64 scalar."""
        return self.in_mask.sum(dtype=torch.float64)

    def free_rows(self) -> None:
        """Free the rows that were computed on demand; one that is needed again is computed again."""
        for name in ("rho_less_one", "one"):
            vars(self).pop(name, None)

    @property
    def exp_abs_less_one(self) -> Tensor:
        """e^|D| - 1, with |D| at most 20: float64."""
        return self.log_ratio.abs().clamp_(max=LOG_CLAMP).expm1_()

    @property
    def binary_kl(self) -> Tensor:
        """KL of "this token or another", pi_rollout to pi_train: float64."""
        return binary_kl(self.rollout_logprobs, self.train_logprobs)

    @property
    def prob_diff(self) -> Tensor:
        """pi_train - pi_rollout: float64."""
        return self.train_logprobs.double().expm1_() - self.rollout_logprobs.double().expm1_()


@dataclass(frozen=True)
class Spans:
    """Which sequence, and which turn of it, each token belongs to."""

    seq_ids: Tensor
    """int64 [T] in [0, num_sequences), numbered alike on all context-parallel ranks."""
    num_sequences: int
    turn_ids: Tensor | None = None
    """int64 [T], 0 for the first turn of a sequence; None: turns are not known."""
    num_turns: int = 1
    """Above every turn id where something is decided by turns; else 1."""

    @cached_property
    def unit_ids(self) -> Tensor:
        """int64 [T]: the turn of the token's sequence where turns decide something, else the sequence."""
        return (
            self.seq_ids
            if self.num_turns == 1
            else turn_segments(self.seq_ids, self.turn_ids, self.num_turns)
        )

    @property
    def num_units(self) -> int:
        """U."""
        return self.num_sequences * self.num_turns

    @collective
    def whole_unit_sums(self, columns: Columns, groups: ParallelGroups | None) -> SpanSums:
        """Sums of columns [T] over each whole unit: one all-reduce over cp, however many columns."""
        by_unit = segment_sums(columns, self.unit_ids, self.num_units)
        if groups is not None:
            by_unit = groups.all_reduce_cp(by_unit)
        by_sequence = by_unit
        if self.num_turns > 1:
            by_sequence = by_unit.view(len(columns), self.num_sequences, self.num_turns).sum(dim=2)
        return SpanSums(tuple(columns), by_unit, by_sequence)


@dataclass(frozen=True)
class SpanSums:
    """Sums and means over the valid tokens of each whole unit [U] and sequence [S], float64, by name."""

    names: tuple[str, ...]
    units: Tensor
    """[K, U]."""
    sequences: Tensor
    """[K, S]."""

    @cached_property
    def by_unit(self) -> Mapping[str, Tensor]:
        """The sums over each unit: float64 [U] by name."""
        return dict(zip(self.names, self.units.unbind(), strict=True))

    @cached_property
    def by_sequence(self) -> Mapping[str, Tensor]:
        """The sums over each sequence: float64 [S] by name."""
        return dict(zip(self.names, self.sequences.unbind(), strict=True))

    @cached_property
    def unit_means(self) -> Mapping[str, Tensor]:
        """Means over the valid tokens of each unit: float64 [U] by name; 0 without valid tokens."""
        return dict(zip(self.names, (self.units / self.by_unit["tokens"].clamp(min=1)).unbind(), strict=True))

    @cached_property
    def sequence_means(self) -> Mapping[str, Tensor]:
        """Means over the valid tokens of each sequence: float64 [S] by name; 0 without valid tokens."""
        means = self.sequences / self.by_sequence["tokens"].clamp(min=1)
        return dict(zip(self.names, means.unbind(), strict=True))

    @cached_property
    def present(self) -> Tensor:
        """bool [S]: the sequence has valid tokens."""
        return self.by_sequence["tokens"] > 0

    @cached_property
    def units_present(self) -> Tensor:
        """bool [U]: the unit has valid tokens."""
        return self.present if self.units is self.sequences else self.by_unit["tokens"] > 0

    @cached_property
    def products(self) -> Tensor:
        """rho's product over each sequence, e^{sum D} with sum D clamped to +-340: float64 [S]; 0
        without valid tokens.

        Whatever weights were chosen, this is a sequence's raw importance weight. A clamp at +-20
        would make long sequences of a large mismatch equal, and the worst batch one of the largest
        effective sample size.
        """
        exponent = self.by_sequence["log_ratio"].clamp(-PRODUCT_LOG_CLAMP, PRODUCT_LOG_CLAMP)
        return exponent.exp_().mul_(self.present)
