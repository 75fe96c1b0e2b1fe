"""Reads a Hugging Face checkpoint folder: its config.json and single tensors of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


class HFCheckpoint:
    """`tensor(name)` reads one tensor, from whichever file holds it; nothing is kept."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        config = self.path / "config.json"
        if not config.is_file():
            raise ValueError(
                f"--rollout-hf-checkpoint {path}: there is no config.json in it; "
                "name a Hugging Face model folder"
            )
        self.config: dict[str, Any] = json.loads(config.read_text())
        self._file_of = self._index()

    @property
    def names(self) -> Iterable[str]:
        """Of all its tensors."""
        return self._file_of.keys()

    def _index(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            return {name: self.path / file for name, file in weight_map.items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise ValueError(
                f"--rollout-hf-checkpoint {self.path}: no model.safetensors and no index in it; "
                "save the model with safe_serialization"
            )
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)

    def tensor(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ValueError(f"--rollout-hf-checkpoint {self.path}: it has no tensor {name}")
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)
