"""Megatron's flags that packed sequences do not go with, each with what to give instead."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_rl_corr.config.problems import Problems
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.models.megatron_flags import DELTA_NETS

ROWS = "--rollout-pad-sequences"
"""The flag that trains on padded rows instead."""


class Unpacked(NamedTuple):
    """A flag with values that need padded rows."""

    flag: str
    field: str
    why: str
    instead: str
    where: Callable[[Any, argparse.Namespace], bool] = lambda value, args: bool(value)
    """where(value, all arguments): whether this value of the flag is meant."""


def _balances_rows(kinds: str | list[str], args: argparse.Namespace) -> bool:
    known = {kinds} if isinstance(kinds, str) else set(kinds)
    return bool(args.num_experts) and not known <= {"none", "aux_loss"}


UNPACKED = (
    Unpacked(
        "--transformer-impl",
        "transformer_impl",
        "its attention takes whole rows only",
        "transformer_engine",
        lambda value, args: value == "local",
    ),
    Unpacked(
        "--moe-token-dispatcher-type",
        "moe_token_dispatcher_type",
        "it is not proven with microbatches of other lengths",
        "alltoall",
        lambda value, args: bool(args.num_experts) and value != "alltoall",
    ),
    Unpacked(
        "--moe-router-load-balancing-type",
        "moe_router_load_balancing_type",
        "it balances rows or batches, which packs are not",
        "aux_loss",
        _balances_rows,
    ),
    Unpacked(
        "--cuda-graph-impl",
        "cuda_graph_impl",
        "it would repeat one microbatch's boundaries",
        "none",
        lambda value, args: value not in (None, "none"),
    ),
    # Before 0.16.
    Unpacked("--enable-cuda-graph", "enable_cuda_graph", "it would repeat one microbatch's boundaries", ""),
    Unpacked(
        "--external-cuda-graph", "external_cuda_graph", "it would repeat one microbatch's boundaries", ""
    ),
    Unpacked(
        "--fine-grained-activation-offloading",
        "fine_grained_activation_offloading",
        "it plans with the first step's microbatches, and keeps pinned buffers of every length that it meets",
        "",
    ),
    Unpacked(
        "--overlap-p2p-communication-warmup-flush",
        "overlap_p2p_comm_warmup_flush",
        "stages tell each other every microbatch's length, and in its order wait for each other for ever",
        "",
    ),
    Unpacked("--fp8-format", "fp8", "sequences are not padded to the multiples that it needs", ""),
    Unpacked("--fp4-format", "fp4", "sequences are not padded to the multiples that it needs", ""),
    Unpacked("--tp-comm-overlap", "tp_comm_overlap", "its buffers have the size of rows", ""),
    Unpacked(
        "--experimental-attention-variant",
        "experimental_attention_variant",
        "it is not proven to keep sequences apart",
        "",
        lambda value, args: value not in (None, DELTA_NETS),
    ),
    Unpacked(
        "--deterministic-mode",
        "deterministic_mode",
        "a gated delta net would not keep sequences apart",
        "",
        lambda value, args: bool(value) and vars(args).get("experimental_attention_variant") == DELTA_NETS,
    ),
)


def check_packed(args: argparse.Namespace) -> None:
    """ValueError for what packed sequences do not go with."""
    problems, most = Problems(), args.rollout_max_tokens_per_microbatch
    needed = (one for maker in RunConfig.makers if maker.needs_packs for one in maker.asked_by)
    rows = "" if any(vars(args).get(f"rollout_{one}") for one in needed) else f", or give {ROWS}"
    if most is not None and most < args.seq_length:
        problems.add(
            f"--rollout-max-tokens-per-microbatch {most} must be at least --seq-length {args.seq_length}: "
            "a sequence is not cut"
        )
    for one in UNPACKED:
        value = vars(args).get(one.field)  # not every release has every flag
        if one.where(value, args):
            remedy = f"use {one.flag} {one.instead}" if one.instead else "leave it out"
            shown = "" if value is True else f" {' '.join(value) if isinstance(value, list) else value}"
            problems.add(f"{one.flag}{shown} does not go with packed sequences, as {one.why}; {remedy}{rows}")
    problems.raise_all()


def set_packed(args: argparse.Namespace) -> None:
    """Let pipeline stages send microbatches of any length, which Megatron has no flag for."""
    if args.pipeline_model_parallel_size > 1:
        args.variable_seq_lengths = True
        # Megatron refuses its default with that, also for dense models, which dispatch nothing.
        args.moe_token_dispatcher_type = "alltoall"
