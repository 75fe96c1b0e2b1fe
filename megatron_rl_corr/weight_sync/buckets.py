"""Groups a stream of named tensors into buckets of bounded size, without looking ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

NamedTensor = tuple[str, Tensor]


def buckets(tensors: Iterable[NamedTensor], bucket_bytes: int) -> Iterator[list[NamedTensor]]:
    """In order; a bucket passes bucket_bytes only where a single tensor does. Empty in, nothing out."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    bucket: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket
