"""Python objects between two processes of one host, their arrays in memory that both have: who receives one
copies nothing.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64
"""Arrays begin at a multiple of so many bytes."""
MOST_HEADER_BYTES = 1 << 16


def send(to: socket.socket, kind: str, number: int, value: Any) -> None:
    """Send one object; its tensors are on the CPU.

    Args:
        to: a SOCK_SEQPACKET of AF_UNIX.
        kind: what it is.
        number: of the request that it belongs to.
        value: what can be pickled.

    Raises:
        OSError: the other side is gone.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _OutOfBand(pickled, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [view.nbytes for view in views]
    header = json.dumps({"kind": kind, "number": number, "sizes": sizes}).encode()
    memory = os.memfd_create("rollout-ingest", os.MFD_CLOEXEC)
    try:
        for view, size in zip(views, sizes, strict=True):
            _write_all(memory, view)
            os.lseek(memory, -size % ALIGNED, os.SEEK_CUR)
        os.ftruncate(memory, max(1, sum(map(_padded, sizes))))
        socket.send_fds(to, [header], [memory])
    finally:
        os.close(memory)


def receive(source: socket.socket) -> tuple[str, int, Any]:
    """(kind, number, value) of the next object; its tensors live in memory that is freed with them.

    Raises:
        EOFError: the other side is gone.
    """
    header, descriptors, _, _ = socket.recv_fds(source, MOST_HEADER_BYTES, 1)
    if not header:
        raise EOFError
    [memory] = descriptors
    try:
        told = json.loads(header)
        size = sum(map(_padded, told["sizes"]))
        # Unlike Python's mmap it keeps no descriptor.
        whole = torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=max(1, size), dtype=torch.uint8)
        mapped = memoryview(whole.numpy())
    finally:
        os.close(memory)
    parts, begin = [], 0
    for size in told["sizes"]:
        parts.append(mapped[begin : begin + size])
        begin += _padded(size)
    return told["kind"], told["number"], pickle.loads(parts[0], buffers=parts[1:])


class _OutOfBand(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return torch.from_numpy, (obj.detach().contiguous().numpy(),)
        return NotImplemented


def _padded(size: int) -> int:
    return size + -size % ALIGNED


def _write_all(memory: int, view: memoryview) -> None:
    left: Sequence[int] | memoryview = view.cast("B") if view.nbytes else view
    while len(left):
        left = left[os.write(memory, left) :]
