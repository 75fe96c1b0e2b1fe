"""The folder that is handed on: its files with their hashes in manifest.json; written in one move."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_rl_corr.files import sha256_of

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the manifest."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out`, which takes its place at the end; after an error there is neither.

    Raises:
        ValueError: there is something at `out`.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"--out {out} is there already; remove it, or give another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> str:
    """Write manifest.json: these facts, and size and SHA-256 of every file.

    Returns:
        SHA-256 of the manifest itself, which stands for all of the bundle.
    """
    files = {name: _described(folder / name) for name in _names(folder)}
    content = json.dumps({"format": FORMAT, **facts, "files": files}, indent=2, allow_nan=False) + "\n"
    (folder / MANIFEST).write_text(content, encoding="utf-8")
    return hashlib.sha256(content.encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle.

    Raises:
        OSError, ValueError: there is none, or it cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"no {MANIFEST} in {folder}; give a folder that `megatron-rl-corr incident` wrote"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, and this package reads {FORMAT}")
        if not all(isinstance(one["sha256"], str) for one in manifest["files"].values()):
            raise ValueError("a file has no hash")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from None
    return manifest


def check_bundle(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle whose files are all as they were written.

    Raises:
        OSError, ValueError: names each file that is missing, changed, a link, or not in the manifest.
    """
    manifest = read_manifest(folder)
    wanted, problems = manifest["files"], []
    for name, described in wanted.items():
        parts, path = PurePosixPath(name).parts, folder / name
        if ".." in parts or PurePosixPath(name).is_absolute():
            problems.append(f"{name}: a path out of the bundle")
        elif not path.exists() and not path.is_symlink():
            problems.append(f"{name}: missing")
        elif path.is_symlink() or not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            problems.append(f"{name}: not a plain file")
        elif _described(path) != {key: described.get(key) for key in ("bytes", "sha256")}:
            problems.append(f"{name}: changed")
    problems += [f"{name}: not in the manifest" for name in _names(folder) if name not in wanted]
    if problems:
        raise ValueError(f"{folder} is not as it was written: {'; '.join(problems)}")
    return manifest


def _names(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(name for path in found if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
