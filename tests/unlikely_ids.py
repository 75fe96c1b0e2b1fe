"""The tiny model with ids that it hardly ever samples, and copies of it whose output layer is otherwise."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONSTANT = 1.0
"""What the first hidden dimension of every token begins with: 2.2 +- 0.2 behind the last norm."""
UNLIKELY = {17: -1.5, 61: -4.0}
"""Id -> its weight of that dimension: they have some e^-8 and e^-13 of the mass."""


def write_unlikely(source: Path, folder: Path, unlikely: Mapping[int, float] = UNLIKELY) -> Path:
    """A copy of the model in which these ids are unlikely wherever they might stand."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[EMBEDDING][:, 0] = CONSTANT
    tensors[HEAD][:, 0] = 0.0
    for token, weight in unlikely.items():
        tensors[HEAD][token, 0] = weight
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def write_changed_head(source: Path, folder: Path, change) -> Path:
    """A copy with change(the output layer's weight [V, H]) in its place, and as large a vocabulary."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[HEAD] = change(tensors[HEAD]).contiguous()
    size, rows = len(tensors[HEAD]), tensors[EMBEDDING]
    if size > len(rows):
        tensors[EMBEDDING] = torch.cat([rows, rows.new_zeros(size - len(rows), rows.shape[1])])
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": size}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def exchanged(first: int, second: int):
    """A change that exchanges the rows of two ids."""

    def change(weight):
        order = torch.arange(len(weight))
        order[[first, second]] = order[[second, first]]
        return weight[order]

    return change


def shifted(beyond: int):
    """A change after which each id from `beyond` on has the row of the next one."""

    def change(weight):
        return torch.cat([weight[:beyond], weight[beyond + 1 :], weight[beyond : beyond + 1]])

    return change


def padded(size: int, first: float):
    """A change after which the vocabulary has this size: behind the model's own ids zeros, but for the first
    hidden dimension.
    """

    def change(weight):
        rows = weight.new_zeros(size - len(weight), weight.shape[1])
        rows[:, 0] = first
        return torch.cat([weight, rows])

    return change
