"""OpenAI's Responses: a body to a ChatRequest, and an answer to a body or to events.

An answer is up to three kinds of items: its thoughts, a message, function calls. Sent back as input they
make the one assistant's message again that they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl_corr.rollout.gateway import openai_messages
from megatron_rl_corr.rollout.gateway.bodies import (
    Body,
    Memory,
    checked_fields,
    checked_type,
    cut,
    event,
    invalid,
    is_one_of,
    joined_text,
    now,
    one_function,
    overridden_fields,
    pieces,
    positive,
    refuse_logits,
    refused,
    require_parallel,
    require_text,
    thinking_variables,
    token_logprobs,
)
from megatron_rl_corr.rollout.gateway.openai_messages import message, tool_choice
from megatron_rl_corr.rollout.gateway.types import Answer, ChatRequest, GatewayError

FIELDS = {
    "model": str,
    "input": (str, list),
    "instructions": str,
    "previous_response_id": str,
    "tools": list,
    "tool_choice": (str, dict),
    "parallel_tool_calls": bool,
    "max_output_tokens": int,
    "max_tool_calls": int,
    "stream": bool,
    "store": bool,
    "include": list,
    "top_logprobs": int,
    "text": dict,
    "reasoning": dict,
    "truncation": str,
    "background": bool,
    "metadata": dict,
    # Known to be asked for, and refused below.
    "conversation": None,
    "prompt": None,
    "context_management": None,
    "moderation": None,
}
IGNORED = {
    "access_programs",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream_options",
    "user",
}
_REFUSED = {
    "conversation": "is kept nowhere: send the items, or 'previous_response_id'.",
    "prompt": "is a template that is not here: send 'input'.",
    "context_management": "is left to the caller.",
    "max_tool_calls": "bounds tools of the server, which has none.",
    "moderation": "has no moderation behind it.",
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = {_LOGPROBS, "reasoning.encrypted_content"}


class ResponseExchange:
    """A request of responses; `memory` keeps the response, unless store is false.

    Raises:
        GatewayError: the body asks for what is not there, or is malformed.
    """

    def __init__(self, body: Body, memory: Memory):
        given = checked_fields(body, FIELDS, required=("model", "input"), ignored=IGNORED, refuses=_REFUSED)
        if given.get("background"):
            raise refused("background", "is true: wait for the answer.")
        if given.get("truncation", "disabled") != "disabled":
            raise refused("truncation", f"is {given['truncation']!r}: nothing of an input is left out.")
        require_text(given.get("text", {}).get("format") or None, "text.format")
        unknown = [name for name in given.get("include", ()) if not is_one_of(name, _INCLUDABLE)]
        if unknown:
            raise refused("include", f"has {unknown[0]!r}: an answer has none.")
        require_parallel(given)
        refuse_logits(given)
        functions, constrained = _tools(given.get("tools"))
        parses_tools, forced = tool_choice(given.get("tool_choice", "auto"))
        history: list[dict[str, Any]] = []
        if (previous := given.get("previous_response_id")) is not None:
            if previous not in memory.responses:
                raise GatewayError(
                    400,
                    "previous_response_not_found",
                    f"Previous response with id '{previous}' not found.",
                    param="previous_response_id",
                )
            history = memory.responses[previous][1]
        instructions = given.get("instructions")
        effort = given.get("reasoning", {}).get("effort")
        wanted = {} if effort is None else {"reasoning.effort": ("reasoning_effort", effort)}
        variables, lacking = thinking_variables(memory, wanted)
        self.streams, self._given, self._memory = given.get("stream", False), given, memory
        self._with_logprobs = _LOGPROBS in given.get("include", ())
        self._created, self._messages = now(), history + _messages(given["input"])
        self.request = ChatRequest(
            [{"role": "system", "content": instructions}] * (instructions is not None) + self._messages,
            tools=functions,
            template_kwargs=variables,
            parses_tools=parses_tools,
            max_tokens=positive(given, "max_output_tokens"),
            overridden=overridden_fields(given, memory.sampling) + forced + constrained + lacking,
        )

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole response, which the episode keeps."""
        (answer,) = answers
        cut_short = answer.finish_reason == "length"
        made = self._head(answer, "incomplete" if cut_short else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut_short else None,
            "completed_at": None if cut_short else now(),
            "output": self._items(answer),
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": answer.output_ids.numel(),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.output_ids.numel(),
            },
        }
        if made["store"]:
            messages = self._memory.once([*self._messages, assistant_message(answer)])
            self._memory.responses[made["id"]] = (made, messages)
        return made

    def events(self, answers: Sequence[Answer]) -> Iterator[bytes]:
        """As OpenAI's servers send them: each item is added, grows, and is done."""
        for number, (name, data) in enumerate(self._numbered(answers)):
            yield event({"type": name, "sequence_number": number, **data}, name)

    def _numbered(self, answers: Sequence[Answer]) -> Iterator[tuple[str, dict[str, Any]]]:
        (answer,) = answers
        begun = self._head(answer, "in_progress") | {"output": [], "usage": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(self._items(answer)):
            at = {"item_id": item["id"], "output_index": index}
            empty = {name: [] if name == "content" else value for name, value in item.items()}
            if "arguments" in item:
                empty["arguments"] = ""
            added = {"output_index": index, "item": empty | {"status": "in_progress"}}
            yield "response.output_item.added", added
            if "arguments" in item:
                for text in cut(item["arguments"]):
                    yield "response.function_call_arguments.delta", at | {"delta": text}
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield "response.function_call_arguments.done", at | done
            else:
                yield from self._content(answer, item, at)
            yield "response.output_item.done", {"output_index": index, "item": item}
        whole = self.body(answers)
        yield f"response.{whole['status']}", {"response": whole}

    def _content(
        self, answer: Answer, item: Mapping[str, Any], at: Mapping[str, Any]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        (part,) = item["content"]
        at = {**at, "content_index": 0}
        empty = part | {"text": ""} | ({"logprobs": []} if "logprobs" in part else {})
        yield "response.content_part.added", at | {"part": empty}
        if part["type"] == "reasoning_text":
            for text in cut(part["text"]):
                yield "response.reasoning_text.delta", at | {"delta": text}
            yield "response.reasoning_text.done", at | {"text": part["text"]}
        else:
            for text, first, last in pieces(answer, self._with_logprobs):
                yield (
                    "response.output_text.delta",
                    at | {"delta": text, "logprobs": self._logprobs(answer, first, last)},
                )
            yield "response.output_text.done", at | {"text": part["text"], "logprobs": part["logprobs"]}
        yield "response.content_part.done", at | {"part": part}

    def _items(self, answer: Answer) -> list[dict[str, Any]]:
        status = "incomplete" if answer.finish_reason == "length" else "completed"
        made: list[dict[str, Any]] = []
        if answer.reasoning:
            part = {"type": "reasoning_text", "text": answer.reasoning}
            made.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": [part]})
            made[-1]["status"] = status
        if answer.text or not answer.tool_calls:
            part = {
                "type": "output_text",
                "text": answer.text,
                "annotations": [],
                "logprobs": self._logprobs(answer),
            }
            made.append({"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "content": [part]})
            made[-1]["status"] = status
        for index, call in enumerate(answer.tool_calls):
            made.append(
                {
                    "id": f"fc_{answer.id}_{index}",
                    "type": "function_call",
                    "call_id": call["id"],
                    **call["function"],
                    "status": "completed",
                }
            )
        return made

    def _logprobs(self, answer: Answer, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        return [made | {"bytes": made["bytes"] or []} for made in token_logprobs(answer, first, last)]

    def _head(self, answer: Answer, status: str) -> dict[str, Any]:
        given, sampling = self._given, self._memory.sampling
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "max_tool_calls": None,
            "metadata": given.get("metadata", {}),
            "model": given["model"],
            "parallel_tool_calls": True,
            "previous_response_id": given.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
            "store": given.get("store", True),
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto" if self.request.parses_tools else "none",
            "tools": given.get("tools", []),
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }


def error_body(error: GatewayError) -> dict[str, Any]:
    """As OpenAI's servers answer; what an episode says of the messages is of the input here."""
    made = openai_messages.error_body(error)
    if error.param == "messages":
        made["error"]["param"] = "input"
    return made


def assistant_message(answer: Answer) -> dict[str, Any]:
    """The answer as a message of ChatRequest."""
    made: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        made["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        made["tool_calls"] = answer.tool_calls
    return made


def _tools(given: Sequence[Any] | None) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    made, constrained = [], False
    for index, tool in enumerate(given or ()):
        place = f"tools[{index}]"
        if checked_type(tool, dict, place).get("type") != "function":
            raise refused(f"{place}.type", f"is {tool.get('type')!r}: tools are functions of the harness.")
        function, strict = one_function({k: v for k, v in tool.items() if k != "type"}, place)
        made.append({"type": "function", "function": function})
        constrained |= strict
    return made or None, ("tools.strict",) * constrained


def _messages(given: str | list[Any]) -> list[dict[str, Any]]:
    """Items as messages: thoughts, a message and calls that follow each other are one assistant's message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    made: list[dict[str, Any]] = []
    current: dict[str, Any] | None = None  # the assistant's message that items are added to
    for index, item in enumerate(given):
        place = f"input[{index}]"
        kind = checked_type(item, dict, place).get("type", "message")
        if kind == "function_call_output":
            current = None
            content = joined_text(
                item.get("output"), f"{place}.output", ("input_text", "output_text", "text")
            )
            label = checked_type(item.get("call_id"), str, f"{place}.call_id")
            made.append({"role": "tool", "content": content, "tool_call_id": label})
        elif kind == "message" and item.get("role") != "assistant":
            current = None
            made.append(message({"role": item.get("role"), "content": _text(item, place)}, place))
        elif kind in ("message", "function_call", "reasoning"):
            begins = current is None or (
                kind != "function_call" and (current["content"] != "" or "tool_calls" in current)
            )
            if begins:
                current = {"role": "assistant", "content": ""}
                made.append(current)
            _add(current, kind, item, place)
        else:
            raise refused(
                f"{place}.type", f"is {kind!r}: items are messages, thoughts, calls and their outputs."
            )
    if not made:
        raise invalid("Invalid 'input': empty array. Expected at least one item.", "input")
    return made


def _add(current: dict[str, Any], kind: str, item: Mapping[str, Any], place: str) -> None:
    if kind == "message":
        current["content"] = _text(item, place)
    elif kind == "reasoning":
        thoughts = joined_text(item.get("content"), f"{place}.content", ("reasoning_text", "text"))
        if thoughts:
            current["reasoning_content"] = thoughts
    else:
        name, arguments, label = (
            checked_type(item.get(key), str, f"{place}.{key}") for key in ("name", "arguments", "call_id")
        )
        call = {"id": label, "type": "function", "function": {"name": name, "arguments": arguments}}
        current.setdefault("tool_calls", []).append(call)


def _text(item: Mapping[str, Any], place: str) -> str:
    if item.get("content") is None:
        raise invalid(f"Missing required parameter: '{place}.content'.", f"{place}.content")
    return joined_text(item["content"], f"{place}.content", ("input_text", "output_text", "text"))
