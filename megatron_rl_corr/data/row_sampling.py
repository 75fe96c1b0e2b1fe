"""What a row of the data may say about how its own prompt is sampled, under the key of `sampling_key`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KNOWN = ("max_new_tokens", "stop", "stop_token_ids")
_REFUSED = {
    "temperature": "the training log-probs of a batch are of one temperature",
    "top_p": "",
    "top_k": "",
    "min_p": "",
    "ignore_eos": "the end of a response is the policy's to learn",
    "seed": "seeds are made from --seed and the place of the prompt, so that the samples of a group differ",
}
_ONE_DISTRIBUTION = "the training samples every prompt from one distribution"


def row_settings(
    value: Any, *, key: str, vocab_size: int | None, max_new_tokens: int | None, with_tokenizer: bool
) -> dict[str, Any]:
    """The settings of a row, checked; {} for None. A setting that is None counts as left out, as
    Parquet writes it.

    Example: {"max_new_tokens": 64, "stop": ("</a>",)} for {"max_new_tokens": 64, "stop":
    "</a>", "seed": None}.

    Args:
        value: what the row has under the key.
        key: names it in messages.
        vocab_size: stop ids are below it.
        max_new_tokens: of the run, which a row may only lower.
        with_tokenizer: there is one, which stop texts need.

    Raises:
        ValueError: it is no object, or a setting is unknown, not a row's to set, or wrong.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f'"{key}" must be an object of settings, got {type(value).__name__}')
    given = {name: one for name, one in value.items() if one is not None}
    for name in given:
        if name in _REFUSED:
            raise ValueError(
                f'"{key}" can not set {name}: {_REFUSED[name] or _ONE_DISTRIBUTION}; leave it out'
            )
        if name not in KNOWN:
            raise ValueError(f'"{key}" has {name!r}, which is no setting; a row may have {", ".join(KNOWN)}')
    longest = given.get("max_new_tokens", 1)
    if type(longest) is not int or longest < 1 or (max_new_tokens is not None and longest > max_new_tokens):
        raise ValueError(
            f'"{key}" max_new_tokens must be a whole number from 1 to that of the run, {max_new_tokens}, got '
            f"{longest!r}"
        )
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f'"{key}" stop must be a text or a list of texts, none of them empty, got {stop!r}')
    if stop and not with_tokenizer:
        raise ValueError(
            f'"{key}" stop needs a tokenizer in --rollout-hf-checkpoint; put one there, or use stop_token_ids'
        )
    ids = given.get("stop_token_ids", ())
    most = float("inf") if vocab_size is None else vocab_size
    if not isinstance(ids, (list, tuple)) or not all(
        type(token) is int and 0 <= token < most for token in ids
    ):
        raise ValueError(f'"{key}" stop_token_ids must be a list of ids in [0, {most}), got {ids!r}')
    found = {"stop": tuple(stop), "stop_token_ids": tuple(ids)}
    checked = {name: one for name, one in found.items() if one}
    return checked | ({"max_new_tokens": longest} if "max_new_tokens" in given else {})
