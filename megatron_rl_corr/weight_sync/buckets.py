"""Groups a stream of lists of named tensors into buckets of bounded size, without looking ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

NamedTensor = tuple[str, Tensor]


def buckets(units: Iterable[list[NamedTensor]], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """In order, no unit in two buckets; a bucket passes bucket_bytes only where a single unit does.

    Empty in, nothing out.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    bucket: list[NamedTensor] = []
    size = 0
    for unit in units:
        nbytes = sum(tensor.nbytes for _, tensor in unit)
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket += unit
        size += nbytes
    if bucket:
        yield bucket
