"""The transport, the proof and the count of what is sent that the flags ask for."""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import safe_open

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from megatron_rl_corr.models.names import NameTable
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.weight_sync.coverage import Coverage
from megatron_rl_corr.weight_sync.proof import PushProof
from megatron_rl_corr.weight_sync.transports.base import WeightTransport
from megatron_rl_corr.weight_sync.transports.broadcast import DistributedTransport
from megatron_rl_corr.weight_sync.transports.disk import DiskTransport, check_folder
from megatron_rl_corr.weight_sync.transports.ipc import TensorTransport, check_same_host


def make_transport(
    kind: str, client: RolloutClient, loop: LoopThread, *, backend: str, checkpoint: Path, folder: str | None,
    stage: int, sends: bool,
) -> WeightTransport:
    """This rank's, for --rollout-weight-transport. ValueError, on a rank that sends, where it can't work."""
    if kind == "disk":
        assert folder is not None
        if sends:
            check_folder(Path(folder))
        return DiskTransport(Path(folder), checkpoint, loop, stage=stage)
    if kind == "tensor":
        if sends:
            check_same_host(client.base_urls)
        return TensorTransport(loop)
    return DistributedTransport(client.control, loop, backend=backend)


def make_proof(kind: str, checkpoint: Path) -> PushProof | None:
    """This rank's, for --rollout-verify-push."""
    if kind == "off":
        return None
    return PushProof(count_elements(checkpoint))


def make_coverage(checkpoint: Path) -> Coverage:
    """This rank's, of the Hugging Face folder that the servers were started with."""
    folder = HFCheckpoint(checkpoint)
    table = NameTable(folder.config, padded_vocab_size=folder.config["vocab_size"])
    return Coverage(folder.names, table.why_kept)


def count_elements(checkpoint: Path) -> int:
    """Numbers in all tensors of a Hugging Face folder, read from its files' heads."""
    count = 0
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count
