"""Metrics of all microbatches and ranks as numbers, in one collective and one host read.

M microbatches, P packed partial values, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed import ProcessGroup

from megatron_rl_corr.core.metrics import Metric
from megatron_rl_corr.parallel.gather import all_gather_stacked

_COMBINE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def merge(parts: Iterable[dict[str, Metric]]) -> dict[str, Metric]:
    """Metrics of several microbatches [M] as one dict; every microbatch must hold the same names."""
    parts = list(parts)
    if not parts:
        return {}
    for part in parts[1:]:
        if part.keys() != parts[0].keys():
            raise ValueError(f"microbatches hold unlike metrics: {sorted(part.keys() ^ parts[0].keys())}")
    merged = {}
    for name, metric in parts[0].items():
        values = torch.stack([part[name].values for part in parts])
        merged[name] = type(metric)(_COMBINE[metric.reduction](values, dim=0))
    return merged


def all_gather_metrics(metrics: dict[str, Metric], group: ProcessGroup | None) -> dict[str, float]:
    """Every metric over the group, exact whatever its reduction: one gather of [P] values, one host read.

    Every rank of the group must hold the same names; they are packed in sorted order. A gather serves sums
    and extrema alike, and P is about 250: 250 kB at 128 ranks, 4 MB at 2048.
    """
    names = sorted(metrics)
    if not names:
        return {}
    packed = torch.cat([metrics[name].values for name in names])
    gathered = all_gather_stacked(packed, group)
    # One reduction of each kind over everything; each metric then reads its own.
    reduced = torch.stack([_COMBINE[kind](gathered, dim=0) for kind in ("sum", "max", "min")]).tolist()
    rows = dict(zip(("sum", "max", "min"), reduced, strict=True))
    numbers, start = {}, 0
    for name in names:
        stop = start + metrics[name].values.numel()
        numbers |= metrics[name].numbers(name, rows[metrics[name].reduction][start:stop])
        start = stop
    return numbers
