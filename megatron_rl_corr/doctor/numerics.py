"""How a server computes: judges precision, decode against prefill, repeated requests and cached prefixes.

R response tokens.
"""

import numpy as np

from megatron_rl_corr.doctor.distances import FLOAT32_MAX, distance
from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.doctor.probe import Answer, Scores

HALF_DTYPES = ("bfloat16", "float16", "half")
LEAD, LEAD_HALF = FLOAT32_MAX, 0.25
"""Measured in bfloat16: rounding moves a log-prob by up to 0.09, and so a lead by up to 0.18."""


def is_half(reported: str, step: float | None, float32_head: bool) -> bool:
    """Whether the server computes in 16 bits: what it reports, or what its log-probs show where that is `auto`.

    float32_head: it runs with --enable-fp32-lm-head, which hides the grid and is asked for only in 16 bits.
    """
    return reported in HALF_DTYPES or (reported == "auto" and (step is not None or float32_head))


def judge_precision(reported: str, step: float | None, expected: str | None) -> Row:
    """The dtype that the server reports, and the grid its log-probs lie on (`grid_step`).

    expected: the trainer's dtype, None where it is not known.
    """
    grid = "log-probs lie on no grid: float32 logits"
    if step is not None:
        grid = f"log-probs lie on a grid of 2^{int(np.log2(step))}: 16-bit logits"
    said, numbers = f"reports {reported}; {grid}", {"dtype": reported, "grid": step, "expected": expected}
    other = reported != "auto" and expected is not None and reported.replace("half", "float16") != expected
    if other or (expected == "float32" and step is not None):
        return found("precision", "dtype_differs", f"{said}; the trainer computes in {expected}", **numbers)
    return Row("precision", "ok", said, numbers)


def judge_decode(answer: Answer, scores: Scores, half: bool) -> Row:
    """Log-probs of sampled tokens, against a prefill of the same tokens without cache."""
    far = distance(answer.logprobs, scores.logprobs)
    if not far.is_rounding(half):
        return found("decode and prefill", "decode_prefill_difference", str(far), **far.numbers())
    return Row("decode and prefill", "ok", str(far), far.numbers())


def judge_repeats(first: Answer, second: Answer, half: bool) -> Row:
    """The same greedy request twice, once among others and once alone; after the first id that differs nothing counts.

    Rounding may change an id where the two likeliest are closer than LEAD (LEAD_HALF in 16 bits).
    """
    differs = np.flatnonzero(np.array(first.output) != np.array(second.output))
    same, numbers, said = len(first.output), {}, "greedy twice: "
    lead_is_rounding = True
    if differs.size:
        same = int(differs[0])
        lead = float(first.top[same, 0] - first.top[same, 1])
        numbers["lead"], lead_is_rounding = lead, lead <= (LEAD_HALF if half else LEAD)
        said += f"token {same} differs, where the likeliest id led by {lead:.1e}; "
    numbers["same_ids"] = same
    far = distance(second.logprobs[:same], first.logprobs[:same]) if same else None
    if far is not None:
        numbers |= far.numbers()
        said += "bit-equal" if far.max == 0 else str(far)
    if not lead_is_rounding or (far is not None and not far.is_rounding(half)):
        return found("repeats", "not_deterministic", said, **numbers)
    equal = not differs.size and far.max == 0
    return Row("repeats", "ok" if equal else "note", said.rstrip("; "), numbers)


def judge_cache(cached: Scores, fresh: Scores, half: bool) -> Row:
    """Scores on a prompt's cached keys and values, against scores without cache: equal, or the cache is stale."""
    if cached.cached_tokens == 0:
        return Row("prefix cache", "note", "nothing of the probe prompt was cached; ask again after a weight update")
    far = distance(cached.logprobs, fresh.logprobs)
    said = f"{cached.cached_tokens} cached tokens against none: {far}"
    if not far.is_rounding(half):
        return found("prefix cache", "stale_prefix_cache", said, **far.numbers())
    return Row("prefix cache", "ok", said, far.numbers())
