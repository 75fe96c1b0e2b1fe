"""Megatron flags that --router-replay and --expert-statistics can't honour, refused before a model is made.

--expert-statistics watches the routers where replay would steer them, and needs the same of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megatron_rl_corr.mcore import compat


def check_router_replay(args: argparse.Namespace) -> None:
    """ValueError for a dense model, a router that never asks for routes, or a Megatron that can't replay."""
    kind, watch = args.router_replay, args.expert_statistics
    if kind == "off" and not watch:
        return
    compat.check_router_replay(given(kind), remedy(kind, watch))
    if not args.num_experts:
        raise ValueError(f"{given(kind)} has no effect without --num-experts; {remedy(kind, watch)}")
    check_choice(args.moe_router_fusion, _as_list(args.moe_router_load_balancing_type), kind, watch)
    if args.cuda_graph_impl != "none":
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} captures the routers with one microbatch, so {given(kind)} "
            f"can't tell its tokens from another's; use none, or {remedy(kind, watch)}"
        )


def check_choice(fused: bool, balancing: Iterable[str], kind: str, watch: bool) -> None:
    """ValueError for routers whose choice of experts can be neither replayed nor watched."""
    if fused:
        raise ValueError(
            f"--moe-router-fusion chooses experts in a kernel, where {given(kind)} can't be; leave it out, or "
            f"{remedy(kind, watch)}"
        )
    unlike = {"sinkhorn", "quantile_balancing"} & set(balancing)
    if unlike:
        raise ValueError(
            f"--moe-router-load-balancing-type {unlike.pop()} does not choose experts by top-k, as {given(kind)} "
            f"needs; use another, or {remedy(kind, watch)}"
        )


def given(kind: str) -> str:
    """The flag that asks for something of the routers; --router-replay's kind is off where only statistics do."""
    return "--expert-statistics" if kind == "off" else f"--router-replay {kind}"


def remedy(kind: str, watch: bool) -> str:
    """What to do to ask nothing of the routers; watch: --expert-statistics was given."""
    steps = ["use --router-replay off"] if kind != "off" else []
    return " and ".join(steps + ["leave --expert-statistics out"] * watch)


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
