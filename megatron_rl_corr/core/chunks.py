"""The tokens of a batch in chunks, each with its moment table, so that memory hardly grows with the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.decisions import fill_token_verdicts
from megatron_rl_corr.core.diagnostics import fill_base_rows
from megatron_rl_corr.core.moments import MomentTable
from megatron_rl_corr.core.second_moment import all_reduce_kept_bins
from megatron_rl_corr.core.tokens import Tokens

if TYPE_CHECKING:
    from megatron_rl_corr.parallel.groups import ParallelGroups

CHUNK_TOKENS = 1 << 17
"""Tokens whose moment table is held at once: 40 rows of float64 are 42 MB then, however many tokens there are."""


class FilledChunks:
    """Each chunk of the tokens: its slice, what is known of it, and its table with `fill_token_verdicts`.

    The table of a batch of one chunk is kept from one pass to the next; those of several are made anew, for memory.
    """

    def __init__(
        self, config: RolloutCorrectionConfig, tokens: Tokens, names: tuple[str, ...], groups: ParallelGroups | None
    ):
        self._config, self._tokens, self._names = config, tokens, names
        self._spans, self._only, self._m2_bins = list(tokens.spans(CHUNK_TOKENS)), None, None
        if config.rollout_m2_threshold is not None:
            chunks = (tokens.part(rows) for rows in self._spans)
            self._m2_bins = all_reduce_kept_bins(chunks, config.rollout_m2_threshold, groups)

    def __iter__(self) -> Iterator[tuple[slice, Tokens, MomentTable]]:
        for rows in self._spans:
            chunk = self._tokens.part(rows)
            table = self._only or self._filled(chunk)
            if len(self._spans) == 1:
                self._only = table
            yield rows, chunk, table

    def _filled(self, chunk: Tokens) -> MomentTable:
        table = MomentTable(self._names, len(chunk.train), chunk.train.device)
        fill_base_rows(table, chunk)
        fill_token_verdicts(self._config, table, self._m2_bins)
        return table
