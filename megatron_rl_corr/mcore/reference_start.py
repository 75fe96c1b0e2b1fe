"""Makes a run's reference policy at its start: from the start's weights, another checkpoint, or a saved reset."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch.distributed as dist

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.mcore.policy_check import naming_checkpoint
from megatron_rl_corr.mcore.reference import LocalReference, Reference, ReferenceWeights
from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint, read_config
from megatron_rl_corr.models.megatron_flags import model_flags
from megatron_rl_corr.models.shards import LocalParameter, ShardRanks


def make_reference(
    config: RolloutCorrectionConfig, options: RunConfig, args: argparse.Namespace,
    parameters: Sequence[LocalParameter], ranks: ShardRanks,
) -> Reference:
    """The reference policy that the KL penalties ask for.

    Args:
        config: the correction.
        options: of the run.
        args: Megatron's.
        parameters: of this rank; at iteration 0 they hold the start's weights.
        ranks: this rank's coordinates.

    Raises:
        ValueError: the checkpoint is of another model, or a flag of Megatron's does not go with a reference.
        OSError: it can't be read.
    """
    if not config.needs_reference:
        return Reference()
    check_arguments(args)
    weights = ReferenceWeights(parameters)
    source = options.reference_checkpoint
    if source is not None:
        _check_same_model(source, options.hf_checkpoint)
    if source is not None or args.iteration > 0:
        with naming_checkpoint(source or options.hf_checkpoint, "--rollout-reference-checkpoint" if source else None):
            weights.load(HFCheckpoint(source or options.hf_checkpoint), ranks)
    if dist.get_rank() == 0:
        print(f"[rollout] reference policy: {source or options.hf_checkpoint}, {weights.nbytes / 2**20:.0f} MiB of the "
              "host's memory on each rank", flush=True)  # fmt: skip
    return LocalReference(weights)


def check_arguments(args: argparse.Namespace) -> None:
    """ValueError for flags of Megatron's whose effect on an exchange of weights is not known."""
    for name in ("fp8", "fp4"):
        if vars(args).get(name):
            raise ValueError(
                f"--{name}-format {vars(args)[name]} with a KL penalty against a reference policy: scales and "
                "quantised weights are kept between passes, and would be the other policy's; train in 16 bits, or "
                "leave --rollout-kl-loss-coef and --rollout-kl-reward-coef out"
            )


def _check_same_model(path: str, start: str) -> None:
    """ValueError unless both config.json describe one model: its weights alone take the place of the others."""
    with naming_checkpoint(path, "--rollout-reference-checkpoint"):
        theirs = model_flags(read_config(path))
    ours = model_flags(read_config(start))
    if theirs != ours:
        other = sorted(set(theirs) ^ set(ours))
        raise ValueError(
            f"--rollout-reference-checkpoint {path} is another model than --rollout-hf-checkpoint {start}: their "
            f"config.json differ in {', '.join(other)}; use one of the same architecture"
        )
