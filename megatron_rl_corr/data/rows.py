"""Rows of data files, each read by its number: what a run holds in memory is an index, whatever
the files' size.

JSON lines are here, Parquet and Hugging Face `datasets` folders in `columns`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_rl_corr.data import json_text

CHUNK_BYTES = 1 << 24
"""Bytes of a file that are searched for line ends at a time."""
DIGEST_PIECES, DIGEST_BYTES = 64, 4096
BOM = b"\xef\xbb\xbf"
_WHITESPACE = 32
"""The last of the bytes that a blank line may have."""


class BadRow(ValueError):
    """A row that cannot be used; the message names its file, its place, the key and the remedy."""


class LongPrompt(BadRow):
    """A row whose prompt leaves no room for a response, where such rows are left out."""


class UnreadLabel(BadRow):
    """A row whose label a reward can't read, where such rows are left out."""


class ChangedFile(RuntimeError):
    """A file is not as it was when its rows were counted, so that numbers no longer mean the same rows."""

    def __init__(self, path: str):
        super().__init__(
            f"{path} changed while the run reads it: its rows are no longer those that were counted; restore "
            "it, or start anew (with --load where there is a checkpoint), and write new data into a new file"
        )


class MapObject(dict):
    """The object of a map: it has the keys that were written alone, where a struct has null for
    those that were not.
    """


class Rows(Protocol):
    """The rows of one source, such as a file."""

    path: str
    notes: list[str]
    """What the user should know of the source, a line each."""
    groups: list[tuple[int, int]]
    """(rows, bytes) of its parts, in order, that can only be read as a whole; empty: any
    row is read alone.
    """
    left_out: Collection[str]
    """Columns of which a part has no JSON value."""
    fills_nulls: bool
    """Objects have null for keys that they lack: in a column all objects of a list have the same keys."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, Any]:
        """The row, from 0. Raises BadRow for one that is no object, and ChangedFile."""

    def check(self, row: int) -> None:
        """Raises ChangedFile where the row's file is no longer as it was."""

    def where(self, row: int) -> str:
        """The row's file and line, or number, for messages."""

    def digest(self) -> str:
        """What tells its files from others, or from the same after an edit: `digest_of` them."""


def digest_of(paths: Sequence[str]) -> str:
    """Size and CRC-32 of files one behind another, as "1234:5e0b8f2a"; of a large file, of pieces of it.

    Those are DIGEST_PIECES of DIGEST_BYTES over all files, at least two of each, spread evenly from its
    first byte to its last. So an edit that keeps the size and lies between them is not found.
    """
    size, crc, most = 0, 0, max(2, DIGEST_PIECES // len(paths))
    for path in paths:
        with open(path, "rb") as file:
            own = os.fstat(file.fileno()).st_size
            last = max(0, own - DIGEST_BYTES)
            pieces = min(most, -(-own // DIGEST_BYTES))
            for piece in range(pieces):
                place = last * piece // max(1, pieces - 1)
                crc = zlib.crc32(os.pread(file.fileno(), DIGEST_BYTES, place), crc)
            size += own
    return f"{size}:{crc:08x}"


class Stamp:
    """Size and time of a file when it was opened."""

    def __init__(self, path: str):
        self._path = path
        self._value = self._now()
        if self._value is None:
            raise ValueError(f"{path}: there is no such file")

    def check(self) -> None:
        """Raises ChangedFile where the file is another one now."""
        if self._now() != self._value:
            raise ChangedFile(self._path)

    def _now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return found.st_size, found.st_mtime_ns


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """The object of a line. Raises BadRow, which begins with `where`, for anything else."""
    try:
        value = json_text.loads(line)
    except ValueError as error:
        remedy = "; write each row on one line" if line.strip() in (b"{", b"[") else ""
        raise BadRow(f"{where}: not JSON: {error}{remedy}") from None
    if not isinstance(value, dict):
        array = "; write its objects on lines of their own" if isinstance(value, list) else ""
        raise BadRow(f"{where}: expected a JSON object, got {type(value).__name__}{array}")
    return value


class JsonLines:
    """The rows of a file of JSON lines, by the byte at which each begins: 8 bytes a row (4 below 4 GiB).

    Blank lines are no rows. Lines may end in CR LF, the last one in nothing; a UTF-8 byte order
    mark is left out.
    """

    groups: list[tuple[int, int]] = []
    left_out: Collection[str] = ()
    fills_nulls = False

    def __init__(self, path: str | Path):
        self.path, self.notes = str(path), []
        self._stamp = Stamp(self.path)
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115  read for as long as the run lasts
        self._size = os.fstat(self._file.fileno()).st_size
        self._starts, self._blanks = self._index()

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, row: int) -> dict[str, Any]:
        """The row, from 0. Raises BadRow for one that is no JSON object, and ChangedFile."""
        self.check(row)
        return json_object(self._line(row), self.where(row))

    def check(self, row: int) -> None:
        """As `Rows`'."""
        self._stamp.check()

    def where(self, row: int) -> str:
        """p.jsonl:3, for the third line, blank ones counted."""
        return f"{self.path}:{row + 1 + int(np.searchsorted(self._blanks, row, side='right'))}"

    def digest(self) -> str:
        """As `Rows`'."""
        return digest_of([self.path])

    def _line(self, row: int) -> bytes:
        start = int(self._starts[row])
        end = int(self._starts[row + 1]) if row + 1 < len(self._starts) else self._size
        return os.pread(self._file.fileno(), end - start, start).split(b"\n", 1)[0]

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """(the byte at which each row begins, for each blank line the rows before it)."""
        dtype = np.uint32 if self._size < 2**32 else np.uint64
        starts, blanks, rows, after_newline = [], [], 0, True
        at = len(BOM) if os.pread(self._file.fileno(), len(BOM), 0) == BOM else 0
        while chunk := os.pread(self._file.fileno(), CHUNK_BYTES, at):
            data = np.frombuffer(chunk, np.uint8)
            begins = np.flatnonzero(data == ord("\n")) + 1
            begins = begins[begins < len(data)]
            if after_newline:
                begins = np.concatenate([[0], begins])
            first = data[begins]
            blank = first == ord("\n")
            for place in np.flatnonzero((first <= _WHITESPACE) & ~blank):
                blank[place] = self._is_blank(at + int(begins[place]))
            starts.append((begins[~blank] + at).astype(dtype))
            blanks.append(rows + np.flatnonzero(blank) - np.arange(blank.sum()))
            rows, at, after_newline = rows + len(starts[-1]), at + len(chunk), chunk.endswith(b"\n")
        if not rows:
            raise ValueError(f"{self.path}: no prompts in it; expected one JSON object a line")
        return np.concatenate(starts), np.concatenate(blanks)

    def _is_blank(self, start: int) -> bool:
        """True if the line that begins there has white space alone."""
        while part := os.pread(self._file.fileno(), 256, start):
            line, newline, _ = part.partition(b"\n")
            if line.strip() or newline:
                return not line.strip()
            start += len(part)
        return True
