"""The flags of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.fields import Between, Options, Positive, option
from megatron_rl_corr.config.problems import Refusal


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

    ledger_layouts: Literal["off", "on"] = option("off", needs="ledger_interval")
    """on: where the rest is more than rounding, try weights in wrong places as causes too: gate and up
    exchanged, query heads in another order, a bias or sinks that one side leaves out, and more, of all layers
    or of some. Up to 60 passes more, and 3 a layer where nothing explains the rest: for the first steps of a
    model, as `megatron-rl-corr accept` has them.
    """

    ledger_top: Annotated[int | None, Positive("64, for example")] = option(
        None, metavar="K", needs="ledger_interval"
    )
    """Ask servers for the K likeliest ids at each of these tokens too, and bound how far the two
    distributions are apart: what sampled tokens do not show. Answers have about 30 bytes for each of K ids
    at each token, prompts included.
    """

    def check_ledger_top(self) -> None:
        """ValueError for lists that no server is asked for, or that the trainer has no log-probs of."""
        if self.ledger_top is None:
            return
        refused = {
            f"`temperature` {self.temperature:g}: servers score at temperature 1": self.temperature != 1,
            "`top_p`, `top_k` or `min_p`: servers score over the whole vocabulary": (
                self.top_p < 1 or self.top_k > 0 or self.min_p > 0
            ),
            "`colocate`: servers have no memory while the trainer computes": self.colocate,
            "`linear_logprobs`, which gives log-probs of the sampled ids alone": self.linear_logprobs,
        }
        given = [text for text, is_given in refused.items() if is_given]
        if given:
            raise Refusal(
                f"`ledger_top` {self.ledger_top} has no effect with {text}; drop one of them"
                for text in given
            )


OPTIONS = LedgerConfig
