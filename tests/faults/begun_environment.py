"""Environments of the drills whose runs end while episodes are under way."""

import os

from megatron_rl_corr.rollout import DONE, Environment

TURNS = 4


class Adds(Environment):
    """Says a number that follows from all turns, until the policy has made TURNS. What is in OUTSIDE is of no
    row: a process with another value of it has other environments.
    """

    replayable = True
    stop_token_ids = tuple(range(0, 82, 2))

    def __init__(self, prompt):
        self.turns, self.sum = 0, int(os.environ.get("OUTSIDE", "0")) + sum(prompt.input_ids)

    async def step(self, output_ids, finish_reason):
        self.turns += 1
        self.sum += self.turns * sum(output_ids)
        return DONE if self.turns == TURNS else [1 + self.sum % 80, 3]

    async def reward(self):
        return self.sum % 7 / 7


class Orders(Adds):
    """Its calls may be noticed outside."""

    replayable = False
