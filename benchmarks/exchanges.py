"""Counts collectives by the group they are of, and the bytes that a rank sends in each."""

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_rl_corr

PACKAGE = str(Path(megatron_rl_corr.__file__).parent)
CARRIERS = ("all_reduce", "all_reduce_cp", "all_reduce_dp_cp", "all_gather_stacked", "exchange")
"""They exchange on behalf of others: who called them is what a collective is for."""
KINDS = {
    "_allgather_base_": "all-gather",
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
    "recv_": "receive",
}
"""What is sent to one rank is counted there alone."""


@dataclass(frozen=True)
class Exchange:
    """One collective as one rank saw it."""

    group: str
    kind: str
    """all-gather, all-reduce, broadcast or receive."""
    ranks: int
    payload: int
    """Bytes of what this rank gives, or receives from one other."""
    caller: str
    """The function of the package that asked for it; empty outside of the package."""

    @property
    def sent(self) -> float:
        return bytes_sent(self.kind, self.ranks, self.payload)


def bytes_sent(kind: str, ranks: int, payload: float) -> float:
    """Bytes that a rank sends, and receives, in a ring; the broadcast's last rank sends nothing. What one
    rank sends to another is its payload.
    """
    if kind in ("broadcast", "receive"):
        return payload
    return (ranks - 1) * payload if kind == "all-gather" else 2 * (ranks - 1) / ranks * payload


class ExchangeCount(TorchDispatchMode):
    """`seen`: the collectives run inside the block, in order; groups named by `names`, group name -> name."""

    def __init__(self, names: Mapping[str, str]):
        super().__init__()
        self._names = names
        self.seen: list[Exchange] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._schema.name != "c10d::send":
            kind = KINDS[func._schema.name.removeprefix("c10d::")]
            # The first object that is no tensor is the group; a reduction's kind comes after it.
            group = ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
            given = [args[1]] if kind == "all-gather" else args[0]
            payload = sum(tensor.numel() * tensor.element_size() for tensor in given)
            name = self._names.get(group.group_name, "another")
            self.seen.append(Exchange(name, kind, group.size(), payload, _caller()))
        return func(*args, **(kwargs or {}))

    @property
    def by_group(self) -> dict[str, int]:
        return dict(Counter(exchange.group for exchange in self.seen))


def _caller() -> str:
    frame = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and frame.f_code.co_name not in CARRIERS:
            return frame.f_code.co_name
        frame = frame.f_back
    return ""
