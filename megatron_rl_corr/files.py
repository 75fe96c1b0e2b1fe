"""Files that are replaced in one move: a reader sees the old file or the new one, never half of it."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

METRICS_NAME = "metrics.jsonl"
"""A run's metrics, in --rollout-log-dir."""
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
    """The name of the file that a temporary one of this name was to replace; None: it is no temporary file of ours."""
    found = _TEMPORARY.fullmatch(temporary)
    return None if found is None else found[1]


def write_atomically(path: str | os.PathLike, content: bytes, *, mode: int = 0o644) -> Path:
    """Replace `path` by a file of this content, as `atomic_writer` does."""
    with atomic_writer(path, mode=mode) as file:
        file.write(content)
    return Path(path)
