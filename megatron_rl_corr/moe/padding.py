"""Keeps padding out of what MoE's routers learn from: auxiliary losses, z loss and balancing bias.

From 0.16 on Megatron hands a `padding_mask` down to its routers. `MaskedRouter` corrects what
they do with it:

* stages behind the first one get the mask of the whole row, also where sequence parallelism has cut the row;
* counting tokens for the balancing bias fails with a mask;
* the z loss is the mean of each rank's mean, whatever number of real tokens a rank has;
* with --calculate-per-token-loss both losses are scaled by the rank's real tokens, but `CorrectedLoss` has
  the gradient divided by all positions.

T tokens of a microbatch on this rank, E experts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_rl_corr.moe.routers import takes_padding_mask
from megatron_rl_corr.reduce.collectives import collective


@dataclass(frozen=True)
class PackedShare:
    """Weighs the losses of routers by a microbatch's real tokens, where microbatches have other
    numbers of them.
    """

    mean_tokens: Tensor
    """float64 scalar: real tokens of a microbatch, in the mean over all microbatches of all replicas."""
    logged: float
    """Microbatches that Megatron's calculator knows, by whose number the logged losses are
    divided, over those run.
    """
    cp_size: int

    @collective
    def loss_factors(self, real: Tensor, router: TopKRouter) -> tuple[Tensor, Tensor, Tensor]:
        """(factor of the logged loss, factor of its gradient, real tokens over all ranks) of a microbatch.

        With --calculate-per-token-loss Megatron multiplies by the microbatch's tokens, and divides the
        gradient by the sum of `Microbatch.counted`, 1 a pack and rank.

        Args:
            real: [T] bool, this rank's real tokens.
            router: whose groups share the microbatch.
        """
        group, tp = router.tp_cp_group, parallel_state.get_tensor_model_parallel_world_size()
        count = real.sum(dtype=torch.float64)
        dist.all_reduce(count, group=group)
        copies = 1 if router.config.sequence_parallel else tp
        weight = count / (copies * self.mean_tokens)
        gradient = weight
        if router.calculate_per_token_loss:
            gradient = weight * (self.cp_size / (len(real) * group.size()))
        return (weight * self.logged).float(), gradient.float(), count


def check_packed_routers(model: list) -> None:
    """ValueError where routers learn from the tokens of packs and can't be told which of them are padding."""
    for chunk in unwrap_model(model):
        flags = learning_flags(chunk.config)
        reason = why_not(chunk) if flags else None
        if reason is not None:
            remedy = " and ".join(f"{flag.split()[0]} 0" for flag in flags)
            raise ValueError(
                f"{', '.join(flags)} with packed sequences: routers would learn from padding, and alike from "
                f"packs of other lengths, as {reason}; use {remedy}, or, without agents, give "
                "--rollout-pad-sequences"
            )


def set_packed_share(model: list, share: PackedShare | None) -> None:
    """Weigh the losses of all routers of the model's chunks; None: as Megatron does, every
    microbatch alike.
    """
    for chunk in unwrap_model(model):
        if share is not None and learning_flags(chunk.config):
            use_masked_routers(chunk)
        for module in chunk.modules():
            if isinstance(module, MaskedRouter):
                module.packed_share = share


def padding_arguments(model: nn.Module, padding: Tensor | None) -> dict[str, Any]:
    """The keyword arguments by which a model chunk's forward leaves out padding [b, L] (bool,
    True: no token).

    Empty for a model whose routers learn nothing from tokens, and for a Megatron that can't
    leave padding out.
    """
    if padding is None:
        return {}
    if model not in _takes_mask:
        (chunk,) = unwrap_model([model])
        _takes_mask[model] = _prepare(chunk)
    return {"padding_mask": padding} if _takes_mask[model] else {}


_takes_mask: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _prepare(chunk: nn.Module) -> bool:
    """True if the chunk takes the mask. If so its routers are replaced; if not the last rank prints why."""
    flags = learning_flags(chunk.config)
    if not flags:
        return False
    reason = why_not(chunk)
    if reason is None:
        use_masked_routers(chunk)
    elif dist.get_rank() == dist.get_world_size() - 1:
        _warn_once(flags, reason)
    return reason is None


def learning_flags(config: Any) -> tuple[str, ...]:
    """The flags, with their values, that make routers learn from every token of a row; 0 turns each off."""
    if not config.num_moe_experts:
        return ()
    coefficients, flags = config.moe_aux_loss_coeff, {}
    if config.moe_router_load_balancing_type not in ("none", "sinkhorn"):
        values = coefficients if isinstance(coefficients, (list, tuple)) else [coefficients]
        flags["--moe-aux-loss-coeff"] = max(values, default=0)
    flags["--moe-z-loss-coeff"] = config.moe_z_loss_coeff or 0
    flags["--moe-router-bias-update-rate"] = (
        config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    )
    return tuple(f"{name} {value:g}" for name, value in flags.items() if value)


def why_not(chunk: nn.Module) -> str | None:
    """Why padding can't be left out of a chunk's routers; None if it can."""
    if not takes_padding_mask(chunk):
        return f"megatron-core {megatron_version} can't leave it out"
    if chunk.config.moe_router_load_balancing_type == "quantile_balancing":
        return "--moe-router-load-balancing-type quantile_balancing can't leave it out"
    if getattr(chunk.config, "cuda_graph_impl", "none") != "none":
        return f"--cuda-graph-impl {chunk.config.cuda_graph_impl} would repeat one microbatch's"
    others = [
        m for m in chunk.modules() if isinstance(m, TopKRouter) and type(m) not in (TopKRouter, MaskedRouter)
    ]
    if others:
        return f"{type(others[0]).__name__} is no router of Megatron's training"
    return None


@cache
def _warn_once(flags: tuple[str, ...], reason: str) -> None:
    remedy = " and ".join(f"{flag.split()[0]} 0" for flag in flags)
    print(
        f"[rollout] {', '.join(flags)}: routers learn from the padding of rows to --seq-length too, for "
        f"{reason}; use {remedy}, or a --seq-length that leaves little of it",
        file=sys.stderr,
        flush=True,
    )


def use_masked_routers(chunk: nn.Module) -> None:
    """Make every router of the chunk a MaskedRouter, in place."""
    for module in chunk.modules():
        if type(module) is TopKRouter:
            module.__class__ = MaskedRouter


class MaskedRouter(TopKRouter):
    """Megatron's router, with a padding mask that is right in every layout."""

    packed_share: PackedShare | None = None
    _factors: tuple[Tensor, Tensor] | None = None
    """With packed_share: `PackedShare.factors` of the microbatch in this pass."""
    _has_tokens: Tensor | None = None
    """With packed_share: whether the microbatch has a real token on any rank. In one without, all of whose
    tokens count with a factor of 0, Megatron's means would be 0 / 0.
    """

    @collective
    def routing(
        self, logits: Tensor, padding_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """logits [s, b, E]; the mask [s, b], or that of whole rows, [s * tp, b]."""
        if padding_mask is not None and padding_mask.shape[0] != logits.shape[0]:
            group = parallel_state.get_tensor_model_parallel_group()
            padding_mask = padding_mask.chunk(group.size())[group.rank()]
            assert padding_mask.shape[0] == logits.shape[0], "a mask of other rows"
        self._factors = self._has_tokens = None
        if self.packed_share is not None and self.training and torch.is_grad_enabled():
            *self._factors, count = self.packed_share.loss_factors(~padding_mask.reshape(-1), self)
            self._has_tokens = count > 0
            padding_mask = padding_mask & self._has_tokens
        return super().routing(logits, padding_mask=padding_mask, **kwargs)

    @collective
    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Rescale the logits [T, E] so that Megatron's mean over T equals the mean over real tokens
        (mask [T] False).

        The z loss is the mean of squared log-sum-exps. Each is scaled by the root of its token's weight: 0
        for padding, and one number for all real tokens.
        """
        if padding_mask is None or not self.config.moe_z_loss_coeff or not torch.is_grad_enabled():
            return super().apply_z_loss(logits)
        real = (~padding_mask).to(torch.float32)
        count = self._all_reduce_count(real)
        root = (real * (len(real) * self.tp_cp_group.size() / count)).sqrt()
        own = logits.float().logsumexp(-1)
        wanted = root * own
        if self._factors is not None:  # the square has the one factor, its gradient the other
            value, gradient = self._factors
            slope = gradient * value.clamp(min=torch.finfo(value.dtype).tiny).rsqrt()
            wanted = root * (value.sqrt() * own.detach() + slope * (own - own.detach()))
        weighted = logits + (wanted - own).unsqueeze(-1).to(logits.dtype)
        # Megatron attaches the loss to its result, which must stay in the graph without changing the logits.
        return logits + 0 * super().apply_z_loss(weighted)

    @collective
    def _all_reduce_count(self, real: Tensor) -> Tensor:
        """Real tokens of the microbatch, over all ranks that have a part of its rows."""
        count = real.sum()
        dist.all_reduce(count, group=self.tp_cp_group)
        return count

    def attach_and_log_load_balancing_loss(
        self, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Scale by all tokens, as without a mask; of packs by their real tokens, in gradient and log."""
        kwargs.pop("valid_token_count", None)
        if self._factors is not None:
            value, gradient = self._factors
            aux_loss = value * aux_loss.detach() + gradient * (aux_loss - aux_loss.detach())
        return super().attach_and_log_load_balancing_loss(
            activation, aux_loss_coeff, aux_loss, *args, **kwargs
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """routing_map [T, E], the mask [T]."""
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        if self._has_tokens is not None:
            routing_map = routing_map & self._has_tokens
        super()._apply_expert_bias(routing_map)
