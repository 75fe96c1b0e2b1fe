"""Adds to a Megatron tree the lines that load the plugin, shows them, or takes them away again.

Standard library only: nothing of the tree is imported or run.
"""

from __future__ import annotations

import ast
import difflib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from megatron_rl_corr.files import write_atomically

FILE = "megatron/training/__init__.py"
ANCHOR = "print_rank_last)"
"""The last line of the file's imports in every Megatron that has megatron/training: by then all
it holds is there.
"""

HUNK = """
# megatron_rl_corr: MEGATRON_RL_CORR=1 loads the plugin; without it these lines do nothing.
import os

if os.environ.get("MEGATRON_RL_CORR", "0") not in ("", "0"):
    import megatron_rl_corr.plugin

    megatron_rl_corr.plugin.load()
"""
MARK = "megatron_rl_corr"
BACKUP_SUFFIX = ".before_megatron_rl_corr"
VERSION_FILE = "megatron/core/package_info.py"


@dataclass(frozen=True)
class Tree:
    """A Megatron tree that can take the lines, or has them."""

    root: Path
    version: str
    """megatron-core's, or unknown."""

    path: Path
    """The file that takes the lines; links are followed, and it lies in root."""

    before: bytes
    after: bytes
    """Its content without the lines and with them."""

    applied: bool

    @property
    def backup(self) -> Path:
        return self.path.with_name(self.path.name + BACKUP_SUFFIX)

    @property
    def summary(self) -> str:
        state = "has the lines" if self.applied else "can take the lines"
        return f"megatron-core {self.version} in {self.root}: {FILE} {state} that load megatron_rl_corr"


def read_tree(root: str | os.PathLike) -> Tree:
    """What is there. ValueError, with the remedy, for anything but a known layout with the
    anchor exactly once.
    """
    root = Path(root).resolve()
    if not root.is_dir():
        raise ValueError(f"--megatron-root {root} is no folder; give the one that holds megatron/")
    path = _within(root, FILE)
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); nothing was changed") from None
    newline = "\r\n" if "\r\n" in text else "\n"
    hunk = HUNK.replace("\n", newline)
    if text.count(hunk) == 1 and text.count(MARK) == HUNK.count(MARK):
        before = text.replace(hunk, "")
        return Tree(root, _version(root), path, before.encode(), content, applied=True)
    if MARK in text:
        raise ValueError(
            f"{path} mentions {MARK}, but not as this version writes it; take those lines out by hand "
            f"(before them it was {path.name}{BACKUP_SUFFIX}, if that is there), and try again"
        )
    after = _inserted(path, text, hunk)
    try:
        compile(after, str(path), "exec")
    except SyntaxError as error:
        raise ValueError(f"{path} with the lines would not compile: {error}; nothing was changed") from None
    return Tree(root, _version(root), path, content, after.encode(), applied=False)


def apply(tree: Tree) -> str:
    """Write the lines, keep what was there beside them; what was done, in a line."""
    if tree.applied:
        return f"{tree.path}: nothing to do, the lines are there"
    _replace(tree.backup, tree.before, like=tree.path)
    _replace(tree.path, tree.after, like=tree.path)
    return (
        f"{tree.path}: {HUNK.strip().count(chr(10)) + 2} lines added; before them it was {tree.backup.name}"
    )


def revert(tree: Tree) -> str:
    """Take the lines away, and the backup too if it says the same; what was done, in a line."""
    if not tree.applied:
        return f"{tree.path}: nothing to do, the lines are not there"
    _replace(tree.path, tree.before, like=tree.path)
    if not tree.backup.is_file():
        return f"{tree.path}: lines taken away"
    if tree.backup.read_bytes() != tree.before:
        return f"{tree.path}: lines taken away; other changes since stay, and so does {tree.backup.name}"
    tree.backup.unlink()
    return f"{tree.path}: lines taken away, {tree.backup.name} removed"


def diff(tree: Tree) -> str:
    """What apply would change, as a unified diff with as little context as finds the place;
    empty if it is there.
    """
    if tree.applied:
        return ""
    lines = [content.decode().splitlines(keepends=True) for content in (tree.before, tree.after)]
    return "".join(difflib.unified_diff(*lines, f"a/{FILE}", f"b/{FILE}", n=1))


def _inserted(path: Path, text: str, hunk: str) -> str:
    lines = text.splitlines(keepends=True)
    found = [number for number, line in enumerate(lines) if line.strip() == ANCHOR]
    if len(found) != 1:
        raise ValueError(
            f"{path} holds the line {ANCHOR!r} {len(found)} times, and the lines go behind the only one: "
            "this Megatron was changed in a way that is not known. Nothing was changed; start the script "
            "with python -m megatron_rl_corr.launch, which needs no patch, or add the lines of --diff on a "
            "stock Megatron by hand"
        )
    place = found[0] + 1
    return "".join([*lines[:place], hunk, *lines[place:]])


def _within(root: Path, relative: str) -> Path:
    """The file behind root/relative. ValueError if there is none, or if links lead out of root."""
    try:
        path = (root / relative).resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError):
        older = " (Megatron-LM has such a folder from core 0.6 on)" if (root / "megatron").is_dir() else ""
        raise ValueError(
            f"there is no {relative} in {root}{older}; --megatron-root is the folder that holds megatron/, "
            "with megatron/training in it"
        ) from None
    if not path.is_relative_to(root):
        raise ValueError(
            f"{root / relative} is a link to {path}, outside --megatron-root; nothing outside it is written. "
            "Give the tree that the link leads to, if that is the one to change"
        )
    if not path.is_file():
        raise ValueError(f"{path} is no file; nothing was changed")
    return path


def _version(root: Path) -> str:
    """MAJOR.MINOR.PATCH and PRE_RELEASE as megatron-core's package_info.py assigns them."""
    try:
        tree = ast.parse((root / VERSION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return "of unknown version"
    assigned = [
        node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    ]
    values = {ast.unparse(node.targets[0]): node.value.value for node in assigned}
    if not {"MAJOR", "MINOR", "PATCH"} <= values.keys():
        return "of unknown version"
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE') or ''}"


def _replace(path: Path, content: bytes, *, like: Path) -> None:
    """Replace the file in one move, with the permissions of `like`.

    The blocks of the old file are not written: package managers link files of several
    environments to one another.
    """
    write_atomically(path, content, mode=stat.S_IMODE(like.stat().st_mode))
