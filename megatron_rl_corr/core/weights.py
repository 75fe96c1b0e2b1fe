"""Importance weights: a level (token, sequence, geometric, turn) and a mode (truncate, clip, mask, gamma).

T tokens, U units of the weights' level: tokens, turns or sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.ratios import LOG_CLAMP, PRODUCT_LOG_CLAMP, Spans, SpanSums, TokenRatios
from megatron_rl_corr.core.segments import constant

K_L_POSITIVE, K_L_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""VESPO's (k, l) for advantages that are not negative, and for negative ones."""
LEAST_GAMMA = float(torch.finfo(torch.float32).tiny)
"""1.2e-38: a smaller weight trains nothing in float32, and from 1e-162 its square is no longer a float64."""


@dataclass(frozen=True)
class ImportanceWeights:
    """Bounded weights, and where the bounds acted."""

    tokens: Tensor
    """float64 [T]: the weight of each token; 0 outside the valid tokens."""
    out_of_bounds: Tensor
    """bool [T]: a bound changed it; nowhere for gamma, which has none."""
    units: Tensor
    """float64 [U]: the weight of each unit that has a weight of its own; 0 where it has no valid token."""
    shared: bool
    """True if a unit is more than a token: then every context-parallel rank holds all units
    of its sequences.
    """


def importance_weights(
    config: RolloutCorrectionConfig, ratios: TokenRatios, spans: Spans, sums: SpanSums
) -> ImportanceWeights | None:
    """w = rho of the token, or the product (sequence, turn) or geometric mean of rho over its unit, bounded.

    The exponent is clamped to +-20; that of a product which the batch's mean divides, to +-340: clamped to
    +-20, products that are all below e^-20 would be alike, and normalisation would make each of them 1.
    None without weights (rollout_is None).

    Args:
        config: the weights' level, mode and bounds.
        ratios: of the tokens.
        spans: their sequences and turns.
        sums: over whole units and sequences, with the column log_ratio, and for gamma with
            input/advantages.
    """
    if config.rollout_is is None:
        return None
    if config.rollout_is_mode == "gamma":
        units = gamma_weights(
            sums.by_sequence["log_ratio"], sums.by_sequence["input/advantages"], sums.present
        )
        tokens = units.index_select(0, spans.seq_ids).mul_(ratios.one)
        return ImportanceWeights(tokens, torch.zeros_like(ratios.valid), units, shared=True)
    if config.rollout_is == "token":
        weights, outside = bounded(config, ratios.rho_less_one + 1, ratios.valid)
        return ImportanceWeights(weights, outside, weights, shared=False)
    if config.rollout_is not in ("sequence", "geometric", "turn"):
        raise ValueError(f"rollout_is {config.rollout_is!r} has no formula here")
    by_turn = config.rollout_is == "turn"
    of_units, ids = (sums.by_unit, spans.unit_ids) if by_turn else (sums.by_sequence, spans.seq_ids)
    exponent = sums.sequence_means["log_ratio"] if config.rollout_is == "geometric" else of_units["log_ratio"]
    present = sums.units_present if by_turn else sums.present
    compared = config.rollout_is_batch_normalize and config.rollout_is != "geometric"
    limit = PRODUCT_LOG_CLAMP if compared else LOG_CLAMP
    units, outside = bounded(config, exponent.clamp(-limit, limit).exp_(), present)
    tokens = units.index_select(0, ids).mul_(ratios.one)  # in place: units are finite
    return ImportanceWeights(tokens, outside.index_select(0, ids) & ratios.valid, units, shared=True)


def gamma_weights(log_ratios: Tensor, advantages: Tensor, present: Tensor) -> Tensor:
    """VESPO's weight of a whole sequence: w^k e^(l (1 - w)), float64 [S]; 0 where not present.

    w = prod rho, with log w clamped to +-20; (k, l) = (2, 3) where the advantage is not negative, else (3,
    2). It is 1 at w = 1, largest at w = k / l (1.208 and 1.242), and goes to 0 on either side: quickly where
    the trained policy has left the sequence, quicker where it has run ahead. Computed as e^(k log w + l (1 -
    w)), which can't overflow; 0 where that is not above LEAST_GAMMA.

    Source: VESPO, arXiv:2602.10693, with TRL's constants.

    Args:
        log_ratios: [S] float64, the sum of D over the sequence.
        advantages: [S] float64, of the sign of the sequence's advantage.
        present: [S] bool, the sequences with valid tokens.
    """
    log_w = log_ratios.clamp(-LOG_CLAMP, LOG_CLAMP)
    good = advantages >= 0
    k, rate = (
        torch.where(
            good, *(constant(pair[i], torch.float64, good.device) for pair in (K_L_POSITIVE, K_L_NEGATIVE))
        )
        for i in (0, 1)
    )
    weights = functional.threshold((k * log_w - rate * log_w.expm1()).exp_(), LEAST_GAMMA, 0.0)
    return torch.where(present, weights, constant(0.0, torch.float64, good.device))


def bounded(config: RolloutCorrectionConfig, weights: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Weights within the bounds of the config.

    truncate: min(w, upper). clip: w into [lower, upper]. mask: w inside the closed interval, else 0 (IcePop).
    Whether w is inside is decided in float32, since log-probs are no finer.

    Args:
        config: the mode and the bounds.
        weights: [U] float64.
        present: [U] bool, the units with valid tokens.

    Returns:
        (weights [U] float64, 0 where not present; bool [U], where a bound acted).
    """
    lower, upper = config.rollout_is_lower, config.rollout_is_upper
    rounded = weights.float()
    inside = present & (rounded.clamp(lower, upper) == rounded)
    del rounded
    kept = inside
    if config.rollout_is_mode in ("truncate", "clip"):
        kept, weights = present, weights.clamp(lower, upper)
    elif config.rollout_is_mode != "mask":
        raise ValueError(f"rollout_is_mode {config.rollout_is_mode!r} has no formula here")
    return torch.where(kept, weights, constant(0.0, torch.float64, weights.device)), present ^ inside
