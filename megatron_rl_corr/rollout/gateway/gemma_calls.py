"""Tool calls as Gemma 4 writes them: its own form of values."""

from __future__ import annotations

import re
from typing import Any

from megatron_rl_corr.rollout.gateway.calls import (
    SPACE,
    MalformedCall,
    SampledCall,
    Tools,
    dumps,
    finite_json,
)

GEMMA_CALL, _QUOTE = "<|tool_call>call:", '<|"|>'
_BARE, _BARE_KEY = re.compile(r"[^,{}\[\]<]*"), re.compile(r"[^:,{}\[\]<]+")


def read_gemma4(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>: Gemma 4.

    A bare word is text, as in SGLang, but null is null.
    """
    calls, at = [], 0
    while (at := text.find(GEMMA_CALL, at)) >= 0:
        begin = at + len(GEMMA_CALL)
        brace = text.find("{", begin)
        name = text[begin:brace].strip()
        if brace < 0 or not re.fullmatch(r"[\w.\-]+", name):
            raise MalformedCall("a call has no name")
        arguments, at = _value(text, brace)
        if not text.startswith("<tool_call|>", at):
            raise MalformedCall("a call has no end")
        calls.append(SampledCall(name, dumps(arguments)))
    return text.partition(GEMMA_CALL)[0], calls


def _value(text: str, at: int) -> tuple[Any, int]:
    """(the value that begins there, where it ends)."""
    at = SPACE.match(text, at).end()
    if text.startswith(_QUOTE, at):
        return _quoted(text, at)
    if text.startswith(("{", "["), at):
        return _items(text, at)
    found = _BARE.match(text, at)
    word = found[0].strip()
    if not word:
        raise MalformedCall("a value is missing")
    try:
        value = finite_json(word)
    except ValueError:
        value = word
    return (word if isinstance(value, str) else value), found.end()


def _quoted(text: str, at: int) -> tuple[str, int]:
    begin = at + len(_QUOTE)
    end = text.find(_QUOTE, begin)
    if end < 0:
        raise MalformedCall("a text has no end")
    return text[begin:end], end + len(_QUOTE)


def _items(text: str, at: int) -> tuple[Any, int]:
    is_object = text[at] == "{"
    made: Any = {} if is_object else []
    at = SPACE.match(text, at + 1).end()
    while not text.startswith("}" if is_object else "]", at):
        if made:
            if not text.startswith(",", at):
                raise MalformedCall("no comma between values")
            at = SPACE.match(text, at + 1).end()
        if is_object:
            key, at = _key(text, at)
            made[key], at = _value(text, at)
        else:
            value, at = _value(text, at)
            made.append(value)
        at = SPACE.match(text, at).end()
    return made, at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, at):
        key, at = _quoted(text, at)
    elif found := _BARE_KEY.match(text, at):
        key, at = found[0].strip(), found.end()
    else:
        raise MalformedCall("a key is missing")
    if not text.startswith(":", at):
        raise MalformedCall("no colon behind a key")
    return key, at + 1
