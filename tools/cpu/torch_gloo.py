"""What gloo needs to stand in for NCCL: one device a process, and lists of unequal sizes
as one all-to-all.
"""

import functools

import torch
import torch.distributed as dist

from tools.cpu.replacement import Replacement


def _unequal(tensors) -> bool:
    return len({tensor.shape for tensor in tensors}) > 1


def _exchange(outputs, inputs, group) -> tuple[torch.Tensor, ...]:
    """Sends inputs[r] to rank r; returns what came from each rank, flat, of the sizes of `outputs`."""
    sizes = [output.numel() for output in outputs]
    received = torch.empty(sum(sizes), dtype=inputs[0].dtype)
    sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
    dist.all_to_all_single(received, sent, sizes, [tensor.numel() for tensor in inputs], group=group)
    return received.split(sizes)


def _all_gather(original):
    @functools.wraps(original)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if not _unequal(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "an unequal all_gather is synchronous here"
        for output, part in zip(
            tensor_list, _exchange(tensor_list, [tensor] * len(tensor_list), group), strict=True
        ):
            output.copy_(part.view_as(output))
        return None

    return all_gather


def _reduce_scatter(original):
    @functools.wraps(original)
    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if not _unequal(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        assert not async_op and op == dist.ReduceOp.SUM, "an unequal reduce_scatter is a synchronous sum here"
        parts = _exchange([output] * len(input_list), input_list, group)
        output.copy_(sum(part.view_as(output) for part in parts))
        return None

    return reduce_scatter


def _on_one_device(original):
    device = functools.cache(original.create_default_device)

    class ProcessGroupGloo(original):
        def __init__(self, store, rank, size, timeout=dist.default_pg_timeout, enable_reconfigure=False):
            options = original._Options()
            options._devices, options._timeout = [device()], timeout
            options.enable_reconfigure = enable_reconfigure
            super().__init__(store, rank, size, options)

    return ProcessGroupGloo


_WHY = "gloo refuses lists of unequal sizes, which experts split over both EP and TP exchange"

ONE_DEVICE = Replacement(
    "torch.distributed.distributed_c10d",
    "ProcessGroupGloo",
    _on_one_device,
    "each group's own device has a thread that wakes 100 times a second: 50 groups cost 4% of a core, idle "
    "or not",
)
REPLACEMENTS = [
    Replacement("torch.distributed", "all_gather", _all_gather, _WHY),
    Replacement("torch.distributed", "reduce_scatter", _reduce_scatter, _WHY),
]
