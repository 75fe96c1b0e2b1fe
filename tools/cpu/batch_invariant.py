"""Products and attention whose rows do not depend on what else is in a batch, by torch: what engines have
as GPU kernels in their batch-invariant modes.

Each number is a sum over contiguous elements of one row, in torch's order for its length alone. b batch, h
heads, g groups of keys and values, t queries, T keys, d head size.
"""

import torch
from torch import Tensor

LARGEST = 1 << 22
"""Elements of the products that are held at once."""

_library: torch.library.Library | None = None


def is_on() -> bool:
    """True once this process computes so."""
    return _library is not None


def enable(*_, **__) -> None:
    """From now on every matrix product on this process's CPU is batch-invariant, and attention that asks."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("aten::mm", product, "CPU")
    _library.impl("aten::addmm", _added, "CPU")
    _library.impl("aten::bmm", _batched, "CPU")


def product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N] -> [M, N]."""
    columns, wide = b.t().contiguous(), a.contiguous()
    if not wide.dtype.is_floating_point or 0 in (*a.shape, *b.shape):
        return (wide[:, None] * columns).sum(-1).to(a.dtype)
    rows = max(1, LARGEST // max(columns.numel(), 1))
    wider = torch.float32 if wide.dtype in (torch.bfloat16, torch.float16) else wide.dtype
    columns = columns.to(wider)
    parts = [(one[:, None].to(wider) * columns).sum(-1) for one in wide.split(rows)]
    return torch.cat(parts).to(a.dtype)


def _added(bias: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    made = product(a, b)
    return (made if alpha == 1 else made * alpha) + (bias if beta == 1 else bias * beta)


def _batched(a: Tensor, b: Tensor) -> Tensor:
    return (
        torch.stack([product(x, y) for x, y in zip(a, b, strict=True)])
        if len(a)
        else a.new_empty(0, a.shape[1], b.shape[2])
    )


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Softmax attention, each query by itself over the keys that it sees.

    Args:
        query: [b, h, t, d]; key, value: [b, g, T, d].
        visible: bool [b, 1, t, T], each query sees a key.
        sinks: [h], one more score of each head without a value; None: there are none.

    Returns:
        [b, h, t, d of the values].
    """
    times = query.shape[1] // key.shape[1]
    rows = []
    for q, k, v, seen in zip(query, key, value, visible[:, 0], strict=True):
        k, v = k.repeat_interleave(times, dim=0), v.repeat_interleave(times, dim=0)
        of_queries = []
        for at in range(q.shape[1]):
            places = seen[at].nonzero()[:, 0]
            scores = (q[:, at, None] * k[:, places]).sum(-1) * scale
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(scores.dtype)[:, None]], dim=-1)
            shares = scores.float().softmax(-1).to(v.dtype)[:, : len(places)]
            of_queries.append((shares[:, None] * v[:, places].transpose(1, 2).contiguous()).sum(-1))
        rows.append(torch.stack(of_queries, dim=1))
    return torch.stack(rows)
