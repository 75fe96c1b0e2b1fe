"""What passes between the protocols, the episode that they ask, and the answers that they make of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class ChatRequest:
    """The policy is asked for the assistant's next message. Example: ChatRequest([{"role": "user",
    "content": "1+1"}]).
    """

    messages: list[dict[str, Any]]
    """As in OpenAI's chat completions: role, content (text, "" for none), and where there are any tool_calls
    (function.arguments is JSON text), tool_call_id, name and reasoning_content. No other keys.
    """
    tools: list[dict[str, Any]] | None = None
    """As in OpenAI's chat completions: {"type": "function", "function": {...}}; None: none, not []."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    parses_tools: bool = True
    """Tool calls are read from the answer's text; False: all of it is content (tool_choice none)."""
    max_tokens: int | None = None
    """Sampled tokens at most; None: as many as the run allows."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    n: int = 1
    """Answers."""
    overridden: tuple[str, ...] = ()
    """Fields that would change the policy; the run's own settings are used instead."""


@dataclass(frozen=True)
class TextRequest:
    """The policy is asked to go on with a text, or with token ids."""

    prompt: str | list[int]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    overridden: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Answer:
    """One answer of the policy."""

    id: str
    """Names the turn within its episode; the response has it, in its protocol's form."""
    text: str
    """What was sampled, without the end-of-turn token and without the stop text: of chats the content that
    is left beside `tool_calls`.
    """
    finish_reason: str
    """length: it was cut, and calls before its end may be there all the same; tool_calls; or stop."""
    prompt_tokens: int
    cached_tokens: int
    output_ids: torch.Tensor
    """[R] int64: all that were sampled, the end-of-turn token too."""
    spelled: Callable[[], list[str]]
    """Makes `token_texts`, which few requests ask for."""
    logprobs: torch.Tensor
    """[R] float32."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """As in OpenAI's chat completions, with ids."""
    reasoning: str = ""
    """Thoughts, where the run asks for them apart from the content."""
    stop_text: str | None = None
    """The stop text that ended it; None: none did."""

    @cached_property
    def token_texts(self) -> list[str]:
        """R texts of the tokens one by one."""
        return self.spelled()


ANSWER_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9]{1,9})(?::([0-9]{1,3}))?")
"""An answer: the id of its response, in any protocol, which has the turn's number, and behind a colon the
index of its choice; without that it is the first.
"""


class EpisodeSession(Protocol):
    """What a gateway asks for one episode; rollout/gateway/episode.py is the one of a run.

    Attributes:
        variables: names of those that the chat template uses.
    """

    variables: Collection[str]

    async def chat(self, request: ChatRequest) -> Sequence[Answer]:
        """n answers, each another turn of the episode.

        Raises:
            GatewayError: the request can't be answered; the harness is told why.
        """

    async def text(self, request: TextRequest) -> Sequence[Answer]:
        """As `chat`, for a raw text."""

    async def count(self, request: ChatRequest) -> int:
        """Tokens of the prompt, encoded from its text."""

    def undelivered(self, answers: Sequence[Answer]) -> None:
        """The connection was gone before the harness had these: they are no turns of the episode."""


class GatewayError(Exception):
    """A request that can't be answered, in the terms of the official servers.

    Example: GatewayError(400, "context_length_exceeded", "This model's maximum context length is ...").

    Attributes:
        param: the field that is wrong; None: none is.
        anthropic: the message in Anthropic's words, where these are others.
        details: what Anthropic's clients read by themselves.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        anthropic: str | None = None,
        details: dict[str, Any] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.anthropic, self.details = anthropic, details
