"""A step's table of every expert: its tokens, their mismatch, their weights and their rejections.

T tokens of this context-parallel rank, L layers with experts of this rank, H layers of the model, K
experts a token, E experts a layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.metric_spec import MetricSpec, in_group
from megatron_rl_corr.files import open_to_append
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.experts import expert_sums, scatter_expert_sums, whole_expert_sums
from megatron_rl_corr.reduce.layout import Layout
from megatron_rl_corr.reduce.metrics import Metric, Sum

FILE_NAME = "experts.jsonl"
COLUMNS = {
    "tokens": "Tokens",
    "log_ratio_abs_mean": "Mean |log-ratio|",
    "weight_mean": "Mean weight",
    "rejected_fraction": "Rejected fraction",
}
"""The file's numbers of each expert, over its valid tokens: key -> title."""


def token_values(valid: Tensor, log_ratio: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """[T, 4] float32 of each token: valid, |log-ratio|, weight, rejected; all 0 where it is not valid.

    Args:
        valid: [T] bool.
        log_ratio: [T] float32, log pi_old - log pi_rollout; anything where not valid.
        weights: [T] importance weights.
        mask: [T] bool, tokens that no rule rejected.
    """
    columns = [valid, log_ratio.abs(), weights, valid & ~mask]
    return torch.stack([torch.where(valid, column, 0).float() for column in columns], dim=1)


@collective
def expert_table(
    values: Tensor,
    chosen: Tensor,
    seen: Tensor,
    *,
    layers: tuple[int, ...],
    num_layers: int,
    num_experts: int,
    layout: Layout,
) -> Tensor:
    """Sums of the tokens' values over every expert of the model; every rank calls it.

    The last stage's values go down the pipeline once; each expert-parallel rank then reduces its own experts'
    rows, which are gathered only here, to be logged.

    Args:
        values: [T, 4] float32, `token_values` on the last stage; on others anything of this shape.
        chosen: [T, L, K], the experts that the tokens went to.
        seen: [T] bool, the tokens that this rank's routers saw; the others are another
            tensor-parallel rank's.
        layers: this rank's L layers, numbered in the whole model.
        num_layers: H.
        num_experts: E.
        layout: this rank's process groups.

    Returns:
        [H, E, 4] float64: tokens, sum of |log-ratio|, sum of weights, rejected tokens.
    """
    if layout.pp_size > 1:
        dist.broadcast(values, layout.last_stage_rank, group=layout.pp_group)
    table = values.new_zeros(num_layers, num_experts, len(COLUMNS), dtype=torch.float64)
    if layers:  # none on every rank of the groups, where a stage's layers are all dense
        # Without sequence parallelism tensor ranks see the same tokens.
        mine = seen if layout.sequence_parallel or layout.tp_group.rank() == 0 else torch.zeros_like(seen)
        sums = expert_sums(chosen, torch.where(mine[:, None], values, 0), num_experts)
        own = scatter_expert_sums(sums, layout.expert_groups)
        table[list(layers)] = whole_expert_sums(own, layout.expert_groups)
    if layout.pp_size > 1:
        dist.all_reduce(table, group=layout.pp_group)
    return table


def means(table: Tensor) -> dict[str, Tensor]:
    """[..., 4] sums -> the COLUMNS by name, [...] each; NaN where an expert has no token."""
    tokens, sizes, weights, rejected = table.unbind(dim=-1)
    return dict(zip(COLUMNS, (tokens, sizes / tokens, weights / tokens, rejected / tokens), strict=True))


def summary(table: Tensor, layers: tuple[int, ...]) -> dict[str, Metric]:
    """Curves of a table [H, E, 4]: how uneven the experts' tokens are, and how uneven their mismatch."""
    table = table[list(layers)]
    tokens, ratio = table[..., 0], means(table)["log_ratio_abs_mean"]
    largest = (tokens.amax(dim=1) / tokens.mean(dim=1)).amax()
    worst = ratio.nan_to_num(0.0).amax()
    return {
        "experts/load_max": Sum(largest[None]),
        "experts/log_ratio_abs_mean_max": Sum(worst[None]),
        "experts/without_tokens": Sum((tokens == 0).sum(dtype=torch.float64)[None]),
    }


class ExpertLog:
    """Appends a step's tables to experts.jsonl in `folder`, and draws them for TensorBoard:
    layers x experts.
    """

    def __init__(self, folder: str | None, writer: Callable[[], object]):
        """Write to experts.jsonl in `folder` (None: no file) and to what writer() returns,
        TensorBoard's or None.
        """
        self._path = None if folder is None else Path(folder) / FILE_NAME
        self._writer = writer

    def write(self, step: int, layers: tuple[int, ...], tables: dict[str, Tensor]) -> None:
        """Append one step's tables.

        Args:
            step: counted from 1.
            layers: those with experts.
            tables: [H, E] each, by the names in COLUMNS; rows of other layers are not written.

        Raises:
            OSError: the file can't be written.
        """
        rows = {name: table[list(layers)].cpu() for name, table in tables.items()}
        if self._path is not None:
            plain = {
                name: [[_json_number(x) for x in row] for row in table.tolist()]
                for name, table in rows.items()
            }
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open_to_append(self._path) as file:
                    file.write(json.dumps({"step": step, "layers": layers, **plain}) + "\n")
            except OSError as error:
                raise OSError(f"`log_dir` {self._path.parent}: {error}") from error
        writer = self._writer()
        if writer is not None:
            for name, table in rows.items():
                writer.add_image(f"experts/{name}", heat_map(table), step, dataformats="HW")


def _json_number(value: float) -> float | None:
    """NaN, of an expert without tokens, becomes null: strict JSON has no NaN."""
    return None if value != value else round(value, 9)


def heat_map(table: Tensor, *, pixels: int = 8) -> Tensor:
    """[H, E] -> [H * pixels, E * pixels] uint8: 255 at the largest value, 0 at the smallest and for NaN."""
    low, high = table.nan_to_num(torch.inf).amin(), table.nan_to_num(-torch.inf).amax()
    scaled = (
        ((table - low) / (high - low).clamp(min=1e-30) * 255).nan_to_num(0.0).clamp(0, 255).to(torch.uint8)
    )
    return scaled.repeat_interleave(pixels, 0).repeat_interleave(pixels, 1)


METRICS = in_group(
    "Expert routing",
    MetricSpec(
        "experts/load_max",
        "tokens of the busiest expert, against its layer's mean",
        "max over layers of max(tokens) / mean(tokens)",
        only_with="--expert-statistics",
    ),
    MetricSpec(
        "experts/log_ratio_abs_mean_max",
        "largest mean disagreement of an expert's tokens; experts.jsonl says which",
        "max over experts of mean |D|",
        only_with="--expert-statistics",
    ),
    MetricSpec(
        "experts/without_tokens",
        "experts of all layers that no valid token went to",
        "count",
        only_with="--expert-statistics",
    ),
)
