"""Weights by broadcast, over process groups of one sender and the ranks of the servers, with NCCL or gloo."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import (
    Backend,
    ProcessGroup,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from megatron_rl_corr.engines.concurrency import raise_first
from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutError, RolloutServerError
from megatron_rl_corr.engines.types import NamedTensor
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.transports.announcers import Announcers
from megatron_rl_corr.weight_sync.transports.base import WeightTransport, common_ranks
from megatron_rl_corr.weight_sync.transports.rendezvous import (
    address_towards,
    errors_are_ours,
    gloo_listening_at,
    listening_store,
)

_Group = ProcessGroup | ProcessGroupGloo

logger = logging.getLogger(__name__)

GROUP_S = 300.0
"""Seconds that servers may take to join a group, or to receive a bucket."""
_ANSWER_S = 5.0
"""Seconds to wait for a server's reason after the group has failed."""
_LEAVE_S = 5.0
"""Seconds that a server may take to leave a group."""
_POLL_S = 0.0005
_ABORT_S = 10.0
"""Seconds that NCCL may take to abort this side of a group."""


class DistributedTransport(WeightTransport):
    """Makes groups at a sender's first bucket and keeps them.

    With gloo each server has a group of its own with the sender: one that dies or hangs in a broadcast holds
    up no other, and only its own group is left. With NCCL all servers share a group, which is made anew when
    one leaves or joins. If one dies or hangs in a broadcast this side is aborted, and those servers that can
    leave the group, and say so, get a new one; the others are stuck. With `group_per_server` each has its own
    with NCCL too, and they take turns: torch asks that one NCCL group be waited for before another is used.

    Args:
        control: makes the ServerControl of some addresses.
        loop: the event loop of the client.
        backend: nccl or gloo.
        address: of this host, at which servers meet; None: the one on the route to them.
        group_per_server: no server shares a group with another one.
        announcers: tell the servers of each bucket; None: this process does.
        timeout_s: limit of making a group, and of one bucket.
    """

    def __init__(
        self,
        control: Callable[[Sequence[str]], ServerControl],
        loop: LoopThread,
        *,
        backend: str,
        address: str | None = None,
        group_per_server: bool = False,
        announcers: Announcers | None = None,
        timeout_s: float = GROUP_S,
    ):
        super().__init__()
        self._control, self._loop, self._backend, self._address = control, loop, backend, address
        self._timeout_s = timeout_s
        self._announcers = announcers or Announcers(loop)
        self._share = backend == "nccl" and not group_per_server
        self._take_turns = backend == "nccl" and group_per_server
        self._failures: list[Exception] = []
        self._groups: list[UpdateGroup] = []
        self._failed: list[UpdateGroup] = []
        self._under_way: list[tuple[UpdateGroup, Future]] = []
        """The bucket that is being sent: a group, and its servers' answers."""

    def aim(self, servers, *, rejoined=None):
        super().aim(servers)
        if not self.broken:
            for group in self._failed:
                self._tell_to_leave(group, servers.base_urls)
        self._failed.clear()
        if rejoined is not None:
            self._drop_groups(
                [g for g in self._groups if self._share or not set(g.urls) <= set(rejoined)], rejoined
            )

    def send(self, bucket: list[NamedTensor]) -> None:
        self.finish()  # the bucket before travelled while this one was gathered
        self._make_groups()
        for group in list(self._groups):
            receiving = group.send(bucket)
            if self._take_turns:
                self._end(group, receiving)
            else:
                self._under_way.append((group, receiving))

    def finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        for group, receiving in under_way:  # to the end, so that every server that can be is done with it
            self._end(group, receiving)
        failures, self._failures = self._failures, []
        raise_first(failures)

    def _end(self, group: UpdateGroup, receiving: Future) -> None:
        """Wait until the group's servers have the bucket, or leave the group."""
        try:
            group.wait(receiving, on_device=self._take_turns)
        except (RolloutError, OSError) as error:
            self._failures.append(error)
            self._groups.remove(group)
            if self._backend == "nccl":
                freed = group.abort()
                if self._check_freed(error, freed) and self._share:
                    self._separate(group.urls, error, group.name)
            elif self._share:
                group.leave()
                self._separate(group.urls, error, group.name)
            else:
                self._failed.append(group)
                group.leave()

    def _make_groups(self) -> None:
        """Groups of those servers that have none yet."""
        present = {url for group in self._groups for url in group.urls}
        missing = [url for url in self.servers.base_urls if url not in present]
        if not missing:
            return
        ranks = common_ranks(self.servers, self._loop.call(self.servers.server_info())).count
        for urls in [missing] if self._share else [[url] for url in missing]:
            try:
                self._groups.append(
                    UpdateGroup(
                        self._control(urls),
                        self._loop,
                        backend=self._backend,
                        announcers=self._announcers,
                        ranks_per_server=ranks,
                        address=self._address,
                        timeout_s=self._timeout_s,
                    )
                )
            except (RolloutError, OSError) as error:
                answered = isinstance(error, RolloutServerError) and error.status is not None
                if self._share and (len(urls) > 1 or not answered):
                    self._separate(urls, error, None)
                raise

    def _check_freed(self, error: Exception, freed: bool) -> bool:
        """Broken where this side could not be freed of a group."""
        if not freed:
            self.broken = True
            error.add_note(
                f"this side of the broadcast could not be aborted within {_ABORT_S:g} s, so the run can't go "
                "on; `weight_transport` tensor and disk can"
            )
        return freed

    def _separate(self, urls: Sequence[str], error: Exception, name: str | None) -> None:
        """Find out which servers of a group that has failed are free, by having them leave it; the others are
        stuck. name: of the group; None: it was not made.
        """
        if isinstance(error, RolloutServerError):
            error.timed_out = False  # as all do that wait for the one that is gone
        control = self._control(urls)
        control.forget_stuck()
        for failure in self._loop.call(control.leave_weights_update_group(name, timeout_s=_LEAVE_S)):
            logger.warning("a server did not leave a broadcast group that has failed: %s", failure)

    def close(self):
        self._drop_groups(list(self._groups), self.servers.base_urls if self.servers else ())
        self._announcers.close()

    def _drop_groups(self, groups: Collection[UpdateGroup], present: Collection[str]) -> None:
        """Leave these groups, and let those servers leave them that are present."""
        if self.broken:
            return
        for group in groups:
            self._tell_to_leave(group, present)
            self._groups.remove(group)
            group.leave()

    def _tell_to_leave(self, group: UpdateGroup, present: Collection[str]) -> None:
        urls = [url for url in group.urls if url in present]
        if not urls:
            return
        control = self._control(urls)
        for failure in self._loop.call(control.leave_weights_update_group(group.name, timeout_s=_LEAVE_S)):
            # it is gone, and the group with it, or its proxy answers
            logger.warning("a server did not leave a broadcast group: %s", failure)


class UpdateGroup:
    """A process group. Rank 0 is this process; the servers follow in the order of control.base_urls.

    Args:
        control: of its servers.
        loop: the event loop of the client.
        backend: nccl or gloo.
        ranks_per_server: the same for all servers.
        announcers: tell the servers of each bucket; None: this process does.
        address: of this host, at which they meet; None: the one on the route to the first server.
        timeout_s: limit of making the group and of one bucket.

    Raises:
        RolloutError: a server's answer explains why the group was not made.
        OSError: no server's answer explains it.
    """

    def __init__(
        self,
        control: ServerControl,
        loop: LoopThread,
        *,
        backend: str,
        ranks_per_server: int,
        announcers: Announcers | None = None,
        address: str | None = None,
        timeout_s: float = GROUP_S,
    ):
        self._control, self._backend, self._timeout_s = control, backend, timeout_s
        self._announcers = announcers or Announcers(loop)
        self.urls = control.base_urls
        # A server may keep a group's name for ever, even if its trainer has died: never use one twice.
        self.name = f"rollout-corr-{uuid.uuid4().hex[:12]}"
        self._works: list = []
        self._bucket: list[NamedTensor] = []
        """What is being broadcast, and must not be freed meanwhile."""
        address = address or address_towards(self.urls[0])
        store, port = listening_store(address, timeout_s)
        joining = loop.submit(
            control.init_weights_update_group(
                address,
                port,
                group_name=self.name,
                backend=backend,
                ranks_per_server=ranks_per_server,
                timeout_s=timeout_s,
            )
        )
        world_size = 1 + len(self.urls) * ranks_per_server
        join = partial(_join, store, world_size, self.name, backend, timeout_s, address)
        try:
            self._group = _joined(join, joining)
            joining.result(timeout_s + _ANSWER_S)
        except (RuntimeError, OSError) as error:
            raise self._cause(
                error,
                joining,
                f"no broadcast group of {world_size} ranks was made at {address}:{port}; can the "
                "servers reach this address, and is no firewall between? `weight_address` names another one",
            ) from error

    def send(self, bucket: list[NamedTensor]) -> Future:
        """Begin to broadcast a bucket; `wait` with what is returned before the next one."""
        self._bucket = [(name, _as_bytes(tensor.contiguous())) for name, tensor in bucket]
        receiving = self._announcers.announce(
            self._control,
            {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": self.name,
                "timeout_s": self._timeout_s,
            },
        )
        self._works = []
        try:
            for _, tensor in self._bucket:
                self._works.append(self._group.broadcast(tensor, root=0))
        except RuntimeError as error:  # told by `wait`, after what the servers answer
            logger.debug("a broadcast did not begin: %s", error)
        return receiving

    def wait(self, receiving: Future, *, on_device: bool = False) -> None:
        """Wait until every server has the bucket.

        on_device: also until the device has sent it. With NCCL a wait is one of a stream alone, and a server
        may answer before it has anything.

        Raises:
            RolloutError: a server's answer explains why it did not receive the bucket.
            OSError: no server's answer explains it.
        """
        try:
            # The servers' answer first: if one has died, waiting for the broadcast would only
            # hide the reason.
            receiving.result(self._timeout_s + _ANSWER_S)
            if on_device:
                self._wait_on_device()
            for work in self._works:
                work.wait()
            self._bucket = []
        except (RuntimeError, OSError) as error:
            raise self._cause(
                error,
                receiving,
                "a broadcast of weights failed; see the servers' logs, or use "
                "`weight_transport` tensor or disk",
            ) from error

    def _wait_on_device(self) -> None:
        end = time.monotonic() + self._timeout_s
        while not all(work.is_completed() for work in self._works):
            if time.monotonic() > end:
                detail = (
                    f"the broadcast to it has not ended on this side's device within {self._timeout_s:g} s"
                )
                raise RolloutServerError(self.urls[0], "(broadcast)", None, detail, timed_out=True)
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """Leave the group, after the servers or without them.

        A broadcast to a server that hangs ends by its time limit only, and a group waits for it when it is
        freed: so such a group is freed on a thread, which does not keep the process from ending. Any other is
        freed at once: a
        thread that is freeing a group while Python ends would abort the process. With NCCL a group stays
        until then: whether freeing it would wait for a rank that is gone has not been tried.
        """
        held, works, self._works = [self._group], self._works, []
        del self._group
        if self._backend != "gloo":
            return
        works = [work for work in works if not work.is_completed()]
        if works:
            threading.Thread(target=_free, args=[held, works], name="weight-group", daemon=True).start()

    def abort(self) -> bool:
        """Leave an NCCL group that has failed. True: this side is free of it.

        By torch's own means for a rank that is gone: its communicators are aborted, which ends
        kernels that wait for others. torch calls that experimental, and `ncclCommAbort` may hang by itself:
        so it runs on a thread. The group was made with torch's own handling of errors off
        (`errors_are_ours`), as it has to be for that.
        """
        group, self._works = self._group, []
        del self._group
        thread = threading.Thread(target=_abort_process_group, args=[group], name="weight-group", daemon=True)
        thread.start()
        thread.join(_ABORT_S)
        if not thread.is_alive():
            self._bucket = []
        return not thread.is_alive()

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
        return OSError(f"{', '.join(self.urls)}: {what}{reason}")


def _joined(join: Callable[[], _Group], joining: Future) -> _Group:
    """The group once all ranks have joined. A failure of `joining` is raised at once, because then
    some never will.

    torch's wait can't be cancelled, so it runs in a thread, which ends by itself after its time limit.
    """
    joined: Future[_Group] = Future()

    def wait() -> None:
        try:
            joined.set_result(join())
        except (RuntimeError, ValueError, OSError) as error:
            joined.set_exception(error)

    threading.Thread(target=wait, name="weight-group", daemon=True).start()
    concurrent.futures.wait([joined, joining], return_when=concurrent.futures.FIRST_COMPLETED)
    if not joined.done():
        joining.result()
    return joined.result()


def _join(store: Store, world_size: int, name: str, backend: str, timeout_s: float, address: str) -> _Group:
    """What init_process_group does for the servers' side, as rank 0 of a group beside the default one."""
    timeout = timedelta(seconds=timeout_s)
    store = PrefixStore(name, store)
    if backend == "gloo":
        # Without torch's list of groups, from which one that hangs could not be taken. Its
        # names in the store:
        store = PrefixStore("cpu/", PrefixStore(f"{name}/", store))
        with gloo_listening_at(address):
            return ProcessGroupGloo(store, 0, world_size, timeout=timeout)
    with errors_are_ours():
        group, _ = _new_process_group_helper(
            world_size,
            0,
            [],
            Backend(backend),
            store,
            group_name=name,
            backend_options=None,
            timeout=timeout,
        )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _as_bytes(tensor: Tensor) -> Tensor:
    """FP8 values as bytes, which every backend takes: a receiver's tensor of FP8 is as long."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _free(held: list[_Group], works: list) -> None:
    """Drop a group once none of its broadcasts is under way: torch would wait for them with
    Python's lock held.
    """
    for work in works:
        with contextlib.suppress(RuntimeError):
            work.wait()
    held.clear()
