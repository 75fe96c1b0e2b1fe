"""Replaces a file in one move, so that a reader never sees half of it."""

import os
import tempfile
from pathlib import Path


def write_atomically(path: str | os.PathLike, content: bytes) -> Path:
    """Write `content` to a temporary file beside `path` and rename it over; the old file stays on failure."""
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        # mkstemp makes the file private; a report is to be read by whoever may read the folder.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path
