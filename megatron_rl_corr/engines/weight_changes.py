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
import math
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
MOST_STAGES = 4096
"""Pipeline stages that a push may have: far above any trainer's."""


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


def shapes_of(bucket: Sequence[tuple[str, Any]]) -> dict[str, list[int]]:
    """The weights that a bucket of `packed` or `end_of_stage` has changes of: Hugging Face name -> shape.

    Raises:
        ValueError: it is another bucket, or has changes of a weight twice.
    """
    told = [one for name, _ in bucket[::2] for one in header_of(name)["tensors"]]
    shapes = {name: shape for name, shape, _ in told}
    if len(shapes) < len(told):
        raise ValueError("a bucket has changes of one weight twice")
    return shapes


def header_of(name: str) -> dict[str, Any]:
    """What the name of a tensor of places tells: `packed` has the fields.

    Raises:
        ValueError: it is another tensor's.
    """
    if not name.startswith(PREFIX):
        raise ValueError("whole weights came where changes were expected; does another trainer push here?")
    header = json.loads(name.removeprefix(PREFIX))
    counts = [header["stage"], header["number"], header["parts"], *(one[2] for one in header["tensors"])]
    sizes = [size for _, shape, _ in header["tensors"] for size in shape]
    if any(type(one) is not int or not 0 <= one < 2**31 for one in (*counts, *sizes)):
        raise ValueError("a count or size of a bucket of changes is not a whole number of at least 0")
    return header


def checked_headers(sent: Sequence[tuple[str, Sequence[int]]]) -> list[dict[str, Any]]:
    """The headers of a bucket. What they tell is compared with the shapes of the tensors behind them, before
    there is memory for these.

    Args:
        sent: name and shape of each tensor of a bucket, as `packed` or `end_of_stage` made it.

    Raises:
        ValueError: places and values are not as many as told, or more than the weights have.
    """
    headers = [header_of(name) for name, _ in sent[::2]]
    for at, header in zip(range(0, len(sent), 2), headers, strict=True):
        tensors = header["tensors"]
        told = sum(count for _, _, count in tensors) if tensors else 1
        found = [list(shape) for _, shape in sent[at : at + 2]]
        if found != [[told]] * (2 if tensors else 1):
            raise ValueError(f"a bucket of changes tells of {told} values, and brings {found}")
        if any(count > math.prod(shape) for _, shape, count in tensors):
            raise ValueError("a bucket has more changes of a weight than the weight has values")
    return headers


def _check_places(tensors: Sequence[Sequence[Any]], places: Tensor) -> None:
    # On a GPU such a place would end the server. Bounds of each weight, as an end for each place would take
    # more memory than the bucket.
    parts = places.split([count for _, _, count in tensors])
    own = [
        (torch.stack(torch.aminmax(part)), math.prod(shape))
        for part, (_, shape, _) in zip(parts, tensors, strict=True)
        if len(part)
    ]
    found = torch.stack([bounds for bounds, _ in own]).tolist() if own else []
    if any(low < 0 or high >= size for (low, high), (_, size) in zip(found, own, strict=True)):
        raise ValueError("a bucket has a change of a place that its weight does not have")


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
        self._refused = self._problem(base, stages, code)
        if self._refused is None:
            self.version, self._push = None, push
            self._next: dict[int, int | None] = dict.fromkeys(range(stages), 0)
        return self._refused

    def _problem(self, base: str, stages: int, code: str) -> str | None:
        if code != CODE:
            return (
                f"this server's megatron-rl-corr is {CODE}, and the trainer's is {code}: install the "
                "trainer's version in the server's environment, and start the server again"
            )
        if type(stages) is not int or not 1 <= stages <= MOST_STAGES:
            return f"a push comes from 1 to {MOST_STAGES} stages, not from {stages!r}"
        if self.version not in (None, base):
            return f"changes of {base!r} do not fit weights that are {self.version!r}"
        return None

    def load(self, named: Iterable[NamedTensor], load_weights: Callable[[Iterator[NamedTensor]], Any]) -> Any:
        """Put one bucket into the model.

        Args:
            named: as `packed` or `end_of_stage` made it.
            load_weights: the engine's own, which copies whole tensors to where they belong.

        Raises:
            ValueError: it is malformed or not the stage's next one, or does not fit this server.
        """
        if self._refused is not None:
            raise ValueError(self._refused)
        parts = list(named)
        headers = checked_headers([(name, tensor.shape) for name, tensor in parts])
        for header, (_, places) in zip(headers, parts[::2], strict=True):
            if header["tensors"]:
                _check_places(header["tensors"], places)
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
