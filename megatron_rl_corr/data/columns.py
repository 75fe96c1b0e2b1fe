"""Rows of Parquet files and of Hugging Face `datasets` folders, read with pyarrow a part at a time."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl_corr.data.arrow_values import ReadColumn, columns_of
from megatron_rl_corr.data.rows import BadRow, Stamp, digest_of

CACHE_BYTES = 1 << 29
"""Decoded row groups of one Parquet source that are kept; at least one is. A multiple of
order.WINDOW_BYTES: values are larger decoded than in the file.
"""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""How an Arrow stream ends: one that was cut between two batches is read without an error."""
_NAMED_FILES = 3
_SHARD = re.compile(r"(.*-)(\d+)(-of-)(\d+)(.*)")
_SPLITS = re.compile(r"(?:^|[-_.])(train|test|validation|valid|val|dev|eval)(?=[-_.]|$)")


class ParquetRows:
    """The rows of Parquet files, one behind another. A row group is decoded as a whole, when a
    row of it is read.

    Args:
        paths: of the files, in their order.
        path: what the user gave: a file, or the folder that they are in.

    Raises:
        ValueError: a file is no Parquet, or has other columns than the first.
    """

    fills_nulls = True

    def __init__(self, paths: list[Path], path: str | Path):
        self.path, self.groups, self.left_out = str(path), [], set()
        self._files, self._stamps = [str(one) for one in paths], [Stamp(str(one)) for one in paths]
        self._places: list[tuple[int, int]] = []
        """File and row group within it of each of `groups`."""
        self._firsts: list[int] = []
        """The row that each file begins with."""
        self._columns: list[list[ReadColumn]] = []
        """Those of each file that are read."""
        self._leaves: list[list[str]] = []
        """Their paths in each file."""
        names, rows, left_out = None, 0, []
        for place, file in enumerate(self._files):
            try:
                metadata = pq.read_metadata(file)
            except pa.ArrowException as error:  # also for a type that it does not know
                raise ValueError(
                    f"{file}: not a Parquet file that can be read: {error}; write it anew, with types that "
                    f"pyarrow {pa.__version__} reads"
                ) from None
            schema = metadata.schema.to_arrow_schema()
            if names is None:
                names, first = sorted(schema.names), file
            elif sorted(schema.names) != names:
                other = ", ".join(sorted(set(schema.names) ^ set(names)))
                raise ValueError(
                    f"{file}: has not the columns of {first} ({other}); give them as data of their own"
                )
            columns = columns_of(schema)
            left_out += [one for column in columns for one in column.left_out]
            self.left_out |= {column.name for column in columns if column.left_out}
            self._columns.append([column for column in columns if column.read is not None])
            self._leaves.append(_leaves(metadata, columns))
            self._firsts.append(rows)
            for group in range(metadata.num_row_groups):
                part = metadata.row_group(group)
                if part.num_rows:
                    size = sum(
                        part.column(number).total_uncompressed_size for number in range(part.num_columns)
                    )
                    self.groups.append((part.num_rows, size))
                    self._places.append((place, group))
            rows += metadata.num_rows
        if not rows:
            raise ValueError(f"{self.path}: no prompts in it, its Parquet files have no rows")
        self.notes = _notes(self.path, left_out)
        self._ends = np.cumsum([size for size, _ in self.groups])
        self._decoded: OrderedDict[int, pa.Table] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, row: int) -> dict[str, Any]:
        """The row, from 0. Raises BadRow where its row group is broken, and ChangedFile."""
        group = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[group]) - self.groups[group][0]
        columns = self._columns[self._places[group][0]]
        self.check(row)
        return _row(self._group(group), columns, row - begin, self.where(row))

    def check(self, row: int) -> None:
        """As `Rows`'."""
        self._stamps[self._file_of(row)].check()

    def where(self, row: int) -> str:
        """p.parquet: row 7."""
        file = self._file_of(row)
        return f"{self._files[file]}: row {row - self._firsts[file]}"

    def _file_of(self, row: int) -> int:
        return int(np.searchsorted(self._firsts, row, side="right")) - 1

    def digest(self) -> str:
        """As `Rows`'."""
        return digest_of(self._files)

    @property
    def column_names(self) -> list[str] | None:
        """The keys of its rows, which are read a whole row group at a time."""
        return [column.name for column in self._columns[0]]

    def _group(self, group: int) -> pa.Table:
        if group in self._decoded:
            self._decoded.move_to_end(group)
            return self._decoded[group]
        file, place = self._places[group]
        try:
            with pq.ParquetFile(self._files[file]) as opened:
                self._decoded[group] = opened.read_row_group(
                    place, columns=self._leaves[file], use_threads=False
                )
        except (OSError, pa.ArrowException) as error:
            raise BadRow(f"{self._files[file]}: row group {place} cannot be read: {error}") from None
        while len(self._decoded) > 1 and sum(table.nbytes for table in self._decoded.values()) > CACHE_BYTES:
            self._decoded.popitem(last=False)
        return self._decoded[group]


class SavedDataset:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote: Arrow streams, mapped into memory.

    Raises:
        ValueError: the folder is not whole, or its rows are in the order of indices beside it.
    """

    groups: list[tuple[int, int]] = []
    fills_nulls = True
    column_names: list[str] | None = None
    """Any row is read alone."""

    def __init__(self, path: str | Path):
        self.path, self.left_out = str(path), set()
        state = json.loads((Path(path) / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise ValueError(
                f"{path}: its rows are in the order of an index; save it after flatten_indices()"
            )
        files = [str(Path(path) / one["filename"]) for one in state["_data_files"]]
        self._files, self._stamps = files, [Stamp(file) for file in files]
        self._batches: list[pa.RecordBatch] = []
        self._file_of: list[int] = []
        """The file of each batch."""
        self._columns: list[list[ReadColumn]] = []
        """Those of each file that are read."""
        left_out = []
        for number, file in enumerate(files):
            try:
                mapped = pa.memory_map(file)
                if mapped.size() and mapped.read_at(len(_END), mapped.size() - len(_END)) != _END:
                    raise pa.ArrowInvalid("it ends in the middle; copy it anew")
                with pa.ipc.open_stream(mapped) as stream:
                    columns = columns_of(stream.schema)
                    left_out += [one for column in columns for one in column.left_out]
                    self.left_out |= {column.name for column in columns if column.left_out}
                    self._columns.append([column for column in columns if column.read is not None])
                    self._batches += [batch for batch in stream if batch.num_rows]
                    self._file_of += [number] * (len(self._batches) - len(self._file_of))
            except (OSError, pa.ArrowInvalid) as error:
                raise ValueError(
                    f"{file}: cannot be read as a part of the data set {path}: {error}"
                ) from None
        if not self._batches:
            raise ValueError(f"{path}: no prompts in it, the data set has no rows")
        self.notes = _notes(self.path, left_out)
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, row: int) -> dict[str, Any]:
        """The row, from 0. Raises ChangedFile."""
        batch = int(np.searchsorted(self._ends, row, side="right"))
        file, begin = self._file_of[batch], int(self._ends[batch]) - self._batches[batch].num_rows
        self.check(row)
        return _row(self._batches[batch], self._columns[file], row - begin, self.where(row))

    def check(self, row: int) -> None:
        """As `Rows`'."""
        self._stamps[self._file_of[int(np.searchsorted(self._ends, row, side="right"))]].check()

    def where(self, row: int) -> str:
        """folder: row 7."""
        return f"{self.path}: row {row}"

    def digest(self) -> str:
        """As `Rows`'."""
        return digest_of(self._files)


def parquet_folder(path: Path, *, whole: bool = True) -> ParquetRows:
    """The rows of a folder of Parquet files, by their names. whole: of all; else of the first one.

    Raises:
        ValueError: it holds several splits, such as train and test, or not all shards of one.
    """
    files = sorted(path.glob("*.parquet"))
    splits = sorted({found[1] for file in files if (found := _SPLITS.search(file.stem))})
    if len(splits) > 1:
        raise ValueError(
            f"{path}: holds the splits {', '.join(splits)}; name the files of one of them instead of the "
            "folder"
        )
    shards: dict[tuple[str, str], set[int]] = {}
    for file in files:
        if (shard := _SHARD.fullmatch(file.stem)) is not None:
            shards.setdefault((shard[1], shard[4]), set()).add(int(shard[2]))
    for (name, count), found in shards.items():
        whole_from_1 = found == set(range(1, int(count) + 1))
        if not whole_from_1 and (missing := set(range(int(count))) - found):
            raise ValueError(
                f"{path}: lacks {len(missing)} of {int(count)} files, {name}{min(missing):0{len(count)}}-of-"
                f"{count} the first; bring them, or name the files instead of the folder"
            )
    rows = ParquetRows(files if whole else files[:1], path)
    others = sorted(set(path.rglob("*.[pP][aA][rR][qQ][uU][eE][tT]")) - set(files))
    if others:
        named = ", ".join(str(one.relative_to(path)) for one in others[:_NAMED_FILES])
        rows.notes.append(f"{path}: {len(others)} Parquet files in it are not read; name them too: {named}")
    return rows


def _row(
    table: pa.Table | pa.RecordBatch, columns: list[ReadColumn], place: int, where: str
) -> dict[str, Any]:
    row = {}
    for column in columns:
        try:
            row[column.name] = column.read(table.column(column.name)[place])
        except (pa.ArrowException, ValueError) as error:  # such as text that is not UTF-8
            raise BadRow(f'{where}: "{column.name}" cannot be read: {error}') from None
    return row


def _leaves(metadata: pq.FileMetaData, columns: list[ReadColumn]) -> list[str]:
    """The paths in the file of what is read: of a struct with an image and its name, the name alone."""
    read = [leaf for column in columns for leaf in column.leaves]
    assert len(read) == metadata.num_columns, (len(read), metadata.num_columns)
    return [metadata.schema.column(number).path for number, leaf in enumerate(read) if leaf]


def _notes(path: str, left_out: list[str]) -> list[str]:
    """A line about columns and fields that are left out, each named once."""
    named = ", ".join(dict.fromkeys(left_out))
    return (
        [f"{path}: columns and fields that JSON has no values for are left out: {named}"] if left_out else []
    )
