"""The Parquet file that a batch's samples are written to and read from.

A row of the file is one response; docs/reference/sample_file.md has its columns.
P prompt tokens, R response tokens, N samples, L tokens a row.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.files import atomic_writer
from megatron_rl_corr.rollout.sample_columns import (
    ADDED,
    FORMAT,
    SCHEMA,
    VERSION,
    Origin,
    Sample,
    samples_of,
    table_of,
)
from megatron_rl_corr.rollout.saved_batch import BATCH, SavedBatch, from_metadata

__all__ = [
    "Origin",
    "Sample",
    "SavedBatch",
    "read_batch",
    "read_sampling",
    "read_trajectories",
    "samples_of_rows",
    "write_trajectories",
]


def samples_of_rows(
    trajectories: Sequence[Trajectory],
    rewards: torch.Tensor | None = None,
    parts: Sequence[dict[str, float] | None] | None = None,
    origins: Sequence[Origin | None] | None = None,
    **rows: torch.Tensor,
) -> list[Sample]:
    """Samples of a batch whose position t of a row predicts token t + 1; on the CPU, sharing no
    memory with the rows.

    Args:
        trajectories: N responses.
        rewards: [N]; None: not known.
        parts: N times the named rewards; None: not known.
        origins: N; None: not known.
        rows: [N, L] each, L >= P + R - 1: fields of a Sample that have a value for each token (loss_mask,
            train_logprobs, advantages).

    Raises:
        ValueError: another N, or an L that is too short.
    """
    count = len(trajectories)
    rows = {name: values.cpu() for name, values in rows.items()}
    for name, values in {"rewards": rewards, "parts": parts, "origins": origins, **rows}.items():
        if values is not None and len(values) != count:
            raise ValueError(f"{count} trajectories have {len(values)} rows of {name}")
    samples = []
    for index, trajectory in enumerate(trajectories):
        first = trajectory.prompt_ids.numel() - 1
        part = slice(first, first + trajectory.output_ids.numel())
        own = {name: values[index, part].clone() for name, values in rows.items()}
        own["reward"] = None if rewards is None else float(rewards[index])
        own["reward_parts"] = None if parts is None else parts[index]
        own["origin"] = None if origins is None else origins[index]
        samples.append(Sample(trajectory, **own))
    return samples


SAMPLING = b"megatron_rl_corr.sampling"
MOST_IDS = (1 << 31) - 1
"""Keys of a row group: Arrow counts those of a column of lists in 32 bits."""
"""Key in the file's metadata: the parameters that all responses were sampled with, as JSON."""
TOKENS_PER_GROUP = 1 << 18
"""A row group ends with the response that reaches so many tokens: what a reader holds at a time."""


def write_trajectories(
    path: str | os.PathLike,
    samples: Iterable[Sample],
    *,
    sampling: SamplingParams | None = None,
    batch: SavedBatch | None = None,
    tokens_per_group: int = TOKENS_PER_GROUP,
    compression: str = "zstd",
) -> Path:
    """Write the samples to a Parquet file, one row a response; an older file stays until the
    new one is whole.

    Args:
        path: of the file; its folder must exist.
        samples: may be a generator: at most one row group of them is held at a time.
        sampling: parameters that all of them were sampled with, written but for their `keys`. Their log-probs
            are of the softmax at its temperature, over the sampling mask's ids where one is kept. None: not
            known.
        batch: which samples they are; None: not known.
        tokens_per_group: a row group ends with the response that reaches so many tokens.
        compression: one of Parquet's, which a reader learns from the file.

    Returns:
        The path.
    """
    path = Path(path)
    sampling = sampling and replace(sampling, keys=None)
    known = {
        key: json.dumps(asdict(one)).encode() for key, one in ((SAMPLING, sampling), (BATCH, batch)) if one
    }
    schema = SCHEMA.with_metadata({**SCHEMA.metadata, **known})
    with atomic_writer(path) as file, pq.ParquetWriter(file, schema, compression=compression) as writer:
        for group in _groups(samples, tokens_per_group):
            table = table_of(group).replace_schema_metadata(schema.metadata)
            writer.write_table(table, row_group_size=len(group))
    return path


def read_trajectories(
    path: str | os.PathLike, *, row_groups: Iterable[int] | None = None, for_people: bool = False
) -> Iterator[Sample]:
    """The samples in the order of the file, read one row group at a time.

    Args:
        path: a file of `write_trajectories`.
        row_groups: which of them to read, numbered from 0; None: all.
        for_people: leave out the sets of ids that tokens were drawn from, the likeliest ids and the
            routed experts, most of a file.

    Raises:
        ValueError: it names the file, and the row if one is wrong: not a file of `write_trajectories`,
            another version, a column that is missing or has another type, or lengths or version spans
            that do not fit.
    """
    names = [
        name
        for name in SCHEMA.names
        if not (for_people and name.startswith(("support_", "routed_", "indexer_", "top_")))
    ]
    with _opened(path) as file:
        firsts = [0]
        for group in range(file.num_row_groups):
            firsts.append(firsts[-1] + file.metadata.row_group(group).num_rows)
        for group in range(file.num_row_groups) if row_groups is None else row_groups:
            if not 0 <= group < file.num_row_groups:
                raise ValueError(f"{path} has row groups 0 to {file.num_row_groups - 1}, got {group}")
            try:
                columns = file.read_row_group(group, names).combine_chunks()
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path}, row group {group}: cannot be read: {error}") from error
            yield from samples_of(columns, path, firsts[group])


def read_sampling(path: str | os.PathLike) -> SamplingParams | None:
    """The parameters that the file's responses were sampled with; None where the file has none.

    Raises:
        ValueError: as `read_trajectories`, or the parameters cannot be read.
    """
    return _from_metadata(path, SAMPLING, SamplingParams)


def read_batch(path: str | os.PathLike) -> SavedBatch | None:
    """Which samples the file holds; None for a file of before this was written.

    Raises:
        ValueError: as `read_trajectories`, or what the file has cannot be read.
    """
    return _from_metadata(path, BATCH, SavedBatch)


def _from_metadata[Kept](path: str | os.PathLike, key: bytes, kind: type[Kept]) -> Kept | None:
    with _opened(path) as file:
        return from_metadata(file.schema_arrow.metadata, key, kind, path)


def _groups(samples: Iterable[Sample], tokens_per_group: int) -> Iterator[list[Sample]]:
    group, tokens, ids = [], 0, 0
    for sample in samples:
        keys = sample.trajectory.indexer_keys
        own = 0 if keys is None else keys.numel()
        if group and ids + own > MOST_IDS:
            yield group
            group, tokens, ids = [], 0, 0
        group.append(sample)
        ids += own
        tokens += sample.trajectory.prompt_ids.numel() + sample.trajectory.output_ids.numel()
        if tokens >= tokens_per_group:
            yield group
            group, tokens, ids = [], 0, 0
    if group:
        yield group


def _opened(path: str | os.PathLike) -> pq.ParquetFile:
    """Checked to be a file of this version with all columns."""
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    found = (file.schema_arrow.metadata or {}).get(FORMAT)
    if found != VERSION:
        content = (
            "holds no trajectories" if found is None else f"has trajectories of version {found.decode()}"
        )
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
