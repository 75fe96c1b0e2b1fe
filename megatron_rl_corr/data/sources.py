"""Finds out what a path of --rollout-prompts is, by what it holds and not by its name, and opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl_corr.data.rows import BOM, JsonLines, Rows, json_object

_REFUSED = (
    (b"\x1f\x8b", "is compressed with gzip; gunzip it"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd; decompress it with zstd -d"),
    (b"BZh", "is compressed with bzip2; decompress it with bunzip2"),
    (b"\xfd7zXZ", "is compressed with xz; decompress it with unxz"),
    (b"PK\x03\x04", "is a zip archive; unpack it"),
    (b"\xff\xfe", "is UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16; save it as UTF-8"),
    (b"ARROW1", "is an Arrow file; give Parquet, or the folder that datasets' save_to_disk writes"),
    (b"\xff\xff\xff\xff", "is an Arrow stream; give the folder that it is in, with its state.json"),
)
"""How files begin that are not read, and the remedy."""


def open_rows(path: str | Path) -> Rows:
    """The rows of a file of JSON lines, of Parquet, or of a folder of Parquet files or one that
    `datasets` saved.

    Raises:
        ValueError: it is none of them, or is empty; the message names it and the remedy.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not is_parquet(path):
        return JsonLines(path)
    from megatron_rl_corr.data.columns import ParquetRows  # pyarrow is for runs that need it

    return ParquetRows([path], path)


def is_parquet(path: Path) -> bool:
    """True if a file is Parquet, else it may have JSON lines. Raises ValueError where it can be neither."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder")
    with open(path, "rb") as file:
        start = file.read(8)
    for magic, what in _REFUSED:
        if start.startswith(magic):
            raise ValueError(f"{path}: {what}")
    return start.startswith(b"PAR1")


def first_row(path: str | Path) -> tuple[dict[str, Any], str, bool]:
    """What the data that a path names begin with; how many rows there are is not counted.

    Args:
        path: as `open_rows`.

    Returns:
        (the first row, its place for messages, whether it has the names of Parquet's columns alone,
        without values).

    Raises:
        ValueError: as `open_rows`, and for a first row that is no object.
    """
    path = Path(path)
    if path.is_dir() or is_parquet(path):
        rows = _open_folder(path, whole=False) if path.is_dir() else open_rows(path)
        names = rows.column_names
        return (
            (rows.read(0), rows.where(0), False)
            if names is None
            else (dict.fromkeys(names), rows.where(0), True)
        )
    with open(path, "rb") as file:
        number, line = next(
            ((number, line) for number, line in enumerate(file, start=1) if line.removeprefix(BOM).strip()),
            (0, b""),
        )
    if not line:
        raise ValueError(f"{path}: no prompts in it; expected one JSON object a line")
    return json_object(line.removeprefix(BOM), f"{path}:{number}"), f"{path}:{number}", False


def _open_folder(path: Path, *, whole: bool = True) -> Rows:
    from megatron_rl_corr.data.columns import SavedDataset, parquet_folder

    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
        raise ValueError(
            f"{path}: holds the splits {', '.join(splits)}; give one of them: "
            f"{path / splits[0] if splits else path}"
        )
    if (path / "state.json").is_file():
        return SavedDataset(path)
    if any(path.glob("*.parquet")):
        return parquet_folder(path, whole=whole)
    if any(path.glob("*.arrow")):
        raise ValueError(
            f"{path}: a cache of datasets, which has no state.json; write the data set with save_to_disk"
        )
    raise ValueError(
        f"{path}: neither Parquet files (*.parquet) nor a folder of datasets' save_to_disk (state.json); "
        "give a file, or such a folder"
    )
