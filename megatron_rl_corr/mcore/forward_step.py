"""Megatron's forward step over rollout microbatches, for scoring and for training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from megatron_rl_corr.mcore.batch import Microbatch

LossOf = Callable[[Microbatch, Tensor], object]


def make_forward_step(loss_of: LossOf) -> Callable:
    """forward_step_func for a schedule: the next microbatch's logits, and loss_of(microbatch, logits).

    The attention mask is left to the model's own causal one.
    """

    def forward_step(
        data_iterator: Iterator[Microbatch], model: nn.Module, return_schedule_plan: bool = False
    ):
        if return_schedule_plan:
            raise ValueError(
                "--overlap-moe-expert-parallel-comm is not supported with rollout correction; leave it out"
            )
        micro = next(data_iterator)
        logits = model(micro.tokens, micro.position_ids, None)

        def loss_func(output: Tensor, non_loss_data: bool = False):
            return loss_of(micro, output)

        return logits, loss_func

    return forward_step


