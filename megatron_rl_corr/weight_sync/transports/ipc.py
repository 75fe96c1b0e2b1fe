"""Weights to servers on this host over HTTP: bytes for servers on the CPU, CUDA IPC handles for those on a GPU."""

from __future__ import annotations

import base64
import io
import pickle
import socket
from collections import OrderedDict
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch
import torch.multiprocessing.reductions
from torch import Tensor

from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.weight_sync.buckets import NamedTensor
from megatron_rl_corr.weight_sync.transports.base import WeightTransport
from megatron_rl_corr.weight_sync.transports.update_group import count_ranks


class TensorTransport(WeightTransport):
    """Needs no process group. Every tensor-parallel rank of a server unpickles an entry of its own."""

    def __init__(self, loop: LoopThread):
        super().__init__()
        self._loop = loop
        self._ranks: dict[str, int] = {}

    def aim(self, servers, *, rejoined=None):
        super().aim(servers)
        if rejoined is not None:
            self._ranks = {}

    def send(self, bucket: list[NamedTensor]) -> None:
        if not self._ranks:
            infos = self._loop.call(self.servers.server_info())
            count_ranks(self.servers.base_urls, infos)  # refuses replicas behind one address
            sizes = [info["tp_size"] for info in infos]
            self._ranks = dict(zip(self.servers.base_urls, sizes, strict=True))
        # A CUDA handle can be opened once, so that each rank needs a pickle of its own; bytes can be shared.
        shared = None if any(tensor.is_cuda for _, tensor in bucket) else serialized(bucket)
        entries = [
            [shared or serialized(bucket) for _ in range(self._ranks[url])] for url in self.servers.base_urls
        ]
        self._loop.call(self.servers.update_weights_from_tensor(entries))


def check_same_host(urls: Sequence[str]) -> None:
    """ValueError for a server whose address is not one of this host's."""
    for url in urls:
        if not is_this_host(urlsplit(url).hostname):
            raise ValueError(
                f"--rollout-weight-transport tensor: {url} is not on {socket.gethostname()}, which sends "
                "weights to it, and hosts share no memory; use distributed, or disk with a shared --rollout-weight-dir"
            )


def is_this_host(host: str) -> bool:
    """Whether a name or address is of one of this host's interfaces: only to those can a socket be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def serialized(bucket: Sequence[NamedTensor]) -> str:
    """base64 of a pickled [(name, tensor)], of nothing but what SGLang's unpickler lets through."""
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump([(name, tensor) for name, tensor in bucket])
    return base64.b64encode(buffer.getvalue()).decode()


class _Function:
    """A function of the server's process by name; here it may be another one, or none."""

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
        return torch._utils._rebuild_tensor_v2, (tensor._typed_storage(), *place)


def _cuda_handle(tensor: Tensor) -> tuple[_Function, tuple]:
    """torch's own handle of memory on a GPU, with the device's UUID in place of its number in this process."""
    _, arguments = torch.multiprocessing.reductions.reduce_tensor(tensor)
    device = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return _REBUILD_CUDA, (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])


_DEVICE = 6
"""Where rebuild_cuda_tensor takes the device: SGLang counts on it too (srt/utils/patch_torch.py)."""
