"""Weights to servers on this host over HTTP: bytes for servers on the CPU, CUDA IPC handles for those on a GPU."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.transports.base import WeightTransport
from megatron_rl_corr.weight_sync.transports.update_group import count_ranks


class TensorTransport(WeightTransport):
    """Needs no process group. Every tensor-parallel rank of a server unpickles an entry of its own."""

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
            count_ranks(self.servers.base_urls, infos)  # refuses replicas behind one address
            sizes = [info["tp_size"] for info in infos]
            self._ranks = dict(zip(self.servers.base_urls, sizes, strict=True))
        # A CUDA handle can be opened once, so that each rank needs a pickle of its own; bytes can be shared.
        serialized = self.servers.engine.serialized
        shared = None if any(tensor.is_cuda for _, tensor in bucket) else serialized(bucket)
        entries = [
            [shared or serialized(bucket) for _ in range(self._ranks[url])] for url in self.servers.base_urls
        ]
        self._loop.call(self.servers.update_weights_from_tensor(entries))


def check_same_host(urls: Sequence[str]) -> None:
    """ValueError for a server whose address is not one of this host's."""
    for url in urls:
        if not is_this_host(urlsplit(url).hostname):
            raise ValueError(
                f"--rollout-weight-transport tensor: {url} is not on {socket.gethostname()}, which sends "
                "weights to it, and hosts share no memory; use distributed, or disk with a shared --rollout-weight-dir"
            )


def is_this_host(host: str) -> bool:
    """Whether a name or address is of one of this host's interfaces: only to those can a socket be bound."""
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
