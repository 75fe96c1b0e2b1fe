"""A process group of one trainer rank and all rollout servers' ranks, that weights are broadcast over."""

from __future__ import annotations

import concurrent.futures
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    ProcessGroup,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.buckets import NamedTensor

_ANSWER_S = 5.0
"""Where the group has failed: how long to wait for a server to say why."""


class UpdateGroup:
    """Rank 0 is this process; the servers follow in the order of client.base_urls.

    What a server answers is raised as RolloutError; a failure of the group that no server explains, as OSError.
    """

    def __init__(
        self, client: ServerControl, loop: LoopThread, *, backend: str, ranks_per_server: int, timeout_s: float = 300.0
    ):
        self._client, self._loop = client, loop
        self._backend, self._timeout_s = backend, timeout_s
        # SGLang keeps a group's name for ever, also when its trainer has died: never use one twice.
        self.name = f"rollout-corr-{uuid.uuid4().hex[:12]}"
        address = _address_towards(client.base_urls[0])
        port = _free_port(address)
        joining = loop.submit(
            client.init_weights_update_group(
                address, port, group_name=self.name, backend=backend, ranks_per_server=ranks_per_server
            )
        )
        world_size = 1 + len(client.base_urls) * ranks_per_server
        try:
            store = _meet(address, port, world_size, timeout_s, joining)
            self._group = _join(store, world_size, self.name, backend, timeout_s)
            joining.result(timeout_s)
        except (RuntimeError, OSError) as error:
            raise self._cause(
                error, joining, f"no broadcast group of {world_size} ranks was made at {address}:{port}; can the "
                "servers reach this address, and is no firewall between?",
            ) from error

    def broadcast(self, bucket: list[NamedTensor]) -> None:
        """Send one bucket to every server and wait until all have it; RolloutServerError if one has not."""
        receiving = self._loop.submit(
            self._client.update_weights_from_distributed(
                [name for name, _ in bucket],
                [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                [list(tensor.shape) for _, tensor in bucket],
                group_name=self.name,
                flush_cache=False,
            )
        )
        try:
            works = [
                dist.broadcast(tensor.contiguous(), src=0, group=self._group, async_op=True)
                for _, tensor in bucket
            ]
            # The servers' answer first: where one has died, waiting for the broadcast would only hide why.
            receiving.result(self._timeout_s)
            for work in works:
                work.wait()
        except (RuntimeError, OSError) as error:
            raise self._cause(
                error, receiving, "a broadcast of weights failed; see the servers' logs, or use "
                "--rollout-weight-transport tensor or disk",
            ) from error

    def destroy(self) -> None:
        """This process's half, when the servers have left theirs.

        Not over NCCL: whether it waits there for a rank that is gone has not been tried, and what stays are some
        buffers until the process ends.
        """
        if self._backend == "gloo" and self._group in _world.pg_map:  # else it went with the default group
            dist.destroy_process_group(self._group)

    def _cause(self, error: Exception, asked: Future, what: str) -> Exception:
        """A server's own answer says more than the group does, where it comes."""
        if isinstance(error, RolloutError):
            return error
        failure = None
        try:
            failure = asked.exception(_ANSWER_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            asked.cancel()
        if isinstance(failure, RolloutError):
            return failure
        said = f" ({error})" if str(error) else f" (no answer within {self._timeout_s:g} s)"
        return OSError(f"{', '.join(self._client.base_urls)}: {what}{said}")


def count_ranks(urls: Sequence[str], infos: Sequence[Mapping[str, Any]]) -> int:
    """Ranks that each server brings into the group: tensor times pipeline parallel size of its /server_info.

    Raises RolloutProtocolError for servers of unlike size, or one that hides several replicas.
    """
    counts = []
    for url, info in zip(urls, infos, strict=True):
        if info["dp_size"] > 1 and not info["enable_dp_attention"]:
            raise RolloutProtocolError(
                url, "/server_info",
                f"it runs --dp-size {info['dp_size']} replicas; start as many servers and name each in --rollout-url",
            )
        counts.append(info["tp_size"] * info["pp_size"])
        if counts[-1] != counts[0]:
            raise RolloutProtocolError(
                url, "/server_info",
                f"it has {counts[-1]} ranks and {urls[0]} has {counts[0]}; "
                "give all servers the same --tp-size and --pp-size",
            )
    return counts[0]


def _meet(address: str, port: int, world_size: int, timeout_s: float, joining: Future) -> dist.Store:
    """The store that all ranks have come to; at once the failure of `joining`, as then some never will.

    torch can't be told to stop waiting, so that is done in a thread, which ends by itself after timeout_s.
    """
    met: Future = Future()

    def wait() -> None:
        try:
            store, _, _ = next(
                rendezvous(f"tcp://{address}:{port}", 0, world_size, timeout=timedelta(seconds=timeout_s))
            )
            met.set_result(store)
        except (RuntimeError, ValueError, OSError) as error:
            met.set_exception(error)

    threading.Thread(target=wait, name="weight-rendezvous", daemon=True).start()
    concurrent.futures.wait([met, joining], return_when=concurrent.futures.FIRST_COMPLETED)
    if not met.done():
        joining.result()
    return met.result()


def _join(store: dist.Store, world_size: int, name: str, backend: str, timeout_s: float) -> ProcessGroup:
    """init_process_group for a group beside the default one: torch has no public call for it."""
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(name, store),
        group_name=name, backend_options=None, timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _address_towards(url: str) -> str:
    """This host's address on the route to a server; nothing is sent by connecting a datagram socket."""
    parts = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
