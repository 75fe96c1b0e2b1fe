"""Files of results with thousands of small tensors: torch.save and torch.load take a hundred times
as long for them.

A file has a pickle, whose length stands before it, and then the tensors' bytes, one behind another. Who
loads it maps it into memory, and its tensors are views of that: results may take a gigabyte, of which a
test reads a part.
"""

import mmap
import os
import pickle
from dataclasses import dataclass

import torch

_LENGTH_BYTES = 8
_ALIGNED = 16
"""Bytes at a multiple of which each tensor begins."""


@dataclass(frozen=True)
class Files:
    """Results that other files have: [[a path, ...], ...]."""

    paths: list[list[str]]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content), value.dtype, tuple(value.shape))


def _tensor(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    found = torch.frombuffer(content, dtype=dtype) if content.nbytes else torch.empty(0, dtype=dtype)
    return found.reshape(shape)


def save(results: object, path: str | os.PathLike) -> None:
    """Write results for `load`; of a tensor its values, number type and shape, without its gradient."""
    buffers: list[pickle.PickleBuffer] = []
    with open(path, "wb") as file:
        file.write(bytes(_LENGTH_BYTES))
        _Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(results)
        length = file.tell() - _LENGTH_BYTES
        lengths = [buffer.raw().nbytes for buffer in buffers]
        pickle.dump(lengths, file, pickle.HIGHEST_PROTOCOL)
        for buffer in buffers:
            file.write(bytes(-file.tell() % _ALIGNED))
            file.write(buffer)
        file.seek(0)
        file.write(length.to_bytes(_LENGTH_BYTES, "big"))


def load(path: str | os.PathLike) -> object:
    """The results of a file that a test of this run wrote; of `Files`, those of each."""
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        length = int.from_bytes(content[:_LENGTH_BYTES], "big")
        file.seek(_LENGTH_BYTES + length)
        lengths, at = pickle.load(file), file.tell()
    buffers = []
    for one in lengths:
        at += -at % _ALIGNED
        buffers.append(content[at : at + one])
        at += one
    results = pickle.loads(content[_LENGTH_BYTES : _LENGTH_BYTES + length], buffers=buffers)
    return [list(map(load, paths)) for paths in results.paths] if isinstance(results, Files) else results
