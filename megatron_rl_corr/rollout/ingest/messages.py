"""Python objects between two processes of one host; large arrays in memory that both have, so that who
receives one copies nothing.
"""

from __future__ import annotations

import array
import copyreg
import errno
import io
import json
import os
import pickle
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64
"""Arrays begin at a multiple of so many bytes."""
MOST_INLINE = 96 << 10
"""Bytes of a message that goes through the socket itself: for fewer, memory of their own costs more than
to copy them. Less than the kernel's usual limit of a socket, 208 KiB.
"""


def send(to: socket.socket, kind: str, number: int, value: Any) -> Tensor | None:
    """Send one object; its tensors are on the CPU.

    Args:
        to: a SOCK_SEQPACKET of AF_UNIX.
        kind: what it is.
        number: of the request that it belongs to.
        value: what can be pickled.

    Returns:
        The shared memory, if it has any: who keeps it until the other side has freed its own has the work of
        giving it back to the kernel.

    Raises:
        OSError: the other side is gone, or there is no descriptor or memory left.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _OutOfBand(pickled, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [pickled.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = [view.nbytes for view in views]
    head = json.dumps({"kind": kind, "number": number, "sizes": sizes}).encode() + b"\n"
    head = head.ljust(_padded(len(head)))
    total = sum(map(_padded, sizes))
    if len(head) + total <= MOST_INLINE:
        parts: list[bytes | memoryview] = [head]
        for view, size in zip(views, sizes, strict=True):
            parts += [view, bytes(-size % ALIGNED)]
        to.sendmsg(parts)
        return None
    memory = os.memfd_create("rollout-ingest", os.MFD_CLOEXEC)
    try:
        for view, size in zip(views, sizes, strict=True):
            _write_all(memory, view)
            os.lseek(memory, -size % ALIGNED, os.SEEK_CUR)
        os.ftruncate(memory, total)
        kept = _mapped(memory, total)
        socket.send_fds(to, [head], [memory])
    finally:
        os.close(memory)
    return kept


class Inbox:
    """Receives objects; for one thread.

    Args:
        source: a SOCK_SEQPACKET of AF_UNIX.
        freed: called with the number of an object that came in shared memory once that is not used here any
            more, on any thread.
    """

    def __init__(self, source: socket.socket, freed: Callable[[int], None] | None = None):
        self._source, self._freed = source, freed
        self._buffer = bytearray(MOST_INLINE)
        self._descriptor_bytes = array.array("i").itemsize

    def receive(self) -> tuple[str, int, Any]:
        """(kind, number, value) of the next object.

        Raises:
            EOFError: the other side is gone.
            OSError: this process has no descriptor left.
        """
        count, ancillary, flags, _ = self._source.recvmsg_into(
            [self._buffer], socket.CMSG_LEN(self._descriptor_bytes)
        )
        if not count:
            raise EOFError
        if flags & socket.MSG_CTRUNC:  # the kernel has dropped the descriptor
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        got = memoryview(self._buffer)[:count]
        end = self._buffer.index(b"\n", 0, count) + 1
        head, begin = json.loads(got[:end].tobytes()), _padded(end)
        sizes, number = head["sizes"], head["number"]
        if ancillary:
            [descriptor] = array.array("i", ancillary[0][2])
            try:
                whole = _mapped(descriptor, sum(map(_padded, sizes))).numpy()
            finally:
                os.close(descriptor)
            if self._freed is not None:  # every tensor in it keeps this array
                weakref.finalize(whole, self._freed, number).atexit = False
            mapped, begin = memoryview(whole), 0
        else:
            mapped, begin = memoryview(bytearray(got[begin:])), 0
        parts = []
        for size in sizes:
            parts.append(mapped[begin : begin + size])
            begin += _padded(size)
        return head["kind"], number, pickle.loads(parts[0], buffers=parts[1:])


def _array_of(tensor: Tensor) -> tuple:
    return torch.from_numpy, (tensor.detach().contiguous().numpy(),)


class _OutOfBand(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {Tensor: _array_of}


def _mapped(memory: int, size: int) -> Tensor:
    """[size] uint8, the memory itself. Unlike Python's mmap it keeps no descriptor.

    Raises:
        OSError: there is no descriptor left to open it, or no room for one more mapping.
    """
    try:
        return torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:  # torch's, for a call that fails
        raise OSError(
            errno.ENOMEM,
            "shared memory can't be mapped: no descriptor or memory is left, or this process has as many "
            "mappings as `sysctl vm.max_map_count` allows",
        ) from error


def _padded(size: int) -> int:
    return size + -size % ALIGNED


def _write_all(memory: int, view: memoryview) -> None:
    left: Sequence[int] | memoryview = view.cast("B") if view.nbytes else view
    while len(left):
        left = left[os.write(memory, left) :]
