"""The turns of one episode: a request, its answer, and the ids of both.

P prompt tokens, R sampled tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.rollout.gateway.templates import Message


class Line:
    """Ids that grow at their end. Lines share memory with those that they begin with, so that an episode of
    many turns has its ids once, and each fork a copy.
    """

    def __init__(self, ids: Tensor, grown: _Memory | None = None):
        self.ids, self._memory = ids, grown or _Memory(ids, ids.numel())

    def plus(self, ids: Tensor) -> Line:
        """The line with these behind; this one stays as it is."""
        begin, end, memory = self.ids.numel(), self.ids.numel() + ids.numel(), self._memory
        if memory.used != begin or memory.ids.numel() < end:
            memory = _Memory(self.ids.new_empty(2 * end), end)
            memory.ids[:begin] = self.ids
        memory.ids[begin:end], memory.used = ids, end
        return Line(memory.ids[:end], memory)


@dataclass
class _Memory:
    ids: Tensor
    used: int


@dataclass(eq=False)
class AskedTurn:
    """A request: what is sampled from, and how it came about."""

    parent: Turn | None
    """The turn that it continues; None: a root."""
    reason: str | None
    """One of REASONS, of a root."""
    line: Line
    """All ids, [P]."""
    added: Tensor
    """[B] int64: those behind the parent's; of a root all."""
    added_text: str
    """As the template wrote it, shielded; of a raw request its text behind the parent's, or "" for ids."""
    messages: list[Message] | None = None
    """The conversation; None: it is a raw text or ids."""
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    chain: bytes = b""
    """The digest of the messages."""
    shown: tuple[int, bytes] | None = None
    """Length and digest of the conversation's text, as the template writes it."""
    first: int | None = None
    """The number of its first answer, by which the response is named; the others' follow it."""

    @property
    def server(self) -> str | None:
        """Where the parent's tokens are in the cache."""
        return None if self.parent is None else self.parent.part.server

    @property
    def routes_known(self) -> int:
        """Tokens whose routed experts have come."""
        part = None if self.parent is None else self.parent.part
        return (
            0 if part is None or part.routed_experts is None else part.routes_from + len(part.routed_experts)
        )


@dataclass(eq=False)
class Turn:
    """One answer."""

    number: int
    asked: AskedTurn
    part: Trajectory
    """As the servers gave it; its prompt_ids are the request's."""
    line: Line
    """All ids, the answer's too."""
    ended: str | None
    """The text of the control token at its end; None: it was cut, or stopped by a text."""
    text: str
    """What was sampled, without that token."""
    whole_text: str
    """What was sampled, that token too."""
    seal: bytes
    """Digest of the ids and log-probs that the servers gave, and of all before."""
    depth: int
    key: bytes | None = None
    """Digest of the conversation with the answer; None: it is a raw text."""
    answer: Message | None = None
    """What the harness got; None: of a raw text."""
    children: list[Turn] = field(default_factory=list)
    continued: bool = False
    """A request has had it in its history: the harness has the answer."""
    rerendered: bool = False
    """The template writes the answer in another way than it was sampled; the ids are as sampled."""

    @property
    def parent(self) -> Turn | None:
        """The turn that it continues."""
        return self.asked.parent

    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]


def shown_of(text: str) -> tuple[int, bytes]:
    """Length and digest of a conversation's text."""
    return len(text), _digest(text)


def follows(text: str, shown: tuple[int, bytes]) -> int | None:
    """The length of the text that an answer was sampled behind; None: this one does not begin with it."""
    length, digest = shown
    return length if len(text) >= length and _digest(text[:length]) == digest else None


def seal(before: bytes | None, added: Tensor, ids: Tensor, logprobs: Tensor) -> bytes:
    """Digest of what a server gave (ids [R], logprobs [R]) behind other ids, and of all before."""
    made = hashlib.blake2b(before or b"", digest_size=16)
    for tensor in (added, ids, logprobs):
        made.update(tensor.numel().to_bytes(8, "little") + tensor.contiguous().numpy().tobytes())
    return made.digest()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
