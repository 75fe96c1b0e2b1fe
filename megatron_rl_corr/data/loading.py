"""Loads what a user names by "path/to/file.py:name" or "package.module:name"."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

FORMS = "give path/to/file.py:name or package.module:name"


def load(spec: str, flag: str) -> Callable:
    """The function or class that the option `flag` names; arguments and errors as `load_with_module`."""
    return load_with_module(spec, flag)[1]


def source_of(spec: str) -> str | None:
    """The text of the file that a spec names; None where it names a module, or no file that can be read."""
    source = spec.rpartition(":")[0]
    try:
        return Path(source).read_text(encoding="utf-8-sig") if source.endswith(".py") else None
    except (OSError, UnicodeDecodeError):  # loading it raises the error
        return None


def load_with_module(
    spec: str, flag: str, text: str | None = None, loaded: dict[str, ModuleType] | None = None
) -> tuple[ModuleType, Callable]:
    """The module that an option names, and the function or class in it.

    Args:
        spec: "path/to/file.py:name" or "package.module:name".
        flag: the option, for errors.
        text: the file's text, as `source_of` read it before; None: the file is read now.
        loaded: files and modules that are not loaded again, by their names; this one is added.

    Raises:
        ValueError: there is no such file, module or name, it is not callable, or its file ends the program;
            the message names the flag and the remedy.
        Exception: what the user's own module raises, as it is.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name:
        raise ValueError(f"{flag}: {FORMS}, got {spec!r}")
    loaded = {} if loaded is None else loaded
    if source not in loaded:
        try:
            loaded[source] = (
                _load_file(source, flag, text) if source.endswith(".py") else _load_module(source, flag)
            )
        except SystemExit as error:  # a rank that takes it for its orderly end leaves the others waiting
            raise ValueError(f"{flag} {spec} called exit({error.code!r}) while it was loaded") from error
    module = loaded[source]
    found = getattr(module, name, None)
    if found is None:
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        has = ", ".join(sorted(known)) or "no functions"
        raise ValueError(f"{flag}: {source} has no {name!r}; it has {has}")
    if not callable(found):
        raise ValueError(f"{flag}: {name!r} in {source} is a {type(found).__name__}, not a function")
    return module, found


def _load_file(source: str, flag: str, text: str | None) -> ModuleType:
    path = Path(source).resolve()
    if text is None and not path.is_file():
        raise ValueError(f"{flag}: there is no file {source} (looked for {path}); {FORMS}")
    name = f"rollout_{flag.strip('`')}_{path.stem}"
    # another folder's file of this name
    if vars(sys.modules.get(name, sys)).get("__file__", str(path)) != str(path):
        name += f"_{sum(one.startswith(name) for one in sys.modules) + 1}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        if text is None:
            spec.loader.exec_module(module)
        else:
            exec(compile(text, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(source: str, flag: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source + ".").startswith(error.name + "."):
            raise  # the module is there; something that it imports is not
        raise ValueError(f"{flag}: there is no module {error.name!r} on PYTHONPATH; {FORMS}") from None
