"""Files that a run writes: replaced in one move, never through a link; folders are tried before
they are needed.
"""

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

PROBE_BYTES = 2**20
"""What is written into a folder to try it: more than a disk has room for that is full, to
the eyes of a user.
"""
_FULL = (errno.ENOSPC, errno.EDQUOT)

METRICS_NAME = "metrics.jsonl"
"""A run's metrics, in --rollout-log-dir."""
CONFIG_NAME = "run.json"
"""The run's settings, beside the metrics."""
_TEMPORARY = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.tmp")
"""What `atomic_writer` names its temporary files."""


@contextmanager
def atomic_writer(path: str | os.PathLike, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; at the end it is on the disk, and takes the place of `path`.

    After an error the old file stays, and the temporary one is removed.

    Args:
        mode: permissions of the new file.
    """
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def replaced_by(temporary: str) -> str | None:
    """The name of the file that a temporary one of this name was to replace; None: it is no
    temporary file of ours.
    """
    found = _TEMPORARY.fullmatch(temporary)
    return None if found is None else found[1]


def write_atomically(path: str | os.PathLike, content: bytes, *, mode: int = 0o644) -> Path:
    """Replace `path` by a file of this content, as `atomic_writer` does."""
    with atomic_writer(path, mode=mode) as file:
        file.write(content)
    return Path(path)


def sha256_of(path: str | os.PathLike) -> str:
    """SHA-256 of a file of any size, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(values: Mapping[str, Any]) -> str:
    """SHA-256 of values as JSON with sorted keys, in hexadecimal."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_writable(folder: str | os.PathLike, option: str) -> None:
    """Make a folder, and write a file of PROBE_BYTES there to the disk, which is removed again.

    What the mode bits allow may still be refused, by a full disk, a read-only one or a quota.

    Args:
        folder: of the user. It may be a link to a folder, as the user named it so.
        option: what named it, for the error.

    Raises:
        ValueError: it can't be made or written; the message names the option, the folder and the remedy.
    """
    folder = Path(folder)
    if folder.is_symlink() and not folder.exists():
        raise ValueError(
            f"{option} {folder} is a link to {os.readlink(folder)}, which is not there; make that, or name "
            "another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {folder} can't be made: {error.strerror}; name another folder") from None
    try:
        _probe(folder)
    except OSError as error:
        remedy = "let this user write it, or name another folder"
        if error.errno in _FULL:
            remedy = f"make room there ({PROBE_BYTES // 2**20} MiB were tried), or name another folder"
        elif error.errno == errno.EFBIG:
            remedy = f"raise the limit of a file's size (ulimit -f; {PROBE_BYTES // 2**20} MiB were tried)"
        raise ValueError(f"{option} {folder} can't be written: {error.strerror}; {remedy}") from None


def _probe(folder: Path) -> None:
    descriptor, path = tempfile.mkstemp(prefix=".probe.", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(PROBE_BYTES))  # some file systems store zeros in no room
            file.flush()
            os.fsync(file.fileno())
    finally:
        os.unlink(path)


def refuse_link(path: str | os.PathLike) -> None:
    """OSError where a link is in the place of a file or folder that is to be written."""
    if os.path.islink(path):
        raise OSError(
            errno.ELOOP,
            f"it is a link to {os.readlink(path)}, and nothing is written through one; remove it",
            str(path),
        )


def open_to_append(path: str | os.PathLike, **options: str) -> IO:
    """Open a file to append to it. options: of `open`. Raises OSError where it can't be
    written, or is a link.
    """
    refuse_link(path)
    return open(path, "a", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666), **options)
