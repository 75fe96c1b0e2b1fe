"""The task: sums and differences of two digits, as chat messages, and which of them are held out
of the training.
"""

import random

HELD_OUT_FIFTH = 5
"""Every fifth question, of a shuffled list, is for the evaluation alone."""


def questions(kind):
    """(a, b, answer) of one kind: all sums of two digits, or all differences that are not negative."""
    if kind == "sums":
        return [(f"{a}+{b}", a + b) for a in range(10) for b in range(10)]
    return [(f"{a}-{b}", a - b) for a in range(10) for b in range(a + 1)]


KINDS = ("sums", "differences")


def row(question, answer):
    """A row of the data: one message of the user, and the answer for the reward."""
    return {"messages": [{"role": "user", "content": question}], "label": str(answer)}


def split(kind, seed=0):
    """(rows to train on, rows held out) of a kind."""
    rows = [row(*one) for one in questions(kind)]
    random.Random(seed).shuffle(rows)
    held_out = len(rows) // HELD_OUT_FIFTH
    return rows[held_out:], rows[:held_out]
