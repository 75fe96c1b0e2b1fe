"""Samples: a response and what a step made of it, and the Parquet file that they are written to and read from.

A row of the file is one response; docs/reference/sample_file.md has its columns.
P prompt tokens, R response tokens, N samples, L tokens a row.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megatron_rl_corr.engines.trajectory import SamplingParams, Support, Trajectory, VersionSpan
from megatron_rl_corr.files import atomic_writer

PER_TOKEN = {
    "loss_mask": torch.bool, "train_logprobs": torch.float32, "advantages": torch.float32,
}  # fmt: skip


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

    def __post_init__(self):
        for name, kind in PER_TOKEN.items():
            values = getattr(self, name)
            if values is None:
                continue
            if values.dim() != 1 or values.dtype != kind:
                raise ValueError(f"{name} must be 1-d {kind}, got {values.dim()}-d {values.dtype}")
            if values.numel() != self.trajectory.output_ids.numel():
                raise ValueError(f"{self.trajectory.output_ids.numel()} output_ids have {values.numel()} {name}")


def samples_of_rows(
    trajectories: Sequence[Trajectory], rewards: torch.Tensor | None = None,
    parts: Sequence[dict[str, float]] | None = None, **rows: torch.Tensor,
) -> list[Sample]:
    """Samples of a batch whose position t of a row predicts token t + 1; on the CPU, sharing no memory with the rows.

    Args:
        trajectories: N responses.
        rewards: [N]; None: not known.
        parts: N times the named rewards; None: not known.
        rows: [N, L] each, L >= P + R - 1: fields of a Sample that have a value for each token (loss_mask,
            train_logprobs, advantages).

    Raises:
        ValueError: another N, or an L that is too short.
    """
    count = len(trajectories)
    rows = {name: values.cpu() for name, values in rows.items()}
    for name, values in {"rewards": rewards, "parts": parts, **rows}.items():
        if values is not None and len(values) != count:
            raise ValueError(f"{count} trajectories have {len(values)} rows of {name}")
    samples = []
    for index, trajectory in enumerate(trajectories):
        first = trajectory.prompt_ids.numel() - 1
        part = slice(first, first + trajectory.output_ids.numel())
        own = {name: values[index, part].clone() for name, values in rows.items()}
        own["reward"] = None if rewards is None else float(rewards[index])
        own["reward_parts"] = None if parts is None else parts[index]
        samples.append(Sample(trajectory, **own))
    return samples


FORMAT, VERSION = b"megatron_rl_corr.trajectories", b"1"
"""Key and value in the file's metadata; another value is another set of columns or another meaning of one."""
SAMPLING = b"megatron_rl_corr.sampling"
"""Key in the file's metadata: the parameters that all responses were sampled with, as JSON."""
TOKENS_PER_GROUP = 1 << 18
"""A row group ends with the response that reaches so many tokens: what a reader holds at a time."""


SPAN = pa.struct([pa.field(name, kind, False) for name, kind in
                  (("version", pa.string()), ("start", pa.int64()), ("end", pa.int64()))])  # fmt: skip


def _many(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", kind, nullable=False))


ALWAYS = {
    "prompt_index": pa.int64(), "sample_index": pa.int64(), "server": pa.string(), "finish_reason": pa.string(),
    "cached_tokens": pa.int64(), "weight_versions": _many(SPAN), "prompt_ids": _many(pa.int64()),
    "output_ids": _many(pa.int64()), "rollout_logprobs": _many(pa.float32()),
}  # fmt: skip
IF_KNOWN = {
    "reward": pa.float64(), "loss_mask": _many(pa.bool_()), "train_logprobs": _many(pa.float32()),
    "advantages": _many(pa.float32()), "turn_ids": _many(pa.int64()), "support_ids": _many(pa.int32()),
    "support_lengths": _many(pa.int32()), "routed_experts": _many(pa.int16()),  # in C order
    "routed_experts_shape": _many(pa.int64()),
}  # fmt: skip
ADDED = {
    "environment_reward": pa.float64(), "routed_experts_bytes": pa.int64(),
    "reward_parts": pa.map_(pa.string(), pa.float64()),
}  # fmt: skip
"""Columns that files of this version may lack: written since, null where they are absent."""
SCHEMA = pa.schema(
    [pa.field(name, kind, False) for name, kind in ALWAYS.items()]
    + [pa.field(*item) for item in (IF_KNOWN | ADDED).items()],
    metadata={FORMAT: VERSION},
)


def write_trajectories(
    path: str | os.PathLike, samples: Iterable[Sample], *, sampling: SamplingParams | None = None,
    tokens_per_group: int = TOKENS_PER_GROUP,
) -> Path:
    """Write the samples to a Parquet file, one row a response; an older file stays until the new one is whole.

    Args:
        path: of the file; its folder must exist.
        samples: may be a generator: at most one row group of them is held at a time.
        sampling: parameters that all of them were sampled with. Their log-probs are of the softmax at its temperature,
            over the sampling mask's ids where one is kept. None: not known.
        tokens_per_group: a row group ends with the response that reaches so many tokens.

    Returns:
        The path.
    """
    path = Path(path)
    schema = SCHEMA
    if sampling is not None:
        schema = SCHEMA.with_metadata({**SCHEMA.metadata, SAMPLING: json.dumps(asdict(sampling)).encode()})
    with atomic_writer(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for group in _groups(samples, tokens_per_group):
            table = _table(group).replace_schema_metadata(schema.metadata)
            writer.write_table(table, row_group_size=len(group))
    return path


def read_trajectories(path: str | os.PathLike, *, row_groups: Iterable[int] | None = None) -> Iterator[Sample]:
    """The samples in the order of the file, read one row group at a time.

    Args:
        path: a file of `write_trajectories`.
        row_groups: which of them to read, numbered from 0; None: all.

    Raises:
        ValueError: it names the file, and the row if one is wrong: not a file of `write_trajectories`, another version,
            a column that is missing or has another type, or lengths or version spans that do not fit.
    """
    with _opened(path) as file:
        firsts = [0]
        for group in range(file.num_row_groups):
            firsts.append(firsts[-1] + file.metadata.row_group(group).num_rows)
        for group in range(file.num_row_groups) if row_groups is None else row_groups:
            if not 0 <= group < file.num_row_groups:
                raise ValueError(f"{path} has row groups 0 to {file.num_row_groups - 1}, got {group}")
            try:
                columns = file.read_row_group(group, list(SCHEMA.names)).combine_chunks()
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path}, row group {group}: cannot be read: {error}") from error
            yield from _samples(columns, path, firsts[group])


def read_sampling(path: str | os.PathLike) -> SamplingParams | None:
    """The parameters that the file's responses were sampled with; None where the file has none.

    Raises:
        ValueError: as `read_trajectories`, or the parameters cannot be read.
    """
    with _opened(path) as file:
        kept = file.schema_arrow.metadata.get(SAMPLING)
    if kept is None:
        return None
    try:
        return SamplingParams(**json.loads(kept))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} has a {SAMPLING.decode()} in its metadata that cannot be read: {error}") from error


def _groups(samples: Iterable[Sample], tokens_per_group: int) -> Iterator[list[Sample]]:
    group, tokens = [], 0
    for sample in samples:
        group.append(sample)
        tokens += sample.trajectory.prompt_ids.numel() + sample.trajectory.output_ids.numel()
        if tokens >= tokens_per_group:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _table(samples: list[Sample]) -> pa.Table:
    rows = [sample.trajectory for sample in samples]
    values = {name: [getattr(row, name) for row in rows] for name in ALWAYS}
    values["weight_versions"] = [[vars(span) for span in row.weight_versions] for row in rows]
    values |= {name: [getattr(sample, name) for sample in samples] for name in ("reward", *PER_TOKEN)}
    values["reward_parts"] = [None if one.reward_parts is None else list(one.reward_parts.items()) for one in samples]
    values |= {name: [getattr(row, name) for row in rows] for name in ("turn_ids", "environment_reward")}
    values["support_ids"] = [None if row.support is None else row.support.ids for row in rows]
    values["support_lengths"] = [None if row.support is None else row.support.lengths for row in rows]
    routes = [row.routed_experts for row in rows]
    values["routed_experts"] = [None if route is None else route.flatten() for route in routes]
    values["routed_experts_bytes"] = [None if route is None else route.element_size() for route in routes]
    values["routed_experts_shape"] = [None if route is None else torch.tensor(route.shape) for route in routes]
    return pa.table([_array(values[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def _array(values: list, kind: pa.DataType) -> pa.Array:
    """A column of tensors goes over as one, without a Python object for a token."""
    if not pa.types.is_list(kind) or kind.value_type == SPAN:
        return pa.array(values, kind)
    lengths = torch.tensor([0 if value is None else value.numel() for value in values])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    known = [value for value in values if value is not None]
    flat = pa.array(torch.cat(known).numpy() if known else [], kind.value_type)
    absent = pa.array([value is None for value in values]) if len(known) < len(values) else None
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), flat, type=kind, mask=absent)


def _opened(path: str | os.PathLike) -> pq.ParquetFile:
    """Checked to be a file of this version with all columns."""
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    found = (file.schema_arrow.metadata or {}).get(FORMAT)
    if found != VERSION:
        content = "holds no trajectories" if found is None else f"has trajectories of version {found.decode()}"
        file.close()
        raise ValueError(f"{path} {content}; this package reads version {VERSION.decode()}")
    for field in SCHEMA:
        index = file.schema_arrow.get_field_index(field.name)
        if index < 0 and field.name in ADDED:
            continue
        if index < 0 or file.schema_arrow.field(index).type != field.type:
            kind = "no column" if index < 0 else f"{file.schema_arrow.field(index).type} in column"
            file.close()
            raise ValueError(f"{path} has {kind} {field.name}; it must be {field.type}")
    return file


def _samples(table: pa.Table, path: str | os.PathLike, first: int) -> Iterator[Sample]:
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
    if not pa.types.is_list(kind) or kind.value_type == SPAN:
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
    for name, other in (("support_ids", "support_lengths"), ("routed_experts", "routed_experts_shape")):
        if (cells[name] is None) != (cells[other] is None):
            raise ValueError(f"of {name} and {other}, one is null")
    cells["weight_versions"] = _spans(cells["weight_versions"], cells["output_ids"].numel())
    support, lengths = cells.pop("support_ids"), cells.pop("support_lengths")
    cells["support"] = None if support is None else Support(support, lengths)
    shape, routes = cells.pop("routed_experts_shape"), cells["routed_experts"]
    size = cells.pop("routed_experts_bytes")
    if routes is not None:
        if routes.numel() != shape.prod():
            raise ValueError(f"{routes.numel()} routed_experts have the shape {shape.tolist()}")
        kind = torch.uint8 if size == 1 else torch.int16
        cells["routed_experts"] = routes.to(kind).view(shape.tolist())
    cells["reward_parts"] = None if cells["reward_parts"] is None else dict(cells["reward_parts"])
    own = {field.name: cells.pop(field.name) for field in fields(Sample) if field.name != "trajectory"}
    return Sample(Trajectory(**cells), **own)


def _spans(spans: list[dict], tokens: int) -> tuple[VersionSpan, ...]:
    bounds = [0, *(span["end"] for span in spans)]
    if bounds[-1] != tokens or bounds[:-1] != [span["start"] for span in spans]:
        raise ValueError(f"weight_versions {spans} do not partition the {tokens} output_ids")
    return tuple(VersionSpan(**span) for span in spans)
