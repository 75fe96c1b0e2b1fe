"""Weights in a request to a vLLM server: JSON with raw bytes in base64, or with CUDA IPC handles; no pickle.

The server's worker imports this module too: standard library and torch only.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int32")}
"""Types that are sent, by the names that requests have for them: of weights, and of the places of changes."""

_DEVICE, _HANDLE, _COUNTER, _EVENT = 6, 7, 11, 13
"""Where torch's rebuild_cuda_tensor takes the device's number and, as bytes, handles of memory,
counter and event.
"""
_TYPES = {0: Tensor, 4: torch.UntypedStorage}
"""Where it takes classes; they are always these."""
_SIZE, _DTYPE = 1, 5


def serialized(bucket: Sequence[tuple[str, Tensor]]) -> str:
    """A bucket as JSON text.

    Args:
        bucket: Hugging Face names and tensors. Those on the CPU go as bytes; those on a GPU as handles,
            each of which one rank of a server on this host can open once.
    """
    return json.dumps([_encoded(name, tensor.detach().contiguous()) for name, tensor in bucket])


def entries(text: str) -> list[dict[str, Any]]:
    """What `serialized` made: for each tensor "name", "dtype", "shape", and "data" or "handle"."""
    return json.loads(text)


def _encoded(name: str, tensor: Tensor) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if not tensor.is_cuda:
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        return entry | {"data": base64.b64encode(memoryview(raw)).decode()}
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    fields = list(arguments)
    fields[_DEVICE] = str(torch.cuda.get_device_properties(tensor.device).uuid)
    fields[_DTYPE] = None
    for place in _TYPES:
        fields[place] = None
    for place in (_HANDLE, _COUNTER, _EVENT):
        fields[place] = base64.b64encode(fields[place]).decode()
    return entry | {"handle": [list(field) if isinstance(field, tuple) else field for field in fields]}


def decoded(entry: dict[str, Any], device: torch.device) -> Tensor:
    """One entry as a tensor of this process on `device`.

    Raises:
        ValueError: a type that is not sent, or a handle of memory on a GPU that this process does not see.
    """
    dtype = dtype_named(entry["dtype"])
    if "data" in entry:
        raw = bytearray(base64.b64decode(entry["data"]))
        tensor = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return tensor.view(dtype).view(entry["shape"]).to(device)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    fields = list(entry["handle"])
    fields[_DEVICE] = _number_of(fields[_DEVICE], entry["name"])
    fields[_DTYPE] = dtype
    for place, kind in _TYPES.items():
        fields[place] = kind
    for place in (_HANDLE, _COUNTER, _EVENT):
        fields[place] = base64.b64decode(fields[place])
    if list(fields[_SIZE]) != list(entry["shape"]):
        raise ValueError(f"{entry['name']} is told as {entry['shape']}, and its handle is of {fields[_SIZE]}")
    # A copy: vLLM keeps a tensor until its whole layer has come, and the sender's memory may
    # change before that.
    return rebuild_cuda_tensor(*fields).to(device, copy=True)


def _number_of(uuid: str, name: str) -> int:
    """The number that a GPU has in this process. Raises ValueError where it is not seen here."""
    seen = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ValueError(
            f"{name} lies on GPU {uuid}, and this server sees {', '.join(seen) or 'none'}; start it with a "
            "CUDA_VISIBLE_DEVICES that has the trainer's GPUs too, or use `weight_transport` distributed"
        )
    return seen.index(uuid)


def dtype_named(name: str) -> torch.dtype:
    """The type of this name. Raises ValueError for one that weights are not sent in."""
    if name not in DTYPES:
        raise ValueError(f"weights are sent as {', '.join(DTYPES)}, not as {name!r}")
    return DTYPES[name]
