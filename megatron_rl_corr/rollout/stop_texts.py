"""Ends a response where its text first holds a stop text, also where the server went on.

A server compares the text of the last few tokens that it sampled itself. So SGLang 0.5.23 misses a stop text
that was sampled in more tokens than the tokenizer would have made of it, plus one, and one that began before
the response was cut short and continued. The tokens after it are no part of the response.

R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_rl_corr.engines.trajectory import Support, Trajectory, VersionSpan

Decode = Callable[[Sequence[int]], str]
"""decode(ids) -> their text, special tokens included."""


def tokens_through_stop(ids: Sequence[int], stop: Sequence[str], decode: Decode) -> int | None:
    """How many tokens there are up to the one that completes a stop text; None: no stop text in the whole.

    Example: 3 for the tokens "a", "<", "/b", ">" and the stop text "</".

    Args:
        ids: R ids.
        stop: the stop texts.
        decode: ids to text.
    """

    def found(count: int) -> bool:
        text = decode(ids[:count])
        return any(one in text for one in stop)

    without, through = 0, len(ids)
    if not found(through):
        return None
    middle = through - 1  # where the server has noticed it
    while without < through - 1:
        without, through = (without, middle) if found(middle) else (middle, through)
        middle = (without + through) // 2
    return through


def cut_at_stop(sample: Trajectory, stop: Sequence[str], decode: Decode) -> Trajectory:
    """The sample up to the token that completes a stop text, with finish_reason stop; the sample
    where there is none.

    Every token that stays keeps its log-prob, weight version, sampling mask and routes.

    Args:
        sample: of one turn.
        stop: the stop texts.
        decode: ids to text.
    """
    count = tokens_through_stop(sample.output_ids.tolist(), stop, decode)
    if count is None:
        return sample
    if count == sample.output_ids.numel():
        return replace(sample, finish_reason="stop")
    support, routes, keys = sample.support, sample.routed_experts, sample.indexer_keys
    if support is not None:
        lengths = support.lengths[:count]
        support = Support(support.ids[: int(lengths.sum())], lengths)
    top = sample.top_logprobs
    if routes is not None:
        routes = routes[: sample.prompt_ids.numel() + count - 1 - sample.routes_from]
    spans = [
        VersionSpan(span.version, span.start, min(span.end, count))
        for span in sample.weight_versions
        if span.start < count
    ]
    return replace(
        sample,
        output_ids=sample.output_ids[:count],
        rollout_logprobs=sample.rollout_logprobs[:count],
        finish_reason="stop",
        weight_versions=tuple(spans),
        support=support,
        top_logprobs=None if top is None else top[:count],
        routed_experts=routes,
        indexer_keys=None if keys is None else keys[: sample.prompt_ids.numel() + count - 1],
    )


def check_decode(stop: Sequence[str], decode: Decode | None) -> None:
    """ValueError for stop texts without what turns ids into text."""
    if stop and decode is None:
        raise ValueError(
            f"`stop` {list(stop)} needs a tokenizer: put the model's tokenizer into the folder of "
            "`hf_checkpoint`, or give RolloutClient decode=, or use `stop_token_ids`"
        )


def check_stop_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for `stop_token_ids` outside the vocabulary."""
    outside = [token for token in ids if token >= vocab_size]
    if outside:
        raise ValueError(
            f"`stop_token_ids` has {outside[0]}, outside [0, {vocab_size}), the model's vocabulary; drop it"
        )
