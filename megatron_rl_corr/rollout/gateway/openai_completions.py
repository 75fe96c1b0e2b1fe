"""OpenAI's (text) completions: a body to a TextRequest, and answers to a body or to chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl_corr.rollout.gateway.bodies import (
    Body,
    Memory,
    answers_wanted,
    checked_fields,
    checked_type,
    event,
    invalid,
    now,
    overridden_fields,
    pieces,
    positive,
    refused,
    stop_texts,
)
from megatron_rl_corr.rollout.gateway.openai_chat import includes_usage
from megatron_rl_corr.rollout.gateway.openai_messages import usage
from megatron_rl_corr.rollout.gateway.types import Answer, TextRequest

FIELDS = {
    "model": str,
    "prompt": (str, list),
    "max_tokens": int,
    "stop": (str, list),
    "n": int,
    "best_of": int,
    "stream": bool,
    "stream_options": dict,
    "logprobs": int,
    "echo": bool,
    "suffix": str,
}
MAX_TOKENS = 16
"""Where a request says nothing, as at OpenAI."""


class TextExchange:
    """A request of completions.

    Raises:
        GatewayError: the body asks for what is not there, or is malformed.
    """

    def __init__(self, body: Body, memory: Memory):
        given = checked_fields(body, FIELDS, required=("model", "prompt"), ignored={"user"})
        if given.get("echo"):
            raise refused("echo", "is true: prompts have no log-probs here; leave it out.")
        if given.get("suffix"):
            raise refused("suffix", "is set: the policy goes on with a text, and fills none in.")
        if given.get("logprobs"):
            raise refused("logprobs", f"is {given['logprobs']}: only sampled tokens have log-probs; use 0.")
        count = answers_wanted(given)
        if given.get("best_of", count) != count:
            raise refused("best_of", f"is {given['best_of']}: answers are not chosen from more than n.")
        self.streams = given.get("stream", False)
        self._model, self._with_usage = given["model"], includes_usage(given)
        self._with_logprobs = "logprobs" in given
        self.request = TextRequest(
            _prompt(given["prompt"]),
            max_tokens=positive(given, "max_tokens") or MAX_TOKENS,
            stop=stop_texts(given),
            n=count,
            overridden=overridden_fields(given, memory.sampling),
        )

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole completion."""
        choices = [
            self._choice(index, answer, answer.text, 0, answer.output_ids.numel(), answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        return self._head(answers) | {"choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[Answer]) -> Iterator[bytes]:
        """Chunks of text of each choice, one with its finish reason, then the usage."""
        head = self._head(answers)
        if self._with_usage:
            head["usage"] = None
        for index, answer in enumerate(answers):
            count = answer.output_ids.numel()
            for text, first, last in pieces(answer, self._with_logprobs):
                yield event(head | {"choices": [self._choice(index, answer, text, first, last, None)]})
            end = self._choice(index, answer, "", count, count, answer.finish_reason)
            yield event(head | {"choices": [end]})
        if self._with_usage:
            yield event(head | {"choices": [], "usage": usage(answers)})
        yield b"data: [DONE]\n\n"

    def _choice(
        self, index: int, answer: Answer, text: str, first: int, last: int, finish: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs and (last > first or finish is None):
            lengths = (len(token) for token in answer.token_texts[:last])
            logprobs = {
                "tokens": answer.token_texts[first:last],
                "token_logprobs": answer.logprobs[first:last].tolist(),
                "top_logprobs": None,
                "text_offset": list(itertools.accumulate(lengths, initial=0))[first:last],
            }
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}

    def _head(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{answers[0].id}",
            "object": "text_completion",
            "created": now(),
            "model": self._model,
            "system_fingerprint": None,
        }


def _prompt(given: str | list[Any]) -> str | list[int]:
    """A text or token ids; a list of one of them is it."""
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        if len(given) > 1:
            raise refused("prompt", f"has {len(given)} prompts: ask for each by a request of its own.")
        given = given[0]
    if isinstance(given, list):
        for index, token in enumerate(given):
            checked_type(token, int, f"prompt[{index}]")
    if not given:
        raise invalid("Invalid 'prompt': it is empty.", "prompt")
    return given
