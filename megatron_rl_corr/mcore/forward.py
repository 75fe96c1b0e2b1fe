"""The model's forward pass over rollout microbatches: log-probs of the labels, in training and
under old weights.

b rows of L tokens (of this context-parallel rank), T tokens of all microbatches, H hidden size, V
vocabulary columns, tp tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.logprobs.sampling_mask import sampling_mask_logprobs
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs
from megatron_rl_corr.mcore import compat
from megatron_rl_corr.mcore.batch.microbatch import Microbatch
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.forward_only import run_forward_only
from megatron_rl_corr.mcore.mtp import mtp_arguments
from megatron_rl_corr.mcore.output_processor import (
    LogprobSettings,
    OutputContext,
    label_logprobs_of_hidden,
    label_logprobs_of_layer,
    split_output,
)
from megatron_rl_corr.moe.padding import padding_arguments
from megatron_rl_corr.moe.routes import Routes

LossOf = Callable[[Microbatch, Tensor], object]


def make_forward_step(
    loss_of: LossOf,
    settings: LogprobSettings,
    *,
    with_entropy: bool,
    routes: Routes,
    with_collision: bool = False,
) -> Callable:
    """Megatron's forward_step_func: the next microbatch through the model, and
    loss_of(microbatch, its output).

    The attention mask is left to the model's own causal one.

    Args:
        loss_of: takes the output, of which `label_logprobs` with the same settings makes log-probs.
        settings: of the log-probs.
        with_entropy: whether `label_logprobs` must give the entropy too.
        routes: steers the routers, within its `scoring` or `training`.
        with_collision: whether `label_logprobs` must give the collision probability too;
            with_entropy alone.
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
        arguments = _output_arguments(micro, settings, with_entropy, with_collision)
        arguments |= padding_arguments(model, micro.padding) | mtp_arguments(model, micro)
        if micro.packed_seq_params is not None:
            arguments["packed_seq_params"] = micro.packed_seq_params
        output = model(micro.tokens, micro.position_ids, None, **arguments)

        def loss_func(output: Tensor, non_loss_data: bool = False):
            return loss_of(micro, output)

        return output, loss_func

    return forward_step


def compute_log_probs(
    model: list,
    packs: Packs,
    settings: LogprobSettings,
    *,
    routes: Routes,
    with_collision: bool = False,
) -> tuple[Tensor, ...] | None:
    """Log-probs of a batch's labels under the current weights, by `run_forward_only`.

    Args:
        model: this rank's chunks.
        packs: the batch's microbatches.
        settings: of the log-probs.
        routes: steers the routers, within its `scoring`.
        with_collision: whether to compute the collision probabilities too.

    Returns:
        (log-probs, entropies) and with_collision the collisions, [T] float32 each, and where microbatches
        have further ids their log-probs [T, K], on the last pipeline stage; None on the others.
    """
    columns = {"with_entropy": True, "with_collision": with_collision}
    forward_step = make_forward_step(
        lambda micro, output: label_logprobs(output, micro, settings, **columns),
        settings,
        routes=routes,
        **columns,
    )
    results = run_forward_only(forward_step, model, packs)
    if not results:
        return None
    return tuple(packs.join(parts) for parts in zip(*results, strict=True))


@dataclass(frozen=True)
class BatchForward:
    """A forward-only pass of the model over a batch, under whatever weights it has then."""

    model: list
    optimizer: Any
    packs: Packs
    settings: LogprobSettings
    samples: Sequence[Trajectory] = ()
    """The batch's, on the replica's data leader."""

    @property
    def batch(self) -> RolloutBatch:
        """This rank's tokens."""
        return self.packs.batch

    def gathered(self) -> AbstractContextManager:
        """Context in which every rank holds whole, current parameters."""
        return compat.gathered_parameters(self.model, self.optimizer)

    def run(self) -> Tensor | None:
        """Log-probs of the labels [T] on the last stage, of the distribution that was sampled;
        None on the others.

        Routers choose by themselves, whatever --router-replay says: the weights may be the reference
        policy's, which would not choose the experts that the servers' policy chose.
        """
        with compat.attention_logits_kept(self.model):
            scored = compute_log_probs(self.model, self.packs, self.settings, routes=Routes())
        return None if scored is None else scored[0]


def label_logprobs(
    output: Tensor,
    micro: Microbatch,
    settings: LogprobSettings,
    *,
    with_entropy: bool = False,
    with_collision: bool = False,
) -> tuple[Tensor | None, ...]:
    """Log-probs, entropy (or None) and with_collision the collisions of a microbatch's labels, flat:
    [b * L] float32. Where the microbatch has the sampler's likeliest ids, their log-probs too: [b * L, K].

    Over the ids that the server sampled from where they are known, else over the whole vocabulary. A label
    that was not sampled has 0 (-inf where ids are known), and no gradient: its logits are not read.

    Args:
        output: the model's: logits [b, L, V/tp], or the hook's [b, L, 1 to 3].
        micro: the microbatch.
        settings: those of `make_forward_step`.
        with_entropy, with_collision: as there.
    """
    if _processor(micro, settings) is not None:
        return split_output(output, 0 if micro.top_ids is None else micro.top_ids.shape[1])
    logits, labels = output.reshape(-1, output.shape[-1]), micro.labels.reshape(-1)
    if micro.sampling_masks is not None:
        return sampling_mask_logprobs(
            logits,
            labels,
            micro.sampling_masks,
            tp_group=settings.tp_group,
            temperature=settings.temperature,
            with_entropy=with_entropy,
            with_collision=with_collision,
        )
    return vocab_parallel_logprobs(
        logits,
        labels,
        tp_group=settings.tp_group,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        with_entropy=with_entropy,
        with_collision=with_collision,
        inplace_gradient=settings.inplace_gradient,
        whole_rows=settings.whole_rows,
        sampled=micro.sampled,
        ids=micro.top_ids,
    )


def _output_arguments(
    micro: Microbatch, settings: LogprobSettings, with_entropy: bool, with_collision: bool
) -> dict[str, Any]:
    """Keyword arguments of the model's forward: the hook behind its last layer, or none."""
    if (processor := _processor(micro, settings)) is None:
        return {}
    context = OutputContext(
        micro.labels,
        settings,
        with_entropy=with_entropy,
        sampled=micro.sampled,
        with_collision=with_collision,
        ids=micro.top_ids,
    )
    return {"output_processor": processor, "output_processor_context": context}


def _processor(micro: Microbatch, settings: LogprobSettings) -> Callable[..., Tensor] | None:
    """The hook that makes log-probs of the microbatch, or None for Megatron's logits."""
    if settings.from_hidden:
        return label_logprobs_of_hidden
    # Sampling masks are in the order of the microbatch's rows.
    return label_logprobs_of_layer if settings.before_copies and micro.sampling_masks is None else None
