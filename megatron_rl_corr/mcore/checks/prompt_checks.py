"""Opens the prompts of a run, and looks at them before the first is sampled: whether their rows
can be used at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from megatron_rl_corr.config.flags import warn
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat, PromptLimits
from megatron_rl_corr.data.prompts import PromptDataset
from megatron_rl_corr.data.rows import LongPrompt
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.reduce.layout import Layout

CHECKED_ROWS = 1000
"""Rows that are looked at where there are more, beside the first and the last of each source: those drawn
first, which are at random, and in few row groups.
"""
CHECKED_IDS = 100_000
"""Data of ids are looked at as a whole up to so many rows: nothing is to be tokenised."""


def training_prompts(
    options: RunConfig, args: argparse.Namespace, layout: Layout, tokenizer: Tokenizer | None, vocab_size: int
) -> PromptDataset | None:
    """The data of --rollout-prompts, after a look at its rows; None on ranks that ask for no samples.

    Args:
        options: the run's.
        args: Megatron's.
        layout: of the ranks.
        tokenizer: of --rollout-hf-checkpoint.
        vocab_size: of the model.

    Raises:
        ValueError: a source can't be read, a row that was looked at is bad, or all of them are too long.
    """
    drop = options.long_prompts == "drop"
    limits = prompt_limits(options, vocab_size=vocab_size, seq_length=args.seq_length, drop=drop)
    form = PromptFormat.of(options, tokenizer, limits)
    if not layout.is_data_leader:
        return None
    with naming_flag("--rollout-prompts"):
        prompts = open_prompts(options.prompts, form, seed=args.seed, weights=options.weights, warn=warn)
    checked, long = check_rows(prompts, "--rollout-prompts")
    if long and layout.dp_rank == 0:
        warn(
            f"--rollout-prompts: {len(long)} of the {checked} rows that were looked at are left out, as "
            f"`long_prompts` drop says; the first: {long[0]}"
        )
    for note in form.notes if layout.dp_rank == 0 else []:
        warn(f"--rollout-prompts: {note}")
    return prompts


def prompt_limits(options: RunConfig, *, vocab_size: int, seq_length: int, drop: bool) -> PromptLimits:
    """What prompts must keep to, so that the longest response fits into a row. The last sampled
    token is no input.

    Raises:
        ValueError: no prompt fits.
    """
    room = seq_length - options.max_new_tokens + 1
    words = f"--seq-length {seq_length} with `max_new_tokens` {options.max_new_tokens}"
    if options.maker is not None and options.maker.bounds_turns:  # one token is enough for a turn
        room, words = seq_length, f"--seq-length {seq_length}"
    if room < 1:
        raise ValueError(
            f"{words} has no room for a prompt; use --seq-length {options.max_new_tokens} or more, and add "
            "the length of the prompts to it"
        )
    if options.max_prompt_tokens is not None and options.max_prompt_tokens < room:
        room, words = options.max_prompt_tokens, f"`max_prompt_tokens` {options.max_prompt_tokens}"
    elif options.max_prompt_tokens is not None and options.max_prompt_tokens > room:
        raise ValueError(
            f"`max_prompt_tokens` {options.max_prompt_tokens} has no effect: {words} leaves {room}; drop it, "
            f"or use --seq-length {options.max_prompt_tokens + options.max_new_tokens - 1}"
        )
    return PromptLimits(vocab_size, room, words, options.max_new_tokens, drop)


def check_rows(prompts: PromptDataset, flag: str, *, all_rows: bool = False) -> tuple[int, list[LongPrompt]]:
    """Make prompts of all rows, or of CHECKED_ROWS and the ends of each source where there are more.

    Args:
        prompts: the data.
        flag: that names them, for messages.
        all_rows: of every row.

    Returns:
        (rows that were looked at, errors of those that are too long and left out).

    Raises:
        ValueError: one is bad, or all are too long.
    """
    with naming_flag(flag):
        whole = (
            all_rows or len(prompts) <= CHECKED_ROWS or (len(prompts) <= CHECKED_IDS and _has_ids(prompts))
        )
        chosen: Iterable[int] = range(len(prompts))
        if not whole:
            chosen = sorted({*prompts.ends, *(prompts.index_at(number) for number in range(CHECKED_ROWS))})
        errors = [_long(prompts, index) for index in chosen]
    long = [error for error in errors if error is not None]
    if len(long) == len(errors):
        raise ValueError(f"{flag}: all of the {len(long)} rows that were looked at are too long; {long[0]}")
    return len(errors), long


@contextmanager
def naming_flag(flag: str) -> Iterator[None]:
    """Put the flag before an error about the data, which names its file alone."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{flag}: {error}") from None


def _has_ids(prompts: PromptDataset) -> bool:
    """True if the first row that is not too long, of the first CHECKED_ROWS, has ids."""
    first = next((row for row in range(min(len(prompts), CHECKED_ROWS)) if _long(prompts, row) is None), None)
    return first is not None and prompts.rows[first].text is None


def _long(prompts: PromptDataset, index: int) -> LongPrompt | None:
    """The error of a row that is left out for its length."""
    try:
        prompts.rows[index]
    except LongPrompt as error:
        return error
    return None
