"""Weights in a request to an SGLang server: a pickle that its unpickler accepts, in base64."""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.multiprocessing.reductions
from torch import Tensor

from megatron_rl_corr.engines.types import NamedTensor


def serialized(bucket: Sequence[NamedTensor]) -> str:
    """The bucket as base64 of a pickled [(name, tensor)], made of only what SGLang's unpickler accepts.

    Tensors on the CPU go as bytes; those on a GPU as CUDA IPC handles, each of which one rank can open once.

    Args:
        bucket: Hugging Face names and tensors.
    """
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump([(name, tensor) for name, tensor in bucket])
    return base64.b64encode(buffer.getvalue()).decode()


class _Function:
    """A function of the server's process, by name; in this process the name may have another one, or none."""

    def __init__(self, module: str, name: str):
        self.opcode = pickle.GLOBAL + f"{module}\n{name}\n".encode()

    def __call__(self):
        raise TypeError("only a server calls it")


# Megatron-core puts a function of its own in this one's place, and SGLang lets only torch's through.
_LOAD_STORAGE = _Function("torch.storage", "_load_from_bytes")
# In a server's process SGLang has replaced it by one that finds the device by its UUID.
_REBUILD_CUDA = _Function("torch.multiprocessing.reductions", "rebuild_cuda_tensor")


class _TensorPickler(pickle._Pickler):  # the one in Python: the C one has no say in how a function is named
    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, _Function):
            self.write(obj.opcode)
        else:
            super().save(obj, save_persistent_id)

    def reducer_override(self, obj):
        if isinstance(obj, torch.storage.TypedStorage):
            saved = io.BytesIO()
            torch.save(obj, saved, _use_new_zipfile_serialization=False)
            return _LOAD_STORAGE, (saved.getvalue(),)
        if not isinstance(obj, Tensor):
            return NotImplemented
        tensor = obj.detach().contiguous()
        if tensor.is_cuda:
            return _cuda_handle(tensor)
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # a view would take its whole storage along
        place = (0, tuple(tensor.shape), tensor.stride(), False, OrderedDict())
        if tensor.dtype in _WITHOUT_STORAGE:
            return torch._utils._rebuild_tensor_v3, (
                tensor.view(torch.uint8)._typed_storage(),
                *place,
                tensor.dtype,
            )
        return torch._utils._rebuild_tensor_v2, (tensor._typed_storage(), *place)


_WITHOUT_STORAGE = (torch.float8_e4m3fn,)
"""Dtypes that torch has no class of a storage for."""


def _cuda_handle(tensor: Tensor) -> tuple[_Function, tuple]:
    """torch's own handle of memory on a GPU, with the device's UUID in place of its number
    in this process.
    """
    _, arguments = torch.multiprocessing.reductions.reduce_tensor(tensor)
    device = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return _REBUILD_CUDA, (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])


_DEVICE = 6
"""Where rebuild_cuda_tensor takes the device: SGLang counts on it too (srt/utils/patch_torch.py)."""
