"""Decides what a server's answers show: one function for each question, from numbers to a row of the result.

R response tokens, K likeliest ids of a token.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_rl_corr.doctor.distances import FLOAT32_MAX, distance, slope
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.engines.inspection import (
    DetailedSample,
    ServedModel,
    TokenScores,
    UpdateSupport,
    VersionSupport,
)
from megatron_rl_corr.engines.routes import ExpertShape

HOT = 2.0
COLD = 1e-3
TOP_P = 0.5
MASK_TOP_P, MASK_TOP_K = 0.9, 8
SLOPE_TOLERANCE = 0.05
"""Measured error of the slope on the tiny model: 1e-6 in float32, 1e-2 in bfloat16."""
LEAST_EVIDENCE = 1e-2
"""Sum of squares below which a slope is not trusted: nearly all samples were the likeliest ids."""
COLD_GAP = 0.1
"""Nats at temperature 1 by which a sample at COLD may be less likely than the likeliest id: a chance of e^-100."""
MASK_TOLERANCE = 1e-3
"""Measured error: 4e-7, in 16 bits too, because both sides come from the same logits."""
FILTERED_SHIFT = 0.1
"""Smallest median rise of log-probs that shows renormalisation on the top-p set; keeping half gives ln 2 = 0.69."""
SEEDS = (1, 2**32 + 1, 2**62 + 1)
"""Their low 32 bits are equal, so a server that truncates seeds to 32 bits is found too."""
CHANCE = 1e-6
"""A response with at most this probability is not drawn twice by chance."""
HALF_DTYPES = ("bfloat16", "float16", "half")
LEAD, LEAD_HALF = FLOAT32_MAX, 0.25
"""Measured in bfloat16: rounding changes a log-prob by up to 0.09, so a lead by up to 0.18."""


def judge_version(engine: str, support: VersionSupport) -> Row:
    """Can weights be updated in flight, and does the server report the weight version of each token?

    Args:
        engine: its name, for instance "SGLang".
        support: what the server's version can do.
    """
    version, numbers = support.version, {"version": support.version}
    if support.lacks:
        return found("version", "version_unsupported", f"{engine} {version} has no {support.lacks}", **numbers)
    if support.note:
        return Row("version", "note", support.note, numbers)
    return Row("version", "ok", f"{engine} {version}, in {support.tested}", numbers)


def judge_model(model: ServedModel, vocab_size: int) -> Row:
    """Which model is served? A server's own sampling defaults do no harm: requests set every parameter.

    Args:
        model: as the server names it.
        vocab_size: of the model.
    """
    numbers = {
        "model_path": model.path, "served_model_name": model.served_name, "model_type": model.type,
        "weight_version": model.weight_version, "vocab_size": vocab_size,
    }  # fmt: skip
    message = f"{model.path} ({model.type}), vocabulary {vocab_size}"
    if model.served_name not in (None, model.path):
        message += f", served as {model.served_name}"
    return Row("model", "ok", f"{message}, weights {model.weight_version!r}", numbers)


def judge_updates(support: UpdateSupport | str) -> Row:
    """Which ways to update weights are there?

    Args:
        support: what the server has; a text: why it does not list its endpoints.
    """
    if isinstance(support, str):
        return Row("weight updates", "note", f"the server does not list its endpoints: {support}")
    transports = list(support.transports)
    numbers = {"transports": transports, "session": support.session}
    if "distributed" not in transports:
        message = f"no distributed update, which a push of ours needs; there is {', '.join(transports) or 'none'}"
        message += f" ({support.remark})" if support.remark else ""
        return found("weight updates", "no_weight_updates", message, **numbers)
    session = "in a session" if support.session else "without a session"
    remark = f" ({support.remark})" if support.remark else ""
    return Row("weight updates", "ok", f"{', '.join(transports)}, {session}{remark}", numbers)


def judge_routes(answer: DetailedSample, shape: ExpertShape | None, expected: bool) -> Row:
    """Are routed experts returned, in the model's shape?

    Args:
        answer: sampled with routed experts, which were checked by `shape`.
        shape: the model's; None: unknown, so that only the number of ids was checked.
        expected: the run needs them.
    """
    ids, tokens = answer.routed_ids, len(answer.prompt) + len(answer.output)
    if ids is None:
        if expected:
            return found("routed experts", "routed_experts_missing", "requested and not returned")
        return Row("routed experts", "note", "not returned; needed only to replay the routing")
    if isinstance(ids, str):
        return found("routed experts", "routed_experts_wrong", ids, tokens=tokens)
    message = f"{ids // (tokens - 1)} ids for each of {tokens - 1} tokens"
    if shape is not None:
        message += f", as the model has {shape.num_layers} layers of {shape.top_k} of {shape.experts} experts"
    return Row("routed experts", "ok", message, {"ids": ids, "tokens": tokens})


def judge_temperature(hot: DetailedSample, hot_scores: TokenScores, cold: DetailedSample, matters: bool) -> Row:
    """Do samples and log-probs follow the requested temperature?

    Log-probs: the differences between the sampled and the likeliest id are 1 / HOT of those at temperature 1 if they
    are scaled, and equal to them if not. Samples: at COLD each is the likeliest id, or at most COLD_GAP less likely, by
    the answer's own log-probs; a prefill may route a token through other experts in 16 bits.

    Args:
        hot: sampled at temperature HOT.
        hot_scores: of the same tokens, at temperature 1.
        cold: sampled at temperature COLD.
        matters: False if the run samples at temperature 1, for which unscaled log-probs are right.
    """
    found_slope, evidence = slope(hot.logprobs, hot.top[:, 0], hot_scores.logprobs, hot_scores.top[:, 0])
    scaled = abs(found_slope - 1 / HOT) <= SLOPE_TOLERANCE
    gap = float((cold.top[:, 0] - cold.logprobs).max()) * (COLD if scaled else 1)
    follows = gap <= COLD_GAP
    numbers = {"slope": found_slope, "evidence": evidence, "follows": follows, "gap": gap}
    if evidence < LEAST_EVIDENCE:
        return Row("temperature", "note", "unknown: the model always samples the likeliest id", numbers)
    likeliest = f"at {COLD:g} samples are{'' if follows else ' not'} the likeliest ids"
    message = f"at {HOT:g} log-prob differences are {found_slope:.3f} of those at 1; {likeliest}"
    if not follows:
        return found("temperature", "temperature_ignored", message, **numbers)
    if scaled:
        return Row("temperature", "ok", f"log-probs are of the temperature-scaled softmax: {message}", numbers)
    if abs(found_slope - 1) > SLOPE_TOLERANCE:
        return found("temperature", "logprobs_of_another_temperature", message, **numbers)
    if matters:
        return found("temperature", "logprobs_without_temperature", message, **numbers)
    return Row("temperature", "note", f"log-probs are of temperature 1, as the run samples: {message}", numbers)


def judge_top_p(answer: DetailedSample, scores: TokenScores, half: bool) -> Row:
    """Are log-probs of the whole vocabulary with top-p too? answer: sampled at TOP_P; scores: of its tokens."""
    far = distance(answer.logprobs, scores.logprobs)
    shift = float(np.median(answer.logprobs - scores.logprobs))
    numbers = far.numbers() | {"shift": shift}
    if not far.is_rounding(half) and shift > FILTERED_SHIFT:
        message = f"with top-p {TOP_P:g} log-probs are {shift:.2f} nats above those of the whole vocabulary"
        return found("top-p", "logprobs_of_another_set", message, **numbers)
    return Row("top-p", "ok", f"log-probs are of the whole vocabulary also with top-p {TOP_P:g}: {far}", numbers)


def judge_mask(answer: DetailedSample | str, needed: bool) -> Row:
    """Does the server return the ids that top-p and top-k kept, and log-probs renormalised on them?

    The renormalised log-prob of a token must be its log-prob minus the log of the kept ids' total probability.

    Args:
        answer: sampled with MASK_TOP_P, MASK_TOP_K and the sampling mask, with enough likeliest ids to contain the
            kept ones; or why the server refused the request.
        needed: the run uses top-p or top-k.
    """
    kept = answer if isinstance(answer, str) else answer.kept
    if isinstance(kept, str):
        if needed:
            return found("sampling mask", "sampling_mask_missing", kept)
        return Row("sampling mask", "note", f"needed only with --rollout-top-p or --rollout-top-k: {kept}")
    masks, logprobs = kept.ids, kept.logprobs
    if not len(masks) == len(logprobs) == len(answer.output) or not all(masks):
        message = f"{len(answer.output)} tokens have {len(masks)} masks and {len(logprobs)} log-probs, or an empty mask"
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

    A server that draws all requests with the same noise gives one response, and all advantages of its group are 0. A
    confident model may give equal independent samples too; the response's probability distinguishes the two.

    Args:
        seeded: an answer for each of SEEDS, at temperature 1.
        repeated: an answer for the first seed once more.
    """
    responses = [tuple(answer.output) for answer in seeded]
    distinct, tokens = len(set(responses)), len(responses[0])
    equal = [first for first, second in itertools.combinations(range(len(responses)), 2)
             if responses[first] == responses[second]]  # fmt: skip
    repeats = tuple(repeated.output) == responses[0]
    log_probability = min((float(seeded[i].logprobs.sum()) for i in equal), default=float(seeded[0].logprobs.sum()))
    numbers = {"seeds": len(responses), "distinct": distinct, "repeats": repeats, "log_probability": log_probability}
    message = f"{len(responses)} seeds gave {distinct} responses of {tokens} tokens"
    if equal and log_probability <= np.log(CHANCE):
        message += f", where the model gives two alike with probability e^{log_probability:.0f}"
        return found("seeds", "one_response", message, **numbers)
    if equal:
        message = f"unknown: {message}, where the model gives two alike with probability {np.exp(log_probability):.2g}"
        return Row("seeds", "note", message, numbers)
    if not repeats:
        message = f"seeds are ignored: {message}, one seed twice gave two; samples cannot be drawn again"
        return Row("seeds", "note", message, numbers)
    return Row("seeds", "ok", f"{message}, one seed twice gave one", numbers)


def is_half(reported: str, step: float | None, float32_head: bool) -> bool:
    """True if the server computes in 16 bits: by its dtype, or for `auto` by its log-probs.

    Args:
        reported: its dtype.
        step: from `grid_step`.
        float32_head: it runs with --enable-fp32-lm-head, which hides the grid and is used only in 16 bits.
    """
    return reported in HALF_DTYPES or (reported == "auto" and (step is not None or float32_head))


def judge_precision(reported: str, step: float | None, expected: str | None) -> Row:
    """Does the server compute in the trainer's dtype? step: from `grid_step`; expected: None if not known."""
    grid = "log-probs lie on no grid: float32 logits"
    if step is not None:
        grid = f"log-probs lie on a grid of 2^{int(np.log2(step))}: 16-bit logits"
    message, numbers = f"reports {reported}; {grid}", {"dtype": reported, "grid": step, "expected": expected}
    other = reported != "auto" and expected is not None and reported.replace("half", "float16") != expected
    if other or (expected == "float32" and step is not None):
        return found("precision", "dtype_differs", f"{message}; the trainer computes in {expected}", **numbers)
    return Row("precision", "ok", message, numbers)


def judge_decode(answer: DetailedSample, scores: TokenScores, half: bool) -> Row:
    """Are the log-probs of sampled tokens those of a prefill of the same tokens without cache?"""
    far = distance(answer.logprobs, scores.logprobs)
    if not far.is_rounding(half):
        return found("decode and prefill", "decode_prefill_difference", str(far), **far.numbers())
    return Row("decode and prefill", "ok", str(far), far.numbers())


def judge_same(first_url: str, first: TokenScores, own: TokenScores, half: bool) -> Row:
    """Does a server score tokens as the first server does? half: one of the two computes in 16 bits."""
    far = distance(first.logprobs, own.logprobs)
    message = f"the same tokens as {first_url}: {far}"
    if not far.is_rounding(half):
        return found("servers", "servers_differ", message, **far.numbers())
    return Row("servers", "ok", message, far.numbers())


def judge_repeats(first: DetailedSample, second: DetailedSample, half: bool) -> Row:
    """Does a greedy request, sent among others and alone, give the same log-probs up to the first id that differs?

    Rounding may change an id where the two likeliest are closer than LEAD (LEAD_HALF in 16 bits).
    """
    differs = np.flatnonzero(np.array(first.output) != np.array(second.output))
    same, numbers, message = len(first.output), {}, "greedy twice: "
    lead_is_rounding = True
    if differs.size:
        same = int(differs[0])
        lead = float(first.top[same, 0] - first.top[same, 1])
        numbers["lead"], lead_is_rounding = lead, lead <= (LEAD_HALF if half else LEAD)
        message += f"token {same} differs, where the likeliest id led by {lead:.1e}; "
    numbers["same_ids"] = same
    far = distance(second.logprobs[:same], first.logprobs[:same]) if same else None
    if far is not None:
        numbers |= far.numbers()
        message += "bit-equal" if far.max == 0 else str(far)
    if not lead_is_rounding or (far is not None and not far.is_rounding(half)):
        return found("repeats", "not_deterministic", message, **numbers)
    equal = not differs.size and far.max == 0
    return Row("repeats", "ok" if equal else "note", message.rstrip("; "), numbers)


def judge_cache(cached: TokenScores, fresh: TokenScores, half: bool) -> Row:
    """Are scores with a prompt's cached keys and values those without cache? If not, the cache is stale."""
    if cached.cached_tokens == 0:
        return Row("prefix cache", "note", "no token of the probe prompt was cached; ask again after a weight update")
    far = distance(cached.logprobs, fresh.logprobs)
    message = f"{cached.cached_tokens} cached tokens against none: {far}"
    if not far.is_rounding(half):
        return found("prefix cache", "stale_prefix_cache", message, **far.numbers())
    return Row("prefix cache", "ok", message, far.numbers())
