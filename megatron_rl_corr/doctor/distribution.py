"""Decides which distribution a server samples from, and which one its log-probs are of.

R response tokens, K likeliest ids of a token.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_rl_corr.doctor.distances import FLOAT32_MAX, distance, slope
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.engines.inspection import DetailedSample, TokenScores

HOT = 2.0
COLD = 1e-3
TOP_P = 0.5
MASK_TOP_P, MASK_TOP_K = 0.9, 8
SLOPE_TOLERANCE = 0.05
"""Measured error of the slope on the tiny model: 1e-6 in float32, 1e-2 in bfloat16."""
LEAST_EVIDENCE = 1e-2
"""Sum of squares below which a slope is not trusted: nearly all samples were the likeliest ids."""
COLD_GAP = 100.0
"""Nats at a low temperature by which a sample may be less likely than the likeliest id: a
chance of e^-100.
"""
MASK_TOLERANCE = 1e-3
"""Measured error: 4e-7, in 16 bits too, because both sides come from the same logits."""
FILTERED_SHIFT = 0.1
"""Smallest median rise of log-probs that shows renormalisation on the top-p set; keeping half
gives ln 2 = 0.69.
"""
RISE_TOLERANCE, RISE_TOLERANCE_HALF = FLOAT32_MAX, 0.1
"""Nats that rounding may move a rise by."""
LEAST_WITHIN = 0.8
"""Share of a response's tokens whose rise 16 bits leave in its bounds; routing to other experts
moves some further.
"""
SEEDS = (1, 2**32 + 1, 2**62 + 1)
"""Their low 32 bits are equal, so a server that truncates seeds to 32 bits is found too."""
CHANCE = 1e-6
"""A response with at most this probability is not drawn twice by chance."""


def judge_temperature(
    hot: DetailedSample, hot_scores: TokenScores, cold: DetailedSample, cold_at: float, matters: bool
) -> Row:
    """Do samples and log-probs follow the requested temperature?

    Log-probs: the differences between the sampled and the likeliest id are 1 / HOT of those at temperature 1
    if they are scaled, and equal to them if not. Samples: at a low temperature each is the likeliest id, or
    at most COLD_GAP less likely, by the answer's own log-probs; a prefill may route a token through other
    experts in 16 bits.

    Args:
        hot: sampled at temperature HOT.
        hot_scores: of the same tokens, at temperature 1.
        cold: sampled at temperature cold_at.
        cold_at: COLD, or the engine's lowest.
        matters: False if the run samples at temperature 1, for which unscaled log-probs are right.
    """
    found_slope, evidence = slope(hot.logprobs, hot.top[:, 0], hot_scores.logprobs, hot_scores.top[:, 0])
    scaled = abs(found_slope - 1 / HOT) <= SLOPE_TOLERANCE
    gap = float((cold.top[:, 0] - cold.logprobs).max()) * (cold_at if scaled else 1)
    follows = gap <= COLD_GAP * cold_at
    numbers = {"slope": found_slope, "evidence": evidence, "follows": follows, "gap": gap}
    if evidence < LEAST_EVIDENCE:
        return Row("temperature", "note", "unknown: the model always samples the likeliest id", numbers)
    likeliest = f"at {cold_at:g} samples are{'' if follows else ' not'} the likeliest ids"
    message = f"at {HOT:g} log-prob differences are {found_slope:.3f} of those at 1; {likeliest}"
    if not follows:
        return found("temperature", "temperature_ignored", message, **numbers)
    if scaled:
        return Row(
            "temperature", "ok", f"log-probs are of the temperature-scaled softmax: {message}", numbers
        )
    if abs(found_slope - 1) > SLOPE_TOLERANCE:
        return found("temperature", "logprobs_of_another_temperature", message, **numbers)
    if matters:
        return found("temperature", "logprobs_without_temperature", message, **numbers)
    return Row(
        "temperature", "note", f"log-probs are of temperature 1, as the run samples: {message}", numbers
    )


def judge_top_p(answer: DetailedSample, scores: TokenScores, half: bool, matters: bool) -> Row:
    """Are log-probs of the whole vocabulary with top-p too, where the engine defines them so?

    Args:
        answer: sampled at TOP_P.
        scores: of its tokens.
        half: the server computes in 16 bits.
        matters: the run truncates; here its log-probs have to be right at any rate.
    """
    far = distance(answer.logprobs, scores.logprobs)
    shift = float(np.median(answer.logprobs - scores.logprobs))
    numbers = far.numbers() | {"shift": shift}
    if not far.is_rounding(half) and shift > FILTERED_SHIFT:
        message = f"with top-p {TOP_P:g} log-probs are {shift:.2f} nats above those of the whole vocabulary"
        return found("top-p", "logprobs_of_another_set", message, **numbers)
    return Row(
        "top-p", "ok", f"log-probs are of the whole vocabulary also with top-p {TOP_P:g}: {far}", numbers
    )


def judge_top_p_kept(answer: DetailedSample, scores: TokenScores, half: bool, matters: bool) -> Row:
    """Are log-probs renormalised on what top-p kept, where the engine defines them so?

    Top-p keeps the likeliest ids up to a sum m of at least TOP_P, and so raises log-probs by -ln m: if the
    likeliest has p >= TOP_P it alone is kept, and m = p; else m is between TOP_P and TOP_P + p, as no id is
    likelier than p.

    Args:
        answer, scores, half: as for `judge_top_p`.
        matters: the run truncates, so that raw log-probs are a defect.
    """
    far, rise = distance(answer.logprobs, scores.logprobs), answer.logprobs - scores.logprobs
    p = np.exp(scores.top[:, 0])
    lowest = -np.log(np.minimum(1, np.where(p < TOP_P, TOP_P + p, p)))
    highest = np.where(p < TOP_P, -np.log(TOP_P), lowest)
    slack = RISE_TOLERANCE_HALF if half else RISE_TOLERANCE
    within = float(((rise >= lowest - slack) & (rise <= highest + slack)).mean())
    numbers = far.numbers() | {
        "shift": float(np.median(rise)),
        "within": within,
        "least": float(lowest.max()),
    }
    if lowest.max() <= 2 * slack and far.is_rounding(half):
        return Row(
            "top-p", "note", f"unknown: top-p {TOP_P:g} hardly changes this model's log-probs: {far}", numbers
        )
    if within == 1 or (half and within >= LEAST_WITHIN):
        message = (
            f"with top-p {TOP_P:g} log-probs rise by {np.median(rise):.2f} nats, as renormalised on "
            "what it kept"
        )
        return Row("top-p", "ok", message, numbers)
    if far.is_rounding(half):
        message = (
            f"with top-p {TOP_P:g} log-probs are of the whole vocabulary, and samples of what it kept: {far}"
        )
        if matters:
            return found("top-p", "logprobs_of_another_set", message, **numbers)
        return Row("top-p", "note", f"the run does not truncate; {message}", numbers)
    message = f"with top-p {TOP_P:g} {within:.0%} of the log-probs are renormalised on what it kept: {far}"
    return found("top-p", "logprobs_of_another_set", message, **numbers)


def judge_mask(answer: DetailedSample | str, needed: bool) -> Row:
    """Does the server return the ids that top-p and top-k kept, and log-probs renormalised on them?

    The renormalised log-prob of a token must be its log-prob minus the log of the kept ids'
    total probability.

    Args:
        answer: sampled with MASK_TOP_P, MASK_TOP_K and the sampling mask, with enough likeliest ids to
            contain the kept ones; or why the server refused the request.
        needed: the run uses top-p or top-k.
    """
    kept = answer if isinstance(answer, str) else answer.kept
    if isinstance(kept, str):
        if needed:
            return found("sampling mask", "sampling_mask_missing", kept)
        return Row("sampling mask", "note", f"needed only with --rollout-top-p or --rollout-top-k: {kept}")
    masks, logprobs = kept.ids, kept.logprobs
    if not len(masks) == len(logprobs) == len(answer.output) or not all(masks):
        message = (
            f"{len(answer.output)} tokens have {len(masks)} masks and {len(logprobs)} log-probs, or an "
            "empty mask"
        )
        return found("sampling mask", "sampling_mask_wrong", message)
    expected, sizes = [], [len(mask) for mask in masks]
    for position, mask in enumerate(masks):
        likely = answer.top[position][np.isin(answer.top_ids[position], mask)]
        if likely.size != len(mask) or answer.output[position] not in mask:
            message = f"token {position}: {likely.size} of its {len(mask)} kept ids are among the likeliest"
            return found("sampling mask", "sampling_mask_wrong", message, sizes=sizes)
        expected.append(answer.logprobs[position] - np.log(np.exp(likely).sum()))
    worst = float(np.abs(np.array(logprobs, dtype=np.float64) - expected).max())  # None becomes NaN
    kept = f"top-p {MASK_TOP_P:g} and top-k {MASK_TOP_K} kept {min(sizes)} to {max(sizes)} ids"
    message = f"{kept}; renormalised on them to {worst:.1e}"
    if not worst <= MASK_TOLERANCE:
        return found("sampling mask", "sampling_mask_wrong", message, sizes=sizes, worst=worst)
    return Row("sampling mask", "ok", message, {"sizes": sizes, "worst": worst})


def judge_seeds(seeded: Sequence[DetailedSample], repeated: DetailedSample) -> Row:
    """Do different seeds give different samples of one prompt?

    A server that draws all requests with the same noise gives one response, and all advantages of its group
    are 0. A confident model may give equal independent samples too; the response's probability
    distinguishes the two.

    Args:
        seeded: an answer for each of SEEDS, at temperature 1.
        repeated: an answer for the first seed once more.
    """
    responses = [tuple(answer.output) for answer in seeded]
    distinct, tokens = len(set(responses)), len(responses[0])
    equal = [
        first
        for first, second in itertools.combinations(range(len(responses)), 2)
        if responses[first] == responses[second]
    ]
    repeats = tuple(repeated.output) == responses[0]
    log_probability = min(
        (float(seeded[i].logprobs.sum()) for i in equal), default=float(seeded[0].logprobs.sum())
    )
    numbers = {
        "seeds": len(responses),
        "distinct": distinct,
        "repeats": repeats,
        "log_probability": log_probability,
    }
    message = f"{len(responses)} seeds gave {distinct} responses of {tokens} tokens"
    if equal and log_probability <= np.log(CHANCE):
        message += f", where the model gives two alike with probability e^{log_probability:.0f}"
        return found("seeds", "one_response", message, **numbers)
    if equal:
        message = (
            f"unknown: {message}, where the model gives two alike with probability "
            f"{np.exp(log_probability):.2g}"
        )
        return Row("seeds", "note", message, numbers)
    if not repeats:
        message = f"seeds are ignored: {message}, one seed twice gave two; samples cannot be drawn again"
        return Row("seeds", "note", message, numbers)
    return Row("seeds", "ok", f"{message}, one seed twice gave one", numbers)
