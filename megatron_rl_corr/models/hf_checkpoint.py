"""Reads a Hugging Face checkpoint folder: config.json and single tensors of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face model folder.

    Args:
        path: the folder.

    Raises:
        ValueError: it has no config.json, or one that is not JSON.
    """
    config = Path(path) / "config.json"
    if not config.is_file():
        raise ValueError(f"{path} is not a Hugging Face model folder: it has no config.json")
    try:
        return json.loads(config.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{config} is not JSON: {error}") from error


class HFCheckpoint:
    """A Hugging Face model folder; tensors are read one at a time and not kept in memory.

    Args:
        path: the folder.

    Raises:
        ValueError: it has no config.json, or no safetensors files.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = read_config(path)
        self._file_of = self._index()

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors in the folder."""
        return self._file_of.keys()

    def _index(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            return {name: self.path / file for name, file in weight_map.items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise ValueError(
                f"{self.path} has neither model.safetensors nor model.safetensors.index.json; save the model with "
                "safe_serialization"
            )
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor. Raises ValueError if the folder has none of that name."""
        with safe_open(self._file(name), framework="pt") as file:
            return file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """That of one tensor, which is not read. Raises ValueError if the folder has none of that name."""
        with safe_open(self._file(name), framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def _file(self, name: str) -> Path:
        if name not in self._file_of:
            raise ValueError(f"the checkpoint {self.path} has no tensor {name}")
        return self._file_of[name]
