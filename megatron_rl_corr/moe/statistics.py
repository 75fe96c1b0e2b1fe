"""What each expert's tokens went through in a step: how many, their mismatch, their weights, their rejections.

N samples of this replica, L columns of this context-parallel rank, t of them that this rank's routers see, M layers
with experts of this rank, H layers of the model, k experts a token, E experts a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.core.metrics import Metric, Sum
from megatron_rl_corr.parallel.experts import all_gather_experts, all_reduce_scatter_experts, expert_sums
from megatron_rl_corr.parallel.layout import Layout

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.batch import RolloutBatch, TrainingTargets
    from megatron_rl_corr.moe.replay import Replay

FILE_NAME = "experts.jsonl"
VALUES = ("tokens", "log_ratio_abs_mean", "weight_mean", "rejected_fraction")
"""What is told of each expert: of its valid tokens, under the names of the file's keys."""


@dataclass(frozen=True)
class ExpertStatistics:
    """Makes a step's table [H, E] of each of VALUES, and has it told by the job's last rank."""

    replay: Replay
    layout: Layout
    tell: Callable[[int, dict[str, Tensor]], None] | None = None
    """tell(step, tables) on the last rank, beside the metrics."""

    def all_gather(self, batch: RolloutBatch, targets: TrainingTargets | None) -> Tensor:
        """[H, E, 4] float64 on every rank: tokens, sum of |log-ratio|, sum of weights, rejected tokens.

        Every rank calls it, after the pass for old log-probs. The last stage's values go down the pipeline once; each
        expert-parallel rank then reduces its own experts' rows, which are gathered only here, to be logged.
        """
        values = self._broadcast_values(batch, targets)
        shape, layers = self.replay.shape, list(self.replay.layers)
        table = values.new_zeros(shape.num_layers, shape.experts, len(VALUES), dtype=torch.float64)
        if layers:  # none on every rank of the groups, where a stage's layers are all dense
            own = all_reduce_scatter_experts(self._own_sums(values), self.layout.expert_groups)
            table[layers] = all_gather_experts(own, self.layout.expert_groups)
        if self.layout.pp_size > 1:
            dist.all_reduce(table, group=self.layout.pp_group)
        return table

    def _broadcast_values(self, batch: RolloutBatch, targets: TrainingTargets | None) -> Tensor:
        """[N, L, 4] float32 of each token: valid, |log-ratio|, weight, rejected; 0 where it is not valid."""
        values = batch.rollout_logprobs.new_empty(*batch.tokens.shape, len(VALUES))
        if targets is not None:
            correction = targets.correction
            difference = (targets.old_logprobs - batch.rollout_logprobs.reshape(-1)).abs()
            columns = [correction.valid, difference, correction.weights, correction.valid & ~correction.mask]
            columns = [torch.where(correction.valid, column, 0).float() for column in columns]
            values = torch.stack(columns, dim=1).view_as(values)
        if self.layout.pp_size > 1:
            last = dist.get_process_group_ranks(self.layout.pp_group)[-1]
            dist.broadcast(values, last, group=self.layout.pp_group)
        return values

    def _own_sums(self, values: Tensor) -> Tensor:
        """[M, E, 4] over the tokens that only this rank has."""
        tp = self.layout.tp_group
        if self.layout.sequence_parallel:
            values = values.chunk(tp.size(), dim=1)[tp.rank()]
        elif tp.rank() > 0:
            values = torch.zeros_like(values)  # tensor ranks hold the same tokens
        chosen = self.replay.chosen
        return expert_sums(chosen.flatten(0, 1), values.flatten(0, 1), self.replay.shape.experts)


def means(table: Tensor) -> dict[str, Tensor]:
    """[..., 4] sums -> VALUES by name, [...]; NaN where an expert has no token."""
    tokens, sizes, weights, rejected = table.unbind(dim=-1)
    return dict(zip(VALUES, (tokens, sizes / tokens, weights / tokens, rejected / tokens), strict=True))


def summary(table: Tensor, layers: tuple[int, ...]) -> dict[str, Metric]:
    """What is a curve of it: how uneven the experts' tokens are, and how uneven their mismatch."""
    table = table[list(layers)]
    tokens, ratio = table[..., 0], means(table)["log_ratio_abs_mean"]
    largest = (tokens.amax(dim=1) / tokens.mean(dim=1)).amax()
    worst = ratio.nan_to_num(0.0).amax()
    return {"experts/load_max": Sum(largest[None]), "experts/log_ratio_abs_mean_max": Sum(worst[None]),
            "experts/without_tokens": Sum((tokens == 0).sum(dtype=torch.float64)[None])}  # fmt: skip


class ExpertLog:
    """Appends a step's tables to experts.jsonl in `folder`, and draws them for TensorBoard: layers x experts."""

    def __init__(self, folder: str | None, layers: tuple[int, ...], writer: Callable[[], object]):
        self._path = None if folder is None else Path(folder) / FILE_NAME
        self._layers, self._writer = layers, writer

    def __call__(self, step: int, tables: dict[str, Tensor]) -> None:
        rows = {name: table[list(self._layers)].cpu() for name, table in tables.items()}
        if self._path is not None:
            plain = {name: [[_number(x) for x in row] for row in table.tolist()] for name, table in rows.items()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, "layers": self._layers, **plain}) + "\n")
        writer = self._writer()
        if writer is not None:
            for name, table in rows.items():
                writer.add_image(f"experts/{name}", heat_map(table), step, dataformats="HW")


def _number(value: float) -> float | None:
    """Of strict JSON: NaN, for an expert without tokens, is null."""
    return None if value != value else round(value, 9)


def heat_map(table: Tensor, *, pixels: int = 8) -> Tensor:
    """[H, E] -> [H * pixels, E * pixels] uint8: 0 at the least value and where there is none, 255 at the greatest."""
    low, high = table.nan_to_num(torch.inf).amin(), table.nan_to_num(-torch.inf).amax()
    scaled = ((table - low) / (high - low).clamp(min=1e-30) * 255).nan_to_num(0.0).clamp(0, 255).to(torch.uint8)
    return scaled.repeat_interleave(pixels, 0).repeat_interleave(pixels, 1)


METRICS = in_group(
    "Expert routing",
    MetricSpec(
        "experts/load_max", "tokens of the busiest expert, against its layer's mean",
        "max over layers of max(tokens) / mean(tokens)", only_with="--expert-statistics",
    ),
    MetricSpec(
        "experts/log_ratio_abs_mean_max",
        "largest mean disagreement of an expert's tokens; experts.jsonl says which",
        "max over experts of mean |D|", only_with="--expert-statistics",
    ),
    MetricSpec(
        "experts/without_tokens", "experts of all layers that no valid token went to", "count",
        only_with="--expert-statistics",
    ),
)
