"""An episode under way: its turns one behind the other, joined once, at its end.

P prompt tokens, T tokens so far, B tokens of an environment's reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl_corr.engines.trajectory import ENVIRONMENT, Trajectory, concatenated


class Turns:
    """What the policy and the environment have said. A turn is appended, and costs what it is long.

    Args:
        prompt_ids: P ids.
    """

    def __init__(self, prompt_ids: Sequence[int]):
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64)
        self._prompt, self._tokens = prompt.numel(), 0
        self._ids = prompt.new_empty(2 * self._prompt)
        self._answers: list[Trajectory] = []
        self._replies: list[Tensor] = []
        self._resumed: Tensor | None = None
        """The turn ids of the first answer, where it is several turns."""
        self._append(prompt)

    @classmethod
    def resumed(cls, so_far: Trajectory) -> Turns:
        """An episode that goes on behind the turns that `whole` had joined."""
        turns = cls(so_far.prompt_ids)
        turns._resumed = so_far.turn_ids
        turns.add(replace(so_far, turn_ids=None))  # `whole` has those of all turns
        return turns

    def copied(self) -> Turns:
        """These turns, to be read by another thread: what is appended later does not change them."""
        other = copy(self)
        other._answers, other._replies = [*self._answers], [*self._replies]
        return other

    @property
    def oldest_version(self) -> str:
        """As `Trajectory.oldest_version`."""
        return self._answers[0].oldest_version

    @property
    def count(self) -> int:
        """Turns of the policy so far."""
        return self._first_count - 1 + len(self._answers) if self._answers else 0

    @property
    def _first_count(self) -> int:
        """Turns that the first answer is."""
        return 1 if self._resumed is None else int(self._resumed.max()) + 1

    @property
    def ids(self) -> Tensor:
        """[T] int64: the prompt of the next turn. What is appended later does not change it."""
        return self._ids[: self._tokens]

    @property
    def response_tokens(self) -> int:
        """Those behind the prompt."""
        return self._tokens - self._prompt

    @property
    def server(self) -> str | None:
        """Where the last turn was sampled."""
        return self._answers[-1].server if self._answers else None

    @property
    def routes_known(self) -> int:
        """Tokens whose routes have come."""
        last = self._answers[-1] if self._answers else None
        return (
            0 if last is None or last.routed_experts is None else last.routes_from + len(last.routed_experts)
        )

    def add(self, answer: Trajectory) -> None:
        """Append a turn that was sampled."""
        self._answers.append(answer)
        self._append(answer.output_ids)

    def say(self, reply: Tensor) -> None:
        """Append the environment's reply, [B] int64; `whole` has it if a turn follows."""
        self._replies.append(reply)
        self._append(reply)

    def whole(self, finish_reason: str) -> Trajectory:
        """The episode as one trajectory.

        Sampled tokens keep log-prob, weight version, sampling mask, and their routes or that they have
        none, as in `concatenated`.
        """
        replies = self._replies[: len(self._answers) - 1]
        turns = [torch.zeros_like(self._answers[0].output_ids) if self._resumed is None else self._resumed]
        later = zip(replies, self._answers[1:], strict=True)
        for number, (reply, answer) in enumerate(later, start=self._first_count):
            turns += [torch.full_like(reply, ENVIRONMENT), torch.full_like(answer.output_ids, number)]
        whole = concatenated(self._answers, replies)
        return replace(whole, turn_ids=torch.cat(turns), finish_reason=finish_reason)

    def said(self) -> list[list[int]]:
        """The ids of the policy's first turn, of the reply to it, of the second turn, and so on up to its
        last one; every turn has a token.
        """
        whole = self.whole("abort")
        _, lengths = torch.unique_consecutive(whole.turn_ids, return_counts=True)
        return [ids.tolist() for ids in whole.output_ids.split(lengths.tolist())]

    def _append(self, ids: Tensor) -> None:
        end = self._tokens + ids.numel()
        if end > self._ids.numel():
            larger = self._ids.new_empty(2 * end)
            larger[: self._tokens] = self.ids
            self._ids = larger
        self._ids[self._tokens : end] = ids
        self._tokens = end
