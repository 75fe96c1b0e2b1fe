"""Rows and files of earlier attempts and runs: removes what is done anew, keeps another run's aside."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from pathlib import Path

from megatron_rl_corr.files import replaced_by, write_atomically

ROW = re.compile(rb'\{"step": (\d+)[,}]')
"""How a row of ours begins."""

logger = logging.getLogger(__name__)


def drop_rows(path: Path, step: int) -> int:
    """Cut the rows of later steps, of steps that come once more, and a last one that is torn; atomically.

    Lines that are no rows of ours stay where they are.

    Args:
        path: of JSON lines that begin with the step; a link is left alone, and so is what isn't there.
        step: the last to keep.

    Returns:
        How many rows were cut.
    """
    if not path.exists(follow_symlinks=False):
        return 0
    found = path.stat(follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        logger.warning("%s is no plain file, so rows of earlier attempts stay in it", path)
        return 0
    kept: list[tuple[int, bytes]] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for line in lines:
        row = ROW.match(line)
        number = int(row[1]) if row else kept[-1][0] if kept else 0
        while row and kept and kept[-1][0] >= number:
            kept.pop()
        if number <= step and not _is_torn(line):
            kept.append((number, line))
    if len(kept) < len(lines):
        write_atomically(path, b"".join(line for _, line in kept), mode=stat.S_IMODE(found.st_mode))
    return len(lines) - len(kept)


def _is_torn(line: bytes) -> bool:
    """True if the process was killed within this line."""
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def drop_files(folder: Path, names: re.Pattern[str], step: int) -> list[str]:
    """Remove the files of later steps, and temporary ones that a killed process has left behind; no links.

    Args:
        folder: looked at itself, not the folders in it.
        names: of whole files; the first group is the step.
        step: the last to keep.

    Returns:
        The names of the files that were removed.
    """
    dropped = []
    for name in _plain_files(folder):
        whole, unfinished = names.fullmatch(name), names.fullmatch(replaced_by(name) or "")
        if unfinished or (whole and int(whole[1]) > step):
            (folder / name).unlink(missing_ok=True)  # leaders of other replicas may remove it too
            dropped.append(name)
    return dropped


def move_files(folder: Path, names: re.Pattern[str], aside: Path) -> list[str]:
    """Move plain files of these names into another folder, which is made for the first one; no links.

    Args:
        folder: looked at itself, not the folders in it.
        names: of the files.
        aside: a folder within it; leaders of other replicas may move files there too.

    Returns:
        The names of the files that were moved.
    """
    moved = []
    for name in _plain_files(folder):
        if names.fullmatch(name):
            aside.mkdir(exist_ok=True)
            try:
                os.rename(folder / name, aside / name)
            except FileNotFoundError:  # another leader was faster
                continue
            moved.append(name)
    return moved


def _plain_files(folder: Path) -> list[str]:
    """Names of the files in a folder, sorted, without links; [] where it is none."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
