"""Multi-token prediction (MTP) layers beside the policy: what their loss counts, and what they
are refused with.

Megatron computes their loss from the tokens alone, in the forward pass: for each position i the cross
entropy of token i + 2 (of the first such layer), in the mean over a microbatch, times
--mtp-loss-scaling-factor. With --mtp-detach-heads its gradient reaches these layers only, so the policy
has the gradients that it has without them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_rl_corr.mcore.batch.microbatch import Microbatch
from megatron_rl_corr.mcore.versions import SUPPORTS_MTP, release
from megatron_rl_corr.models.mtp import num_mtp_layers

FLAG = "--mtp-num-layers"
NOT_SHOWN = "what the layers' loss is there was not shown to be right"
PROBLEMS: tuple[tuple[Callable[[argparse.Namespace], Any], str, str], ...] = (
    (
        lambda args: not args.mtp_detach_heads,
        "the layers' own loss would move the policy too, which the corrected loss alone trains",
        "give --mtp-detach-heads, with which it trains these layers alone",
    ),
    (
        lambda args: not args.mtp_loss_scaling_factor,
        "with --mtp-loss-scaling-factor 0 the layers cost time and are "
        "not trained, but --weight-decay shrinks them",
        f"leave {FLAG} out: exported folders keep the checkpoint's",
    ),
    (
        lambda args: args.mtp_use_repeated_layer,
        "one layer in the place of several is no checkpoint's",
        "leave --mtp-use-repeated-layer out",
    ),
    (
        lambda args: not args.untie_embeddings_and_output_weights,
        f"with tied embeddings {NOT_SHOWN}",
        "leave it out",
    ),
    (
        lambda args: args.context_parallel_size > 1,
        f"with --context-parallel-size, {NOT_SHOWN}",
        "use --context-parallel-size 1, or leave it out",
    ),
    (
        lambda args: not args.rollout_pad_sequences,
        f"with packed sequences {NOT_SHOWN}",
        "leave it out, or, without agents, give --rollout-pad-sequences",
    ),
    (
        lambda args: args.calculate_per_token_loss,
        "with --calculate-per-token-loss their gradient would be divided by all positions, padding too",
        "leave one of the two out",
    ),
    (
        lambda args: args.rollout_linear_logprobs,
        "--rollout-linear-logprobs never holds the logits that they need",
        "leave one of the two out",
    ),
    (
        lambda args: args.virtual_pipeline_model_parallel_size or args.pipeline_model_parallel_layout,
        f"with interleaved stages, or a --pipeline-model-parallel-layout, {NOT_SHOWN}",
        "leave one of the two out",
    ),
    (
        lambda args: args.hybrid_layer_pattern,
        "HybridModel's layers of this kind have no table of names",
        "leave one of the two out",
    ),
    (lambda args: args.fp8 or args.fp4, f"in FP8 or FP4 {NOT_SHOWN}", "leave one of the two out"),
)
"""(whether Megatron's arguments have it, why it is refused with MTP layers, what to do)."""


def mtp_problems(args: argparse.Namespace, hf_config: Mapping[str, Any]) -> list[str]:
    """A line for each reason why a run can't have its MTP layers: flag and value, reason, remedy;
    [] without layers.

    Args:
        args: Megatron's, and ours.
        hf_config: the checkpoint's config.json.
    """
    count = args.mtp_num_layers
    if not count:
        return []
    given = f"{FLAG} {count}"
    if release() < SUPPORTS_MTP:
        needed = ".".join(map(str, SUPPORTS_MTP))
        return [
            f"{given}: needs megatron-core {needed} or newer, whose --mtp-detach-heads keeps the layers' "
            "loss from the policy; leave it out"
        ]
    lines = [f"{given}: {why}; {remedy}" for has, why, remedy in PROBLEMS if has(args)]
    there = num_mtp_layers(hf_config)
    if count != there:
        remedy = f"give {FLAG} {there}, or leave it out" if there else "leave it out"
        lines.append(f"{given}: config.json has num_nextn_predict_layers {there}; {remedy}")
    return lines


def mtp_arguments(model: nn.Module, micro: Microbatch) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward for the loss of its MTP layers; none without
    them, or in scoring.

    Without a mask that loss would count prompts and padding. Megatron takes it of tokens, and ours is of
    labels: the last of a sample is no token of its row, which has padding there.

    Args:
        model: a chunk, wrapped or not.
        micro: in training on the last stage it has the loss's inputs.
    """
    (chunk,) = unwrap_model([model])
    if not chunk.config.mtp_num_layers or not chunk.post_process or micro.loss_inputs is None:
        return {}
    sampled, mask = micro.loss_inputs.loss_mask.view_as(micro.tokens), ~micro.padding
    mask[:, 1:] &= sampled[:, :-1]
    mask[:, 0] = False
    return {"loss_mask": mask.float()}
