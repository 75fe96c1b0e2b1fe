"""Weights by broadcast, over a process group of one sender and the ranks of all servers, with NCCL or gloo."""

from __future__ import annotations

import concurrent.futures
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
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
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.transports.base import WeightTransport, common_ranks

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
"""Seconds to wait for a server's reason after the group has failed."""


class DistributedTransport(WeightTransport):
    """Makes a group at a sender's first bucket and keeps it; a server that leaves or joins needs a new one.

    If a server dies in a broadcast, the others stay in it until this process and its connections end: neither gloo nor
    NCCL can free them from here.

    Args:
        control: makes the ServerControl of some addresses.
        loop: the event loop of the client.
        backend: nccl or gloo.
    """

    def __init__(self, control: Callable[[Sequence[str]], ServerControl], loop: LoopThread, *, backend: str):
        super().__init__()
        self._control, self._loop, self._backend = control, loop, backend
        self._group: UpdateGroup | None = None

    def aim(self, servers, *, rejoined=None):
        if rejoined is not None:
            self._drop_group(rejoined)
        super().aim(servers)

    def send(self, bucket: list[NamedTensor]) -> None:
        if self._group is None:
            self._make_group()
        try:
            self._group.broadcast(bucket)
        except (RolloutError, OSError) as error:
            self._break(error)
            raise

    def _make_group(self) -> None:
        infos = self._loop.call(self.servers.server_info())
        ranks_per_server = common_ranks(self.servers, infos).count
        try:
            self._group = UpdateGroup(
                self.servers, self._loop, backend=self._backend, ranks_per_server=ranks_per_server
            )
        except (RolloutError, OSError) as error:
            answered = isinstance(error, RolloutServerError) and error.status is not None
            if len(self.servers.base_urls) > 1 or not answered:
                self._break(error)
            raise

    def _break(self, error: Exception) -> None:
        self.broken = True
        error.add_note(
            "other servers may be waiting in the broadcast, so the run can't go on without this one; "
            "`weight_transport` tensor and disk can"
        )

    def close(self):
        self._drop_group(self.servers.base_urls if self.servers else ())

    def _drop_group(self, urls: Sequence[str]) -> None:
        if self._group is None or self.broken:
            return
        for url in urls:
            try:
                self._loop.call(self._control([url]).destroy_weights_update_group(self._group.name))
            except RolloutServerError as error:  # it is gone, and the group with it
                logger.warning("a server did not leave a broadcast group: %s", error)
        self._group.destroy()
        self._group = None


class UpdateGroup:
    """The process group. Rank 0 is this process; the servers follow in the order of control.base_urls.

    Args:
        control: of the servers.
        loop: the event loop of the client.
        backend: nccl or gloo.
        ranks_per_server: the same for all servers.
        timeout_s: limit of making the group and of one bucket.

    Raises:
        RolloutError: a server's answer explains why the group was not made.
        OSError: no server's answer explains it.
    """

    def __init__(
        self, control: ServerControl, loop: LoopThread, *, backend: str, ranks_per_server: int, timeout_s: float = 300.0
    ):
        self._control, self._loop = control, loop
        self._backend, self._timeout_s = backend, timeout_s
        # A server may keep a group's name for ever, even if its trainer has died: never use one twice.
        self.name = f"rollout-corr-{uuid.uuid4().hex[:12]}"
        address = _address_towards(control.base_urls[0])
        port = _free_port(address)
        joining = loop.submit(
            control.init_weights_update_group(
                address, port, group_name=self.name, backend=backend, ranks_per_server=ranks_per_server
            )
        )
        world_size = 1 + len(control.base_urls) * ranks_per_server
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
        """Send one bucket to every server and wait until all have it.

        Raises:
            RolloutError: a server's answer explains why it did not receive the bucket.
            OSError: no server's answer explains it.
        """
        receiving = self._loop.submit(
            self._control.update_weights_from_distributed(
                [name for name, _ in bucket],
                [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                [list(tensor.shape) for _, tensor in bucket],
                group_name=self.name,
            )
        )
        try:
            works = [
                dist.broadcast(tensor.contiguous(), src=0, group=self._group, async_op=True)
                for _, tensor in bucket
            ]
            # The servers' answer first: if one has died, waiting for the broadcast would only hide the reason.
            receiving.result(self._timeout_s)
            for work in works:
                work.wait()
        except (RuntimeError, OSError) as error:
            raise self._cause(
                error, receiving, "a broadcast of weights failed; see the servers' logs, or use "
                "`weight_transport` tensor or disk",
            ) from error

    def destroy(self) -> None:
        """Leave the group after the servers.

        Not with NCCL: whether it would wait for a rank that is gone has not been tried, and only some buffers stay
        until the process ends.
        """
        if self._backend == "gloo" and self._group in _world.pg_map:  # else it ended with the default group
            dist.destroy_process_group(self._group)

    def _cause(self, error: Exception, request: Future, what: str) -> Exception:
        """A server's own answer if there is one, because it explains more than the group's error."""
        if isinstance(error, RolloutError):
            return error
        failure = None
        try:
            failure = request.exception(_ANSWER_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            request.cancel()
        if isinstance(failure, RolloutError):
            return failure
        reason = f" ({error})" if str(error) else f" (no answer within {self._timeout_s:g} s)"
        return OSError(f"{', '.join(self._control.base_urls)}: {what}{reason}")


def _meet(address: str, port: int, world_size: int, timeout_s: float, joining: Future) -> dist.Store:
    """The store in which all ranks have met. A failure of `joining` is raised at once, because then some never will.

    torch's wait can't be cancelled, so it runs in a thread, which ends by itself after timeout_s.
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
    """init_process_group for a group beside the default one, for which torch has no public function."""
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), PrefixStore(name, store),
        group_name=name, backend_options=None, timeout=timeout,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _address_towards(url: str) -> str:
    """This host's address on the route to a server; connecting a datagram socket sends nothing."""
    parts = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
