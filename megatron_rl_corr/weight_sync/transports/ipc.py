"""Weights inside requests to servers on this host: as bytes to the CPU, as CUDA IPC handles to a GPU."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.transports.base import WeightTransport, common_ranks


class TensorTransport(WeightTransport):
    """Needs no process group. Every tensor-parallel rank of a server loads an entry of its own.

    Args:
        loop: the event loop of the client.
    """

    def __init__(self, loop: LoopThread):
        super().__init__()
        self._loop = loop
        self._ranks: dict[str, int] = {}

    def aim(self, servers, *, rejoined=None):
        super().aim(servers)
        if rejoined is not None:
            self._ranks = {}

    def send(self, bucket: list[NamedTensor]) -> None:
        if not self._ranks:
            infos = self._loop.call(self.servers.server_info())
            common_ranks(self.servers, infos)  # raises for servers of unlike size, and for hidden replicas
            self._ranks = {
                url: self.servers.engine_of(url).ranks(url, info).tensor
                for url, info in zip(self.servers.base_urls, infos, strict=True)
            }
        # A CUDA handle can be opened only once, so each rank needs its own entry; bytes can be shared.
        shared = {}
        if not any(tensor.is_cuda for _, tensor in bucket):
            shared = {name: engine.serialized(bucket) for name, engine in self.servers.fleet.engines.items()}
        entries = [
            [
                shared.get(self.servers.fleet.name_of(url)) or self.servers.engine_of(url).serialized(bucket)
                for _ in range(self._ranks[url])
            ]
            for url in self.servers.base_urls
        ]
        self._loop.call(self.servers.update_weights_from_tensor(entries))


def check_same_host(urls: Sequence[str]) -> None:
    """Check that every server runs on this host.

    Raises:
        ValueError: a server's address does not belong to this host.
    """
    for url in urls:
        if not is_this_host(urlsplit(url).hostname):
            raise ValueError(
                f"`weight_transport` tensor: {url} is not on {socket.gethostname()}, which sends "
                "weights to it, and hosts share no memory; use distributed, or disk with a shared "
                "`weight_dir`"
            )


def is_this_host(host: str) -> bool:
    """True if a name or address belongs to an interface of this host: a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False
