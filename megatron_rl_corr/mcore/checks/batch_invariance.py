"""--rollout-batch-invariant in Megatron: flags are set before the model is made, and in force after it."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from megatron.core import __version__ as megatron_version

from megatron_rl_corr.config.problems import Problems

FLAG = "--rollout-batch-invariant"
KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
"""Megatron's products, norms and log-softmax whose rows do not depend on what else is in a batch."""
SINCE = "0.17"


def check_batch_invariance(args: argparse.Namespace) -> None:
    """ValueError, which lists everything, for what Megatron has no batch-invariant kernels for."""
    if not args.rollout_batch_invariant:
        return
    if "batch_invariant_mode" not in vars(args) or find_spec(KERNELS) is None:
        raise ValueError(
            f"{FLAG}: megatron-core {megatron_version} has no --batch-invariant-mode; use {SINCE} or newer, "
            f"or leave {FLAG} out"
        )
    problems = Problems()
    if args.context_parallel_size > 1:
        problems.add(
            f"--context-parallel-size {args.context_parallel_size} with {FLAG}: its attention runs kernels "
            "that Megatron can't pin; use 1"
        )
    if args.transformer_impl != "transformer_engine":
        problems.add(
            f"--transformer-impl {args.transformer_impl} with {FLAG}: Megatron replaces the kernels of "
            "Transformer Engine's layers; use transformer_engine"
        )
    if args.attention_backend.name not in ("auto", "flash"):
        problems.add(
            f"--attention-backend {args.attention_backend.name} with {FLAG}: FlashAttention alone has a "
            "fixed order of its sums; use flash"
        )
    if vars(args).get("flash_attention_version") not in (None, 3, 4):
        problems.add(
            f"--flash-attention-version {args.flash_attention_version} with {FLAG}: version 2 has no fixed "
            "order of its sums; use 3 or 4, as the servers do"
        )
    if args.num_experts and args.moe_grouped_gemm:
        problems.add(
            f"--moe-grouped-gemm with {FLAG}: Megatron's batch-invariant mode does not replace grouped "
            "products; leave it out, so that each expert multiplies by itself"
        )
    for name in ("fp8", "fp4"):
        if vars(args).get(name):
            problems.add(f"--{name}-format {vars(args)[name]} with {FLAG}: train in 16 or 32 bits")
    problems.raise_all()


def set_batch_invariance(args: argparse.Namespace) -> None:
    """Set the flags of Megatron that the mode needs, and replace its kernels, before a model is made."""
    from megatron.core.transformer.enums import AttnBackend

    args.batch_invariant_mode, args.attention_backend = True, AttnBackend.flash
    if "flash_attention_version" in vars(args) and args.flash_attention_version is None:
        args.flash_attention_version = 3
    _kernels().enable_batch_invariant_mode()


def check_in_force(chunks: list) -> None:
    """ValueError unless the model was made in the mode, and its kernels are in place.

    Args:
        chunks: this rank's, unwrapped.
    """
    made = all(vars(chunk.config).get("batch_invariant_mode") for chunk in chunks)
    if not made or not _kernels().is_batch_invariant_mode_enabled():
        raise ValueError(
            f"{FLAG}: the script made its model without batch_invariant_mode, or took its kernels away "
            "again; make the model's config of Megatron's arguments, as pretrain_gpt.py does"
        )


def _kernels() -> ModuleType:
    return import_module(KERNELS)
