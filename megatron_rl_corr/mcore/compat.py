"""Every version-sensitive fact of Megatron in one place: groups, signatures, results."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import __version__ as megatron_version
from megatron.core import parallel_state as mpu

from megatron_rl_corr.mcore.step_scale import scaled_learning_rates
from megatron_rl_corr.mcore.versions import check_parameters, release
from megatron_rl_corr.models.shards import ShardRanks
from megatron_rl_corr.reduce.layout import ExpertGroups, Layout, StageGroups

OUTPUT_PROCESSOR_SINCE = (0, 18)
"""GPTModel.forward's hook behind the last layer."""

EXPERT_GROUPS_SINCE = (0, 19)
"""Experts' gradients are summed over the experts' own groups, whatever their number of ranks."""


def check_output_processor(model: list) -> None:
    """Raises ValueError unless the model's forward has the hook behind the last layer."""
    if release() < OUTPUT_PROCESSOR_SINCE:
        raise ValueError(
            "--rollout-linear-logprobs needs megatron-core "
            f"{OUTPUT_PROCESSOR_SINCE[0]}.{OUTPUT_PROCESSOR_SINCE[1]} or "
            f"newer, and this is {megatron_version}; leave it out"
        )
    for chunk in model:
        if vars(chunk).get("hybrid_layer_pattern") is not None:
            raise ValueError(
                "--rollout-linear-logprobs: HybridModel has no hook behind its last layer; leave it out"
            )
        check_parameters(chunk.forward, ("output_processor", "output_processor_context"))


def has_output_processor(model: list) -> bool:
    """True if the model's forward has the hook behind the last layer, and nothing scales logits
    after that layer.
    """
    names = {"output_processor", "output_processor_context"}
    return release() >= OUTPUT_PROCESSOR_SINCE and all(
        names <= set(inspect.signature(chunk.forward).parameters) and not chunk.config.use_mup
        for chunk in model
    )


def check_expert_layout(args: argparse.Namespace) -> None:
    """Raises ValueError for a layout whose expert gradients are silently wrong in Megatron before 0.19.

    With one expert-parallel rank Megatron treats experts' weights as dense ones, and sums their gradients
    over data-parallel ranks only; where experts are not split like the rest, tensor-parallel ranks hold
    replicas of them.
    """
    split = args.expert_tensor_parallel_size in (None, args.tensor_model_parallel_size)
    if (
        release() < EXPERT_GROUPS_SINCE
        and args.num_experts
        and args.expert_model_parallel_size == 1
        and not split
    ):
        raise ValueError(
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} with "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} and "
            f"--expert-model-parallel-size 1: megatron-core {megatron_version} leaves tokens out of the "
            "experts' gradients; use 0.19 or newer, more expert-parallel ranks, or the same tensor-parallel "
            "size for both"
        )


def layout(*, sequence_parallel: bool = False) -> Layout:
    """Read from Megatron's initialised parallel state. sequence_parallel: Megatron's flag of this name."""
    expert_group = mpu.get_expert_tensor_and_model_parallel_group()
    # Ranks of a stage are numbered tensor first, so its lowest rank is tensor rank 0 of the first replica.
    stage_ranks = torch.distributed.get_process_group_ranks(
        mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    )
    return Layout(
        dp_rank=mpu.get_data_parallel_rank(),
        dp_size=mpu.get_data_parallel_world_size(),
        cp_size=mpu.get_context_parallel_world_size(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        pp_size=mpu.get_pipeline_model_parallel_world_size(),
        is_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=True),
        tp_group=mpu.get_tensor_model_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
        dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        tp_cp_group=mpu.get_tensor_and_context_parallel_group(),
        shard=ShardRanks(
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            expert_tp_rank=mpu.get_expert_tensor_parallel_rank(),
            expert_tp_size=mpu.get_expert_tensor_parallel_world_size(),
            ep_rank=mpu.get_expert_model_parallel_rank(),
        ),
        stage_groups=StageGroups(
            tp=mpu.get_tensor_model_parallel_group(),
            expert=expert_group,
            sender=min(stage_ranks),
            senders=mpu.get_pipeline_model_parallel_group(),
        ),
        expert_groups=ExpertGroups(
            mpu.get_expert_model_parallel_group(),
            (mpu.get_expert_tensor_parallel_group(), mpu.get_expert_data_parallel_group()),
        ),
        sequence_parallel=sequence_parallel,
    )


@contextlib.contextmanager
def gathered_parameters(model: list, optimizer: Any) -> Iterator[None]:
    """Within, every rank holds whole, current parameters.

    With --overlap-param-gather the optimizer leaves the all-gather to hooks of the next forward pass;
    before the first step has ended those hooks are off, so the gather is made here.
    """
    from megatron.training import training

    overlapped = any(chunk.ddp_config.overlap_param_gather for chunk in model)
    hooked = overlapped and bool(model[0].remove_forward_pre_hook_handles)
    if hooked:
        takes_optimizer = "optimizer" in inspect.signature(training.disable_forward_pre_hook).parameters
        training.disable_forward_pre_hook(model, **({"optimizer": optimizer} if takes_optimizer else {}))
    elif overlapped:
        _gather(model, optimizer)
    try:
        yield
    finally:
        if hooked:
            training.enable_forward_pre_hook(model)


def _gather(model: list, optimizer: Any) -> None:
    """`training.force_param_sync`, which is there from 0.16 on, and takes the optimizer from 0.19 on."""
    from megatron.training import training

    if release() < (0, 16):
        for chunk in model:
            chunk.start_param_sync(force_sync=True)
        return
    takes_optimizer = "optimizer" in inspect.signature(training.force_param_sync).parameters
    training.force_param_sync(model, *([optimizer] if takes_optimizer else []))


@contextlib.contextmanager
def asked_before_update(optimizer: Any, decide_update: Callable[[], float]) -> Iterator[None]:
    """Within, optimizer.step() first calls decide_update(), which its learning rates are multiplied by.

    If it is 0 the step changes nothing and reports an overflow.
    """
    update, bound = optimizer.step, "step" in vars(optimizer)  # as --optimizer-cuda-graph binds it

    def step() -> tuple:
        factor = decide_update()
        if not factor:
            return False, None, None
        with contextlib.nullcontext() if factor == 1 else scaled_learning_rates(optimizer, factor):
            return update()

    optimizer.step = step
    try:
        yield
    finally:
        if bound:
            optimizer.step = update
        else:
            del optimizer.step


class RouterState:
    """The balancing biases of a model's routers, which a training pass moves before the optimizer's step.

    They belong to the checkpoint and to what is pushed, so a step that is skipped must restore them.
    """

    def __init__(self, model: list):
        self._kept = [(buffer, buffer.clone()) for chunk in model for buffer in _persistent_buffers(chunk)]
        self._model = model

    def restore(self) -> None:
        """Put back the values of the time when this object was made."""
        for buffer, before in self._kept:
            buffer.copy_(before)

    def zero_attention_logits(self) -> None:
        """Keep --qk-clip, which rescales weights after the optimizer's step, from changing any: its
        maxima become 0.

        Not None: Megatron reduces them over ranks, before 0.17 without checking.
        """
        for chunk in self._model:
            for module in chunk.modules():
                if hasattr(module, "current_max_attn_logits") and module.current_max_attn_logits is not None:
                    module.current_max_attn_logits = torch.zeros_like(module.current_max_attn_logits)


@contextlib.contextmanager
def attention_logits_kept(model: list) -> Iterator[None]:
    """Within, passes of other weights leave no trace in the maxima of attention logits.

    Transformer Engine's attention keeps them over every forward pass, in evaluation too, and --qk-clip
    would rescale the trained weights by what the others made.
    """
    modules = [
        module for chunk in model for module in chunk.modules() if hasattr(module, "current_max_attn_logits")
    ]
    kept = [module.current_max_attn_logits for module in modules]
    try:
        yield
    finally:
        for module, maxima in zip(modules, kept, strict=True):
            module.current_max_attn_logits = maxima


def _persistent_buffers(chunk: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The buffers that a checkpoint holds."""
    for module in chunk.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer


def with_microbatches(train_step: Callable, count: int) -> Callable:
    """Megatron's `train_step`, whose schedule runs so many microbatches whatever Megatron's calculator says.

    The calculator itself is left alone: consumed samples and the learning rate follow from it.
    """
    signature = inspect.signature(train_step)
    check_parameters(train_step, ("forward_backward_func",))

    @functools.wraps(train_step)
    def step(*args: Any, **kwargs: Any) -> tuple:
        given = signature.bind(*args, **kwargs)
        schedule = given.arguments["forward_backward_func"]
        given.arguments["forward_backward_func"] = lambda **named: schedule(
            **(named | {"num_microbatches": count})
        )
        return train_step(*given.args, **given.kwargs)

    return step


def smallest_schedule(model: list) -> int:
    """The fewest microbatches that Megatron's schedule takes: with virtual pipeline stages a
    whole group of them.
    """
    return 1 if len(model) == 1 else unwrapped(model)[0].config.microbatch_group_size_per_vp_stage


def grad_norm_of(result: tuple) -> float | None:
    """The gradient norm in `train_step`'s result."""
    norm = result[5]
    return None if norm is None else float(norm)


def was_skipped(result: tuple) -> bool:
    """True if `train_step` left the weights as they were."""
    return bool(result[1])


def without_losses(result: tuple) -> tuple:
    """The result of a skipped step, for another one that was not made: no losses to average,
    the rest as it is.
    """
    return ({}, *result[1:])


def is_leaving(result: tuple) -> bool:
    """True if `train_step` ends the run before its update, as the rerun state machine asks for."""
    return bool(result[3])


def asks_for_checkpoint(result: tuple) -> bool:
    """True if `train_step` ends the run with a checkpoint of the weights that its update
    would have changed.
    """
    return bool(result[2])


def stays(result: tuple) -> tuple:
    """The result of a step that would leave with a checkpoint, as that of a skipped one; the exit code stays.

    The rerun state machine goes on as if it had found nothing: what it would run again is not in a
    later checkpoint.
    """
    from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

    get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET
    losses, _, _, _, *rest = result
    return (losses, 1, False, False, *rest)


@contextlib.contextmanager
def leaving(leaves: bool) -> Iterator[None]:
    """Within, `checkpoint_and_decide_exit` saves and leaves, if `leaves`, as at an --exit-interval."""
    from megatron.training import training

    args = training.get_args()
    interval = args.exit_interval
    if leaves:
        args.exit_interval = 1
    try:
        yield
    finally:
        args.exit_interval = interval


def unwrapped(model: list) -> list:
    """The model chunks without DDP's and the precision's wrappers."""
    from megatron.core.utils import unwrap_model

    return unwrap_model(model)


def begins_with_pretrained(args: argparse.Namespace) -> bool:
    """True if Megatron has loaded --pretrained-checkpoint, which it does where --load has
    no checkpoint yet.
    """
    return args.iteration == 0 and args.finetune
