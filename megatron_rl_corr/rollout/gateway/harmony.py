"""Answers of gpt-oss: one answer is several messages, each in a channel, and one that calls a function is for
that function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl_corr.rollout.gateway.calls import MalformedCall, SampledCall, Tools, dumps, loads

_BEGIN, _MESSAGE, _CHANNEL = "<|start|>assistant", "<|message|>", "<|channel|>"
_END = re.compile(r"<\|(?:end|call|return)\|>\Z")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=(?:functions\.)?([\w.\-]+)")


@dataclass(frozen=True)
class HarmonyMessage:
    """One message of an answer. Example: HarmonyMessage("commentary", "look", '{"a": 1}', "...")."""

    channel: str
    recipient: str | None
    """The function that it calls; None: none."""
    body: str
    text: str
    """All of it, as it was sampled."""


def harmony_messages(text: str) -> Iterator[HarmonyMessage]:
    """The messages of an answer, which begins within the first one's header: its prompt ends with
    <|start|>assistant. Text without a header is a message in no channel.
    """
    for part in text.split(_BEGIN):
        header, message, body = part.partition(_MESSAGE)
        if not message:
            header, body = "", part
        channel = re.match(r"\w*", header.partition(_CHANNEL)[2])[0]
        recipient = _RECIPIENT.search(header)
        yield HarmonyMessage(channel, recipient and recipient[1], _END.sub("", body), part)


def read_harmony(text: str, tools: Tools) -> tuple[str, list[SampledCall]]:
    """commentary to=functions.name <|constrain|>json<|message|>{...}, a message of its own: gpt-oss.

    The recipient stands before the channel, as the template writes it, or behind; SGLang reads the second
    alone, and not in an answer's first message.
    """
    content, calls = [], []
    for one in harmony_messages(text):
        if one.recipient is None:
            content.append(one.body)
            continue
        arguments = loads(one.body.strip() or "{}")
        if not isinstance(arguments, dict):
            raise MalformedCall("a call's arguments are an object")
        calls.append(SampledCall(one.recipient, dumps(arguments)))
    return "\n".join(content), calls


def split_harmony(text: str, *, begun: bool = False) -> tuple[str, str]:
    """(thoughts, rest) of an answer, as `tool_calls.split_thoughts`: thoughts are messages of the channel
    analysis. Of an answer that calls a function the rest is the messages that are left, as sampled.
    """
    messages = list(harmony_messages(text))
    rest = [one for one in messages if one.channel != "analysis" or one.recipient is not None]
    thoughts = "\n".join(one.body for one in messages if one not in rest)
    if any(one.recipient is not None for one in rest):
        return thoughts, _BEGIN.join(one.text for one in rest)
    return thoughts, "\n".join(one.body for one in rest)
