"""The weight-transfer backend "rl_corr" of vLLM: receives buckets by broadcast or in
requests, and loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_rl_corr.engines.vllm import checks, tensors
from megatron_rl_corr.engines.vllm.checks import BACKEND
from megatron_rl_corr.engines.vllm.memory_checksums import UNKNOWN
from megatron_rl_corr.engines.vllm.worker.changes import ChangesUpdate
from megatron_rl_corr.engines.vllm.worker.loading import Kept, LayerwiseUpdate, experts_problem
from megatron_rl_corr.engines.weight_changes import CODE, ChangesReceiver, checked_headers, shapes_of

GROUP_BACKENDS = ("gloo", "nccl")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A process group in which the trainer is rank 0 and this server's ranks start at rank_offset."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float = 300.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket: its names, types and shapes if rank 0 broadcasts it, or what
    `tensors.serialized` made of it.
    """

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    group_name: str | None = None
    serialized: str | None = None


class WeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Nothing of the model is touched before the first bucket, and nothing by a bucket that
    does not fit it.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self._groups: dict[str, dist.ProcessGroup] = {}
        """By name: each pipeline stage's sender has a group of its own."""
        self._held: dict[str, list[int]] | None = None
        self._planned: checks.Shapes | None = None
        self._with_checksums = True
        self._received: set[str] = set()
        self._update: LayerwiseUpdate | None = None
        self.is_open = False
        self.is_mixed = False
        """An update broke off: some layers have its weights, the others those of before."""
        self.checksums: dict[str, str] = {}
        """Name of each parameter that an update has loaded -> its checksum before it was packed."""
        self.unpacked: set[str] = set()
        """Parameters that lie in memory as they were loaded."""
        self._keeps = self._brings_changes = False
        self._kept: Kept = {}
        self._changes = ChangesReceiver()

    # The group

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group, by the rendezvous that the trainer's side has too."""
        if init_info.backend not in GROUP_BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(GROUP_BACKENDS)}, got {init_info.backend!r}")
        self.leave(init_info.group_name)
        timeout = timedelta(seconds=init_info.timeout_s)
        address, size = init_info.master_address, init_info.world_size
        rank = init_info.rank_offset + self.parallel_config.rank
        host = f"[{address}]" if ":" in address else address
        store, _, _ = next(rendezvous(f"tcp://{host}:{init_info.master_port}", rank, size, timeout=timeout))
        store.set_timeout(timeout)
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            Backend(init_info.backend),
            PrefixStore(init_info.group_name, store),
            group_name=init_info.group_name,
            backend_options=None,
            timeout=timeout,
        )
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        self._groups[init_info.group_name] = group

    def shutdown(self) -> None:
        """Leave every group."""
        for name in list(self._groups):
            self.leave(name)

    def leave(self, name: str) -> None:
        """Leave the group of this name, if this server is in it."""
        group = self._groups.pop(name, None)
        if group is not None:
            dist.destroy_process_group(group)

    # An update

    def begin(self, sent: checks.Shapes | None, *, with_checksums: bool, keep: bool = False) -> None:
        """Check the next update, end one that a killed trainer has left open, and accept buckets.

        Args:
            sent: all of its tensors; None: any that the server's checkpoint has.
            with_checksums: hash the parameters.
            keep: keep what kernels want packed as it was loaded too, for updates of what changes alone.

        Raises:
            ValueError: this server can't take it; its weights have not been touched.
        """
        self.break_off()
        problem = checks.config_problem(self.vllm_config)
        if problem is not None:
            raise ValueError(problem)
        if self._held is None:
            self._held = checks.shapes_of_folder(
                model_folder(self.model_config, self.vllm_config.load_config)
            )
        problem = experts_problem(self.model, self.device)
        if problem is None and sent is not None:
            problem = checks.problem(sent, self._held)
        if problem is not None:
            raise ValueError(problem)
        self._planned, self._with_checksums, self._keeps = sent, with_checksums, keep
        self.is_open, self._received = True, set()

    def begin_changes(self, push: str, base: str, stages: int) -> None:
        """Expect in the open update what has changed alone; arguments as of `ChangesReceiver.begin`.

        Raises:
            ValueError: it does not fit what this server has; its weights have not been touched.
        """
        if not self.is_open:
            raise ValueError("no update is open; begin one before its changes")
        if self.is_mixed or not self._kept:
            raise ValueError("this server does not know what the changes are of; send everything first")
        problem = self._changes.begin(push, base, stages, CODE)
        if problem is not None:
            raise ValueError(problem)
        self._brings_changes = True

    def check_is_whole(self) -> None:
        """Raises ValueError while weights are being loaded: what is there is no one's, and maybe as no kernel
        has it.
        """
        if self._update is not None:
            raise ValueError(
                "weights are being loaded; their checksums can be told when the update has ended"
            )

    def start_weight_update(self) -> None:
        """vLLM's own endpoint of this name. Raises ValueError: `begin` is needed."""
        raise ValueError(
            "this server takes updates by its worker extension alone; see /collective_rpc rl_corr_begin"
        )

    def update_weights(self, update_info: dict) -> None:
        """Check, receive and load one bucket; if that fails the update is broken off."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except BaseException:
            self.break_off()
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check, receive and load one bucket."""
        if not self.is_open:
            raise ValueError("no update is open; begin one before its buckets")
        entries = [] if update_info.serialized is None else tensors.entries(update_info.serialized)
        named = [(one["name"], one["shape"]) for one in entries]
        named = named or list(zip(update_info.names, update_info.shapes, strict=True))
        if self._brings_changes:
            checked_headers(named)
        shapes = shapes_of(named) if self._brings_changes else dict(named)
        problem = self._bucket_problem(shapes)
        if problem is None and len(dict(named)) < len(named) and not self._brings_changes:
            problem = "a tensor is twice in one bucket"
        if problem is None and not entries and update_info.group_name not in self._groups:
            problem = (
                f"this server is not in the group {update_info.group_name!r}; it was started again, or "
                "left it"
            )
        if problem is not None:
            raise ValueError(problem)
        if entries:
            weights = ((one["name"], tensors.decoded(one, self.device)) for one in entries)
        else:
            weights = self._broadcast(update_info)
        if self._brings_changes:
            self._load_changes(list(weights))
        else:
            self.load(weights)

    def _bucket_problem(self, shapes: checks.Shapes) -> str | None:
        planned = self._held if self._planned is None else self._planned
        return checks.bucket_problem(shapes, planned, self._received)

    def _load_changes(self, bucket: list[tuple[str, Tensor]]) -> None:
        if self._update is None:
            self._update = ChangesUpdate(
                self.model,
                self.model_config,
                self.device,
                with_checksums=self._with_checksums,
                kept=self._kept,
                receiver=self._changes,
            )
        self._update.load(bucket)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors that were checked."""
        if self._update is None:
            if not self._keeps:
                self._kept.clear()
            self._changes.version = None
            self._update = LayerwiseUpdate(
                self.model,
                self.model_config,
                self.device,
                with_checksums=self._with_checksums,
                kept=self._kept if self._keeps else None,
            )

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                self._received.add(name)
                yield name, tensor

        self._update.load(noted())

    def _broadcast(self, info: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        received = []
        for name, dtype, shape in zip(info.names, info.dtypes, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=tensors.dtype_named(dtype), device=self.device)
            work = dist.broadcast(tensor, src=0, group=self._groups[info.group_name], async_op=True)
            received.append((name, tensor, work))
        for name, tensor, work in received:
            work.wait()
            yield name, tensor

    def finish_weight_update(self) -> None:
        """End an update that is complete. Raises ValueError for one that is not; it is broken off then."""
        if not self.is_open:
            raise ValueError("no update is open")
        problem = self._incomplete()
        if problem is not None:
            self.break_off()
            raise ValueError(f"the update is not complete: {problem}")
        try:
            found = self._update.finish()
        except BaseException:
            self.break_off()
            raise
        if not self._with_checksums:  # those of the weights before are of what is no more there
            self.checksums = {
                name: one if name in self.unpacked else UNKNOWN for name, one in self.checksums.items()
            }
        self.checksums |= found
        self._update, self.is_open, self.is_mixed, self._brings_changes = None, False, False, False

    def _incomplete(self) -> str | None:
        """What of the open update is missing; None: nothing."""
        if self._brings_changes:
            return None if self._changes.version is not None else "not all buckets of changes have come"
        planned = self._planned if self._planned is not None else self._received
        problem = checks.incomplete(planned, self._received)
        if problem is None and self._planned is None:
            problem = checks.problem({name: self._held[name] for name in self._received}, self._held)
        return problem

    def break_off(self) -> None:
        """End an open update: layers that are not complete get their old weights back, so that
        the server can run.

        With a complete one it has weights of two versions then, and must not be sampled from
        before a whole update.
        """
        update, self._update, self.is_open, self._received = self._update, None, False, set()
        self._brings_changes = False
        if update is not None:
            update.roll_back()
            if update.touched:
                self.is_mixed = True
                self.checksums = dict.fromkeys(self.checksums, UNKNOWN)


def model_folder(model_config, load_config) -> Path:
    """The folder of the checkpoint that the server was started with, or its copy where vLLM has
    downloaded it to.
    """
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    )


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, WeightTransfer)
