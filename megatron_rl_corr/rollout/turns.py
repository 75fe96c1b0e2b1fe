"""An episode under way: its turns one behind the other, joined once, at its end.

P prompt tokens, T tokens so far, B tokens of an environment's reply.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._append(prompt)

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
        turns = [torch.zeros_like(self._answers[0].output_ids)]
        for number, (reply, answer) in enumerate(zip(replies, self._answers[1:], strict=True), start=1):
            turns += [torch.full_like(reply, ENVIRONMENT), torch.full_like(answer.output_ids, number)]
        whole = concatenated(self._answers, replies)
        return replace(whole, turn_ids=torch.cat(turns), finish_reason=finish_reason)

    def _append(self, ids: Tensor) -> None:
        end = self._tokens + ids.numel()
        if end > self._ids.numel():
            larger = self._ids.new_empty(2 * end)
            larger[: self._tokens] = self.ids
            self._ids = larger
        self._ids[self._tokens : end] = ids
        self._tokens = end
