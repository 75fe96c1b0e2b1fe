"""torch.cuda on a machine without CUDA: devices, streams, events and statistics as
constants without effect.
"""

import contextlib
import types
from collections import defaultdict

import torch

from tools.cpu.replacement import Replacement

CPU = torch.device("cpu")


class _Event:
    """A CUDA event that is always complete."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def record(self, *args, **kwargs) -> None:
        pass

    def wait(self, *args, **kwargs) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


class _Stream:
    """A CUDA stream on the CPU, where operations run in the program's order."""

    def __init__(self, *args, **kwargs) -> None:
        self.device = CPU
        self.cuda_stream = 0

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def record_event(self, event=None):
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        pass


_ONLY_STREAM = _Stream()


def _answering(value):
    """Make functions that return `value`; a new one each time, since torch refuses one object
    under two names.
    """
    return lambda original: lambda *args, **kwargs: value


def _no_context(original):
    @contextlib.contextmanager
    def context(*args, **kwargs):
        yield

    return context


def _get_rng_state(original):
    return lambda *args, **kwargs: torch.get_rng_state()


def _set_rng_state(original):
    return lambda state, *args, **kwargs: torch.set_rng_state(state)


def _manual_seed(original):
    return lambda seed: torch.default_generator.manual_seed(seed)


_PROPERTIES = types.SimpleNamespace(
    name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=1 << 34
)

_DEVICE = "Megatron asks for a current CUDA device, and cannot go on without one"
_ORDER = "streams and events order work on a GPU; on the CPU the program's order is the order"
_MEMORY = "memory statistics of a GPU"
_RANDOM = "the CPU's generator stands for the GPU's, so that dropout and initialisation are reproducible"
_PROFILER = "profiler ranges"

_TABLE = [
    (_DEVICE, _answering(CPU), ["current_device"]),
    (_DEVICE, _answering(1), ["device_count"]),
    (_DEVICE, _answering(None), ["set_device", "init", "_lazy_init"]),
    (_DEVICE, _answering((9, 0)), ["get_device_capability"]),
    (_DEVICE, _answering(_PROPERTIES), ["get_device_properties"]),
    (_ORDER, _answering(None), ["synchronize", "set_stream"]),
    (_ORDER, _answering(_ONLY_STREAM), ["current_stream", "default_stream"]),
    (_ORDER, _no_context, ["stream"]),
    (_ORDER, lambda original: _Stream, ["Stream"]),
    (_ORDER, lambda original: _Event, ["Event"]),
    (_MEMORY, _answering(None), ["empty_cache", "ipc_collect", "reset_peak_memory_stats"]),
    (
        _MEMORY,
        _answering(0),
        ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"],
    ),
    (_MEMORY, lambda original: lambda *args, **kwargs: defaultdict(int), ["memory_stats"]),
    (_RANDOM, _get_rng_state, ["get_rng_state", "random.get_rng_state"]),
    (_RANDOM, _set_rng_state, ["set_rng_state", "random.set_rng_state"]),
    (
        _RANDOM,
        _manual_seed,
        ["manual_seed", "manual_seed_all", "random.manual_seed", "random.manual_seed_all"],
    ),
    (_PROFILER, _answering(None), ["nvtx.range_push", "nvtx.range_pop", "nvtx.mark"]),
]

REPLACEMENTS = [Replacement("torch.cuda", name, make, why) for why, make, names in _TABLE for name in names]
