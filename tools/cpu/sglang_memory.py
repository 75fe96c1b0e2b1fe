"""A memory saver for SGLang 0.5.23 without a GPU: torch_memory_saver, which --enable-memory-saver
needs, is CUDA alone.

As on a GPU, a pass of the model ends the server's process while any memory is released, and what comes
back holds nothing of before: it is NaN (and -1 in integers), so that weights which nobody has sent since
show in every log-prob.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.cpu.replacement import Replacement

_FACTORIES = (
    "empty",
    "empty_strided",
    "zeros",
    "ones",
    "full",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
)
"""Functions of torch that make the tensors which parameters and caches are views of."""
_NAN = 0xFF
"""Every byte of a NaN, in each type of floating point numbers that has one with all bits set;
of -1 in integers.
"""


class _Allocations(TorchDispatchMode):
    """While it is active, what is allocated is put into a list."""

    def __init__(self, storages: list[torch.UntypedStorage]):
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _FACTORIES and made.device.type == "cpu":
            self._storages.append(made.untyped_storage())
        return made


class _Saver:
    """What stands in the place of SGLang's adapter of torch_memory_saver: one for each process."""

    enabled = True

    def __init__(self):
        self._storages: dict[str, list[torch.UntypedStorage]] = {}
        self.released: set[str] = set()
        """Tags of the memory that is released."""

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        if enable_cpu_backup:
            raise ValueError("the CPU's memory saver keeps no copy; leave --enable-weights-cpu-backup out")
        with _Allocations(self._storages.setdefault(tag, [])):
            yield

    def pause(self, tag: str) -> None:
        if tag in self.released:
            raise RuntimeError(f"memory of {tag} is released already: torch_memory_saver ends the process")
        self.released.add(tag)
        self._forget(tag)

    def resume(self, tag: str) -> None:
        if tag not in self.released:
            raise RuntimeError(f"memory of {tag} is not released: torch_memory_saver ends the process")
        self.released.remove(tag)
        self._forget(tag)  # what was written meanwhile too

    def _forget(self, tag: str) -> None:
        for storage in self._storages.get(tag, ()):
            _fill(storage)

    @contextmanager
    def configure_subprocess(self) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    def check_validity(self, caller_name: str) -> None:
        pass


_SAVER = _Saver()


def _on_the_cpu(original):
    def create(enable: bool):
        return _SAVER if enable else original(enable)

    return staticmethod(create)


def _without_weights(original):
    @functools.wraps(original)
    def change(self, recv_req):
        answer = original(self, recv_req)
        if "weights" in (recv_req.tags or ["weights"]):
            for weight in self.tp_worker.model_runner.model.parameters():
                _fill(weight.data.untyped_storage())
        return answer

    return change


def _fill(storage: torch.UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_NAN)


def _not_of_released(original):
    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        if _SAVER.released:
            raise RuntimeError(f"illegal memory access: {', '.join(sorted(_SAVER.released))} released")
        return original(self, *args, **kwargs)

    return forward


def _no_device(original):
    def synchronize(device=None) -> None:
        pass

    return synchronize


EARLY = [
    Replacement(
        "torch.cuda",
        "synchronize",
        _no_device,
        "/release_memory_occupation waits for the device, which torch takes for CUDA where there is no other",
    ),
]
LATE = [
    Replacement(
        "sglang.srt.utils.torch_memory_saver_adapter",
        "TorchMemorySaverAdapter.create",
        _on_the_cpu,
        "--enable-memory-saver needs torch_memory_saver, which is made of CUDA's own calls",
    ),
    *(
        Replacement(
            "sglang.srt.managers.scheduler_components.weight_updater",
            f"SchedulerWeightUpdaterManager.{name}",
            _without_weights,
            "loading may have put new memory in the place of what a region has noted",
        )
        for name in ("release_memory_occupation", "resume_memory_occupation")
    ),
    Replacement(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.forward",
        _not_of_released,
        "a GPU refuses access to memory that is released, and the process ends",
    ),
]
