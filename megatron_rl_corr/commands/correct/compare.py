"""Compares corrections on samples that a run has saved: the metrics that each would have had. Trains nothing.

T response tokens of all samples together.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.observability.catalogue import catalogue, label_of, ordered, spec_of
from megatron_rl_corr.rollout.sample_file import Sample
from megatron_rl_corr.tables import readable, text_table

PREFIX = "rollout_corr/"


@dataclass(frozen=True)
class KeptBatch:
    """All samples as one batch, flat over tokens."""

    train_logprobs: torch.Tensor
    """[T] float32."""
    rollout_logprobs: torch.Tensor
    """[T] float32."""
    sampled: torch.Tensor
    """[T] bool: the policy's tokens."""
    seq_ids: torch.Tensor
    """[T] int64."""
    num_sequences: int
    turn_ids: torch.Tensor | None
    """[T] int64; None where every sample has one turn."""
    advantages: torch.Tensor | None
    """[T] float32; None where they were not kept."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "KeptBatch":
        """All tokens of the samples, one sample after the other.

        Args:
            samples: of one or several files of --rollout-save-trajectories.

        Raises:
            ValueError: there is no sample, or one without the trainer's log-probs.
        """
        if not samples:
            raise ValueError("there are no samples")
        without = sum(sample.train_logprobs is None for sample in samples)
        if without:
            raise ValueError(
                f"{without} of {len(samples)} samples have no train_logprobs: a run with "
                "--rollout-bypass-mode does not compute them; save samples of a run without it"
            )
        rows = [sample.trajectory for sample in samples]
        turns = None
        if any(row.turn_ids is not None for row in rows):
            turns = torch.cat(
                [
                    torch.zeros_like(row.output_ids) if row.turn_ids is None else row.turn_ids.clamp(min=0)
                    for row in rows
                ]
            )
        known = all(sample.advantages is not None for sample in samples)
        return cls(
            torch.cat([sample.train_logprobs for sample in samples]),
            torch.cat([row.rollout_logprobs for row in rows]),
            torch.cat([row.sampled for row in rows]),
            torch.repeat_interleave(torch.tensor([row.output_ids.numel() for row in rows])),
            len(rows),
            turns,
            torch.cat([sample.advantages for sample in samples]) if known else None,
        )

    def metrics(self, config: RolloutCorrectionConfig) -> dict[str, float]:
        """The correction's metrics by their logged names, without those that have no value (NaN).

        Args:
            config: the correction to try.

        Raises:
            ValueError: the configuration needs an input that the samples do not have.
        """
        turns = None if self.turn_ids is None else int(self.turn_ids.max()) + 1
        correction = compute_correction(
            self.train_logprobs,
            self.rollout_logprobs,
            self.sampled,
            self.seq_ids,
            num_sequences=self.num_sequences,
            config=config,
            turn_ids=self.turn_ids,
            num_turns=turns,
            advantages=self.advantages,
        )
        numbers: dict[str, float] = {}
        for name, metric in correction.metrics.items():
            numbers |= metric.numbers(f"{PREFIX}{name}", metric.values.tolist())
        return {name: value for name, value in numbers.items() if not math.isnan(value)}


def comparison(columns: Mapping[str, Mapping[str, float]]) -> str:
    """A text table: a row for each metric with `compared` in the catalogue, a column for each correction.

    Args:
        columns: metrics by the correction's name.
    """
    shown = {spec.name for spec in catalogue().values() if spec.compared}
    recorded = {name for numbers in columns.values() for name in numbers}
    shown |= {name for name in recorded if (spec := spec_of(name)) and spec.compared}
    rows = [("", *columns)]
    for name in ordered(shown):
        if not name.endswith("/"):  # a family has its members' rows
            cells = [readable(numbers.get(name)) for numbers in columns.values()]
            rows.append((label_of(name).removeprefix(PREFIX), *cells))
    return "\n".join(text_table(rows, align="l" + "r" * len(columns)))
