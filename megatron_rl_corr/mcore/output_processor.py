"""GPTModel.forward's output_processor: log-probs in the place of the model's logits, behind its last layer.

b rows of L tokens (of this context-parallel rank), H hidden size, V vocabulary columns, tp
tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs

LOGITS_BYTES = 256 * 2**20
"""Logits that exist at a time where log-probs come from hidden states: fewer, larger multiplications."""


@dataclass(frozen=True)
class LogprobSettings:
    """How the model's last layer becomes log-probs of the same distribution that the server sampled from."""

    tp_group: ProcessGroup | None
    temperature: float
    vocab_size: int
    """V without the padding of the embedding."""
    from_hidden: bool = False
    """Without ever holding all logits, through Megatron's output_processor hook."""
    before_copies: bool = False
    """From the output layer's own logits, through that hook, before Megatron copies them into rows
    and into float32.
    """
    fp32_lm_head: bool = False
    """Logits in float32, from float32 copies of hidden states and weight; with from_hidden."""
    inplace_gradient: bool = False
    """The logits' gradient is written over them."""
    whole_rows: bool = False
    """Log-probs by log-softmax of whole rows, as servers make them; not with from_hidden."""


@dataclass(frozen=True)
class OutputContext:
    """What the hook behind the last layer needs of a microbatch: GPTModel.forward's
    output_processor_context.
    """

    labels: Tensor
    """[b, L] int64."""
    settings: LogprobSettings
    with_entropy: bool = False
    sampled: SampledRows | None = None
    """Which of the b * L labels get a log-prob; None: all."""
    chunk_tokens: int | None = None
    """Tokens whose logits exist at a time; None: as many as fill LOGITS_BYTES, but at least 1024."""
    with_collision: bool = False
    """With with_entropy alone: the third of the output's columns."""
    ids: Tensor | None = None
    """[b * L, I]: ids whose log-probs are wanted too, the last of the output's columns; not from hidden
    states.
    """


def label_logprobs_of_layer(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None,
    context: OutputContext,
    **_: Any,
) -> Tensor:
    """GPTModel.forward's output_processor: log-probs of the output layer's logits, where and of the
    type that they are.

    Arguments and result are those of `label_logprobs_of_hidden`; nothing may scale the logits after
    the layer (MuP).
    """
    logits, _bias = output_layer(hidden_states, weight=output_weight)
    settings, rows, ids = context.settings, logits.shape[1], context.ids
    outputs = vocab_parallel_logprobs(
        logits.flatten(0, 1),
        context.labels.t().reshape(-1),
        tp_group=settings.tp_group,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        with_entropy=context.with_entropy,
        with_collision=context.with_collision,
        inplace_gradient=settings.inplace_gradient,
        whole_rows=settings.whole_rows,
        sampled=None if context.sampled is None else context.sampled.column_major(rows),
        ids=None if ids is None else ids.view(rows, -1, ids.shape[1]).transpose(0, 1).flatten(0, 1),
    )
    return _in_rows(outputs, rows)


def label_logprobs_of_hidden(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None,
    config: TransformerConfig,
    context: OutputContext,
    **_: Any,
) -> Tensor:
    """GPTModel.forward's output_processor: the model's output becomes log-probs, and no rank ever
    holds all logits.

    The weight's gradient is its .grad, which DDP's hook adds to main_grad; under
    --gradient-accumulation-fusion it is added to main_grad here, as Megatron's output layer does.

    Args:
        hidden_states: [L, b, H], or this rank's part of L under sequence parallelism. Parts are gathered
            whole, because a chunk of tokens lies on all ranks; the gather's backward sums the ranks' shares
            of the gradient, which linear_logprobs does otherwise.
        output_layer: Megatron's.
        output_weight: a shared embedding's, or None for the layer's own.
        config: the model's.
        context: labels and settings.

    Returns:
        [b, L, 1] float32, [b, L, 2] with the entropy, [b, L, 3] with the collision too.

    Raises:
        ValueError: for what the logits would go through and this does not: a bias, scaled logits (MuP),
            more heads (MTP), and weight gradients that Megatron defers, or has fused into main_grad
            where this does not.
    """
    weight = output_layer.weight if output_weight is None else output_weight
    _check_output_layer(output_layer, weight, config)
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=context.settings.tp_group)
    rows = hidden_states.shape[1]
    sampled, chunk_tokens = context.sampled, context.chunk_tokens
    if chunk_tokens is None:
        element = 4 if context.settings.fp32_lm_head else hidden_states.element_size()
        chunk_tokens = max(LOGITS_BYTES // (len(weight) * element), 1024)
    outputs = linear_logprobs(
        hidden_states.flatten(0, 1),
        weight,
        context.labels.t().reshape(-1),
        tp_group=context.settings.tp_group,
        temperature=context.settings.temperature,
        vocab_size=context.settings.vocab_size,
        with_entropy=context.with_entropy,
        with_collision=context.with_collision,
        chunk_tokens=chunk_tokens,
        fp32_lm_head=context.settings.fp32_lm_head,
        reduce_hidden_gradient=not output_layer.sequence_parallel,
        sampled=None if sampled is None else sampled.column_major(rows),
        into_main_grad=_is_fused(weight, config) and weight.requires_grad and torch.is_grad_enabled(),
    )
    return _in_rows(outputs, rows)


def _in_rows(outputs: tuple[Tensor | None, ...], rows: int) -> Tensor:
    """Values a token [L * b] or [L * b, I], position after position -> [b, L, columns]."""
    columns = [x.view(-1, rows, x[0].numel()).transpose(0, 1) for x in outputs if x is not None]
    return torch.cat(columns, dim=2)


def split_output(output: Tensor, num_ids: int = 0) -> tuple[Tensor | None, ...]:
    """The hook's output [b, L, columns] -> log-probs, entropy (or None), the collision if it is there:
    [b * L]; and of ids, if there are any, [b * L, I].
    """
    flat = output.flatten(0, 1)
    columns, of_ids = flat[:, : flat.shape[1] - num_ids], flat[:, flat.shape[1] - num_ids :]
    logprobs, *more = columns.unbind(dim=1)
    return logprobs, *(more or [None]), *([of_ids] if num_ids else [])


def _is_fused(weight: Tensor, config: TransformerConfig) -> bool:
    """True if Megatron's output layer would add the weight's gradient to main_grad itself
    (FSDP makes its own).
    """
    has_buffer = hasattr(weight, "main_grad") and not hasattr(weight, "__fsdp_param__")
    return config.gradient_accumulation_fusion and has_buffer


def _check_output_layer(output_layer: nn.Module, weight: Tensor, config: TransformerConfig) -> None:
    remedy = "; take log-probs from the logits"
    if output_layer.bias is not None:
        raise ValueError("log-probs from hidden states need an output layer without bias" + remedy)
    if config.use_mup:
        raise ValueError("log-probs from hidden states do not know MuP's scaled logits" + remedy)
    if config.mtp_num_layers:
        raise ValueError(
            f"log-probs from hidden states do not know MTP, got {config.mtp_num_layers} layers" + remedy
        )
    if config.defer_embedding_wgrad_compute:
        raise ValueError(
            "log-probs from hidden states do not know --defer-embedding-wgrad-compute; leave it out"
        )
    # DDP's hook leaves .grad out where Megatron has added to main_grad in the same step.
    if getattr(weight, "grad_added_to_main_grad", False) and not _is_fused(weight, config):
        raise ValueError(
            "--gradient-accumulation-fusion has added to the output weight's main_grad in this step, so its "
            "gradient from hidden states would be lost: take all microbatches of a step from hidden states, "
            "or --no-gradient-accumulation-fusion"
        )
