"""Decides what answers around a weight update show: where the weights switched, and what was
left in the cache.

R response tokens.
"""

from dataclasses import asdict

import numpy as np

from megatron_rl_corr.doctor.distances import FLOAT32_MAX, distance, switch_position
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.engines.inspection import DetailedSample, TokenScores

MARGIN, MARGIN_HALF = FLOAT32_MAX, 0.1
"""Nats by which the reported switch may fit worse than the best one."""


def judge_spans(check: str, answer: DetailedSample, before: np.ndarray, after: np.ndarray, half: bool) -> Row:
    """Compare the reported first token of the new weights with the one that the log-probs show.

    Args:
        check: name of the row.
        answer: R tokens, sampled across the update, with the spans that the server reports.
        before: [R] log-probs of its tokens under the old weights.
        after: [R] log-probs of its tokens under the new weights.
        half: the server computes in 16 bits.
    """
    true, costs = switch_position(answer.logprobs, before, after)
    spans = answer.version_spans
    reported_spans = None if spans is None else [asdict(span) for span in spans]
    numbers = {"tokens": len(answer.output), "true": true, "spans": reported_spans}
    if not 0 < true < len(answer.output):
        return Row(check, "note", f"no switch of weights among the {len(answer.output)} tokens", numbers)
    if spans is None or len(spans) != 2:
        message = f"{0 if spans is None else len(spans)} spans for {len(answer.output)} tokens of two weights"
        return found(check, "version_spans_wrong", message, **numbers)
    reported = spans[1].start
    worse = float(costs[reported] - costs[true]) if 0 <= reported < len(costs) else float("inf")
    message = f"reported switch at token {reported}, log-probs switch at {true} of {len(answer.output)}"
    if not worse <= (MARGIN_HALF if half else MARGIN):
        return found(check, "version_spans_wrong", message, reported=reported, worse=worse, **numbers)
    return Row(check, "ok", message, numbers | {"reported": reported})


def judge_update(
    before: TokenScores, after: TokenScores, cached: DetailedSample, fresh: TokenScores, half: bool
) -> Row:
    """Compare scores of the same tokens under old and new weights, and a sample under the new ones
    with its scores.

    Args:
        before: of some tokens, under the old weights.
        after: of the same, under the new ones.
        cached: sampled under the new weights after a prompt that was cached under the old ones.
        fresh: scores of its tokens, without any cached key or value.
        half: the server computes in 16 bits.
    """
    effect, stale = distance(before.logprobs, after.logprobs), distance(cached.logprobs, fresh.logprobs)
    numbers = {"effect": effect.numbers(), "stale": stale.numbers(), "cached_tokens": cached.cached_tokens}
    count = "an unknown number of" if cached.cached_tokens is None else cached.cached_tokens
    if effect.is_rounding(half):
        return found("update", "update_without_effect", f"log-probs moved by {effect}", **numbers)
    if not stale.is_rounding(half):
        message = f"after update and flush {count} old tokens are still used: {stale}"
        return found("update", "stale_prefix_cache", message, **numbers)
    message = f"log-probs moved by {effect.mean:.2f} nats on average; then {count} tokens were cached"
    return Row("update", "ok", message, numbers)
