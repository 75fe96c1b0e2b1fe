"""The task: sums that the policy may ask a tool for, and whether an answer is right."""

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


def add(a, b):
    """What the tool answers."""
    return a + b


def reward(answer, label):
    """1.0 for the right answer, else 0.0."""
    return float(str(answer).strip() == label)
