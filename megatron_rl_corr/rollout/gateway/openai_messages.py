"""What the protocols of OpenAI share: messages and tools as chat completions have them, errors, and usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl_corr.rollout.gateway.again import Again
from megatron_rl_corr.rollout.gateway.bodies import (
    checked_type,
    choice_of_tools,
    invalid,
    is_one_of,
    joined_text,
    one_function,
    refused,
)
from megatron_rl_corr.rollout.gateway.types import Answer, GatewayError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_EMPTY_ECHOES = ("refusal", "audio", "annotations", "function_call", "parsed")
"""Keys of the assistant's message that clients send back as they got them, or made them, empty."""
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}
_ERROR_TYPES = {400: "invalid_request_error", 401: "invalid_request_error", 404: "invalid_request_error"}


def messages(given: Sequence[Any], before: Again) -> list[dict[str, Any]]:
    """Messages as ChatRequest has them; those that come again are the same objects.

    Args:
        given: of the body.
        before: the episode's, whose items are the same if they are equal: all of a message that counts is
            text, which equals nothing else.

    Raises:
        GatewayError: one is malformed, or not of text.
    """
    if not given:
        raise invalid("Invalid 'messages': empty array. Expected at least one message.", "messages")
    return before.made(given, lambda value, index: message(value, f"messages[{index}]"))


def message(given: Any, place: str) -> dict[str, Any]:
    """One message of `messages`."""
    checked_type(given, dict, place)
    if not is_one_of(given.get("role"), _ROLES):
        raise invalid(
            f"Invalid value: {given.get('role')!r}. Supported values are: {', '.join(_ROLES)}.",
            f"{place}.role",
        )
    for name, value in given.items():
        if name in _EMPTY_ECHOES and not value:
            continue
        if name not in _KEYS:
            raise invalid(f"Unrecognized key '{name}' in '{place}'.", f"{place}.{name}", "unknown_parameter")
    role = _ROLES[given["role"]]
    made = {"role": role, "content": joined_text(given.get("content"), f"{place}.content")}
    if given.get("content") is None and role != "assistant":
        raise invalid(f"Missing required parameter: '{place}.content'.", f"{place}.content")
    if given.get("name") is not None:
        made["name"] = checked_type(given["name"], str, f"{place}.name")
    if role == "tool":
        made["tool_call_id"] = checked_type(given.get("tool_call_id"), str, f"{place}.tool_call_id")
    if role == "assistant":
        thoughts = given.get("reasoning_content") or given.get("reasoning")
        if thoughts:
            made["reasoning_content"] = checked_type(thoughts, str, f"{place}.reasoning_content")
        calls = checked_type(given.get("tool_calls") or [], list, f"{place}.tool_calls")
        if calls:
            made["tool_calls"] = [
                _call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)
            ]
    return made


def _call(given: Any, place: str) -> dict[str, Any]:
    checked_type(given, dict, place)
    if given.get("type", "function") != "function":
        raise refused(f"{place}.type", f"is {given['type']!r}: tools are functions.")
    function = checked_type(given.get("function"), dict, f"{place}.function")
    return {
        "id": checked_type(given.get("id"), str, f"{place}.id"),
        "type": "function",
        "function": {
            name: checked_type(function.get(name), str, f"{place}.function.{name}")
            for name in ("name", "arguments")
        },
    }


def tools(given: Sequence[Any] | None) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """(tools as ChatRequest has them, a field that is overridden where their arguments were to be strict)."""
    made, constrained = [], False
    for index, tool in enumerate(given or ()):
        place = f"tools[{index}]"
        if checked_type(tool, dict, place).get("type") != "function":
            raise refused(f"{place}.type", f"is {tool.get('type')!r}: tools are functions.")
        function, strict = one_function(tool.get("function"), f"{place}.function")
        made.append({"type": "function", "function": function})
        constrained |= strict
    return made or None, ("tools.strict",) * constrained


def tool_choice(given: str | dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """As `choice_of_tools`, of a request's tool_choice."""
    if isinstance(given, str):
        return choice_of_tools(given, forced=("required",))
    return choice_of_tools(f"a {given.get('type')}", forced=("a function",))


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of a request with n answers; its prompt counts once."""
    prompt, sampled = answers[0].prompt_tokens, sum(answer.output_ids.numel() for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens, "audio_tokens": 0},
    }


def error_body(error: GatewayError) -> dict[str, Any]:
    """As OpenAI's servers answer."""
    kind = _ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
