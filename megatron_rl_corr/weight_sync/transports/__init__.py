"""Ways for weights to reach the servers, one module each; `make_transport` chooses."""

from __future__ import annotations

import socket
from pathlib import Path

from megatron_rl_corr.files import check_writable
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.transports.announcers import Announcers, announcing_processes
from megatron_rl_corr.weight_sync.transports.base import WeightTransport
from megatron_rl_corr.weight_sync.transports.broadcast import GROUP_S, DistributedTransport
from megatron_rl_corr.weight_sync.transports.disk import DiskTransport
from megatron_rl_corr.weight_sync.transports.ipc import TensorTransport, check_same_host
from megatron_rl_corr.weight_sync.transports.rendezvous import bound


def make_transport(
    kind: str,
    client: RolloutClient,
    loop: LoopThread,
    *,
    backend: str,
    checkpoint: Path,
    folder: str | None,
    stage: int,
    sends: bool,
    address: str | None = None,
    group_per_server: bool = False,
    quantization: BlockFP8 | None = None,
) -> WeightTransport:
    """This rank's transport, for `weight_transport`.

    Args:
        kind: distributed, tensor or disk.
        client: of the servers.
        loop: the event loop of the client.
        backend: of distributed's process group: nccl or gloo.
        checkpoint: the Hugging Face folder of the model; disk copies its config and tokenizer.
        folder: `weight_dir`, for disk.
        stage: this rank's pipeline stage.
        sends: this rank is the stage's sender.
        address: `weight_address`, for distributed; None: the one on the route to a server.
        group_per_server: `weight_group_per_server`, for distributed.
        quantization: of the servers, for disk.

    Raises:
        ValueError: on a rank that sends, if the transport can't work here.
    """
    if kind == "disk":
        assert folder is not None
        if sends:
            check_writable(Path(folder), "`weight_dir`")
        return DiskTransport(Path(folder), checkpoint, loop, stage=stage, quantization=quantization)
    if kind == "tensor":
        if sends:
            check_same_host(client.base_urls)
        return TensorTransport(loop)
    if sends and address is not None:
        try:
            bound(address).close()
        except OSError as error:
            raise ValueError(
                f"`weight_address` {address}: no socket can listen there ({error}); name an address of "
                f"{socket.gethostname()}, which sends weights, or leave it out"
            ) from None
    count = announcing_processes(len(client.base_urls)) if sends else 0
    processes = [client.asking_process() for _ in range(count)]
    return DistributedTransport(
        client.control,
        loop,
        backend=backend,
        address=address,
        group_per_server=group_per_server,
        announcers=Announcers(loop, processes),
        timeout_s=min(GROUP_S, client.fleet.timeout_s),
    )
