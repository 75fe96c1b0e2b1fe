"""Kernels, exchanges and bytes of the Triton log-probs, counted without a GPU: every launch is
recorded, none is run.

T tokens, N of them sampled, V columns of this rank, tp tensor-parallel ranks, P parts of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.operators import OperatorCount
from megatron_rl_corr.logprobs import vocab
from megatron_rl_corr.logprobs.sampled_rows import SampledRows

KERNELS = ("stats_kernel", "merge_kernel", "combine_kernel", "gradient_kernel")
PER_TOKEN = 4 * 4
"""Bytes of a token's four numbers, as statistics and as what is made of them; 4 more with the collision."""


@dataclass(frozen=True)
class Launch:
    """A kernel's launch. Example: `stats_kernel` over 4096 sampled rows of 5 parts: 20480 programs."""

    kernel: str
    programs: int
    moved: int
    """Bytes that it reads and writes, each once."""


@dataclass(frozen=True)
class Counts:
    """What log-probs and their gradient take."""

    forward: list[Launch]
    backward: list[Launch]
    operators: list[str]
    """Torch's own kernels beside them."""
    exchanged: list[int]
    """Bytes that a rank gives, by collective."""
    floor: int
    """Bytes of the sampled rows of the logits, read twice, and of the gradient, written once."""

    @property
    def moved(self) -> int:
        """Bytes of all kernels."""
        return sum(one.moved for one in self.forward + self.backward)


def count(
    tokens: int,
    columns: int,
    *,
    sampled: int | None = None,
    tp: int = 1,
    with_entropy: bool = False,
    entropy_in_loss: bool = False,
    with_collision: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Counts:
    """Count one forward and one backward pass of vocab_parallel_logprobs, on tensors without storage.

    Args:
        tokens: T.
        columns: V.
        sampled: N; None: all tokens, without a list of rows.
        tp: tensor-parallel ranks.
        with_entropy: whether the entropy is computed.
        entropy_in_loss: whether the loss depends on it.
        with_collision: whether the collision probability is computed.
        dtype: of the logits.
    """
    logits = torch.empty(tokens, columns, dtype=dtype, device="meta", requires_grad=True)
    labels, rows = torch.empty(tokens, dtype=torch.int64, device="meta"), None
    if sampled is not None:
        rows = SampledRows(torch.empty_like(labels), np.arange(tokens + 1) * sampled // tokens)
    upstream = torch.empty(2, tokens, device="meta")
    forward: list[Launch] = []
    backward: list[Launch] = []
    exchanged: list[int] = []

    def gather(stats: Tensor, group: None) -> Tensor:
        exchanged.extend([stats.nbytes] * (tp > 1))
        return stats.new_empty(tp, *stats.shape)

    with mock.patch.object(vocab, "all_gather_stacked", gather), OperatorCount() as operators:
        with recorded(forward):
            outputs = vocab.vocab_parallel_logprobs(
                logits, labels, with_entropy=with_entropy, with_collision=with_collision, sampled=rows
            )
        used = [x for x in outputs[: 1 + entropy_in_loss] if x is not None]
        with recorded(backward):
            torch.autograd.grad(used, logits, list(upstream[: len(used)]))
    kept = tokens if sampled is None else sampled
    floor = (2 * kept + tokens) * columns * dtype.itemsize
    return Counts(forward, backward, operators.kernels, exchanged, floor)


@contextlib.contextmanager
def recorded(launches: list[Launch]) -> Iterator[None]:
    """Triton's kernels are the backend and are recorded, not run, within."""
    from megatron_rl_corr.logprobs import triton_backend

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(vocab, "backend", lambda logits: triton_backend))
        for name in KERNELS:
            kernel = Recorder(name, getattr(triton_backend, name).arg_names, launches)
            stack.enter_context(mock.patch.object(triton_backend, name, kernel))
        yield


@dataclass(frozen=True)
class Recorder:
    """Stands in for a kernel."""

    name: str
    names: list[str]
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]):
        """The launcher, as Triton's kernels have it."""

        def launch(*arguments, **constants) -> None:
            given = dict(zip(self.names, arguments, strict=False)) | constants
            self.launches.append(Launch(self.name, int(np.prod(grid)), moved(self.name, given)))

        return launch


def moved(kernel: str, given: dict) -> int:
    """Bytes that a launch with these arguments reads and writes."""
    stats = PER_TOKEN + 4 * given.get("WITH_COLLISION", False)
    if kernel == "stats_kernel":
        row = given["limit"] * given["logits"].element_size()
        index = 8 * (1 + given["SOME_ROWS"]) * given["parts"]
        return given["count"] * (row + index + given["parts"] * stats)
    if kernel == "merge_kernel":
        return given["tokens"] * (given["parts"] + 1) * stats
    if kernel == "combine_kernel":
        index = 8 * given["SOME_ROWS"] * given["tokens"]
        return given["count"] * given["shards"] * stats + index + given["tokens"] * stats
    read = given["count"] * given["limit"] * given["logits"].element_size()
    written = given["tokens"] * given["width"] * given["out"].element_size()
    # Of each token: label, upstream gradients, its four numbers and its place, once a part.
    numbers = 8 + 4 * (1 + given["WITH_ENTROPY"]) + PER_TOKEN + 8 * given["SOME_ROWS"]
    return read + written + given["tokens"] * given["parts"] * numbers
