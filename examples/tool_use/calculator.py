"""A calculator as a tool: the policy ends its turn with "=", and the environment says what stood
before it comes to.

"12+3=" is answered with "15;", what is no sum, difference or product of two numbers (or a number
alone) with "?;".
"""

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from make_model import CHARACTERS

from megatron_rl_corr.rollout import DONE, Environment

CALL = "="
WANTED_CALLS = 3
EXPRESSION = re.compile(r"(\d{1,3})(?:([-+*])(\d{1,3}))?")
APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def encode(text):
    """The quickstart's tokenizer: a token a character. With a real model: tokenizer.encode(text)."""
    return [CHARACTERS.index(character) for character in text]


def decode(ids):
    """The text; <pad> and <eos> are a character that is in no expression."""
    return "".join(
        CHARACTERS[token] if token < len(CHARACTERS) else "\N{REPLACEMENT CHARACTER}" for token in ids
    )


def calculate(expression):
    """What it comes to, as text; None if it is no expression."""
    match = EXPRESSION.fullmatch(expression)
    if match is None:
        return None
    first, sign, second = match.groups()
    return str(int(first) if sign is None else APPLY[sign](int(first), int(second)))


class Calculator(Environment):
    """Answers WANTED_CALLS calls, then ends the episode."""

    stop_token_ids = encode(CALL)
    replayable = True  # the same calls have the same answers, and it does not matter how often they are made

    def __init__(self, prompt):
        self.scores = []

    def step(self, output_ids, finish_reason):
        text = decode(output_ids)
        if not text.endswith(CALL):
            return DONE  # the end-of-sequence id, or the bound on tokens
        expression = text.removesuffix(CALL)
        result = calculate(expression)
        usable = sum(character in "0123456789+-*" for character in expression) / max(len(expression), 1)
        self.scores.append(0.5 * usable + 0.5 * (result is not None))
        if len(self.scores) == WANTED_CALLS:
            return DONE
        return encode(f"{'?' if result is None else result};")

    def reward(self):
        """In [0, 1]: a call counts half by its share of digits and signs, half if it could be answered."""
        return sum(self.scores) / WANTED_CALLS
