"""Anthropic's messages: a body to a ChatRequest, and an answer to a body or to events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl_corr.rollout.gateway.bodies import (
    Body,
    Memory,
    checked_fields,
    checked_type,
    choice_of_tools,
    cut,
    event,
    invalid,
    is_one_of,
    joined_text,
    overridden_fields,
    positive,
    refused,
    stop_texts,
    thinking_variables,
)
from megatron_rl_corr.rollout.gateway.templates import whole_numbers
from megatron_rl_corr.rollout.gateway.types import Answer, ChatRequest, GatewayError

FIELDS = {
    "model": str,
    "messages": list,
    "system": (str, list),
    "max_tokens": int,
    "stop_sequences": list,
    "stream": bool,
    "tools": list,
    "tool_choice": dict,
    "thinking": dict,
    "output_config": dict,
    # Known to be asked for, and refused below.
    "container": None,
    "context_management": None,
    "mcp_servers": None,
    "output_format": None,
    "thread": None,
}
IGNORED = {
    "cache_control",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
}
_REFUSED = {
    "container": "has no container behind it.",
    "mcp_servers": "has no tools of the server behind it.",
    "output_format": "asks for a constrained answer, which is of another policy.",
}
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_WORDS = {
    "unknown_parameter": "Extra inputs are not permitted",
    "missing_required_parameter": "Field required",
    "integer_below_min_value": "Input should be greater than or equal to 1",
}
"""By code, behind the field."""
_NO_THREAD = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""By which the client's runner of tools knows that it is to send all messages each time."""
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that Claude Code sends, another one with each request."""
_KEEPS_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


class MessageExchange:
    """A request of messages; `memory` keeps how the arguments of calls were written.

    Raises:
        GatewayError: the body asks for what is not there, or is malformed.
    """

    def __init__(self, body: Body, memory: Memory):
        given = checked_fields(body, FIELDS, required=("model", "max_tokens", "messages"), ignored=IGNORED)
        for name, why in _REFUSED.items():
            if given.get(name):
                raise refused(name, why)
        if given.get("thread"):
            raise GatewayError(
                400,
                "unsupported_parameter",
                "'thread' is kept nowhere: send all messages.",
                param="thread",
                details=_NO_THREAD,
            )
        managed = _managed(given.get("context_management"))
        variables, lacking = thinking_variables(memory, _wanted(given))
        if given.get("output_config", {}).get("format"):
            raise refused(
                "output_config.format", "asks for a constrained answer, which is of another policy."
            )
        choice = given.get("tool_choice", {"type": "auto"})
        if choice.get("disable_parallel_tool_use"):
            raise refused(
                "tool_choice.disable_parallel_tool_use",
                "is true: the policy decides how many calls an answer has; leave it out.",
            )
        tools, constrained = _tools(given.get("tools"))
        parses_tools, forced = choice_of_tools(choice.get("type", ""), forced=("any", "tool"))
        self._model, self._memory = given["model"], memory
        self.streams = given.get("stream", False)
        self.request = ChatRequest(
            _system(given.get("system")) + self._messages(given["messages"]),
            tools=tools,
            template_kwargs=variables,
            parses_tools=parses_tools,
            max_tokens=positive(given, "max_tokens"),
            stop=stop_texts(given, "stop_sequences"),
            overridden=overridden_fields(given, memory.sampling) + forced + constrained + managed + lacking,
        )

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole message."""
        (answer,) = answers
        return self._head(answer) | {
            "content": self._blocks(answer),
            **self._stop(answer),
            "usage": _usage(answer, answer.output_ids.numel()),
        }

    def events(self, answers: Sequence[Answer]) -> Iterator[bytes]:
        """As Anthropic's servers send them: each block starts, grows, and stops."""
        for name, data in self._named(answers):
            yield event({"type": name, **data}, name)

    def _named(self, answers: Sequence[Answer]) -> Iterator[tuple[str, dict[str, Any]]]:
        (answer,) = answers
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
        yield "message_start", {"message": self._head(answer) | nothing}
        for index, block in enumerate(self._blocks(answer)):
            kind = block["type"]
            if kind == "text":
                empty, deltas = block | {"text": ""}, _deltas("text", cut(answer.text))
            elif kind == "thinking":
                empty, deltas = block | {"thinking": ""}, _deltas("thinking", cut(block["thinking"]))
            else:
                text = self._memory.arguments[_known_by(block["id"], block["input"])]
                empty = block | {"input": {}}
                deltas = _deltas("input_json", cut(text), "partial_json")
            yield "content_block_start", {"index": index, "content_block": empty}
            for delta in deltas:
                yield "content_block_delta", {"index": index, "delta": delta}
            yield "content_block_stop", {"index": index}
        sampled = answer.output_ids.numel()
        yield "message_delta", {"delta": self._stop(answer), "usage": _usage(answer, sampled)}
        yield "message_stop", {}

    def _head(self, answer: Answer) -> dict[str, Any]:
        return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": self._model}

    def _blocks(self, answer: Answer) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        if answer.reasoning:
            made.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            made.append({"type": "text", "text": answer.text, "citations": None})
        for call in answer.tool_calls:
            function = call["function"]
            arguments = json.loads(function["arguments"])
            self._memory.arguments[_known_by(call["id"], arguments)] = function["arguments"]
            made.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        return made

    def _stop(self, answer: Answer) -> dict[str, Any]:
        """stop_reason and stop_sequence; a stop text of the run's own is no sequence of the request."""
        if answer.finish_reason != "stop":
            reason = {"length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]
            return {"stop_reason": reason, "stop_sequence": None}
        found = answer.stop_text if answer.stop_text in self.request.stop else None
        return {"stop_reason": "end_turn" if found is None else "stop_sequence", "stop_sequence": found}

    def _messages(self, given: Sequence[Any]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for index, value in enumerate(given):
            place = f"messages[{index}]"
            role = checked_type(value, dict, place).get("role")
            content = checked_type(value.get("content"), (str, list), f"{place}.content")
            if role == "assistant":
                made.append(self._assistant(content, f"{place}.content"))
            elif role in ("user", "system"):
                made += _heard(role, content, f"{place}.content")
            else:
                raise invalid(
                    f"'{place}.role': must be 'user' or 'assistant', got {role!r}.", f"{place}.role"
                )
        if not made:
            raise invalid("messages: at least one message is required", "messages")
        if made[-1]["role"] == "assistant":
            raise refused(
                f"messages[{len(given) - 1}]", "is the assistant's: an answer can't be begun for the policy."
            )
        return made

    def _assistant(self, content: str | list[Any], place: str) -> dict[str, Any]:
        if isinstance(content, str):
            return {"role": "assistant", "content": content}
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(content):
            at = f"{place}[{index}]"
            kind = checked_type(block, dict, at).get("type")
            if kind == "text":
                texts.append(checked_type(block.get("text"), str, f"{at}.text"))
            elif kind == "thinking":
                thoughts.append(checked_type(block.get("thinking"), str, f"{at}.thinking"))
            elif kind == "tool_use":
                label, name = (checked_type(block.get(key), str, f"{at}.{key}") for key in ("id", "name"))
                function = {"name": name, "arguments": self._arguments(label, block.get("input"))}
                calls.append({"id": label, "type": "function", "function": function})
            else:
                raise refused(
                    f"{at}.type", f"is {kind!r}: the assistant's blocks are text, thinking, tool_use."
                )
        made: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            made["reasoning_content"] = "\n".join(thoughts)
        if calls:
            made["tool_calls"] = calls
        return made

    def _arguments(self, label: str, value: Any) -> str:
        """As they were answered, where they are the same: a value has many texts, and one was sampled."""
        answered = self._memory.arguments.get(_known_by(label, value))
        return json.dumps(value, ensure_ascii=False) if answered is None else answered


def _known_by(label: str, value: Any) -> tuple[str, str]:
    """The arguments of a call as they are compared: clients write keys in another order, and 1 for 1.0."""
    return label, json.dumps(whole_numbers(value), sort_keys=True)


def error_body(error: GatewayError) -> dict[str, Any]:
    """As Anthropic's servers answer: the field is named in the message."""
    named = error.param is None or error.param in error.message
    message = error.message if named else f"{error.param}: {error.message}"
    if error.code in _WORDS:
        message = f"{error.param}: {_WORDS[error.code]}"
    details = {} if error.details is None else {"details": error.details}
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    made = {"type": kind, "message": error.anthropic or message, **details}
    return {"type": "error", "error": made, "request_id": None}


def _deltas(kind: str, texts: Any, field: str | None = None) -> Iterator[dict[str, Any]]:
    for text in texts:
        yield {"type": f"{kind}_delta", field or kind: text}


def _usage(answer: Answer, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": sampled,
    }


def _system(given: str | list[Any] | None) -> list[dict[str, Any]]:
    if isinstance(given, list):
        given = [one for one in given if not _is_billing(one)]
    text = joined_text(given, "system")
    return [{"role": "system", "content": text}] if text else []


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text")).startswith(_BILLING)


def _managed(given: Any) -> tuple[str, ...]:
    """context_management where it changes nothing; raises GatewayError where it would."""
    if not given:
        return ()
    edits = checked_type(given, dict, "context_management").get("edits") or []
    if given.keys() != {"edits"} or any(one != _KEEPS_ALL for one in edits):
        raise refused("context_management", "is left to the caller.")
    return ("context_management",)


def _wanted(given: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """As `thinking_variables` takes them."""
    made: dict[str, tuple[str, Any]] = {}
    if (thinking := given.get("thinking")) is not None:
        if not is_one_of(thinking.get("type"), _THINKING):
            raise invalid(f"thinking.type: must be one of {', '.join(_THINKING)}", "thinking.type")
        made["thinking"] = "enable_thinking", _THINKING[thinking["type"]]
    if (effort := given.get("output_config", {}).get("effort")) is not None:
        made["output_config.effort"] = "reasoning_effort", effort
    return made


def _tools(given: Sequence[Any] | None) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    made, constrained = [], False
    for index, tool in enumerate(given or ()):
        place = f"tools[{index}]"
        if checked_type(tool, dict, place).get("type", "custom") not in ("custom", None):
            raise refused(f"{place}.type", f"is {tool['type']!r}: tools are functions of the harness.")
        function = {"name": checked_type(tool.get("name"), str, f"{place}.name")}
        if tool.get("description") is not None:
            function["description"] = checked_type(tool["description"], str, f"{place}.description")
        function["parameters"] = checked_type(tool.get("input_schema"), dict, f"{place}.input_schema")
        made.append({"type": "function", "function": function})
        constrained |= bool(tool.get("strict"))
    return made or None, ("tools.strict",) * constrained


def _heard(role: str, content: str | list[Any], place: str) -> list[dict[str, Any]]:
    """A user's blocks as messages: results of tools are messages of their own, and text between them too."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    made: list[dict[str, Any]] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            made.append({"role": role, "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(content):
        at = f"{place}[{index}]"
        kind = checked_type(block, dict, at).get("type")
        if kind == "text":
            texts.append(checked_type(block.get("text"), str, f"{at}.text"))
        elif kind == "tool_result":
            end_text()
            label = checked_type(block.get("tool_use_id"), str, f"{at}.tool_use_id")
            text = joined_text(block.get("content"), f"{at}.content")
            made.append({"role": "tool", "content": text, "tool_call_id": label})
        else:
            raise refused(f"{at}.type", f"is {kind!r}: the policy reads text alone.")
    end_text()
    return made
