"""Files of results with thousands of small tensors: torch.save and torch.load take a hundred times as long for them."""

import os
import pickle
from pathlib import Path

import torch


class _Pickler(pickle.Pickler):
    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (content, value.dtype, tuple(value.shape))


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    found = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return found.reshape(shape)


def save(results: object, path: str | os.PathLike) -> None:
    """Write results for `load`; of a tensor its values, number type and shape, without its gradient."""
    with open(path, "wb") as file:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(results)


def load(path: str | os.PathLike) -> object:
    """The results of a file that a test of this run wrote."""
    return pickle.loads(Path(path).read_bytes())
