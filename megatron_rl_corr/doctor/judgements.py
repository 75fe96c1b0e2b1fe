"""Decides what a server's answers show: one function for each question, from numbers to a row of the result.

R response tokens, K likeliest ids of a token.
"""

import numpy as np

from megatron_rl_corr.doctor.distances import FLOAT32_MAX, distance
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.engines.inspection import (
    DetailedSample,
    ServedModel,
    TokenScores,
    UpdateSupport,
    VersionSupport,
)
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.weight_sync.quantization import described

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
        return found(
            "version", "version_unsupported", f"{engine} {version} has no {support.lacks}", **numbers
        )
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
        "model_path": model.path,
        "served_model_name": model.served_name,
        "model_type": model.type,
        "weight_version": model.weight_version,
        "vocab_size": vocab_size,
    }
    kind = f" ({model.type})" if model.type else ""
    message = f"{model.path}{kind}, vocabulary {vocab_size}"
    if model.served_name not in (None, model.path):
        message += f", served as {model.served_name}"
    return Row("model", "ok", f"{message}, weights {model.weight_version!r}", numbers)


def judge_updates(support: UpdateSupport | str, quantization: BlockFP8 | str | None = None) -> Row:
    """Which ways to update weights are there, and are weights in a form that a push can send?

    Args:
        support: what the server has; a text: why it does not list its endpoints.
        quantization: how the server has its weights, as far as that is known; a text: why no push
            can send them so.
    """
    if isinstance(quantization, str):
        return found("weight updates", "quantisation_unsupported", quantization)
    if isinstance(support, str):
        return Row("weight updates", "note", f"the server does not list its endpoints: {support}")
    transports = list(support.transports)
    numbers = {"transports": transports, "session": support.session}
    if "distributed" not in transports:
        message = (
            f"no distributed update, which a push of ours needs; there is {', '.join(transports) or 'none'}"
        )
        message += f" ({support.remark})" if support.remark else ""
        return found("weight updates", "no_weight_updates", message, **numbers)
    session = "in a session" if support.session else "without a session"
    remark = f" ({support.remark})" if support.remark else ""
    form = "" if quantization is None else f"; weights {described(quantization)}, and so are pushes"
    return Row("weight updates", "ok", f"{', '.join(transports)}, {session}{remark}{form}", numbers)


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
        return found(
            "precision", "dtype_differs", f"{message}; the trainer computes in {expected}", **numbers
        )
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
    """Does a greedy request, sent among others and alone, give the same log-probs up to the first
    id that differs?

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


def judge_cache(cached: DetailedSample, fresh: TokenScores, half: bool) -> Row:
    """Are log-probs on a prompt's cached keys and values those without cache? If not, the cache is stale."""
    if cached.cached_tokens == 0:
        return Row(
            "prefix cache", "note", "no token of the probe prompt was cached; ask again after a weight update"
        )
    far = distance(cached.logprobs, fresh.logprobs)
    count = "a number of" if cached.cached_tokens is None else cached.cached_tokens
    message = f"{count} cached tokens against none: {far}"
    if not far.is_rounding(half):
        return found("prefix cache", "stale_prefix_cache", message, **far.numbers())
    if cached.cached_tokens is None:
        message = f"the server does not tell how many tokens were cached; {far}"
        return Row("prefix cache", "note", message, far.numbers())
    return Row("prefix cache", "ok", message, far.numbers())
