"""The columns of a sample file: Parquet tables of samples, and samples of a table's rows, bit for bit.

P prompt tokens, R response tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import torch

from megatron_rl_corr.engines.trajectory import MessageSpan, Support, TopLogprobs, Trajectory, VersionSpan

PER_TOKEN = {
    "loss_mask": torch.bool,
    "train_logprobs": torch.float32,
    "advantages": torch.float32,
}


@dataclass(frozen=True)
class Origin:
    """Where a response comes from. Example: Origin(group=812, row=40, label="17")."""

    group: int
    """The number of its group since the run's beginning."""
    row: int
    """The data set's row that its prompt is of."""
    label: Any = None
    """The row's label, as JSON has it."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A response and what is known of it after a step; None where it is not."""

    trajectory: Trajectory
    reward: float | None = None
    loss_mask: torch.Tensor | None = None
    """[R] bool: the response token enters the loss."""
    train_logprobs: torch.Tensor | None = None
    """[R] float32 of Megatron's pi_old, natural log."""
    advantages: torch.Tensor | None = None
    """[R] float32."""
    reward_parts: dict[str, float] | None = None
    """The named rewards that `reward` was made of, before their weights."""
    origin: Origin | None = None

    def __post_init__(self):
        for name, kind in PER_TOKEN.items():
            values = getattr(self, name)
            if values is None:
                continue
            if values.dim() != 1 or values.dtype != kind:
                raise ValueError(f"{name} must be 1-d {kind}, got {values.dim()}-d {values.dtype}")
            if values.numel() != self.trajectory.output_ids.numel():
                raise ValueError(
                    f"{self.trajectory.output_ids.numel()} output_ids have {values.numel()} {name}"
                )


FORMAT, VERSION = b"megatron_rl_corr.trajectories", b"1"
"""Key and value in the file's metadata; another value is another set of columns or another meaning of one."""


def _struct(**kinds: pa.DataType) -> pa.DataType:
    return pa.struct([pa.field(name, kind, False) for name, kind in kinds.items()])


SPAN = _struct(version=pa.string(), start=pa.int64(), end=pa.int64())
MESSAGE = _struct(role=pa.string(), start=pa.int64(), ended=pa.string())


def _many(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", kind, nullable=False))


ALWAYS = {
    "prompt_index": pa.int64(),
    "sample_index": pa.int64(),
    "server": pa.string(),
    "finish_reason": pa.string(),
    "cached_tokens": pa.int64(),
    "weight_versions": _many(SPAN),
    "prompt_ids": _many(pa.int64()),
    "output_ids": _many(pa.int64()),
    "rollout_logprobs": _many(pa.float32()),
}
IF_KNOWN = {
    "reward": pa.float64(),
    "loss_mask": _many(pa.bool_()),
    "train_logprobs": _many(pa.float32()),
    "advantages": _many(pa.float32()),
    "turn_ids": _many(pa.int64()),
    "support_ids": _many(pa.int32()),
    "support_lengths": _many(pa.int32()),
    "routed_experts": _many(pa.int16()),  # in C order
    "routed_experts_shape": _many(pa.int64()),
}
ADDED = {
    "environment_reward": pa.float64(),
    "routed_experts_bytes": pa.int64(),
    "indexer_keys": _many(pa.int16()),  # in C order
    "indexer_keys_shape": _many(pa.int64()),
    "indexer_keys_bytes": pa.int64(),
    "group": pa.int64(),
    "row": pa.int64(),
    "label": pa.string(),  # JSON
    "reward_parts": pa.map_(pa.string(), pa.float64()),
    "engine": pa.string(),
    "branch": pa.int64(),
    "began": pa.string(),
    "messages": _many(MESSAGE),
    "top_ids": _many(pa.int32()),  # K for each response token, one token after the other
    "top_logprobs": _many(pa.float32()),
}
"""Columns that files of this version may lack: written since, null where they are absent."""
CHOICES = ("routed_experts", "indexer_keys")
"""What servers chose for each token, in each layer."""
SCHEMA = pa.schema(
    [pa.field(name, kind, False) for name, kind in ALWAYS.items()]
    + [pa.field(*item) for item in (IF_KNOWN | ADDED).items()],
    metadata={FORMAT: VERSION},
)


def table_of(samples: list[Sample]) -> pa.Table:
    """A row for each sample, with the columns of SCHEMA."""
    rows = [sample.trajectory for sample in samples]
    values = {name: [getattr(row, name) for row in rows] for name in ALWAYS}
    values["weight_versions"] = [[vars(span) for span in row.weight_versions] for row in rows]
    values |= {name: [getattr(sample, name) for sample in samples] for name in ("reward", *PER_TOKEN)}
    values |= {
        name: [getattr(row, name) for row in rows]
        for name in ("turn_ids", "environment_reward", "engine", "branch", "began")
    }
    values["messages"] = [[vars(one) for one in row.messages] or None for row in rows]
    values["support_ids"] = [None if row.support is None else row.support.ids for row in rows]
    values["support_lengths"] = [None if row.support is None else row.support.lengths for row in rows]
    tops = [row.top_logprobs for row in rows]
    values["top_ids"] = [None if top is None else top.ids.flatten() for top in tops]
    values["top_logprobs"] = [None if top is None else top.logprobs.flatten() for top in tops]
    for name in CHOICES:
        ids = [getattr(row, name) for row in rows]
        values[name] = [None if one is None else one.flatten() for one in ids]
        values[f"{name}_bytes"] = [None if one is None else one.element_size() for one in ids]
        values[f"{name}_shape"] = [None if one is None else torch.tensor(one.shape) for one in ids]
    origins = [sample.origin for sample in samples]
    values |= {
        name: [None if one is None else getattr(one, name) for one in origins] for name in ("group", "row")
    }
    values["label"] = [None if one is None else json.dumps(one.label, default=str) for one in origins]
    values["reward_parts"] = [
        None if one.reward_parts is None else list(one.reward_parts.items()) for one in samples
    ]
    return pa.table([_array(values[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def _array(values: list, kind: pa.DataType) -> pa.Array:
    """A column of tensors goes over as one, without a Python object for a token."""
    if not pa.types.is_list(kind) or pa.types.is_struct(kind.value_type):
        return pa.array(values, kind)
    lengths = torch.tensor([0 if value is None else value.numel() for value in values])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    known = [value for value in values if value is not None]
    flat = pa.array(torch.cat(known).numpy() if known else [], kind.value_type)
    absent = pa.array([value is None for value in values]) if len(known) < len(values) else None
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), flat, type=kind, mask=absent)


def samples_of(table: pa.Table, path: object, first: int) -> Iterator[Sample]:
    """The samples of a table's rows. path, first: for errors, the file and the number of the
    table's first row.
    """
    there = set(table.column_names)
    columns = {name: _values(table[name]) if name in there else [None] * len(table) for name in SCHEMA.names}
    for row, cells in enumerate(zip(*columns.values(), strict=True), start=first):
        try:
            yield _sample(dict(zip(columns, cells, strict=True)))
        except ValueError as error:
            raise ValueError(f"{path}, row {row}: {error}") from error


def _values(column: pa.ChunkedArray) -> list:
    """A value, a tensor or None for each row."""
    kind = column.type
    if not pa.types.is_list(kind) or pa.types.is_struct(kind.value_type):
        return column.to_pylist()
    lists = column.combine_chunks()
    # A copy, so that one row does not keep the row group in memory.
    return [
        torch.from_numpy(lists[row].values.to_numpy(zero_copy_only=False).copy()) if valid else None
        for row, valid in enumerate(lists.is_valid().to_pylist())
    ]


def _sample(cells: dict) -> Sample:
    if None in [cells[name] for name in ALWAYS]:
        raise ValueError(f"{next(name for name in ALWAYS if cells[name] is None)} is null")
    for name, other in (
        ("support_ids", "support_lengths"),
        *((name, f"{name}_shape") for name in CHOICES),
        ("top_ids", "top_logprobs"),
    ):
        if (cells[name] is None) != (cells[other] is None):
            raise ValueError(f"of {name} and {other}, one is null")
    cells["weight_versions"] = _spans(cells["weight_versions"], cells["output_ids"].numel())
    support, lengths = cells.pop("support_ids"), cells.pop("support_lengths")
    cells["support"] = None if support is None else Support(support, lengths)
    top, logprobs = cells.pop("top_ids"), cells.pop("top_logprobs")
    cells["top_logprobs"] = None if top is None else _top(top, logprobs, cells["output_ids"].numel())
    for name in CHOICES:
        shape, ids = cells.pop(f"{name}_shape"), cells[name]
        size = cells.pop(f"{name}_bytes")
        if ids is not None:
            if ids.numel() != shape.prod():
                raise ValueError(f"{ids.numel()} {name} have the shape {shape.tolist()}")
            kind = torch.uint8 if size == 1 else torch.int16
            cells[name] = ids.to(kind).view(shape.tolist())
    # A file from before there were these columns.
    cells["engine"], cells["branch"] = cells["engine"] or "", cells["branch"] or 0
    cells["began"] = cells["began"] or ""
    tokens = cells["prompt_ids"].numel() + cells["output_ids"].numel()
    cells["messages"] = _messages(cells["messages"] or [], tokens)
    cells["reward_parts"] = None if cells["reward_parts"] is None else dict(cells["reward_parts"])
    group, row, label = (cells.pop(name) for name in ("group", "row", "label"))
    if group is not None:
        cells["origin"] = Origin(group, row, None if label is None else json.loads(label))
    own = {one.name: cells.pop(one.name) for one in fields(Sample) if one.name in cells}
    return Sample(Trajectory(**cells), **own)


def _messages(messages: list[dict], tokens: int) -> tuple[MessageSpan, ...]:
    starts = [one["start"] for one in messages]
    if starts != sorted(starts) or (starts and not 0 <= starts[0] <= starts[-1] <= tokens):
        raise ValueError(f"messages start at {starts}, which is no order within the {tokens} tokens")
    return tuple(MessageSpan(**one) for one in messages)


def _top(ids: torch.Tensor, logprobs: torch.Tensor, tokens: int) -> TopLogprobs:
    width = ids.numel() // max(tokens, 1)
    if not ids.numel() == logprobs.numel() == width * tokens:
        raise ValueError(
            f"{tokens} output_ids have {ids.numel()} top_ids and {logprobs.numel()} top_logprobs"
        )
    return TopLogprobs(ids.view(tokens, width), logprobs.view(tokens, width))


def _spans(spans: list[dict], tokens: int) -> tuple[VersionSpan, ...]:
    bounds = [0, *(span["end"] for span in spans)]
    if bounds[-1] != tokens or bounds[:-1] != [span["start"] for span in spans]:
        raise ValueError(f"weight_versions {spans} do not partition the {tokens} output_ids")
    return tuple(VersionSpan(**span) for span in spans)
