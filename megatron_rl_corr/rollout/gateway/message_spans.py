"""Which tokens each message of a conversation has, for people who read it: nothing is trained by it.

The template's text of new messages is cut at its control tokens. A message is in the first piece behind the
one before it that ends with its content, or else has it. It begins with the second control token behind the
message before, as the first one ends that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch

from megatron_rl_corr.engines.trajectory import MessageSpan
from megatron_rl_corr.rollout.gateway.templates import Message, Templates
from megatron_rl_corr.rollout.gateway.tree import Turn

RAW = "text"
"""The role of a prompt that is no conversation."""


def message_spans(path: Sequence[Turn], templates: Templates) -> tuple[MessageSpan, ...]:
    """The messages of a branch, the policy's among them, by start.

    Args:
        path: its turns, from the root on.
        templates: of the checkpoint.
    """
    spans, begin = [], 0
    for turn in path:
        asked, added = turn.asked, turn.asked.added.numel()
        roles, starts = [RAW], [0, added]
        if asked.messages is not None:
            new = asked.messages[0 if asked.parent is None else len(asked.parent.asked.messages) + 1 :]
            roles = [one.plain["role"] for one in new]
            starts = list(_starts(asked.added_text, asked.added, new, templates))
        spans += [MessageSpan(role, begin + start) for role, start in zip(roles, starts[:-1], strict=True)]
        spans.append(MessageSpan("assistant", begin + starts[-1], turn.part.finish_reason))
        begin += added + turn.part.output_ids.numel()
    return tuple(spans)


def _starts(text: str, ids: torch.Tensor, messages: Sequence[Message], templates: Templates) -> Iterator[int]:
    """Where each message begins in the ids, and then the assistant's next one. Where the ids have other
    control tokens than the text, the messages are not told apart.
    """
    pieces = templates.pieces(text)
    controls = torch.isin(ids, templates.control_ids).nonzero()[:, 0].tolist()
    if len(controls) != len(pieces) - 1:
        yield from (*[0] * len(messages), ids.numel())
        return
    start, last, calls = 0, -1, False
    for one in messages:
        place = _place(one, pieces, last)
        if 0 <= last < place:  # control k is the first one behind piece k
            start = controls[place - 1 if calls else min(last + 1, place - 1)]
        yield start
        last, calls = place, "tool_calls" in one.plain
    behind = controls[max(last, 0) :]
    yield behind[min(1, len(behind) - 1) if last >= 0 else 0] if behind else ids.numel()


def _place(message: Message, pieces: Sequence[str], last: int) -> int:
    """The piece that has the message; that of the message before, `last` (-1: there is none), where none
    is found.
    """
    content = (message.shown["content"] or "").rpartition("</think>")[2].strip()
    calls = message.plain.get("tool_calls")
    content = content or (calls[0]["function"]["name"] if calls else "")
    # The last piece is the beginning of the assistant's answer.
    behind = range(last + 1, max(1, len(pieces) - 1))
    if content:
        for form in (content, json.dumps(content, ensure_ascii=False)[1:-1]):
            for place in behind:
                if pieces[place].rstrip().endswith(form):
                    return place
            for place in behind:
                if form in pieces[place]:
                    return place
    return max(last, 0)
