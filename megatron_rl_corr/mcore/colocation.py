"""Trainer and servers on the same GPUs, in turn: who has memory when, from the start of a run to its end.

The servers' turn: they have all of their memory, the trainer its weights; gradients are freed and
the optimizer's state is on the host. The trainer's turn: the servers have nothing. A push ends
the trainer's turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version

from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.versions import release
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError, communication_device
from megatron_rl_corr.weight_sync.colocated import ColocatedServers
from megatron_rl_corr.weight_sync.export import StageExporter
from megatron_rl_corr.weight_sync.update import release_servers

OFFLOAD_SINCE = (0, 17)
"""Megatron's optimizer and DDP free GPU memory for inference, as its own RL loop has them do."""
_REFUSED = {
    "async_save": "a checkpoint would still be read while the optimizer's state is moved",
    "reuse_grad_buf_for_mxfp8_param_ag": "weights are gathered in the gradients' memory, which is freed",
    "use_megatron_fsdp": "Megatron frees gradients of its own DistributedDataParallel alone",
    "use_torch_fsdp2": "Megatron frees gradients of its own DistributedDataParallel alone",
    "nccl_ub": "gradients in NCCL's buffers can't be freed",
    "log_params_norm": "Megatron reads the optimizer's main copies of the weights after the push, when they "
    "are freed",
    "optimizer_cuda_graph": "the graph keeps the addresses of state that is moved",
}
"""Megatron's flags, and why its offloading does not go with them."""


def check_colocation(args: argparse.Namespace) -> None:
    """ValueError for Megatron flags with which it can't free the memory of gradients and optimizer."""
    if not args.rollout_colocate:
        return
    if release() < OFFLOAD_SINCE:
        raise ValueError(
            f"--rollout-colocate needs megatron-core {OFFLOAD_SINCE[0]}.{OFFLOAD_SINCE[1]} or newer, which "
            f"can free gradients and move its optimizer to the host, and this is {megatron_version}; leave "
            "it out"
        )
    values, problems = vars(args), Problems()
    moved = not values.get("optimizer_cpu_offload")  # else its state is on the host always
    if moved and values.get("use_precision_aware_optimizer"):
        problems.add(
            "--use-precision-aware-optimizer with --rollout-colocate: it updates the model's weights "
            "themselves, and Megatron's offloading would cut them off from it; leave it out, or add "
            "--optimizer-cpu-offload"
        )
    if not moved and (fraction := values.get("optimizer_offload_fraction", 1.0)) < 1:
        problems.add(
            f"--optimizer-offload-fraction {fraction} with --rollout-colocate: the share on the GPU is never "
            "freed; give 1.0, or leave --optimizer-cpu-offload out"
        )
    for name, why in _REFUSED.items():
        if values.get(name):
            problems.add(f"--{name.replace('_', '-')} with --rollout-colocate: {why}; leave one of them out")
    if values.get("cuda_graph_impl", "none") != "none":
        problems.add(
            f"--cuda-graph-impl {args.cuda_graph_impl} with --rollout-colocate: graphs of training keep the "
            "addresses of gradients, which are freed; leave one of them out"
        )
    problems.raise_all()


@dataclass
class TrainerMemory:
    """What the trainer frees of its GPU while servers sample, by Megatron's own means; on every rank.

    Gradients are freed, and zeros when they come back. The optimizer's state and its main copies of the
    weights go to the host. On a CPU the same is called; only gradients are freed.
    """

    model: list
    optimizer: Any
    on_host: bool = False
    """--optimizer-cpu-offload: the optimizer's state is on the host always."""
    is_free: bool = False

    def free(self) -> None:
        """Harmless twice."""
        if self.is_free:
            return
        self._check_weights_stay()
        for chunk in self.model:
            chunk.offload_grad_buffers()
        if not self.on_host:
            self.optimizer.offload_to_cpu()
        self.is_free = True

    def take_back(self) -> None:
        """Harmless twice."""
        if not self.is_free:
            return
        for chunk in self.model:
            chunk.restore_grad_buffers()
        if not self.on_host:
            self.optimizer.restore_from_cpu()
        self.is_free = False

    def _check_weights_stay(self) -> None:
        """Raises StartupError where the weights, which are pushed and probed, would go to
        the host as well.
        """
        if torch.cuda.is_available() and not self.on_host and self.moves_weights():
            raise StartupError(
                "--rollout-colocate: parameters of this optimizer are the model's own, as in float32, and "
                "would leave the GPU with its state; add --use-distributed-optimizer"
            )

    def moves_weights(self) -> bool:
        """True if a parameter of the optimizer is one of the model's, and not a copy or a shard of it."""
        weights = {id(weight) for chunk in self.model for weight in chunk.parameters()}
        return any(id(one) in weights for group in self.optimizer.param_groups for one in group["params"])


@dataclass
class Colocation:
    """Whose turn it is; every rank has one, and takes its turns with the others."""

    exporter: StageExporter
    servers: ColocatedServers
    trainer: TrainerMemory
    trains: bool = True
    """It is the trainer's turn, as at the start."""

    @collective
    def begin_training_turn(self) -> None:
        """The servers' turn ends: they free their memory, then the trainer takes its own back.

        Raises:
            RolloutError: as `release_servers`, on one rank.
            PeerFailure: then, on the other ranks.
        """
        assert not self.trains, "the trainer has its turn already"
        release_servers(self.exporter, self.servers)
        self.trains = True
        self.trainer.take_back()

    def before_push(self) -> None:
        """The trainer's turn ends: it frees memory that the servers get by the push which follows."""
        self.trainer.free()

    @collective
    def begin_serving_turn(self) -> dict[str, float]:
        """The servers' turn begins. Their seconds of getting memory back, which rank 0
        knows, on every rank.
        """
        self.trains = False
        seconds = torch.tensor(
            self.servers.memory.take_resume_s(), dtype=torch.float64, device=communication_device()
        )
        dist.broadcast(seconds, src=0)
        return {"time/resume_s": float(seconds)}


@contextmanager
@collective
def trainers_turn(colocation: Colocation | None, push: Callable[[int], Any], version: int) -> Iterator[None]:
    """Within, the trainer has its memory, as for a checkpoint; then the push gives servers theirs
    back; on all ranks.

    Args:
        colocation: None: there is none, and nothing to do.
        push, version: push(version) sends the current weights.
    """
    if colocation is None or colocation.trains:  # it trains where the run leaves within a step
        yield
        return
    colocation.begin_training_turn()
    yield
    with compat.gathered_parameters(colocation.trainer.model, colocation.trainer.optimizer):
        push(version)
