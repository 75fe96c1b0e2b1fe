"""Cells of Arrow columns as JSON values: how each type is read, and which fields JSON has no values for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import types

from megatron_rl_corr.data.rows import MapObject

Read = Callable[[pa.Scalar], Any]


@dataclass
class ReadColumn:
    """How one column is read.

    Example: of the struct image {"bytes": b"x", "path": "p"} `left_out` is ["image.bytes (binary)"], and
    `leaves` are [False, True].
    """

    name: str
    read: Read | None
    """Makes the JSON value of a cell; None: no field of it has one."""
    left_out: list[str] = field(default_factory=list)
    """Path and type of each field that JSON has no values for."""
    leaves: list[bool] = field(default_factory=list)
    """Whether each field without fields of its own is read, in the order in which Parquet stores them."""


def columns_of(schema: pa.Schema) -> list[ReadColumn]:
    """How each column is read."""
    columns, names = [], Counter(schema.names)
    for one in schema:
        column = ReadColumn(one.name, None)
        column.read = _reader(one.type, one.name, column)
        if names[one.name] > 1:
            column.read, column.left_out = None, [f"{one.name} (of which there are {names[one.name]})"]
            column.leaves = [False] * len(column.leaves)
        columns.append(column)
    return columns


def _reader(kind: pa.DataType, path: str, column: ReadColumn) -> Read | None:
    """What reads a type, None for one that JSON has no values for; adds to `left_out` and `leaves`."""
    fields, leaves = len(column.left_out), len(column.leaves)
    if types.is_struct(kind):
        read = _struct_reader(kind, path, column)
    elif types.is_map(kind):
        read = _map_reader(kind, path, column)
    elif types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        read = _value_reader(kind.value_type, path, column)
    elif isinstance(kind, pa.BaseExtensionType) and kind.extension_name != "arrow.bool8":
        read = _value_reader(kind.storage_type, path, column)
    elif any(test(kind) for test in _LISTS):
        read = _list_reader(kind, path, column)
    else:
        read = _leaf_reader(kind, path)
        column.leaves.append(read is not None)
    if read is None:
        column.left_out[fields:] = [f"{path} ({kind})"]
        column.leaves[leaves:] = [False] * (len(column.leaves) - leaves)
    return read


_LISTS = (
    types.is_list,
    types.is_large_list,
    types.is_fixed_size_list,
    types.is_list_view,
    types.is_large_list_view,
)
_TEXTS = (types.is_string, types.is_large_string, types.is_string_view)
_PLAIN = (types.is_null, types.is_boolean, types.is_integer, *_TEXTS)


def _as_py(cell: pa.Scalar) -> Any:
    """The cell's own Python value, which JSON has as well."""
    return cell.as_py()


def _leaf_reader(kind: pa.DataType, path: str) -> Read | None:
    if any(test(kind) for test in _PLAIN) or isinstance(kind, pa.BaseExtensionType):
        return _as_py
    if types.is_floating(kind):
        return _FloatReader(path, None if types.is_float64(kind) else kind.to_pandas_dtype())
    return _read_whole_decimal if types.is_decimal(kind) and kind.scale <= 0 else None


@dataclass(frozen=True)
class _FloatReader:
    """Reads floats, which must be finite: JSON has no others, and would have null or an
    error far from here.
    """

    path: str
    """Name of the column or field, for messages."""
    short: Callable[[float], Any] | None
    """The type, if it has fewer than 64 bits."""

    def __call__(self, cell: pa.Scalar) -> float | None:
        return self._checked(cell.as_py())

    def values(self, cell: pa.Scalar) -> list[float | None] | None:
        """Those of a list, which may be long."""
        return [self._checked(value) for value in cell.as_py()] if cell.is_valid else None

    def _checked(self, value: float | None) -> float | None:
        if value is None:
            return None
        if not math.isfinite(value):
            raise ValueError(
                f"{self.path} has {value}, which is not a number in JSON; write null, or leave it out"
            )
        # As it was written: 123.1 in 4 bytes is 123.0999985 in 8, a label that no answer equals.
        return value if self.short is None else float(str(self.short(value)))


def _read_whole_decimal(cell: pa.Scalar) -> int | None:
    return int(cell.as_py()) if cell.is_valid else None


def _value_reader(kind: pa.DataType, path: str, column: ReadColumn) -> Read | None:
    """What reads a cell that has its value in another: of a dictionary, a run, an extension of a type."""
    read = _reader(kind, path, column)
    return None if read is None else lambda cell: read(cell.value) if cell.is_valid else None


def _list_reader(kind: pa.DataType, path: str, column: ReadColumn) -> Read | None:
    read = _reader(kind.value_type, f"{path}[]", column)
    if read is None or read is _as_py:
        return read
    if isinstance(read, _FloatReader):
        return read.values
    return lambda cell: [read(one) for one in cell.values] if cell.is_valid else None


def _struct_reader(kind: pa.DataType, path: str, column: ReadColumn) -> Read | None:
    reads, names = [], Counter(one.name for one in kind)
    for one in kind:
        own, leaves = f"{path}.{one.name}", len(column.leaves)
        read = _reader(one.type, own, column)
        if read is not None and names[one.name] > 1:
            column.left_out.append(f"{own} (of which there are {names[one.name]})")
            column.leaves[leaves:] = [False] * (len(column.leaves) - leaves)
        elif read is not None:
            reads.append((one.name, read))
    if len(reads) == kind.num_fields and all(read is _as_py for _, read in reads):
        return _as_py
    if not reads:
        return None
    return lambda cell: {name: read(cell[name]) for name, read in reads} if cell.is_valid else None


def _map_reader(kind: pa.DataType, path: str, column: ReadColumn) -> Read | None:
    _reader(kind.key_type, path, column)
    read = _reader(kind.item_type, f"{path}[]", column)
    if read is None or not any(test(kind.key_type) for test in _TEXTS):
        return None

    def read_map(cell: pa.Scalar) -> MapObject | None:
        if not cell.is_valid:
            return None
        items = [(one[0].as_py(), read(one[1])) for one in cell.values]
        found = MapObject(items)
        if len(found) < len(items):
            raise ValueError(f"a map has a key twice, of {', '.join(sorted(found))}")
        return found

    return read_map
