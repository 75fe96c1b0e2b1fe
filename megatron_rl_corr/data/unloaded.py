"""Looks at the user's functions without running their files: before Megatron is imported, nothing of
the user's runs.

What can't be known so is left to the loading itself, so that nothing is refused that would load.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_rl_corr.data.loading import FORMS
from megatron_rl_corr.data.reward_input import FORMS as REWARD_FORMS

_DYNAMIC = ("globals", "exec", "eval", "vars", "locals", "setattr", "__getattr__")
"""A file that has one of these names may define what its text does not show."""
_ENDS = ("exit", "quit", "_exit")
"""A file that calls one of these as it is loaded is refused for that, when it is."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def check_unloaded(spec: str, flag: str, script_folder: str | None = None) -> None:
    """Look for the function or class that an option names.

    Args:
        spec: "path/to/file.py:name" or "package.module:name".
        flag: the option, for errors.
        script_folder: of the script that will run, from which modules are imported too.

    Raises:
        ValueError: as `load_with_module`, for a file or module that is not there, a file that is not
            Python, and a name that it does not have.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(f"{flag}: {FORMS}, got {spec!r}")
    if not source.endswith(".py"):
        _check_module(source, flag, script_folder)
        return
    tree = _parsed(source, spec, flag)
    if name not in _names(tree) and not _is_dynamic(tree):
        known = {node.name for node in _module_nodes(tree) if isinstance(node, _SCOPES[:3])}
        has = ", ".join(sorted(one for one in known if not one.startswith("_"))) or "no functions"
        raise ValueError(f"{flag}: {source} has no {name!r}; it has {has}")


def check_unloaded_reward(spec: str, flag: str, script_folder: str | None = None) -> None:
    """As `check_unloaded`, and that a reward function has one of the forms, where its
    signature is in its file.

    Raises:
        ValueError: as `check_unloaded` and `form_of`.
    """
    check_unloaded(spec, flag, script_folder)
    source, _, name = spec.rpartition(":")
    if not source.endswith(".py"):
        return
    tree = _parsed(source, spec, flag)
    made = [node for node in _module_nodes(tree) if isinstance(node, _SCOPES[:3]) and node.name == name]
    if (
        len(made) != 1
        or isinstance(made[0], ast.ClassDef)
        or made[0].decorator_list
        or name in _assigned(tree)
    ):
        return
    one, three = (_takes(made[0].args, count) for count in (1, 3))
    if one == three:
        both = "both one argument and three" if one else "neither one argument nor three"
        signature = f"({ast.unparse(made[0].args)})"
        raise ValueError(f"{flag} {spec} has the signature {signature}, which takes {both}; {REWARD_FORMS}")


def _parsed(source: str, spec: str, flag: str) -> ast.Module:
    path = Path(source).resolve()
    if not path.is_file():
        raise ValueError(f"{flag}: there is no file {source} (looked for {path}); {FORMS}")
    try:
        return ast.parse(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"{flag} {spec} could not be loaded: {error.strerror}; let this user read it"
        ) from None
    except (SyntaxError, ValueError) as error:  # ValueError: a byte 0, or no text
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{flag} {spec} could not be loaded: {source} is not Python{line}: {what}") from None


def _check_module(source: str, flag: str, script_folder: str | None) -> None:
    """ValueError where the package that a module is in can't be found; nothing is imported."""
    top, before = source.split(".")[0], list(sys.path)
    if script_folder is not None:
        sys.path.insert(0, script_folder)
    try:
        missing = top not in sys.modules and importlib.util.find_spec(top) is None
    finally:
        sys.path[:] = before
    if missing:
        raise ValueError(f"{flag}: there is no module {top!r} on PYTHONPATH; {FORMS}")


def _module_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run when the module does: those of functions and classes are left out, they
    themselves are not.
    """
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _module_nodes(node)


def _assigned(tree: ast.Module) -> set[str]:
    """Names that the module binds otherwise than by def and class."""
    found = set()
    for node in _module_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
    return found


def _names(tree: ast.Module) -> set[str]:
    return _assigned(tree) | {node.name for node in _module_nodes(tree) if isinstance(node, _SCOPES[:3])}


def _is_dynamic(tree: ast.Module) -> bool:
    """True if the module may have names that its text does not show."""
    for node in ast.walk(tree):
        star = isinstance(node, ast.alias) and node.name == "*"
        called = isinstance(node, ast.Name) and node.id in _DYNAMIC
        defined = isinstance(node, ast.FunctionDef) and node.name in _DYNAMIC
        modules = isinstance(node, ast.Attribute) and node.attr in ("modules", "__dict__")
        if star or called or defined or modules or isinstance(node, (ast.Global, ast.TypeAlias)):
            return True
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Attribute) and node.attr in _ENDS)
        or (isinstance(node, ast.Name) and node.id in _ENDS)
        for node in _module_nodes(tree)
    )


def _takes(arguments: ast.arguments, count: int) -> bool:
    """True if a function with these can be called with so many positional arguments alone."""
    named = len(arguments.posonlyargs) + len(arguments.args)
    if any(default is None for default in arguments.kw_defaults):
        return False
    return named - len(arguments.defaults) <= count and (count <= named or arguments.vararg is not None)
