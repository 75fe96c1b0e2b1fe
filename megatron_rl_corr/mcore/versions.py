"""Which releases of Megatron are supported, and whether the installed one is complete and of one release."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

import megatron.core
from megatron.core import __version__ as megatron_version

FIRST, LAST = (0, 14), (0, 20)
"""Releases of megatron-core on which `make test-matrix` runs corrected steps, both
inclusive; 0.20 is main's.
"""
SUPPORTS_MTP = (0, 19)
"""The first release with --mtp-detach-heads that computes the layers' loss without labels."""
SUPPORTED = f"megatron-core {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


class UnsupportedMegatron(RuntimeError):
    """This Megatron is not known, and nothing was replaced; the message names what was found and
    what is supported.
    """


def release(version: str = megatron_version) -> tuple[int, int]:
    """(0, 19) of "0.19.2" or "0.19.0rc1"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_version() -> None:
    """Raises UnsupportedMegatron unless the hooks were written for this release of megatron-core."""
    if not FIRST <= release() <= LAST:
        raise UnsupportedMegatron(
            f"megatron-core {megatron_version} is not supported; supported are {SUPPORTED}: install one of "
            "them"
        )


def tree() -> Path:
    """The folder that `megatron` was imported from."""
    return Path(megatron.core.__file__).resolve().parents[2]


def check_training() -> None:
    """Raises UnsupportedMegatron if megatron.training is missing, or not of the same tree as megatron.core.

    `megatron` is a namespace package: with two trees on the path, the second gives what the first lacks.
    Does not import megatron.training.
    """
    core = tree()
    spec = importlib.util.find_spec("megatron.training")
    training = None if spec is None or spec.origin is None else Path(spec.origin).resolve().parents[2]
    if core == training:
        return
    found = (
        f"{core} has no megatron.training"
        if training is None
        else f"megatron.core {megatron_version} is of {core}, but megatron.training of {training}"
    )
    raise UnsupportedMegatron(
        f"{found}; wheels of megatron-core hold megatron.training from 0.17.1 on: for {megatron_version}, "
        "put one whole checkout of Megatron-LM first on PYTHONPATH, or use the library in your own loop"
    )


def transformer_engine() -> str:
    """Which Transformer Engine Megatron's layers are made of in this process, in a few words."""
    try:
        import transformer_engine
    except ImportError:
        return "none"
    version = transformer_engine.__version__
    return f"stand-in for the CPU ({version})" if vars(transformer_engine).get("STAND_IN") else version


def check_parameters(function: Callable, names: tuple[str, ...]) -> None:
    """Raises UnsupportedMegatron if a function that is about to be replaced does not take these arguments."""
    found = inspect.signature(function).parameters
    missing = [name for name in names if name not in found]
    if missing:
        raise UnsupportedMegatron(
            f"{function.__module__}.{function.__qualname__} of megatron-core {megatron_version} does not "
            f"take {', '.join(missing)}: this Megatron was changed in a way that megatron_rl_corr does not "
            f"know; supported are {SUPPORTED}"
        )
