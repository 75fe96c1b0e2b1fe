"""The soak's task: the quickstart's, in shorter answers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/quickstart"))

from make_model import CHARACTERS
from reward import KINDS

TOKENS = 24


def reward(prompt, output_ids, finish_reason):
    """Share of TOKENS characters that are of the wanted kind; ending early loses what is missing."""
    wanted = KINDS[prompt.metadata["kind"]]
    return sum(token < len(CHARACTERS) and CHARACTERS[token] in wanted for token in output_ids) / TOKENS
