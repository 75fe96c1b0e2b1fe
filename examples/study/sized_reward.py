"""The study's task: the quickstart's, for responses of the length that the prompt's row names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from make_model import CHARACTERS
from reward import KINDS


def reward(prompt, output_ids, finish_reason):
    """Share of the wanted number of characters that are of the wanted kind; ending early loses
    what is missing.
    """
    wanted = KINDS[prompt.metadata["kind"]]
    right = sum(token < len(CHARACTERS) and CHARACTERS[token] in wanted for token in output_ids)
    return right / prompt.metadata["wanted_tokens"]


def less(prompt, output_ids, finish_reason):
    """The same less 2: below 0 for every response, so that raw rewards have no baseline that fits."""
    return reward(prompt, output_ids, finish_reason) - 2.0
