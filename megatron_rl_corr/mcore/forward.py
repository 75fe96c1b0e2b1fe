"""The model's forward pass over rollout microbatches: log-probs of the labels, in training and under old weights.

b rows of L tokens (of this context-parallel rank), T tokens of all microbatches, H hidden size, V vocabulary columns,
tp tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs.linear import linear_logprobs
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.sampling_mask import sampling_mask_logprobs
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs
from megatron_rl_corr.mcore.batch import RolloutBatch
from megatron_rl_corr.mcore.microbatches import Microbatch, microbatches
from megatron_rl_corr.mcore.packed_batch import PackedBatch
from megatron_rl_corr.mcore.packs import Packs
from megatron_rl_corr.moe.padding import padding_arguments
from megatron_rl_corr.moe.routes import Routes

LOGITS_BYTES = 256 * 2**20
"""Logits that exist at a time where log-probs come from hidden states: fewer, larger multiplications."""

LossOf = Callable[[Microbatch, Tensor], object]


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
    """From the output layer's own logits, through that hook, before Megatron copies them into rows and into float32."""
    fp32_lm_head: bool = False
    """Logits in float32, from float32 copies of hidden states and weight; with from_hidden."""
    inplace_gradient: bool = False
    """The logits' gradient is written over them."""


@dataclass(frozen=True)
class OutputContext:
    """What the hook behind the last layer needs of a microbatch: GPTModel.forward's output_processor_context."""

    labels: Tensor
    """[b, L] int64."""
    settings: LogprobSettings
    with_entropy: bool = False
    sampled: SampledRows | None = None
    """Which of the b * L labels get a log-prob; None: all."""
    chunk_tokens: int | None = None
    """Tokens whose logits exist at a time; None: as many as fill LOGITS_BYTES, but at least 1024."""


def make_forward_step(
    loss_of: LossOf, settings: LogprobSettings, *, with_entropy: bool, routes: Routes
) -> Callable:
    """Megatron's forward_step_func: the next microbatch through the model, and loss_of(microbatch, its output).

    The attention mask is left to the model's own causal one.

    Args:
        loss_of: takes the output, of which `label_logprobs` with the same settings makes log-probs.
        settings: of the log-probs.
        with_entropy: whether `label_logprobs` must give the entropy too.
        routes: steers the routers, within its `scoring` or `training`.
    """

    def forward_step(
        data_iterator: Iterator[Microbatch], model: nn.Module, return_schedule_plan: bool = False
    ):
        if return_schedule_plan:
            raise ValueError(
                "--overlap-moe-expert-parallel-comm is not supported with rollout correction; leave it out"
            )
        micro = next(data_iterator)
        routes.before_forward(model, micro.places)
        arguments = _output_arguments(micro, settings, with_entropy) | padding_arguments(model, micro.padding)
        if micro.packed_seq_params is not None:
            arguments["packed_seq_params"] = micro.packed_seq_params
        output = model(micro.tokens, micro.position_ids, None, **arguments)

        def loss_func(output: Tensor, non_loss_data: bool = False):
            return loss_of(micro, output)

        return output, loss_func

    return forward_step


@torch.no_grad()
def compute_log_probs(
    model: list, batch: RolloutBatch | PackedBatch, settings: LogprobSettings, *, micro_batch_size: int,
    seq_length: int, routes: Routes, packs: Packs | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Log-probs of the batch's labels under the current weights, by Megatron's forward-only schedule.

    The model is in evaluation mode meanwhile (no dropout), and back in training mode after.

    Args:
        model: this rank's chunks.
        batch: this rank's tokens.
        settings: of the log-probs.
        micro_batch_size: b.
        seq_length: tokens of a whole row.
        routes: steers the routers, within its `scoring`.
        packs: the microbatches of a packed batch, in place of rows of micro_batch_size; None: rows.

    Returns:
        (log-probs, entropies), [T] float32 each, on the last pipeline stage; None on the others.
    """
    forward_step = make_forward_step(
        lambda micro, output: label_logprobs(output, micro, settings, with_entropy=True), settings, with_entropy=True,
        routes=routes,
    )
    iterators = [microbatches(batch, micro_batch_size) if packs is None else packs.microbatches() for _ in model]
    for chunk in model:
        chunk.eval()
    try:
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model,
            num_microbatches=batch.num_sequences // micro_batch_size if packs is None else packs.count,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    finally:
        for chunk in model:
            chunk.train()
    if not results:
        return None
    join = torch.cat if packs is None else packs.join
    return join([logprobs for logprobs, _ in results]), join([entropy for _, entropy in results])


def label_logprobs(
    output: Tensor, micro: Microbatch, settings: LogprobSettings, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (and entropy, or None) of a microbatch's labels, flat: [b * L] float32.

    Over the ids that the server sampled from where they are known, else over the whole vocabulary. A label that was not
    sampled has 0 (-inf where ids are known), and no gradient: its logits are not read.

    Args:
        output: the model's: logits [b, L, V/tp], or the hook's [b, L, 1 or 2].
        micro: the microbatch.
        settings: those of `make_forward_step`.
        with_entropy: as there.
    """
    if _processor(micro, settings) is not None:
        return split_output(output)
    logits, labels = output.reshape(-1, output.shape[-1]), micro.labels.reshape(-1)
    if micro.sampling_masks is not None:
        return sampling_mask_logprobs(
            logits, labels, micro.sampling_masks, tp_group=settings.tp_group,
            temperature=settings.temperature, with_entropy=with_entropy,
        )
    return vocab_parallel_logprobs(
        logits, labels, tp_group=settings.tp_group, temperature=settings.temperature,
        vocab_size=settings.vocab_size, with_entropy=with_entropy, inplace_gradient=settings.inplace_gradient,
        sampled=micro.sampled,
    )


def _output_arguments(micro: Microbatch, settings: LogprobSettings, with_entropy: bool) -> dict[str, Any]:
    """Keyword arguments of the model's forward: the hook behind its last layer, or none."""
    if (processor := _processor(micro, settings)) is None:
        return {}
    context = OutputContext(micro.labels, settings, with_entropy=with_entropy, sampled=micro.sampled)
    return {"output_processor": processor, "output_processor_context": context}


def _processor(micro: Microbatch, settings: LogprobSettings) -> Callable[..., Tensor] | None:
    """The hook that makes log-probs of the microbatch, or None for Megatron's logits."""
    if settings.from_hidden:
        return label_logprobs_of_hidden
    # Sampling masks are in the order of the microbatch's rows.
    return label_logprobs_of_layer if settings.before_copies and micro.sampling_masks is None else None


def label_logprobs_of_layer(
    *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: OutputContext, **_: Any
) -> Tensor:
    """GPTModel.forward's output_processor: log-probs of the output layer's logits, where and of the type that they are.

    Arguments and result are those of `label_logprobs_of_hidden`; nothing may scale the logits after the layer (MuP).
    """
    logits, _bias = output_layer(hidden_states, weight=output_weight)
    settings, rows = context.settings, logits.shape[1]
    logprobs, entropy = vocab_parallel_logprobs(
        logits.flatten(0, 1), context.labels.t().reshape(-1), tp_group=settings.tp_group,
        temperature=settings.temperature, vocab_size=settings.vocab_size, with_entropy=context.with_entropy,
        inplace_gradient=settings.inplace_gradient,
        sampled=None if context.sampled is None else context.sampled.column_major(rows),
    )  # fmt: skip
    return _in_rows(logprobs, entropy, rows)


def label_logprobs_of_hidden(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None,
    config: TransformerConfig,
    context: OutputContext,
    **_: Any,
) -> Tensor:
    """GPTModel.forward's output_processor: the model's output becomes log-probs, and no rank ever holds all logits.

    The weight's gradient is its .grad, which DDP's hook adds to main_grad; under --gradient-accumulation-fusion it is
    added to main_grad here, as Megatron's output layer does.

    Args:
        hidden_states: [L, b, H], or this rank's part of L under sequence parallelism. Parts are gathered whole, because
            a chunk of tokens lies on all ranks; the gather's backward sums the ranks' shares of the gradient, which
            linear_logprobs does otherwise.
        output_layer: Megatron's.
        output_weight: a shared embedding's, or None for the layer's own.
        config: the model's.
        context: labels and settings.

    Returns:
        [b, L, 1] float32, or [b, L, 2] with the entropy.

    Raises:
        ValueError: for what the logits would go through and this does not: a bias, scaled logits (MuP), more heads
            (MTP), and weight gradients that Megatron defers, or has fused into main_grad where this does not.
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
    logprobs, entropy = linear_logprobs(
        hidden_states.flatten(0, 1), weight, context.labels.t().reshape(-1), tp_group=context.settings.tp_group,
        temperature=context.settings.temperature, vocab_size=context.settings.vocab_size,
        with_entropy=context.with_entropy, chunk_tokens=chunk_tokens,
        fp32_lm_head=context.settings.fp32_lm_head, reduce_hidden_gradient=not output_layer.sequence_parallel,
        sampled=None if sampled is None else sampled.column_major(rows),
        into_main_grad=_is_fused(weight, config) and weight.requires_grad and torch.is_grad_enabled(),
    )  # fmt: skip
    return _in_rows(logprobs, entropy, rows)


def _in_rows(logprobs: Tensor, entropy: Tensor | None, rows: int) -> Tensor:
    """Values a token [L * b], position after position -> [b, L, 1 or 2]."""
    outputs = [logprobs] if entropy is None else [logprobs, entropy]
    return torch.stack([x.view(-1, rows).t() for x in outputs], dim=2)


def split_output(output: Tensor) -> tuple[Tensor, Tensor | None]:
    """The hook's output [b, L, 1 or 2] -> log-probs and entropy (or None), flat: [b * L]."""
    logprobs, *entropy = output.flatten(0, 1).unbind(dim=1)
    return logprobs, entropy[0] if entropy else None


def _is_fused(weight: Tensor, config: TransformerConfig) -> bool:
    """Whether Megatron's output layer would add the weight's gradient to main_grad itself (FSDP makes its own)."""
    has_buffer = hasattr(weight, "main_grad") and not hasattr(weight, "__fsdp_param__")
    return config.gradient_accumulation_fusion and has_buffer


def _check_output_layer(output_layer: nn.Module, weight: Tensor, config: TransformerConfig) -> None:
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
    if getattr(weight, "grad_added_to_main_grad", False) and not _is_fused(weight, config):
        raise ValueError(
            "--gradient-accumulation-fusion has added to the output weight's main_grad in this step, so its gradient "
            "from hidden states would be lost: take all microbatches of a step from hidden states, or "
            "--no-gradient-accumulation-fusion"
        )
