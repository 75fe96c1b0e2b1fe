"""Megatron's forward step over rollout microbatches, for scoring and for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_rl_corr.mcore.batch import Microbatch
from megatron_rl_corr.mcore.logprobs import LogprobSettings, model_arguments
from megatron_rl_corr.moe.padding import padding_arguments

if TYPE_CHECKING:
    from megatron_rl_corr.moe.replay import Replay

LossOf = Callable[[Microbatch, Tensor], object]


def make_forward_step(
    loss_of: LossOf, settings: LogprobSettings, *, with_entropy: bool, replay: Replay | None = None
) -> Callable:
    """forward_step_func for a schedule: the next microbatch through the model, and loss_of(microbatch, its output).

    The output is what `label_logprobs` of the same settings takes. The attention mask is left to the model's own
    causal one. replay: what the routers of the model do, within its `scoring` or `training`.
    """

    def forward_step(
        data_iterator: Iterator[Microbatch], model: nn.Module, return_schedule_plan: bool = False
    ):
        if return_schedule_plan:
            raise ValueError(
                "--overlap-moe-expert-parallel-comm is not supported with rollout correction; leave it out"
            )
        micro = next(data_iterator)
        if replay is not None:
            replay.arm(model, micro.index, len(micro.tokens))
        arguments = model_arguments(micro, settings, with_entropy=with_entropy)
        arguments |= padding_arguments(model, micro.padding)
        output = model(micro.tokens, micro.position_ids, None, **arguments)

        def loss_func(output: Tensor, non_loss_data: bool = False):
            return loss_of(micro, output)

        return output, loss_func

    return forward_step


