"""An upper bound of an estimator's bias, from the log-probs of both policies for the sampled tokens.

T tokens of packed sequences, S sequences. docs/explanation/mathematics.md, section 11, has the proof.
"""

from __future__ import annotations

import math

from torch import Tensor

from megatron_rl_corr.core.segments import segment_sums

LONGEST_SCORE = math.sqrt(2)
"""G: the gradient of a token's log-prob in its logits, e_y - p, is no longer; it is nearly that where p has
almost all on another token.
"""


def longest_scores(logprobs: Tensor) -> Tensor:
    """sqrt(2) (1 - p), at least ||e_y - p||, where the rest of the distribution is not known: float64 [T].

    The others' p_v sum to 1 - p, so their squares sum to at most (1 - p)^2. Where sum_v p_v^2 is known,
    `token_baseline.gradient_energies` has the square itself.

    Args:
        logprobs: [T], log p of the sampled token.
    """
    return -LONGEST_SCORE * logprobs.double().expm1()


def bias_terms(
    pulls: Tensor,
    scores: Tensor,
    advantages: Tensor,
    products: Tensor,
    seq_ids: Tensor,
    *,
    cap: float,
    furthest: float,
) -> Tensor:
    """A number for each response, whose mean over mu is at least ||E_mu g_hat - grad J||: float64 [S].

    b(y) = sum_t |c_t - min(w, cap) A| ||psi_t|| + furthest (1 - min(w, cap)), w = p(y) / mu(y), with
    g_hat(y) = sum_t c_t psi_t. It holds whatever the weights, bounds and rejections that make c, and where mu
    lacks tokens of p too. The mean falls as the cap grows, and single terms spread more.

    Args:
        pulls: [T], c: weight times advantage, 0 where rejected; in general minus the derivative of the
            sequence's loss in log p. Every trained token of the responses must be there.
        scores: [T], ||psi_t|| or a bound of it, in logits: `longest_scores`.
        advantages: [S], A, from a baseline that does not depend on these samples.
        products: [S], w (`Correction.sequence_ratios`).
        seq_ids: [T] int64 in [0, S).
        cap: above 0; the largest weight, where weights have one.
        furthest: max |A| times the longest response times LONGEST_SCORE: bounds |A| sum_t ||psi_t|| of all
            responses, sampled or not.
    """
    weights = products.double().clamp(max=cap)
    wanted = (weights * advantages.double())[seq_ids]
    apart = segment_sums({"apart": lambda: (pulls - wanted).abs() * scores}, seq_ids, len(products))[0]
    return apart + furthest * (1 - weights)


def mean_at_most(values: Tensor, *, lowest: float, highest: float, chance: float) -> Tensor:
    """At least the values' expected mean, but for this chance: float64 scalar.

    mean + sqrt(2 V ln(2 / chance) / n) + 7 (highest - lowest) ln(2 / chance) / (3 (n - 1)), V their variance.
    Source: empirical Bernstein bound, Maurer and Pontil 2009, theorem 11.

    Args:
        values: [n], n at least 2, independent of each other.
        lowest, highest: what a value can be at all.
        chance: of being wrong, as 0.05.
    """
    count, rarity = len(values), math.log(2 / chance)
    spread = (2 * values.double().var() * rarity / count).sqrt()
    return values.double().mean() + spread + 7 * (highest - lowest) * rarity / (3 * (count - 1))
