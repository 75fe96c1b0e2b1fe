"""Megatron's routers: where a model has them, and which of its flags keep their choice from being
replayed or watched.

--expert-statistics watches the routers where --router-replay would steer them, and needs the same of them.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable

from megatron.core import __version__ as megatron_version
from torch import nn


def moe_routers(chunk: nn.Module) -> list[nn.Module]:
    """The routers of a model chunk in the order of their layers, without those of multi-token prediction."""
    from megatron.core.transformer.moe.router import TopKRouter

    # By attribute names: only newer releases mark these routers themselves.
    routers = [
        module
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and "mtp" not in name.split(".")
    ]
    return sorted(routers, key=lambda router: router.layer_number)


def takes_padding_mask(chunk: nn.Module) -> bool:
    """True if the forward of an unwrapped model chunk hands its routers a mask (megatron-core 0.16)."""
    return "padding_mask" in inspect.signature(chunk.forward).parameters


def check_router_replay(args: argparse.Namespace) -> None:
    """Check Megatron's arguments against --router-replay and --expert-statistics, before a model is made.

    Raises:
        ValueError: for a dense model, routers that cannot be replayed, or a Megatron without RouterReplay.
    """
    kind, watch = args.router_replay, args.expert_statistics
    if kind == "off" and not watch:
        return
    try:
        from megatron.core.transformer.moe import router_replay  # noqa: F401
    except ImportError:
        raise ValueError(
            f"{flag_of(kind)} needs Megatron's RouterReplay, which megatron-core {megatron_version} does not "
            f"have: install megatron-core 0.16 or newer, or {remedy(kind, watch)}"
        ) from None
    if not args.num_experts:
        raise ValueError(f"{flag_of(kind)} has no effect without --num-experts; {remedy(kind, watch)}")
    check_choice(args.moe_router_fusion, _as_list(args.moe_router_load_balancing_type), kind, watch)
    if args.cuda_graph_impl != "none":
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} captures the routers with one microbatch, so "
            f"{flag_of(kind)} can't tell its tokens from another's; use none, or {remedy(kind, watch)}"
        )


def check_choice(fused: bool, balancing: Iterable[str], kind: str, watch: bool) -> None:
    """Check that the routers' choice of experts can be replayed and watched.

    Args:
        fused: --moe-router-fusion.
        balancing: --moe-router-load-balancing-type.
        kind: --router-replay.
        watch: --expert-statistics was given.

    Raises:
        ValueError: it can't; the message names the flag and the remedy.
    """
    if fused:
        raise ValueError(
            f"--moe-router-fusion chooses experts in a kernel, where {flag_of(kind)} can't be; leave it out, "
            f"or {remedy(kind, watch)}"
        )
    other = {"sinkhorn", "quantile_balancing"} & set(balancing)
    if other:
        raise ValueError(
            f"--moe-router-load-balancing-type {other.pop()} does not choose experts by top-k, as "
            f"{flag_of(kind)} needs; use another, or {remedy(kind, watch)}"
        )


def flag_of(kind: str) -> str:
    """The flag that needs the routers: --router-replay with its kind, or --expert-statistics
    alone (kind off).
    """
    return "--expert-statistics" if kind == "off" else f"--router-replay {kind}"


def remedy(kind: str, watch: bool) -> str:
    """How to turn both flags off, for errors. watch: --expert-statistics was given."""
    steps = ["use --router-replay off"] if kind != "off" else []
    return " and ".join(steps + ["leave --expert-statistics out"] * watch)


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
