"""What the sampled tokens and their log-probs are of: judges temperature, top-p, the sampling mask and seeds.

R response tokens, K likeliest ids of a token.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_rl_corr.doctor.distances import distance, slope
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.doctor.probe import Answer, Scores

HOT = 2.0
COLD = 1e-3
TOP_P = 0.5
MASK_TOP_P, MASK_TOP_K = 0.9, 8
SLOPE_TOLERANCE = 0.05
"""Measured on the tiny model: right to 1e-6 in float32, to 1e-2 in bfloat16."""
LEAST_EVIDENCE = 1e-2
"""Sum of squares below which a slope says nothing: all samples were (nearly) the likeliest ids."""
COLD_GAP = 0.1
"""Nats, at temperature 1, below the likeliest id that a sample at COLD may lie: a chance of e^-100."""
MASK_TOLERANCE = 1e-3
"""Measured: 4e-7, in 16 bits too, for both sides come from the same logits."""
FILTERED_SHIFT = 0.1
"""Least median rise of log-probs that renormalising on the top-p set explains; keeping half gives ln 2 = 0.69."""
SEEDS = (1, 2**32 + 1, 2**62 + 1)
"""The low half is the same, so a server that cuts a seed to 32 bits is found too."""
CHANCE = 1e-6
"""A response of at most this probability is not drawn twice by chance."""


def judge_temperature(hot: Answer, hot_scores: Scores, cold: Answer, matters: bool) -> Row:
    """Whether samples and log-probs are of the temperature that was asked for.

    hot was sampled at HOT, cold at COLD. Log-probs: the slope of the differences between the sampled and the
    likeliest id on the same differences at temperature 1 is 1 / HOT where they are scaled, 1 where they are not.
    Samples: at COLD every one is the likeliest id, or one that lies at most COLD_GAP below it. The answer itself
    says so; a prefill of it may, in 16 bits, route a token through other experts and find another id likeliest.
    matters: False where the run samples at temperature 1, so that unscaled log-probs are right for it.
    """
    found_slope, evidence = slope(hot.logprobs, hot.top[:, 0], hot_scores.logprobs, hot_scores.top[:, 0])
    scaled = abs(found_slope - 1 / HOT) <= SLOPE_TOLERANCE
    gap = float((cold.top[:, 0] - cold.logprobs).max()) * (COLD if scaled else 1)
    follows = gap <= COLD_GAP
    numbers = {"slope": found_slope, "evidence": evidence, "follows": follows, "gap": gap}
    if evidence < LEAST_EVIDENCE:
        return Row("temperature", "note", "cannot be told: the model always samples the likeliest id", numbers)
    likeliest = f"at {COLD:g} samples are{'' if follows else ' not'} the likeliest ids"
    said = f"at {HOT:g} log-prob differences are {found_slope:.3f} of those at 1; {likeliest}"
    if not follows:
        return found("temperature", "temperature_ignored", said, **numbers)
    if scaled:
        return Row("temperature", "ok", f"log-probs are of the temperature-scaled softmax: {said}", numbers)
    if abs(found_slope - 1) > SLOPE_TOLERANCE:
        return found("temperature", "logprobs_of_another_temperature", said, **numbers)
    if matters:
        return found("temperature", "logprobs_without_temperature", said, **numbers)
    return Row("temperature", "note", f"log-probs are of temperature 1, as the run samples: {said}", numbers)


def judge_top_p(answer: Answer, scores: Scores, half: bool) -> Row:
    """Whether top-p leaves the log-probs alone: sampled at temperature 1 and TOP_P, compared with a prefill."""
    far = distance(answer.logprobs, scores.logprobs)
    shift = float(np.median(answer.logprobs - scores.logprobs))
    numbers = far.numbers() | {"shift": shift}
    if not far.is_rounding(half) and shift > FILTERED_SHIFT:
        said = f"with top-p {TOP_P:g} log-probs are {shift:.2f} nats above those of the whole vocabulary"
        return found("top-p", "logprobs_filtered", said, **numbers)
    return Row("top-p", "ok", f"log-probs are of the whole vocabulary also with top-p {TOP_P:g}: {far}", numbers)


def judge_mask(answer: Answer | str, needed: bool) -> Row:
    """Whether the ids that top-p and top-k kept come back, and log-probs renormalised on them.

    answer: sampled at temperature 1 with MASK_TOP_P, MASK_TOP_K and return_sampling_mask, with enough likeliest
    ids to find the kept ones among them; or why the server refused. The renormalised log-prob of a token must be
    its log-prob less the logarithm of the kept ids' sum of probabilities.
    """
    masks = None if isinstance(answer, str) else answer.meta.get("output_token_sampling_mask")
    logprobs = None if isinstance(answer, str) else answer.meta.get("output_token_sampling_logprobs")
    if masks is None or logprobs is None:
        said = answer if isinstance(answer, str) else "the answer holds no output_token_sampling_mask"
        if needed:
            return found("sampling mask", "sampling_mask_missing", said)
        return Row("sampling mask", "note", f"needed only with --rollout-top-p or --rollout-top-k: {said}")
    if not len(masks) == len(logprobs) == len(answer.output) or not all(masks):
        said = f"{len(answer.output)} tokens have {len(masks)} masks and {len(logprobs)} log-probs, or an empty mask"
        return found("sampling mask", "sampling_mask_wrong", said)
    expected, sizes = [], [len(mask) for mask in masks]
    for position, mask in enumerate(masks):
        likely = answer.top[position][np.isin(answer.top_ids[position], mask)]
        if likely.size != len(mask) or answer.output[position] not in mask:
            said = f"token {position}: {likely.size} of its {len(mask)} kept ids are among the likeliest"
            return found("sampling mask", "sampling_mask_wrong", said, sizes=sizes)
        expected.append(answer.logprobs[position] - np.log(np.exp(likely).sum()))
    worst = float(np.abs(np.array(logprobs, dtype=np.float64) - expected).max())  # None becomes NaN
    kept = f"top-p {MASK_TOP_P:g} and top-k {MASK_TOP_K} kept {min(sizes)} to {max(sizes)} ids"
    said = f"{kept}; renormalised on them to {worst:.1e}"
    if not worst <= MASK_TOLERANCE:
        return found("sampling mask", "sampling_mask_wrong", said, sizes=sizes, worst=worst)
    return Row("sampling mask", "ok", said, {"sizes": sizes, "worst": worst})


def judge_seeds(seeded: Sequence[Answer], repeated: Answer) -> Row:
    """Whether samples of one prompt are different samples: all were asked at temperature 1.

    seeded: one for each of SEEDS; repeated: with the first seed once more. A server that draws all requests with the
    same noise gives one response, and a group of such samples has no advantage that is not 0. A model may be so sure
    of its response that independent samples are equal too: what the server says of the response's probability tells
    these apart.
    """
    responses = [tuple(answer.output) for answer in seeded]
    distinct, tokens = len(set(responses)), len(responses[0])
    equal = [first for first, second in itertools.combinations(range(len(responses)), 2)
             if responses[first] == responses[second]]  # fmt: skip
    repeats = tuple(repeated.output) == responses[0]
    log_probability = min((float(seeded[i].logprobs.sum()) for i in equal), default=float(seeded[0].logprobs.sum()))
    numbers = {"seeds": len(responses), "distinct": distinct, "repeats": repeats, "log_probability": log_probability}
    said = f"{len(responses)} seeds gave {distinct} responses of {tokens} tokens"
    if equal and log_probability <= np.log(CHANCE):
        said += f", where the model gives two alike with probability e^{log_probability:.0f}"
        return found("seeds", "one_response", said, **numbers)
    if equal:
        said = f"cannot be told: {said}, where the model gives two alike with probability {np.exp(log_probability):.2g}"
        return Row("seeds", "note", said, numbers)
    if not repeats:
        said = f"seeds are ignored: {said}, one seed twice gave two; samples cannot be drawn again"
        return Row("seeds", "note", said, numbers)
    return Row("seeds", "ok", f"{said}, one seed twice gave one", numbers)
