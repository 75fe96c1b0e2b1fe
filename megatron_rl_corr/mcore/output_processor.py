"""Megatron's hook behind the last layer: log-probs of the labels from hidden states, never holding all logits.

b rows of L tokens (of this context-parallel rank), H hidden size, V/tp vocabulary columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.mcore.logprobs import LogprobSettings


@dataclass(frozen=True)
class OutputContext:
    """What the hook needs of a microbatch: GPTModel.forward's output_processor_context."""

    labels: Tensor
    """[b, L] int64."""
    settings: LogprobSettings
    with_entropy: bool = False
    chunk_tokens: int = 1024


def label_logprobs_of_hidden(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None,
    config: TransformerConfig,
    context: OutputContext,
    **_: Any,
) -> Tensor:
    """GPTModel.forward's output_processor: the model's output is then [b, L, 1], or [b, L, 2] with entropy, float32.

    hidden_states [L, b, H], or this rank's part of L under sequence parallelism: they are gathered whole, because
    parts of a chunk of tokens lie on all ranks, and the gather's backward sums the ranks' shares of their gradient.
    Without it linear_logprobs sums them. The weight's gradient is its .grad, which DDP's hook adds to main_grad.

    Raises ValueError for what the logits would go through and this does not: a bias, scaled logits (MuP), more heads
    (MTP), and weight gradients that Megatron defers or has fused into main_grad meanwhile.
    """
    weight = output_layer.weight if output_weight is None else output_weight
    _check(output_layer, weight, config)
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=context.settings.tp_group)
    length, rows, _hidden = hidden_states.shape
    logprobs, entropy = linear_logprobs(
        hidden_states.flatten(0, 1), weight, context.labels.t().reshape(-1), tp_group=context.settings.tp_group,
        temperature=context.settings.temperature, vocab_size=context.settings.vocab_size,
        with_entropy=context.with_entropy, chunk_tokens=context.chunk_tokens, fp32_head=context.settings.fp32_lm_head,
        reduce_hidden_gradient=not output_layer.sequence_parallel,
    )  # fmt: skip
    outputs = [logprobs] if entropy is None else [logprobs, entropy]
    return torch.stack([x.view(length, rows).t() for x in outputs], dim=2)


def split_output(output: Tensor) -> tuple[Tensor, Tensor | None]:
    """The hook's output [b, L, 1 or 2] -> log-probs and entropy (or None), flat: [b * L]."""
    logprobs, *entropy = output.flatten(0, 1).unbind(dim=1)
    return logprobs, entropy[0] if entropy else None


def _check(output_layer: nn.Module, weight: Tensor, config: TransformerConfig) -> None:
    remedy = "; take log-probs from the logits"
    if output_layer.bias is not None:
        raise ValueError("log-probs from hidden states need an output layer without bias" + remedy)
    if config.use_mup:
        raise ValueError("log-probs from hidden states do not know MuP's scaled logits" + remedy)
    if config.mtp_num_layers:
        raise ValueError(f"log-probs from hidden states do not know MTP, got {config.mtp_num_layers} layers" + remedy)
    if config.defer_embedding_wgrad_compute:
        raise ValueError("log-probs from hidden states do not know --defer-embedding-wgrad-compute; leave it out")
    # DDP's hook leaves .grad out where Megatron has added to main_grad in the same step.
    if getattr(weight, "grad_added_to_main_grad", False):
        raise ValueError(
            "--gradient-accumulation-fusion has added to the output weight's main_grad in this step, so its gradient "
            "from hidden states would be lost: take all microbatches of a step from hidden states, or "
            "--no-gradient-accumulation-fusion"
        )
