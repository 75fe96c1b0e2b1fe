"""Messages and tools of a row, checked and in the forms that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl_corr.data import json_text
from megatron_rl_corr.data.rows import MapObject

_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles by the names of other data formats: many templates would write these, and no model knows them."""
_MEDIA = ("image", "images", "image_url", "video", "videos", "video_url", "audio", "audios", "input_audio")
"""Keys of messages in other data formats, whose values are no text."""
_OF_CALL, _OF_FUNCTION = {"id", "type", "index"}, {"name", "arguments"}
"""Keys of a tool call and of its function; one without a function has both."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")


class Arguments(dict):
    """The arguments of a tool call."""

    text: str | None = None
    """Their JSON text as the row has it; None: the row has an object."""

    def as_text(self) -> str:
        """Their JSON text."""
        return json.dumps(self, ensure_ascii=False) if self.text is None else self.text


@dataclass(frozen=True)
class Form:
    """What templates differ in.

    Example: that of DeepSeek-V3 takes Form(arguments_as_text=True, empty_as_null=True).
    """

    arguments_as_text: bool = False
    """Arguments of tool calls are JSON text, not an object."""
    empty_as_null: bool = False
    """The content beside tool calls is null where there is none, not empty text."""


@dataclass(frozen=True)
class Chat:
    """The messages of a prompt. Example: Chat([{"role": "user", "content": "1+1"}], tools=None)."""

    messages: list[dict[str, Any]]
    """Contents are text; the arguments of tool calls are `Arguments`."""
    tools: list[dict[str, Any]] | None = None
    added: int = 0
    """Messages before the row's own."""

    def with_system(self, text: str) -> Chat:
        """With a system message, if it has none."""
        if any(message["role"] in ("system", "developer") for message in self.messages):
            return self
        return replace(self, messages=[{"role": "system", "content": text}, *self.messages], added=1)

    def forms(self) -> list[Form]:
        """Those that differ for these messages, the one that most templates take first."""
        called = [message for message in self.messages if message.get("tool_calls")]
        as_null = [False, True] if any(not one["content"].strip() for one in called) else [False]
        return [Form(text, null) for text in ([False, True] if called else [False]) for null in as_null]

    def in_form(self, form: Form) -> list[dict[str, Any]]:
        """The messages as a template gets them."""
        return [_in_form(one, form) if one.get("tool_calls") else one for one in self.messages]


def chat_of(values: Sequence[Any], key: str, *, fills_nulls: bool) -> Chat:
    """The messages of a row.

    Args:
        values: of the row.
        key: names them in errors.
        fills_nulls: as `Rows.fills_nulls`.

    Raises:
        ValueError: one is not a message, or the last one is the assistant's.
    """
    messages = []
    for number, value in enumerate(values):
        what = f'message {number} of "{key}"'
        if not isinstance(value, dict) or not isinstance(value.get("role"), str):
            keys = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f'{what} must be an object with "role" and "content", got {keys}')
        _check_role(value["role"], what)
        messages.append(_message(value, what, fills_nulls=fills_nulls))
    if messages[-1]["role"] == "assistant":
        last = f'the last message of "{key}"'
        raise ValueError(f"{last} is the assistant's, which is to be sampled; leave it out")
    return Chat(messages)


def tools_of(value: Any, key: str, *, fills_nulls: bool) -> list[dict[str, Any]] | None:
    """The list of tools of a row, given as such or as JSON text; None for an empty one.

    Raises:
        ValueError: it is not a list of objects.
    """
    if isinstance(value, str):
        fills_nulls = False  # a text has the nulls that were written
        try:
            value = json_text.loads(value)
        except ValueError as error:
            raise ValueError(f'"{key}" is text and not JSON: {error}') from None
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f'"{key}" must be a list of objects, got {str(value)[:100]}')
    return (_without_nulls(value) if fills_nulls else value) or None


def function_of(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with the name of a tool or a tool call, which may be its own."""
    return one["function"] if isinstance(one.get("function"), dict) else one


def with_function(one: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """A copy of a tool or a tool call with other values in its function."""
    function = {**function_of(one), **changed}
    return {**one, "function": function} if isinstance(one.get("function"), dict) else function


def _check_role(role: str, what: str) -> None:
    plain = role.strip().casefold()
    known = _OTHER_ROLES.get(plain, plain)
    if known in _ROLES and known != role:
        raise ValueError(f'{what} has the role "{role}"; call it "{known}"')


def _message(value: Mapping[str, Any], what: str, *, fills_nulls: bool) -> dict[str, Any]:
    """The message with a content, and without keys that are null, which templates do not expect."""
    message = {name: one for name, one in value.items() if one is not None}
    calls = message.pop("tool_calls", None) or None
    if fills_nulls:
        message = _without_nulls(message)
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(f'{what}, whose role is "{value["role"]}", {_no_text(content)}')
    if "function_call" in message:
        raise ValueError(f'{what} has a "function_call", which templates leave out; write it as "tool_calls"')
    if media := [name for name in _MEDIA if message.get(name)]:
        raise ValueError(f'{what} has "{media[0]}", and prompts are text alone; leave such rows out')
    message.setdefault("content", "")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError(f'"tool_calls" of {what} must be a list of objects, got {str(calls)[:100]}')
        message["tool_calls"] = [
            _tool_call(call, f"tool call {number} of {what}", fills_nulls=fills_nulls)
            for number, call in enumerate(calls)
        ]
    return message


def _no_text(content: Any) -> str:
    """How a content is refused that is not text."""
    if not isinstance(content, list):
        return f"must have text as its content, got {type(content).__name__}"
    kinds = sorted({str(one.get("type", "text")) if isinstance(one, dict) else "text" for one in content})
    remedy = "leave such rows out" if set(kinds) - {"text"} else "store them as one text"
    return (
        "must have text as its content, got list; parts, such as images, are not supported (it has "
        f"{', '.join(kinds) or 'no parts'}): {remedy}"
    )


def _tool_call(call: Mapping[str, Any], what: str, *, fills_nulls: bool) -> dict[str, Any]:
    """The call without the keys that are null, and with `Arguments`."""
    call = {name: one for name, one in call.items() if one is not None}
    function = {name: one for name, one in function_of(call).items() if one is not None}
    _check_keys(call, function, what)
    value = function.get("arguments")
    if value is None:
        arguments = Arguments()
    elif isinstance(value, str):
        arguments = Arguments(_parsed(value, what))
        arguments.text = value
    elif isinstance(value, dict):
        arguments = Arguments(_without_nulls(value) if fills_nulls else value)
    else:
        raise ValueError(f"{what}: its arguments must be an object, or its JSON text, got {str(value)[:100]}")
    if function_of(call) is call:
        return {**function, "arguments": arguments}
    return {**call, "function": {**function, "arguments": arguments}}


def _check_keys(call: Mapping[str, Any], function: Mapping[str, Any], what: str) -> None:
    """ValueError for a key that templates leave out, such as arguments by another name or elsewhere."""
    whole = isinstance(call.get("function"), dict)
    other = sorted(call.keys() - _OF_CALL - ({"function"} if whole else _OF_FUNCTION))
    if other := other or sorted(function.keys() - _OF_FUNCTION if whole else ()):
        raise ValueError(
            f'{what} has "{other[0]}", which templates leave out; a call is {{"id": ..., "type": "function", '
            '"function": {"name": ..., "arguments": {...}}}'
        )
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f'{what} has no "name" of its function, got {str(function)[:100]}')


def _parsed(text: str, what: str) -> dict[str, Any]:
    try:
        value = json_text.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{what}: its arguments are text and not JSON: {error}; give an object, or its JSON text "
            f"({{}} for none), got {text[:100]!r}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{what}: its arguments must be an object, or its JSON text, got {text[:100]}")
    return value


def _in_form(message: Mapping[str, Any], form: Form) -> dict[str, Any]:
    changed = dict(message)
    if form.empty_as_null and not message["content"].strip():
        changed["content"] = None
    if form.arguments_as_text:
        changed["tool_calls"] = [
            with_function(call, arguments=function_of(call)["arguments"].as_text())
            for call in message["tool_calls"]
        ]
    return changed


def _without_nulls(value: Any) -> Any:
    """Without the keys that have null, but for those of maps."""
    if isinstance(value, MapObject):
        return value
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
