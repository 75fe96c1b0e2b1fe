"""What is replaced in a process that runs Megatron without a GPU (megatron-core 0.14 to
0.20); no arithmetic.
"""

import collections
import functools
import importlib.util

import torch

from tools.cpu import batch_invariant, torch_cuda, torch_devices, torch_gloo
from tools.cpu.replacement import MissingName, Replacement

EARLY = [
    *torch_cuda.REPLACEMENTS,
    *torch_devices.REPLACEMENTS,
    *torch_gloo.REPLACEMENTS,
    torch_gloo.ONE_DEVICE,
]


def _get_rng_state(original):
    return lambda *args, **kwargs: torch.get_rng_state()


def _set_rng_state(original):
    return lambda state, *args, **kwargs: torch.set_rng_state(state)


def _logging_without_rng_warning(original):
    """A `logging` for one module, whose loggers drop the one warning that is always wrong here."""

    class _Quiet:
        def __getattr__(self, name):
            return getattr(original, name)

        def getLogger(self, name=None):
            logger = original.getLogger(name)
            logger.addFilter(_expected_message)
            return logger

    return _Quiet()


def _expected_message(record) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


def _norm_with_sequence_parallel(original):
    def __new__(cls, config, *args, **kwargs):
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            # finalize_model_grads sums the gradients of marked parameters over TP.
            parameter.sequence_parallel = sequence_parallel
        return norm

    return __new__


def _deallocate_later(original):
    kept = collections.deque(maxlen=64)

    @functools.wraps(original)
    def deallocate_output_tensor(out, deallocate_pipeline_outputs=False):
        if deallocate_pipeline_outputs and torch.is_tensor(out):
            kept.append(out.data)
        return original(out, deallocate_pipeline_outputs)

    return deallocate_output_tensor


def _counts_as_numpy(original):
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        tensor = original(tensor, as_numpy, record_stream)
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


def _attention_over_context_ranks(original):
    @functools.wraps(original)
    def core_attention(self):
        from megatron.core import parallel_state

        if not parallel_state.is_initialized() or parallel_state.get_context_parallel_world_size() == 1:
            return original(self)
        from tools.cpu.cp_attention import ContextParallelAttention

        return ContextParallelAttention

    return core_attention


def _allow_no_cuda(original):
    @functools.wraps(original)
    def initialize_megatron(*args, **kwargs):
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    return initialize_megatron


def _compile_if_missing(original):
    @functools.wraps(original)
    def _compile_dependencies() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return _compile_dependencies


def _invariant_in_torch(original):
    def enable_batch_invariant_mode() -> None:
        batch_invariant.enable()

    return enable_batch_invariant_mode


def _invariant_is_on(original):
    def is_batch_invariant_mode_enabled() -> bool:
        return batch_invariant.is_on()

    return is_batch_invariant_mode_enabled


_RANDOM = "the CPU's generator is the device's, so its state is what the tracker saves and restores"

LATE = [
    Replacement("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", _get_rng_state, _RANDOM),
    Replacement("megatron.core.tensor_parallel.random", "_set_cuda_rng_state", _set_rng_state, _RANDOM),
    Replacement(
        "megatron.core.tensor_parallel.random",
        "logging",
        _logging_without_rng_warning,
        "its warning that the CPU's generator moved is about this very thing, once per layer and step",
    ),
    Replacement(
        "megatron.core.transformer.torch_norm",
        "WrappedTorchNorm.__new__",
        _norm_with_sequence_parallel,
        "it refuses sequence parallelism, not marking its parameters for the sum over TP; here it does",
    ),
    Replacement(
        "megatron.core.pipeline_parallel.schedules",
        "deallocate_output_tensor",
        _deallocate_later,
        "gloo sends later, from another thread; an output freed at once would arrive as NaN",
    ),
    Replacement(
        "megatron.core.transformer.moe.moe_utils",
        "maybe_move_tensor_to_cpu",
        _counts_as_numpy,
        "it makes split sizes a list of ints only if they were on a GPU",
    ),
    MissingName(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        None,
        "without Transformer Engine, 0.14 to 0.16 ask whether it is None and never bind it",
    ),
    Replacement(
        "megatron.core.models.backends",
        "LocalSpecProvider.core_attention",
        _attention_over_context_ranks,
        "its own attention refuses context parallelism, and Transformer Engine's needs a GPU",
    ),
    Replacement(
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "enable_batch_invariant_mode",
        _invariant_in_torch,
        "--batch-invariant-mode puts GPU kernels in the place of torch's matrix products; these do the same "
        "on a CPU",
    ),
    Replacement(
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "is_batch_invariant_mode_enabled",
        _invariant_is_on,
        "it tells of the kernels that are not there",
    ),
    Replacement(
        "megatron.training.initialize",
        "initialize_megatron",
        _allow_no_cuda,
        "it refuses to start without CUDA unless allow_no_cuda is given",
    ),
    Replacement(
        "megatron.training.initialize",
        "_compile_dependencies",
        _compile_if_missing,
        "it runs make in the installed package at every start, even if the wheel holds the compiled helpers",
    ),
]
