"""The flags of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megatron_rl_corr.config.fields import Between, Options, Positive, option


@dataclass(frozen=True, kw_only=True)
class LedgerConfig(Options):
    """Ledger: what the mismatch of a batch comes from, in parts that add up to it."""

    acts_in_replay = False

    ledger_interval: Annotated[int | None, Positive()] = option(None, metavar="N")
    """In the first batch and every N-th after it, split the log-ratio of a few samples' tokens into parts
    that add up to it: staleness, routing, the output layer's number type, rounding of pushed weights, the
    server's decoding, the rest. Each part takes a forward pass of these samples. Each rank keeps its weights
    of the version before in the host's memory, with `max_lag` K those of up to K + 1.
    """

    ledger_share: Annotated[float, Between(0, 1)] = option(1 / 64, metavar="X", needs="ledger_interval")
    """Share of a batch's samples that the ledger takes, whole ones, drawn by --seed; of each replica as many
    as have 1024 tokens at least. A pass of it costs about X / 3 of the training pass.
    """


OPTIONS = LedgerConfig
