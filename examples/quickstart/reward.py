"""The quickstart's task: write nothing but the kind of character that the prompt asks for."""

from make_model import CHARACTERS

KINDS = {
    "digits": set("0123456789"),
    "vowels": set("aeiouAEIOU"),
    "signs": set("+-*/=<>!?#"),
}
WANTED_TOKENS = 12


def reward(prompt, output_ids, finish_reason):
    """Share of WANTED_TOKENS characters that are of the wanted kind; ending early loses what is missing."""
    wanted = KINDS[prompt.metadata["kind"]]
    right = sum(token < len(CHARACTERS) and CHARACTERS[token] in wanted for token in output_ids)
    return right / WANTED_TOKENS
