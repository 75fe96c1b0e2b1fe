"""Make tensors for device "cuda" on the CPU, and leave functions uncompiled."""

import functools

import torch
import torch.utils.cpp_extension
from torch.utils._device import _device_constructors

from tools.cpu.replacement import Replacement

CPU = torch.device("cpu")

FACTORIES = [
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "linspace",
    "eye",
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_strided",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
]
METHODS = ["new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"]


def _is_cuda(device) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _device_argument_on_cpu(original):
    # torch remembers its factories at the first `with torch.device(...)`. It must be the originals, or such a
    # block has no effect any more: transformers builds its models on "meta" that way.
    _device_constructors()

    # A wrapper, not a TorchFunctionMode: a mode is off inside Tensor.backward(), where activation
    # recomputation runs Megatron's forward again.
    @functools.wraps(original)
    def on_cpu(*args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return on_cpu


def _to_cpu(original):
    @functools.wraps(original)
    def to(self, *args, **kwargs):
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *(CPU if _is_cuda(argument) else argument for argument in args), **kwargs)

    return to


def _itself(original):
    return lambda self, *args, **kwargs: self


def _type_names_cuda(original):
    @functools.wraps(original)
    def type_name(self, *args, **kwargs):
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_name


def _identity_compile(original):
    def compile(model=None, *args, **kwargs):
        return model if model is not None else lambda function: function

    return compile


def _refuse_to_compile(original):
    @functools.wraps(original)
    def load_inline(name, *args, **kwargs):
        raise RuntimeError(f"{name} is an extension for a GPU, and there is none")

    return load_inline


_FACTORY = 'device="cuda" means the CPU here, and there is no pinned memory'
_MOVE = "a tensor is where it should be already"

REPLACEMENTS = [
    *(Replacement("torch", name, _device_argument_on_cpu, _FACTORY) for name in FACTORIES),
    *(Replacement("torch", f"Tensor.{name}", _device_argument_on_cpu, _FACTORY) for name in METHODS),
    Replacement("torch", "Tensor.to", _to_cpu, _MOVE),
    Replacement("torch", "Tensor.cuda", _itself, _MOVE),
    Replacement("torch", "Tensor.pin_memory", _itself, _MOVE),
    Replacement(
        "torch",
        "Tensor.type",
        _type_names_cuda,
        "Megatron's optimizer takes a parameter only if its type is named torch.cuda.FloatTensor or the like",
    ),
    Replacement(
        "torch",
        "compile",
        _identity_compile,
        "Megatron's jit_fuser is torch.compile, which needs a C++ compiler here",
    ),
    Replacement(
        "torch",
        "utils.cpp_extension.load_inline",
        _refuse_to_compile,
        "megatron-core 0.15 compiles an allocator for GPUs when it is imported, and takes only a "
        "RuntimeError for a no",
    ),
]
