"""OpenAI's chat completions: a body to a ChatRequest, and answers to a body or to chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl_corr.rollout.gateway.bodies import (
    Body,
    Memory,
    answers_wanted,
    checked_fields,
    cut,
    event,
    invalid,
    now,
    overridden_fields,
    pieces,
    positive,
    refuse_logits,
    refused,
    require_parallel,
    require_text,
    stop_texts,
    thinking_variables,
    token_logprobs,
)
from megatron_rl_corr.rollout.gateway.openai_messages import messages, tool_choice, tools, usage
from megatron_rl_corr.rollout.gateway.types import Answer, ChatRequest

FIELDS = {
    "model": str,
    "messages": list,
    "tools": list,
    "tool_choice": (str, dict),
    "parallel_tool_calls": bool,
    "max_tokens": int,
    "max_completion_tokens": int,
    "stop": (str, list),
    "n": int,
    "stream": bool,
    "stream_options": dict,
    "logprobs": bool,
    "top_logprobs": int,
    "response_format": dict,
    "modalities": list,
    "reasoning_effort": str,
    "chat_template_kwargs": dict,
    # Known to be asked for, and refused below.
    "audio": None,
    "functions": None,
    "function_call": None,
    "web_search_options": None,
    "moderation": None,
}
IGNORED = {
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
"""They change nothing of what is sampled."""
_REFUSED = {
    "audio": "makes no sense: the policy writes text.",
    "functions": "is of old: use 'tools'.",
    "function_call": "is of old: use 'tool_choice'.",
    "web_search_options": "has no search behind it.",
    "moderation": "has no moderation behind it.",
}


def includes_usage(given: Body) -> bool:
    """stream_options.include_usage."""
    options = given.get("stream_options", {})
    if options and not given.get("stream"):
        raise invalid(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options"
        )
    return bool(options.get("include_usage"))


class ChatExchange:
    """A request of chat completions.

    Raises:
        GatewayError: the body asks for what is not there, or is malformed.
    """

    def __init__(self, body: Body, memory: Memory):
        given = checked_fields(
            body, FIELDS, required=("model", "messages"), ignored=IGNORED, refuses=_REFUSED
        )
        require_text(given.get("response_format"), "response_format")
        if given.get("modalities", ["text"]) != ["text"]:
            raise refused("modalities", "must be ['text'].")
        if "max_tokens" in given and "max_completion_tokens" in given:
            raise invalid(
                "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
                "max_tokens",
            )
        require_parallel(given)
        refuse_logits(given)
        functions, constrained = tools(given.get("tools"))
        parses_tools, forced = tool_choice(given.get("tool_choice", "auto"))
        wanted = {name: (name, given[name]) for name in ("reasoning_effort",) if name in given}
        effort, lacking = thinking_variables(memory, wanted)
        self.streams = given.get("stream", False)
        self._model, self._with_usage = given["model"], includes_usage(given)
        self._with_logprobs = given.get("logprobs", False)
        self.request = ChatRequest(
            messages(given["messages"], memory.chat),
            tools=functions,
            template_kwargs=effort | given.get("chat_template_kwargs", {}),
            parses_tools=parses_tools,
            max_tokens=positive(given, "max_completion_tokens") or positive(given, "max_tokens"),
            stop=stop_texts(given),
            n=answers_wanted(given),
            overridden=overridden_fields(given, memory.sampling) + forced + constrained + lacking,
        )

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole completion."""
        choices = [
            {
                "index": index,
                "message": _message(answer),
                "logprobs": self._logprobs(answer),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return self._head(answers, "chat.completion") | {"choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[Answer]) -> Iterator[bytes]:
        """Chunks: of each choice its role, thoughts, content, calls and finish reason; then the usage."""
        head = self._head(answers, "chat.completion.chunk")
        if self._with_usage:
            head["usage"] = None
        for index, answer in enumerate(answers):
            for delta, logprobs, finish in self._deltas(answer):
                choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
                yield event(head | {"choices": [choice]})
        if self._with_usage:
            yield event(head | {"choices": [], "usage": usage(answers)})
        yield b"data: [DONE]\n\n"

    def _deltas(self, answer: Answer) -> Iterator[tuple[dict[str, Any], Any, str | None]]:
        yield {"role": "assistant", "content": "", "refusal": None}, None, None
        for text in cut(answer.reasoning):
            yield {"reasoning_content": text}, None, None
        for text, first, last in pieces(answer, self._with_logprobs):
            if text or self._with_logprobs:
                yield {"content": text}, self._logprobs(answer, first, last), None
        for index, call in enumerate(answer.tool_calls):
            function = {"name": call["function"]["name"], "arguments": ""}
            yield {"tool_calls": [{"index": index, **call, "function": function}]}, None, None
            for text in cut(call["function"]["arguments"]):
                yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}, None, None
        yield {}, None, answer.finish_reason

    def _logprobs(self, answer: Answer, first: int = 0, last: int | None = None) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return {"content": token_logprobs(answer, first, last), "refusal": None}

    def _head(self, answers: Sequence[Answer], kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{answers[0].id}",
            "object": kind,
            "created": now(),
            "model": self._model,
            "system_fingerprint": None,
        }


def _message(answer: Answer) -> dict[str, Any]:
    made: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.tool_calls else None,
        "refusal": None,
        "annotations": [],
    }
    if answer.reasoning:
        made["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        made["tool_calls"] = answer.tool_calls
    return made
