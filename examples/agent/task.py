"""The task: sums, which the agent has a tool for."""

import random

LARGEST = 49
"""Of either number."""


def row(a, b):
    """A row of the data: what the user asks, and the right answer."""
    return {"messages": [{"role": "user", "content": f"{a}+{b}"}], "label": str(a + b)}


def rows(count, *, seed=0):
    """So many different rows."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    return [row(*pair) for pair in random.Random(seed).sample(pairs, count)]
