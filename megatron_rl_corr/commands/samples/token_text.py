"""The text of each token: ids -> spans of text, also where a character is made by several tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl_corr.data.tokenizer import Tokenizer

INVALID = "\ufffd"
"""What a tokenizer writes for bytes that are no character."""


@dataclass(frozen=True)
class TextSpan:
    """The text that tokens [first, last) make together. Example: two tokens that are half
    a character each.
    """

    text: str
    first: int
    last: int


def text_spans(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[TextSpan]:
    """The ids' text in spans that cover every id once, most of them of one id.

    A span ends as soon as its bytes are whole characters. Ids whose bytes never become one are shown as ⟨id⟩.

    Args:
        tokenizer: of the model; None: the ids themselves are the text.
        ids: of a prompt or a response.
    """
    if tokenizer is None:
        return [TextSpan(f"{token} ", place, place + 1) for place, token in enumerate(ids)]
    spans: list[TextSpan] = []
    before: Sequence[int] = []
    """The span before, which some tokenizers need to know whether a blank stands between two words."""
    first = 0
    for last in range(1, len(ids) + 1):
        text = _text_behind(tokenizer, before, ids[first:last])
        if _is_cut(text) and last < len(ids):
            continue  # the next id may complete the character
        if INVALID in text:  # it did not: the last id may still begin a character of its own
            spans += [_named(tokenizer, ids, place) for place in range(first, last - 1)]
            before, first = [], last - 1
            if _is_cut(tokenizer.decode_all(ids[first:last])) and last < len(ids):
                continue
        whole = TextSpan(text, first, last) if INVALID not in text else _named(tokenizer, ids, first)
        spans.append(whole)
        before, first = ids[first:last] if INVALID not in text else [], last
    return spans


def _is_cut(text: str) -> bool:
    """True if only the end of the text is no whole character."""
    return text.find(INVALID) == len(text) - 1 >= 0


def _text_behind(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that ids add behind those before them."""
    return tokenizer.decode_all([*before, *ids])[len(tokenizer.decode_all(before)) if before else 0 :]


def _named(tokenizer: Tokenizer, ids: Sequence[int], place: int) -> TextSpan:
    """The span of one id, which stands for its bytes that are no character."""
    text = re.sub(f"{INVALID}+", f"⟨{ids[place]}⟩", tokenizer.decode_all([ids[place]]))
    return TextSpan(text, place, place + 1)
