"""Finds out what a path of --rollout-prompts is, by what it holds and not by its name, and opens it."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl_corr.data.rows import JsonLines, Rows

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
    """The rows of a file of JSON lines, of Parquet, or of a folder of Parquet files or one that `datasets` saved.

    Raises:
        ValueError: it is none of them, or is empty; the message names it and the remedy.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file or folder")
    with open(path, "rb") as file:
        start = file.read(8)
    for magic, what in _REFUSED:
        if start.startswith(magic):
            raise ValueError(f"{path}: {what}")
    if start.startswith(b"PAR1"):
        from megatron_rl_corr.data.columns import ParquetRows  # pyarrow is for runs that need it

        return ParquetRows([path], path)
    return JsonLines(path)


def _open_folder(path: Path) -> Rows:
    from megatron_rl_corr.data.columns import SavedDataset, parquet_folder

    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
        raise ValueError(
            f"{path}: holds the splits {', '.join(splits)}; give one of them: {path / splits[0] if splits else path}"
        )
    if (path / "state.json").is_file():
        return SavedDataset(path)
    if any(path.glob("*.parquet")):
        return parquet_folder(path)
    if any(path.glob("*.arrow")):
        raise ValueError(f"{path}: a cache of datasets, which has no state.json; write the data set with save_to_disk")
    raise ValueError(
        f"{path}: neither Parquet files (*.parquet) nor a folder of datasets' save_to_disk (state.json); give a file, "
        "or such a folder"
    )
