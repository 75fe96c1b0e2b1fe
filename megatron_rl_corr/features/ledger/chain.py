"""A chain of policies from the trainer's to the sampler's: the log-ratio of a token is the sum of its steps.

N tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_rl_corr.core.ledger_verdict import TERMS

PASSES = ("staleness", "routing", "head", "rounding")
"""The steps that the trainer's own passes make, in their order."""
REST, DECODE = "rest", "decode"
assert (*PASSES, REST, DECODE) == TERMS


def split_log_ratio(
    trained: Tensor, passes: Mapping[str, Tensor], prefill: Tensor | None, sampled: Tensor
) -> dict[str, Tensor]:
    """The terms of D = log pi_train - log pi_rollout, [N] float64 each, which add up to it.

    The chain is trained = p_0, the passes p_1 ... p_k, the server's prefill q, what it sampled with r:

        D = p_0 - r = (p_0 - p_1) + ... + (p_(k-1) - p_k) + (p_k - q) + (q - r)

    A policy that is not known of a token (NaN) is left out of its chain: that term is 0, and its part is in
    the next one's, behind the last pass in the rest.

    Args:
        trained: [N] log-probs of the policy that trains.
        passes: name of PASSES -> [N] log-probs behind that step, in the order of PASSES.
        prefill: [N] the server's, of the tokens in one pass; None: the run has none.
        sampled: [N] the server's, when it sampled.
    """
    terms, before = {}, trained.double()
    for name in (one for one in PASSES if one in passes):
        value = passes[name].double()
        after = torch.where(value.isfinite(), value, before)
        terms[name], before = before - after, after
    sampled = sampled.double()
    scored = sampled if prefill is None else torch.where(prefill.isfinite(), prefill.double(), sampled)
    terms[REST] = before - scored
    if prefill is not None:
        terms[DECODE] = scored - sampled
    return terms
