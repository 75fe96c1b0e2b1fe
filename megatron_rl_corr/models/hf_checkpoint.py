"""Reads a Hugging Face checkpoint folder: config.json and single tensors of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron_rl_corr.models.architectures import has_table
from megatron_rl_corr.models.settings import with_defaults

if TYPE_CHECKING:
    from torch import Tensor


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face model folder, as it stands there.

    Args:
        path: the folder.

    Raises:
        ValueError: it has no config.json, or one that is not a JSON object.
    """
    config = Path(path) / "config.json"
    if not config.is_file():
        raise ValueError(f"{path} is not a Hugging Face model folder: it has no config.json")
    return _json_object(config)


def read_model(path: str | Path) -> dict[str, Any]:
    """As `read_config`, with transformers' default for each setting of the model that is not there."""
    return _with_defaults(read_config(path))


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    return with_defaults(config) if has_table(config) else transformers_config(config)


def transformers_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of a family that no table has, with the defaults of transformers' class for it.

    Args:
        config: it; of a type that transformers does not know it is returned as it is.
    """
    from transformers import AutoConfig  # which takes seconds, and known families do not need it

    try:
        return AutoConfig.for_model(**config).to_dict() | dict(config)
    except (ValueError, TypeError, AttributeError):
        return dict(config)


class HFCheckpoint:
    """A Hugging Face model folder; tensors are read one at a time and not kept in memory.

    The file that was read last stays open: to open one means to read the names of all its tensors.

    Args:
        path: the folder.

    Raises:
        ValueError: it has no config.json, no safetensors files, or one of them can't be read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._given = read_config(path)
        self._file_of = self._index()
        self._last: tuple[Path, safe_open] | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json as `read_model` has it; made when it is asked for, as that can take seconds."""
        return _with_defaults(self._given)

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors in the folder."""
        return self._file_of.keys()

    def _index(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = _json_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(
                isinstance(file, str) for file in weight_map.values()
            ):
                raise ValueError(
                    f"{index} has no weight_map, which names the file of each tensor; save the model anew"
                )
            return {name: self.path / file for name, file in weight_map.items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise ValueError(
                f"{self.path} has neither model.safetensors nor model.safetensors.index.json; save the model "
                "with safe_serialization"
            )
        with _named_in_errors(single), safe_open(single, framework="numpy") as file:
            return dict.fromkeys(file.keys(), single)

    def check_files(self) -> None:
        """Open every file, which finds those that are missing or were cut, and look for each
        tensor; none is read.

        Raises:
            ValueError: a file can't be read, or lacks a tensor that the index says it has.
        """
        by_file: dict[Path, list[str]] = {}
        for name, path in self._file_of.items():
            by_file.setdefault(path, []).append(name)
        for path, names in by_file.items():
            # no tensor is read: torch need not be there yet
            with _named_in_errors(path), safe_open(path, framework="numpy") as file:
                lacking = sorted(set(names) - set(file.keys()))
            if lacking:
                raise ValueError(
                    f"{path} has no tensor {lacking[0]} (one of {len(lacking)} that "
                    "model.safetensors.index.json names there); copy or save the model anew"
                )

    def tensor(self, name: str) -> Tensor:
        """Read one tensor. Raises ValueError if the folder has none of that name, or its
        file can't be read.
        """
        with self._reading(name) as file:
            return file.get_tensor(name)

    def row(self, name: str, number: int) -> Tensor:
        """Read one row of a tensor, along its first dimension. Raises ValueError as `tensor`."""
        with self._reading(name) as file:
            return file.get_slice(name)[number]

    def shape(self, name: str) -> tuple[int, ...]:
        """That of one tensor, which is not read. Raises ValueError as `tensor`."""
        with self._reading(name) as file:
            return tuple(file.get_slice(name).get_shape())

    @contextmanager
    def _reading(self, name: str) -> Iterator[safe_open]:
        path = self.file_of(name)
        with _named_in_errors(path):
            last = self._last  # another thread may read too
            if last is None or last[0] != path:
                last = self._last = path, safe_open(path, framework="pt")
            yield last[1]

    def file_of(self, name: str) -> Path:
        """The file that has a tensor. Raises ValueError if the folder has none of that name."""
        if name not in self._file_of:
            raise ValueError(f"the checkpoint {self.path} has no tensor {name}")
        return self._file_of[name]


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object, but {str(found)[:80]}")
    return found


@contextmanager
def _named_in_errors(path: Path) -> Iterator[None]:
    """A safetensors file that is missing, or was cut while it was copied, is named."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} can't be read as safetensors ({error}); copy or save the model anew"
        ) from error
