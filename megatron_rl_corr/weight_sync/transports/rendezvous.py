"""Where a broadcast group meets: a store, and gloo's connections, on one address of this
host and no other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import TCPStore

_SIOCGIFADDR = 0x8915
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_being_made: list[str | None] = []
"""Interfaces of this process's groups that are being made: none of them was named by the user."""


def listening_store(address: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store that listens on this address alone, and its port.

    The socket listens before anybody is told of it, so that no other process can take the port in between.

    Args:
        address: a name or number of this host.
        timeout_s: limit of a wait in the store.

    Raises:
        OSError: this host has no such address.
    """
    listener = bound(address)
    listener.listen()
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def bound(address: str) -> socket.socket:
    """A TCP socket on any free port of an address of this host.

    Raises:
        OSError: this host has no such address.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.bind(place)
    except OSError:
        made.close()
        raise
    return made


def address_towards(url: str) -> str:
    """This host's address on the route to a server; connecting a datagram socket sends nothing."""
    parts = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


@contextlib.contextmanager
def gloo_listening_at(address: str) -> Iterator[None]:
    """Groups that are made meanwhile listen on the interface of this address, as far as it has
    an IPv4 address.

    Gloo's other ways to name it hold Python's lock until all ranks have come. An interface that the user
    names stays. One whose group is still waited for, as its server has failed, does not.
    """
    if os.environ.get(_GLOO_INTERFACE) not in (None, *_being_made):
        yield
        return
    interface = _interface_of(address)
    _being_made.append(interface)
    os.environ.pop(_GLOO_INTERFACE, None)
    if interface is not None:
        os.environ[_GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        _being_made.remove(interface)
        if interface not in _being_made and os.environ.get(_GLOO_INTERFACE) == interface:
            os.environ.pop(_GLOO_INTERFACE, None)


@contextlib.contextmanager
def errors_are_ours() -> Iterator[None]:
    """NCCL groups that are made meanwhile have their errors reported by torch's watchdog, and no more.

    It would end this process as soon as a server is gone (the default, 3), or abort the group at the same
    time as we do; torch asks for 0 where `_abort_process_group` is called. A value that the user has set
    stays.
    """
    if _NCCL_ERRORS in os.environ:
        yield
        return
    os.environ[_NCCL_ERRORS] = "0"
    try:
        yield
    finally:
        os.environ.pop(_NCCL_ERRORS, None)


def _interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an address
                if fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24] == wanted:
                    return name
    return None
