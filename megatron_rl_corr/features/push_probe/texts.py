"""The texts that servers score after a push: of the run's prompts, and of responses that it has
just trained on.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import torch

from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rows import BadRow
from megatron_rl_corr.engines.trajectory import Trajectory

FIRST_TEXTS, TEXTS = 5, 8
"""Texts of every push, and of a further round."""
TEXT_TOKENS, LONG_TOKENS = 64, 192
"""Ids of a text at most, and of the first one, which shows positions farther apart."""


def round_texts(
    prompts: PromptDataset, number: int, responses: Sequence[Trajectory], longest: int
) -> list[tuple]:
    """The texts of a round; those of another round begin elsewhere in the data.

    Round 0 has FIRST_TEXTS, prompts alone, the same in every push. A later one has TEXTS, half of them
    responses as far as there are some.

    Args:
        prompts: of the run.
        number: of the round.
        responses: of the last batch.
        longest: ids that a text may have.
    """
    if number == 0:
        counts = [LONG_TOKENS] + [TEXT_TOKENS] * (FIRST_TEXTS - 1)
        return [prompt_text(prompts, place, min(count, longest)) for place, count in enumerate(counts)]
    made = _response_texts(responses, number - 1, min(TEXT_TOKENS, longest))
    for place in range(number * TEXTS, (number + 1) * TEXTS - len(made)):
        made.append(prompt_text(prompts, place, min(TEXT_TOKENS, longest)))
    return made


def prompt_text(prompts: PromptDataset, place: int, count: int) -> tuple[int, ...]:
    """`count` ids of the data: the end of a long prompt, as many begin alike; short ones one
    behind the other.

    Args:
        prompts: of the run.
        place: texts of other places are of other prompts, or of other parts of them where there are too few.
        count: ids, at least 2.

    Raises:
        ValueError, OSError: as `PromptDataset.rows`, for a row of another fault than a prompt
            that can't be used.
    """
    again, begin = divmod(place * _prompts_of_text(prompts), len(prompts))
    ids: list[int] = []
    for offset in itertools.count():
        index = (begin + offset) % len(prompts)
        try:
            more = prompts.rows[index].input_ids
        except BadRow:
            if offset == len(prompts) - 1 and not ids:
                raise
            continue
        if not ids and len(more) >= count:
            end = len(more) - again * count % (len(more) - count + 1)
            return tuple(more[end - count : end])
        ids += more
        if len(ids) >= count + again:
            return tuple(ids[again : count + again])
    raise AssertionError("a data set has at least one row")


def _prompts_of_text(prompts: PromptDataset) -> int:
    """How many prompts make TEXT_TOKENS, by the first that can be used."""
    for row in range(len(prompts)):
        with contextlib.suppress(BadRow):
            return -(-TEXT_TOKENS // len(prompts.rows[row].input_ids))
    return 1


def _response_texts(responses: Sequence[Trajectory], place: int, count: int) -> list[tuple[int, ...]]:
    """At most TEXTS / 2 texts of `count` ids: ends of prompts with their responses, several
    where they are short.

    A prompt's samples may be the same tokens, which are evidence once. So each prompt gives one, in
    one place alone.
    """
    ids: list[int] = []
    for sample in {sample.prompt_index: sample for sample in responses}.values():
        ids += torch.cat([sample.prompt_ids[-(count // 2) :], sample.output_ids])[:count].tolist()
    texts = [tuple(ids[start : start + count]) for start in range(0, len(ids) - count + 1, count)]
    return texts[place * TEXTS // 2 : (place + 1) * TEXTS // 2]
