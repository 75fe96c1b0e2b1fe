"""Reads the fields that all protocols have: taken, ignored, overridden by the run, or refused by name."""

from __future__ import annotations

import json
import math
import operator
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout.gateway.again import Again
from megatron_rl_corr.rollout.gateway.templates import digest
from megatron_rl_corr.rollout.gateway.types import Answer, ChatRequest, GatewayError, TextRequest

Body = Mapping[str, Any]
MOST_ANSWERS = 128
"""n at most, as OpenAI's servers have it."""
MOST_PIECES = 32
"""A streamed text has so many at most: all of it is there when the first is sent."""

_NUMBER = (int, float)
SAMPLING_FIELDS: dict[str, Any] = {
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": int,
    "min_p": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "logit_bias": dict,
    "seed": int,
}
"""Fields that decide what is sampled: the run's values are used."""
_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


class Exchange(Protocol):
    """One request of a protocol, and how its answers are written."""

    request: ChatRequest | TextRequest
    streams: bool

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]: ...

    def events(self, answers: Sequence[Answer]) -> Iterator[bytes]:
        """Server-sent events, the whole answer."""


@dataclass(eq=False)
class Memory:
    """What protocols keep of an episode, until it is closed."""

    sampling: SamplingParams
    """The run's."""
    variables: Collection[str] = ()
    """Names of those that the chat template uses."""
    chat: Again = field(default_factory=lambda: Again(operator.eq))
    """The messages of the last request of chat completions, and what was made of them."""
    responses: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = field(default_factory=dict)
    """id -> (body, all messages with the answer's), of the Responses API."""
    arguments: dict[tuple[str, str], str] = field(default_factory=dict)
    """(id of a tool call, its arguments as `anthropic` compares them) -> their text as it was answered, where
    a protocol has no text. Some models count their calls anew in each answer, so that an id comes again.
    """
    messages: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    """Those of `responses`, by digest."""

    def once(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, each as one that is equal was before: clients send all of them again each time."""
        return [self.messages.setdefault(digest(one), one) for one in messages]


def invalid(message: str, param: str | None, code: str = "invalid_value") -> GatewayError:
    return GatewayError(400, code, message, param=param)


def refused(name: str, why: str) -> GatewayError:
    """A field that is known, and can't be honoured."""
    return invalid(f"Unsupported parameter: '{name}' {why}", name, "unsupported_parameter")


def checked_type(value: Any, kinds: Any, name: str) -> Any:
    """The value; raises GatewayError where it has another type. A boolean is not a number."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted, found = _NAMES[kinds[-1]], _NAMES.get(type(value), "another")
        if len(kinds) > 1 and kinds != _NUMBER:
            wanted = " or ".join(_NAMES[kind] for kind in kinds)
        raise invalid(
            f"Invalid type for '{name}': expected {wanted}, but got {found} instead.", name, "invalid_type"
        )
    return value


def is_one_of(value: Any, options: Collection[str]) -> bool:
    """True if it is one of these words; a client may send a list or an object where a word belongs."""
    return isinstance(value, str) and value in options


def checked_fields(
    body: Body,
    kinds: Mapping[str, Any],
    *,
    required: Sequence[str],
    ignored: Collection[str],
    refuses: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The fields that are set, with the types of `kinds`; null is as good as left out.

    Args:
        body: of the request.
        kinds: field -> its types, beside SAMPLING_FIELDS.
        required: fields that must be set.
        ignored: fields that change nothing.
        refuses: of `kinds`, those that can't be honoured, and why.

    Raises:
        GatewayError: one is unknown, missing, refused or has another type.
    """
    kinds = SAMPLING_FIELDS | dict(kinds)
    unknown = [name for name in body if name not in kinds and name not in ignored]
    if unknown:
        raise invalid(
            f"Unrecognized request argument supplied: {', '.join(unknown)}", unknown[0], "unknown_parameter"
        )
    given = {name: value for name, value in body.items() if value is not None and name in kinds}
    for name in required:
        if name not in given:
            raise invalid(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    for name, value in given.items():
        if kinds[name] is not None:
            checked_type(value, kinds[name], name)
    for name, why in (refuses or {}).items():
        if name in given:
            raise refused(name, why)
    return given


def overridden_fields(given: Body, sampling: SamplingParams) -> tuple[str, ...]:
    """Fields of the request that ask for another policy than the run's."""
    run = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
    }
    off = {"top_k": (0, -1)}
    return tuple(
        name
        for name in SAMPLING_FIELDS
        if name in given
        and (name not in run or given[name] != run[name])
        and not (given[name] in off.get(name, ()) and run[name] in off.get(name, ()))
    )


def thinking_variables(
    memory: Memory, wanted: Mapping[str, tuple[str, Any]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(variables of the template, fields of a request that it has no variable for).

    Args:
        memory: of the episode.
        wanted: field -> the variable that it sets, and its value. False and "none" ask for no thoughts, which
            a template that has no such variable meets.
    """
    has = memory.variables
    made = {variable: value for variable, value in wanted.values() if variable in has}
    without = {"none"} if "enable_thinking" not in has else ()
    lacking = (
        name
        for name, (variable, value) in wanted.items()
        if variable not in has and value is not False and not is_one_of(value, without)
    )
    return made, tuple(lacking)


def positive(given: Body, name: str) -> int | None:
    """An integer of at least 1, or None."""
    value = given.get(name)
    if value is not None and value < 1:
        raise invalid(
            f"Invalid '{name}': integer below minimum value. Expected a value >= 1, but got {value} instead.",
            name,
            "integer_below_min_value",
        )
    return value


def answers_wanted(given: Body) -> int:
    count = positive(given, "n") or 1
    if count > MOST_ANSWERS:
        raise invalid(
            f"Invalid 'n': integer above maximum value. Expected a value <= {MOST_ANSWERS}, but got {count} "
            "instead.",
            "n",
            "integer_above_max_value",
        )
    return count


def stop_texts(given: Body, name: str = "stop") -> tuple[str, ...]:
    stop = given.get(name, ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    for index, text in enumerate(stop):
        checked_type(text, str, f"{name}[{index}]")
        if not text:
            place = f"{name}[{index}]"
            raise invalid(f"Invalid '{place}': a stop text must not be empty.", place)
    return stop


def joined_text(content: Any, name: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of a content: a text, or a list of parts that line breaks join, as in vLLM.

    Raises:
        GatewayError: a part is no text.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    texts = []
    for index, part in enumerate(checked_type(content, (str, list), name)):
        place = f"{name}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = checked_type(part, dict, place).get("type")
        if kind == "refusal" and "text" in kinds:
            texts.append(checked_type(part.get("refusal"), str, f"{place}.refusal"))
        elif kind in kinds:
            texts.append(checked_type(part.get("text"), str, f"{place}.text"))
        else:
            raise refused(f"{place}.type", f"is {kind!r}: the policy reads text alone.")
    return "\n".join(texts)


def one_function(function: Any, place: str) -> tuple[dict[str, Any], bool]:
    """(a function as the template gets it, whether its arguments were to be constrained) of a tool."""
    function = dict(checked_type(function, dict, place))
    strict = bool(function.pop("strict", None))
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"Missing required parameter: '{place}.name'.", f"{place}.name")
    return {name: value for name, value in function.items() if value is not None}, strict


def choice_of_tools(choice: str, *, forced: Collection[str]) -> tuple[bool, tuple[str, ...]]:
    """(whether calls are read from the answer, tool_choice where the run's own auto takes its place).

    Args:
        choice: auto, none, or one of another policy.
        forced: what asks for a call.

    Raises:
        GatewayError: it asks for something else.
    """
    if choice == "none":
        return False, ()
    if choice in forced:
        return True, ("tool_choice",)
    if choice != "auto":
        raise refused("tool_choice", f"is {choice!r}: the policy is offered all tools; use 'auto'.")
    return True, ()


def require_text(wanted: Any, name: str) -> None:
    """wanted: the form of the answer that is asked for; None: none is."""
    kind = "text" if wanted is None else checked_type(wanted, dict, name).get("type")
    if kind != "text":
        raise refused(name, f"is {kind!r}: constrained answers are of another policy; use 'text'.")


def require_parallel(given: Body, name: str = "parallel_tool_calls") -> None:
    if given.get(name) is False:
        raise refused(name, "is false: the policy decides how many calls an answer has; leave it out.")


def refuse_logits(given: Body) -> None:
    if given.get("top_logprobs"):
        raise refused(
            "top_logprobs", f"is {given['top_logprobs']}: only sampled tokens have log-probs; use 0."
        )


def now() -> int:
    return int(time.time())


def json_bytes(data: Any) -> bytes:
    """The JSON text of a body: what a policy has sampled may be larger or deeper than orjson writes.

    Raises:
        UnicodeEncodeError: a text has half of a character.
    """
    try:
        return orjson.dumps(data)
    except orjson.JSONEncodeError:
        return json.dumps(data, ensure_ascii=False).encode()


def event(data: Any, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json_bytes(data) + b"\n\n"


def token_logprobs(answer: Answer, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
    """Tokens as chat completions have them; a token that is part of a character has no bytes."""
    values = answer.logprobs[first:last].tolist()
    return [
        {
            "token": text,
            "logprob": value,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, value in zip(answer.token_texts[first:last], values, strict=True)
    ]


def cut(text: str) -> list[str]:
    """The text in MOST_PIECES pieces at most."""
    step = max(4, math.ceil(len(text) / MOST_PIECES))
    return [text[start : start + step] for start in range(0, len(text), step)]


def pieces(answer: Answer, by_token: bool) -> Iterator[tuple[str, int, int]]:
    """(text, its first token, the token behind its last) of the answer's text, all tokens among them.

    With by_token each piece is the text of its tokens. Where these don't make up the answer's text (calls or
    thoughts were taken out, or characters have several tokens), all tokens come with the first piece.
    """
    count, texts = answer.output_ids.numel(), answer.token_texts if by_token else []
    if not answer.text or not "".join(texts).startswith(answer.text):
        for index, text in enumerate(cut(answer.text) or [""]):
            yield text, 0 if index == 0 else count, count
        return
    step, at, left = math.ceil(count / MOST_PIECES), 0, answer.text
    while left:
        end = min(at + step, count)
        text = "".join(texts[at:end])[: len(left)]
        left = left[len(text) :]
        yield text, at, end if left else count
        at = end
