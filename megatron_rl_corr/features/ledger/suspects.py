"""What a server may compute otherwise than the trainer, each as a change of the model that one pass tries.

Every rank makes the same list, from Megatron's arguments and the model's configuration; a change that a stage
has no module for does nothing there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

EPSILONS = (1e-5, 1e-6)
"""RMSNorm has them in the models of today."""
BASES = (1e4, 5e5, 1e6, 5e6, 1e7)
"""Rotary bases of the models of today."""
STRETCHES = (2, 4)
"""Factors by which servers stretch positions for longer contexts."""
FUSED_NORMS = ("use_transformer_engine_op_fuser", "fused_residual_rmsnorm")
"""Settings under which norms keep the epsilon of their first pass."""
CACHE_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""In which servers keep keys and values with --kv-cache-dtype, as they are: without a scale."""
ROUTER_TYPES = {"fp32": torch.float32, "fp64": torch.float64}
"""By --moe-router-dtype, the type of scores and of experts' weights."""

Changed = Callable[[Sequence[nn.Module]], AbstractContextManager]

SIZED, SWITCHED = (0.1, 10.0), (0.5, 2.0)
"""How many times the tried change a cause may be: another value of a setting, and one that is on or off."""
LEAST_FIT, LEAST_FIT_OF_PART = 0.3, 0.2
"""Share of the square of e along a suspect's d from which on it is a cause: of the very change, and of one
that is half of what a server does.
"""


@dataclass(frozen=True)
class Suspect:
    """One change of the trainer's model; `core.ledger_verdict.CAUSES` has the words.

    Example: Suspect("norm_epsilon/1e-05", attribute_changed("eps", 1e-5, of=is_norm), SIZED).
    """

    name: str
    changed: Changed | None
    """changed(model chunks): within, they compute so. None: logits times a factor, which needs no pass."""
    sizes: tuple[float, float] = SWITCHED
    """Least and most of sum(de) / sum(d^2)."""
    best_of: int = 1
    """So many were tried to find this one, which then needs more evidence."""
    least_fit: float = LEAST_FIT


LOGIT_SCALE = Suspect("logit_scale", None, (-0.3, 0.3))
"""d is of first order in the factor, so that a larger one is no evidence."""
OWN_ROUTES = Suspect("routes/own", lambda chunks: nullcontext())
"""With R3: the experts that the model itself chooses, in the place of those that servers report."""


def suspects_of(args: argparse.Namespace, config: Any, compute_type: torch.dtype) -> list[Suspect]:
    """What is tried of a model; [] where it is replayed from CUDA graphs, which no change reaches.

    Args:
        args: Megatron's, of which those of positions are read.
        config: the model's TransformerConfig.
        compute_type: what the model computes in.
    """
    if is_replayed(config):
        return []
    found = []
    if not any(vars(config).get(name) for name in FUSED_NORMS):
        found += [
            Suspect(f"norm_epsilon/{value:g}", attribute_changed("eps", value, of=is_norm), SIZED)
            for value in EPSILONS
            if value != config.layernorm_epsilon
        ]
    # Multi-latent attention has rotary modules of its own.
    if args.position_embedding_type == "rope" and not config.multi_latent_attention:
        found += _rotary_suspects(args)
    if not config.multi_latent_attention:  # whose cache holds what keys and values are made of
        found += [
            Suspect(f"kv_cache/{name}", keys_and_values_as(dtype)) for name, dtype in CACHE_TYPES.items()
        ]
    if config.num_moe_experts:
        found += _router_suspects(config, compute_type)
    return [*found, LOGIT_SCALE]


def is_replayed(config: Any) -> bool:
    """True if Megatron's own CUDA graphs replay the model, in passes without gradients, too."""
    return bool(vars(config).get("enable_cuda_graph")) or (vars(config).get("cuda_graph_impl") == "local")


def _rotary_suspects(args: argparse.Namespace) -> list[Suspect]:
    base = float(args.rotary_base)
    if args.position_embedding_type != "rope":  # YaRN's frequencies are made anew in each pass
        return []
    if args.rotary_seq_len_interpolation_factor not in (None, 1):
        return []
    if args.use_rope_scaling:  # as Llama 3.1 has it, of its own base
        return [Suspect("rotary_scaling/none", rotary_changed(lambda own: of_base(base, own)))]
    bases = [
        Suspect(f"rotary_base/{value:g}", rotary_changed(lambda own, value=value: of_base(value, own)), SIZED)
        for value in BASES
        if value != base
    ]
    return bases + [
        Suspect(f"rotary_stretch/{factor}", rotary_changed(lambda own, factor=factor: own / factor), SIZED)
        for factor in STRETCHES
    ]


def _router_suspects(config: Any, compute_type: torch.dtype) -> list[Suspect]:
    narrow = compute_type != torch.float32 and config.moe_router_dtype is None
    found = [
        Suspect("router_type/float32", config_changed("moe_router_dtype", "fp32"))
        if narrow
        else Suspect("router_type/bfloat16", router_in_bfloat16)
    ]
    if config.moe_router_score_function == "softmax":
        before = bool(config.moe_router_pre_softmax)
        name = "normalised" if before else "not_normalised"
        found.append(Suspect(f"expert_weights/{name}", config_changed("moe_router_pre_softmax", not before)))
    if config.moe_router_topk_scaling_factor not in (None, 1.0):
        found.append(Suspect("expert_scaling/none", config_changed("moe_router_topk_scaling_factor", None)))
    if config.moe_router_enable_expert_bias:
        found.append(Suspect("expert_bias/none", without_expert_bias))
    return found


def is_norm(module: nn.Module) -> bool:
    """True of norms, those that Transformer Engine fuses with a linear layer too."""
    return "norm" in type(module).__name__.lower() and isinstance(getattr(module, "eps", None), float)


def is_router(module: nn.Module) -> bool:
    """True of an expert layer's router."""
    return "router" in type(module).__name__.lower() and hasattr(module, "gating")


def attribute_changed(name: str, value: Any, *, of: Callable[[nn.Module], bool]) -> Changed:
    """The change of one attribute of all modules of a kind."""

    def changed(chunks: Sequence[nn.Module]) -> AbstractContextManager:
        return _set({id(one): one for one in _modules(chunks) if of(one)}.values(), name, value)

    return changed


def config_changed(name: str, value: Any) -> Changed:
    """The change of one setting of the routers' configuration."""

    def changed(chunks: Sequence[nn.Module]) -> AbstractContextManager:
        configs = {id(one.config): one.config for one in _modules(chunks) if is_router(one)}
        return _set(configs.values(), name, value)

    return changed


def rotary_changed(frequencies: Callable[[Tensor], Tensor]) -> Changed:
    """The change of the rotary embeddings' frequencies, which the module caches the angles of."""

    @contextmanager
    def changed(chunks: Sequence[nn.Module]) -> Iterator[None]:
        rotary = [one for one in _modules(chunks) if type(one).__name__ == "RotaryEmbedding"]
        own = [one.inv_freq for one in rotary]
        try:
            for module, before in zip(rotary, own, strict=True):
                _set_frequencies(module, frequencies(before))
            yield
        finally:
            for module, before in zip(rotary, own, strict=True):
                _set_frequencies(module, before)

    return changed


def _set_frequencies(module: nn.Module, frequencies: Tensor) -> None:
    module.inv_freq = frequencies
    type(module).forward.cache_clear()


def of_base(base: float, like: Tensor) -> Tensor:
    """base^(-2 i / d) for the d / 2 frequencies of a rotary embedding. like: [d / 2]."""
    places = torch.arange(len(like), dtype=torch.float32, device=like.device)
    return (1.0 / base ** (places / len(like))).to(like.dtype)


@contextmanager
def rounding_otherwise(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, every fourth number that a norm gives is its neighbour: the same policy, rounded anew."""

    def moved(module: nn.Module, given: tuple, made: Any) -> Any:
        if isinstance(made, tuple):
            return (moved(module, given, made[0]), *made[1:])
        signs = torch.zeros(made.shape[-1], dtype=torch.float64, device=made.device)
        signs[::8], signs[4::8] = 1, -1
        return (made.double() * (1 + 0.75 * signs * torch.finfo(made.dtype).eps)).to(made.dtype)

    with ExitStack() as hooks:
        for norm in filter(is_norm, _modules(chunks)):
            hooks.enter_context(norm.register_forward_hook(moved))
        yield


@contextmanager
def router_in_bfloat16(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, routers multiply in bfloat16, and score what came of it."""
    routers = [one for one in _modules(chunks) if is_router(one)]

    def in_bfloat16(router: nn.Module) -> Callable[[Tensor], Tensor]:
        def gating(hidden: Tensor) -> Tensor:
            bias = None if router.bias is None else router.bias.bfloat16()
            logits = nn.functional.linear(hidden.bfloat16(), router.weight.bfloat16(), bias)
            return logits.to(ROUTER_TYPES.get(router.config.moe_router_dtype, hidden.dtype))

        return gating

    own = [vars(router).get("gating") for router in routers]
    try:
        for router in routers:
            router.gating = in_bfloat16(router)
        yield
    finally:
        for router, before in zip(routers, own, strict=True):
            if before is None:
                del router.gating
            else:
                router.gating = before


def keys_and_values_as(dtype: torch.dtype) -> Changed:
    """The change of keys and values that are rounded to this type before attention reads them."""
    largest = torch.finfo(dtype).max

    def rounded(module: nn.Module, given: tuple) -> tuple:
        query, *cached = given[:3]
        return (query, *(one.clamp(-largest, largest).to(dtype).to(one.dtype) for one in cached), *given[3:])

    @contextmanager
    def changed(chunks: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as hooks:
            for one in _modules(chunks):
                if hasattr(one, "core_attention"):
                    hooks.enter_context(one.core_attention.register_forward_pre_hook(rounded))
            yield

    return changed


@contextmanager
def without_experts(experts: Sequence[str], chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, these experts of each layer give nothing; the weights of the others stay.

    A server that has others in their places lacks just that, and adds something that is not known.
    """
    columns = [int(one) for one in experts]

    def without(router: nn.Module, given: tuple, made: tuple) -> tuple:
        probs, *further = made
        return (probs.index_fill(-1, probs.new_tensor(columns, dtype=torch.int64), 0.0), *further)

    with ExitStack() as hooks:
        for router in filter(is_router, _modules(chunks)):
            hooks.enter_context(router.register_forward_hook(without))
        yield


@contextmanager
def without_expert_bias(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Within, experts are chosen by their scores alone."""
    biases = [one.expert_bias for one in _modules(chunks) if getattr(one, "expert_bias", None) is not None]
    own = [bias.clone() for bias in biases]
    try:
        for bias in biases:
            bias.zero_()
        yield
    finally:
        for bias, before in zip(biases, own, strict=True):
            bias.copy_(before)


def _modules(chunks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for chunk in chunks:
        yield from chunk.modules()


@contextmanager
def _set(objects: Any, name: str, value: Any) -> Iterator[None]:
    objects = list(objects)
    own = [getattr(one, name) for one in objects]
    try:
        for one in objects:
            setattr(one, name, value)
        yield
    finally:
        for one, before in zip(objects, own, strict=True):
            setattr(one, name, before)
