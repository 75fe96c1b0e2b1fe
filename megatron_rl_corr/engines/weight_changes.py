"""Changes of weights: how they travel in a bucket, and how a server puts them into a running model.

A bucket of changes is, for each dtype, a tensor of places, whose name tells of which weights, and one of
values. The receiver makes each Hugging Face tensor whole, with NaN where nothing changed, and gives it to
the engine's own loader, which decides where its values belong; what is NaN is not copied. A trainer sends
no NaN.

C changed values of all tensors of one bucket and dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl_corr import __version__
from megatron_rl_corr.engines.types import NamedTensor

CODE = f"{__version__}-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"
"""Which code of this package a trainer and a server have, as the process began."""
PREFIX = "rl_corr_changes "
"""How the name of a tensor begins that is no weight, but a part of a bucket of changes."""


@dataclass(frozen=True)
class ChangedTensor:
    """What differs in one Hugging Face tensor from an earlier version of it."""

    shape: tuple[int, ...]
    places: Tensor
    """[C] int32, in the flat tensor."""
    values: Tensor
    """[C], in its dtype."""

    @classmethod
    def of(cls, whole: Tensor) -> ChangedTensor:
        """What is a number in a tensor of less than 2^31 values that is NaN where nothing changed."""
        flat = whole.reshape(-1)
        places = flat.isnan().logical_not_().nonzero()[:, 0]
        return cls(tuple(whole.shape), places.int(), flat[places])

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.places.nbytes + self.values.nbytes


def packed(tensors: Sequence[tuple[str, ChangedTensor]], *, stage: int, number: int) -> list[NamedTensor]:
    """A bucket: for each dtype the places [C] int32 under a name that tells the rest, and the values [C].

    Args:
        tensors: by their Hugging Face names.
        stage: pipeline stage that sends them.
        number: of the bucket among that stage's, from 0.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, ChangedTensor]]] = {}
    for name, tensor in tensors:
        by_dtype.setdefault(tensor.values.dtype, []).append((name, tensor))
    bucket: list[NamedTensor] = []
    for own in by_dtype.values():
        told = [[name, one.shape, len(one.places)] for name, one in own]
        header = {"stage": stage, "number": number, "parts": len(by_dtype), "tensors": told}
        places, values = (torch.cat([getattr(one, each) for _, one in own]) for each in ("places", "values"))
        bucket += [(PREFIX + json.dumps(header), places), (PREFIX + "values", values)]
    return bucket


def end_of_stage(*, stage: int, buckets: int) -> list[NamedTensor]:
    """What follows a stage's last bucket, so that a receiver notices if one is missing."""
    header = {"stage": stage, "number": buckets, "parts": 0, "tensors": []}
    return [(PREFIX + json.dumps(header), torch.zeros(1, dtype=torch.int32))]


def shapes_of(bucket: Sequence[NamedTensor]) -> dict[str, list[int]]:
    """The weights that a bucket of `packed` or `end_of_stage` has changes of: Hugging Face name -> shape.

    Raises:
        ValueError: it is another bucket.
    """
    headers = [name.removeprefix(PREFIX) for name, _ in bucket[::2] if name.startswith(PREFIX)]
    if len(headers) < len(bucket[::2]):
        raise ValueError("whole weights came where changes were expected; does another trainer push here?")
    return {name: shape for header in headers for name, shape, _ in json.loads(header)["tensors"]}


class ChangesReceiver:
    """What a server knows of the changes that it is sent; one for each of its models."""

    def __init__(self):
        self._refused: str | None = None
        self.version: str | None = None
        """What the last whole push of changes made; None: there was none, or it broke off."""
        self._push, self._next = "", {}

    def begin(self, push: str, base: str, stages: int, code: str = "older", **others: object) -> str | None:
        """Expect the changes from version `base` to `push`, from so many pipeline stages.

        Returns why they do not fit, which `load` refuses: an engine may not survive an exception here.

        Args:
            code: the trainer's CODE.
            others: what a trainer of another version tells.
        """
        self._refused = self._problem(base, code)
        if self._refused is None:
            self.version, self._push = None, push
            self._next: dict[int, int | None] = dict.fromkeys(range(stages), 0)
        return self._refused

    def _problem(self, base: str, code: str) -> str | None:
        if code != CODE:
            return (
                f"this server's megatron-rl-corr is {CODE}, and the trainer's is {code}: install the "
                "trainer's version in the server's environment, and start the server again"
            )
        if self.version not in (None, base):
            return f"changes of {base!r} do not fit weights that are {self.version!r}"
        return None

    def load(self, named: Iterable[NamedTensor], load_weights: Callable[[Iterator[NamedTensor]], Any]) -> Any:
        """Put one bucket into the model.

        Args:
            named: as `packed` or `end_of_stage` made it.
            load_weights: the engine's own, which copies whole tensors to where they belong.

        Raises:
            ValueError: it is not the stage's next bucket, or the changes do not fit this server.
        """
        if self._refused is not None:
            raise ValueError(self._refused)
        parts = list(named)
        headers = [json.loads(name.removeprefix(PREFIX)) for name, _ in parts[::2]]
        stage, number = headers[0]["stage"], headers[0]["number"]
        if self._next.get(stage) != number:
            raise ValueError(
                f"bucket {number} of stage {stage} came where {self._next.get(stage)} was expected: changes "
                "were lost, came twice or in another order"
            )
        self._next[stage] = None if headers[0]["parts"] == 0 else number + 1
        if all(following is None for following in self._next.values()):
            self.version = self._push
        if headers[0]["parts"] == 0:
            return None
        return load_weights(
            made
            for header, (_, places), (_, values) in zip(headers, parts[::2], parts[1::2], strict=True)
            for made in _whole(header["tensors"], places, values)
        )


def _whole(told: Sequence[list], places: Tensor, values: Tensor) -> Iterator[NamedTensor]:
    begin = 0
    for name, shape, count in told:
        whole = torch.full(shape, torch.nan, dtype=values.dtype, device=values.device)
        own = slice(begin, begin + count)
        whole.view(-1)[places[own].long()] = values[own]
        begin += count
        yield name, whole.as_subclass(ChangedValues)


class ChangedValues(Tensor):
    """A tensor whose NaN stand for no change: copied into another one, they leave what that has.

    What is cut out of it, turned or converted is one too, in any thread: loaders have several. Another way
    into a tensor than copying, or out as a number, is a ValueError: NaN would be taken for a weight.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is Tensor.copy_ and not isinstance(args[0], cls):
            into, values = args[0], args[1].as_subclass(Tensor).to(args[0].device)
            return into.copy_(torch.where(values.isnan(), into, values.to(into.dtype)))
        if func is Tensor.__setitem__ and not isinstance(args[0], cls):
            into, place, values = args
            now = into[place]
            values = values.as_subclass(Tensor).to(now.device)
            into[place] = torch.where(values.isnan(), now, values.to(now.dtype))
            return None
        name = func.__name__
        in_place = name.endswith("_") and not name.endswith("__") and not isinstance(args[0], cls)
        if in_place or name == "item":
            raise ValueError(f"a loader uses {name}, by which changes alone can't be loaded; use `push` full")
        return super().__torch_function__(func, types, args, kwargs or {})
