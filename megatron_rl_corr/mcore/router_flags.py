"""Megatron flags that --router-replay can't honour, refused before a model is made."""

from __future__ import annotations

import argparse

from megatron_rl_corr.mcore import compat


def check_router_replay(args: argparse.Namespace) -> None:
    """ValueError for a dense model, a router that never asks for routes, or a Megatron that can't replay.

    --expert-statistics watches the routers where replay would steer them, and needs the same.
    """
    kind = args.router_replay
    if kind == "off" and not args.expert_statistics:
        return
    compat.check_router_replay()
    if not args.num_experts:
        flag = f"--router-replay {kind}" if kind != "off" else "--expert-statistics"
        raise ValueError(f"{flag} has no effect without --num-experts; leave it out")
    if args.moe_router_fusion:
        raise ValueError(
            "--moe-router-fusion chooses experts in a kernel that never asks for replayed routes; leave it out, or use "
            "--router-replay off"
        )
    unlike = {"sinkhorn", "quantile_balancing"} & set(_as_list(args.moe_router_load_balancing_type))
    if unlike:
        raise ValueError(
            f"--moe-router-load-balancing-type {unlike.pop()} does not choose experts by top-k, so routes can't be "
            "replayed; use another, or --router-replay off"
        )
    if args.cuda_graph_impl != "none":
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} captures the routers with the routes of one microbatch; use "
            "none, or --router-replay off"
        )


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
