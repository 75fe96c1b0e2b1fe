"""The task: sums, which the agent has a tool for."""

import random

NUMBERS = range(10, 50)
"""What is added: two digits each."""


def row(a, b):
    """A row of the data: what the user asks, and the right answer."""
    return {"messages": [{"role": "user", "content": f"{a}+{b}"}], "label": str(a + b)}


def rows(count, *, seed=0):
    """So many different rows."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS]
    return [row(*pair) for pair in random.Random(seed).sample(pairs, count)]
