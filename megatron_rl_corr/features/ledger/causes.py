"""Which changes of the trainer's model make it compute what the server has: the rest, taken apart.

e of a token is the part of its D that lies between two ways to compute the same weights: the rest, and with
--router-replay compare the routing, as another epsilon moves the choice of experts, too. A suspect's pass has
log p_h, and d = log p - log p_h is what e would be if the suspect were all there is.

Where the changes of the model leave something, changes of parts of it are tried: a server may have old
weights in some layers, or other experts in the places of some.

e and d must not share the rounding of one pass, or every suspect would look like a quarter of a healthy e in
16 bits: log p of d is that of a pass of its own, whose norms round otherwise. T' tokens of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.ledger_places import LEAST_TOKENS
from megatron_rl_corr.core.ledger_verdict import LAYOUTS, SAME
from megatron_rl_corr.features.ledger.parts import ALL, Node, NodeSums, find_changed_parts
from megatron_rl_corr.features.ledger.suspects import LEAST_FIT, SIZED, SWITCHED, Suspect
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import communication_device

MOST = 3
"""Causes that are looked for at a time."""
MOST_PASSES = 64
"""Passes after which no further beginning is tried."""
LEAST_EVIDENCE = 12.0
"""(sum de)^2 / sum (de)^2 is chi2 of one degree where d and e have nothing to do with each other, however few
tokens have most of both; above 12 it is 5e-4 of the time.
"""
ABOUT = (0.5, 2.0)
"""Factors between which it may be, beside another cause."""
MOST_LEFT, FEW_NOISES = 0.5, 3.0
"""The very changes leave little: at most this share of sum(e^2), or a mean |e| of a few times the noise."""
BEGINNINGS = 3
"""Suspects that are tried as the first cause."""


@dataclass(frozen=True)
class Cause:
    """A suspect that the rest looks like."""

    name: str
    share: float
    """Part of sum(e^2), of the whole e, that is gone when this cause is taken out."""
    times: float
    """How much of the suspect's change the rest has, sum(d e) / sum(d^2); of logits their factor."""


@dataclass(frozen=True)
class Rest:
    """What causes are looked for in, on ranks of the last stage."""

    e: Tensor
    """[T'] float64, 0 where a token is not valid."""
    valid: Tensor
    """[T'] bool."""
    slope: Tensor
    """[T'] log p + entropy of the trainer's policy: d log p / d log b of logits times b."""

    def only(self, here: Tensor) -> Rest:
        """The rest of these tokens, [T'] bool."""
        return replace(self, e=torch.where(here, self.e, 0.0), valid=self.valid & here)


@dataclass(frozen=True)
class Divided:
    """A change that may be one of some parts of the model alone."""

    parts: Node
    changed: Callable[[Node, Sequence[Any]], AbstractContextManager]
    """changed(parts, model chunks): within, these are changed."""
    name: Callable[[Node], str | None]
    """name(parts) of a suspect; None: it is none."""
    whole: tuple[float, float] = ALL
    """As `find_changed_parts` has it."""
    least_fit: float = LEAST_FIT
    """Its suspects', as `Suspect` has it."""
    sizes: tuple[float, float] = SIZED
    """That of all parts, as `Suspect` has it; some of them are changed or not."""


@dataclass(frozen=True)
class _Found:
    """Causes that were taken out one after the other, and what is left behind them."""

    causes: tuple[Cause, ...]
    taken: tuple[Suspect, ...]
    """Those whose own passes took them out: later passes are made under them."""
    rest: Rest | None
    tokens: float
    square: float
    """sum(e^2) of what is left."""
    is_noise: bool
    """What is left needs no cause."""
    is_small: bool
    """What is left is a few times as much as noise."""


@dataclass(frozen=True)
class _Tried:
    """A suspect's pass over what is left."""

    suspect: Suspect
    d: Tensor | None
    """[T'] float64, 0 where it is not known."""
    both: float
    """sum(de)."""
    own: float
    """sum(d^2)."""
    products: float
    """sum((de)^2)."""
    explains: bool
    """e - d is noise: however few tokens have most of it, nothing more is needed."""

    @property
    def times(self) -> float:
        return self.both / self.own if self.own else 0.0

    @property
    def is_same(self) -> bool:
        """The very change that was tried."""
        return self.suspect.changed is not None and SAME[0] <= self.times <= SAME[1]

    def fit(self, square: float) -> float:
        """Share of sum(e^2) that lies along d; 0 where it may be chance, or of a size that no change has."""
        least, most = self.suspect.sizes
        if not self.products or not least <= self.times <= most:
            return 0.0
        # The best of n has evidence by chance: chi2 above x falls as exp(-x / 2).
        evidence = LEAST_EVIDENCE + 2 * math.log(self.suspect.best_of)
        if not self.explains and self.both * self.both < evidence * self.products:
            return 0.0
        return self.both * self.both / (self.own * square)


@dataclass(frozen=True)
class CauseSearch:
    """Looks for the suspects that explain a rest; every rank calls its methods, with the same suspects."""

    suspects: Sequence[Suspect]
    log_probs: Callable[[Sequence[Suspect], bool], Tensor | None]
    """log_probs(suspects, rounds_otherwise): a pass under these changes; None on stages but the last.
    Collective.
    """
    noise: float
    """mean |e| that needs no cause."""
    copies: int
    """Ranks that hold each token, which are the tensor-parallel ones."""
    divided: Sequence[Divided] = ()
    """What is tried of parts of the model where the suspects leave something."""
    _passes: dict[tuple[frozenset[str], bool], Tensor | None] = field(default_factory=dict)

    @collective
    def needs_causes(self, rest: Rest | None) -> bool:
        """True if e is more than noise. rest: None on ranks of other stages."""
        return not self._found((), rest).is_noise

    @collective
    def square_of(self, rest: Rest | None) -> float:
        """sum(e^2) over all tokens."""
        return self._found((), rest).square

    @collective
    def causes(self, rest: Rest | None) -> tuple[Cause, ...]:
        """The causes of a rest that is more than noise, in the order in which they are taken out.

        The suspect whose d has the largest share of the square of e along it, (sum de)^2 / (sum d^2 sum e^2)
        and its least_fit at least, is a cause. It is taken out, by its own pass if its size fits, else by its
        line, and what is left is tried again under it. Where that leaves something, other beginnings are
        tried, as two changes at a time may look most like a third one; the one that leaves least holds.

        Args:
            rest: None on ranks of other stages.
        """
        start = self._found((), rest)
        best = self._best(start)
        suspects = list(self.suspects)
        for divided in self.divided:
            # The whole rest before what is left of it: a wrong cause takes a part of old weights along.
            for before in (start, best)[: 1 + bool(best.causes)]:
                found = None if best.is_noise else self._changed_parts(divided, before)
                if found is not None and all(one.name != found.name for one in suspects):
                    suspects.append(found)
                    again = replace(self, suspects=suspects)._best(start)
                    best = min(best, again, key=lambda one: one.square)
        if best.is_small or best.square <= MOST_LEFT * start.square:
            return best.causes
        # The cause is none of those that are known whole: what else a server may do looks a little like many.
        parts = [one for one in suspects if one.least_fit < LEAST_FIT]
        return replace(self, suspects=parts)._best(start).causes if parts else ()

    @collective
    def likeliest(self, rest: Rest | None) -> tuple[Cause, ...]:
        """The one suspect along whose d most of the square of e lies, with that share; () where none has
        enough. rest: None on ranks of other stages.
        """
        start = self._found((), rest)
        return tuple(
            Cause(one.suspect.name, one.fit(start.square), one.times) for one in self._fitting(start)[:1]
        )

    @collective
    def changes_nothing(self, divided: Divided, rest: Rest | None) -> bool:
        """True if the change of all parts moves no log-prob by a single bit. rest: None on other stages.

        Where two passes of one model differ, as with kernels that add in any order, it is never so.
        """
        plain, changed = self._pass(()), self._pass((_suspect_of(divided, divided.parts),))
        moved = [] if rest is None else [(rest.valid & (plain != changed)).sum()]
        return self._summed(moved, 1) == [0.0]

    @collective
    def _best(self, start: _Found) -> _Found:
        """The causes that leave least, of several beginnings."""
        best, whole = start, start.square
        for first, by_pass in self._beginnings(start):
            found = self._greedy(self._without(start, first, by_pass, whole), whole)
            best = min(best, found, key=lambda one: one.square)
            if best.is_noise or len(self._passes) >= MOST_PASSES:
                break
        return best

    @collective
    def _changed_parts(self, divided: Divided, found: _Found) -> Suspect | None:
        """The parts of the model that what is left looks most as if they were changed; None where these are
        no suspect.
        """

        def sums_of(nodes: Sequence[Node]) -> NodeSums:
            return self._node_sums(found, divided, nodes)

        parts, tried = find_changed_parts(divided.parts, sums_of, divided.whole)
        return None if divided.name(parts) is None else _suspect_of(divided, parts, tried)

    @collective
    def _node_sums(self, found: _Found, divided: Divided, nodes: Sequence[Node]) -> NodeSums:
        base = self._pass(found.taken, rounds_otherwise=True)
        passes = [self._pass((*found.taken, _suspect_of(divided, node))) for node in nodes]
        count, sums = len(nodes), []
        if found.rest is not None:
            e = found.rest.e
            d = torch.stack([_line(found.rest, base, one) for one in passes])
            sums = [*(d @ d.T).flatten(), *(d @ e), *(e - d).abs().sum(dim=1)]
        values = torch.tensor(self._summed(sums, count * (count + 2)), dtype=torch.float64)
        gram, both, behind = values.split([count * count, count, count])
        explains = tuple((behind <= self.noise * found.tokens).tolist())
        return NodeSums(gram.view(count, count), both, found.square, found.tokens, explains)

    @collective
    def _greedy(self, found: _Found, whole: float) -> _Found:
        """Further causes taken out until nothing fits."""
        while not found.is_noise and len(found.causes) < MOST:
            [best, *_] = self._fitting(found) or [None]
            if best is None:
                break
            found = self._without(found, best, best.is_same, whole)
        return found

    @collective
    def _beginnings(self, start: _Found) -> list[tuple[_Tried, bool]]:
        """(suspect, whether its own pass takes it out), the most likely first."""
        likely = self._fitting(start)[:BEGINNINGS]
        # Beside another cause the size of one looks wrong.
        about = [one for one in likely if one.suspect.changed and ABOUT[0] <= one.times <= ABOUT[1]]
        return [(one, one.is_same) for one in likely] + [(one, True) for one in about if not one.is_same]

    @collective
    def _fitting(self, found: _Found) -> list[_Tried]:
        """The suspects along whose d enough of e lies, most first."""
        gone = {_part(cause.name) for cause in found.causes}
        left = [one for one in self.suspects if _part(one.name) not in gone]
        base = self._pass(found.taken, rounds_otherwise=True)
        passes = [None if one.changed is None else self._pass((*found.taken, one)) for one in left]
        sums, lines = [], [None] * len(left)
        if found.rest is not None:
            lines = [_line(found.rest, base, one) for one in passes]
            sums = [one for d in lines for one in _sums(d, found.rest.e)]
        totals, tried = self._summed(sums, 4 * len(left)), []
        for at, (one, d) in enumerate(zip(left, lines, strict=True)):
            both, own, products, behind = totals[4 * at : 4 * at + 4]
            tried.append(_Tried(one, d, both, own, products, behind <= self.noise * found.tokens))
        fits = [(one.fit(found.square), one) for one in tried]
        return [one for fit, one in sorted(fits, key=lambda pair: -pair[0]) if fit >= one.suspect.least_fit]

    @collective
    def _pass(self, suspects: Sequence[Suspect], *, rounds_otherwise: bool = False) -> Tensor | None:
        """[T'] log-probs under these changes, made once; None on stages but the last."""
        key = frozenset(one.name for one in suspects), rounds_otherwise
        if key not in self._passes:
            self._passes[key] = self.log_probs(suspects, rounds_otherwise)
        return self._passes[key]

    @collective
    def _without(self, found: _Found, one: _Tried, by_pass: bool, whole: float) -> _Found:
        """What is left without this cause: of the changed model, or without d times its size."""
        rest = found.rest
        if rest is not None:
            rest = replace(rest, e=rest.e - (1.0 if by_pass else one.times) * one.d)
        after = self._found((*found.taken, one.suspect) if by_pass else found.taken, rest)
        size = one.times if one.suspect.changed else 1 + one.times
        cause = Cause(one.suspect.name, (found.square - after.square) / whole, size)
        return replace(after, causes=(*found.causes, cause))

    @collective
    def _found(self, taken: tuple[Suspect, ...], rest: Rest | None) -> _Found:
        """What is left, before it is said which causes were taken out."""
        sizes = [] if rest is None else [rest.valid.sum(), rest.e.abs().sum(), rest.e.square().sum()]
        tokens, size, square = self._summed(sizes, 3)
        noise = self.noise * tokens
        is_noise = tokens < LEAST_TOKENS or size <= noise
        return _Found((), taken, rest, tokens, square, is_noise, size <= FEW_NOISES * noise)

    @collective
    def _summed(self, values: Sequence[Tensor], count: int) -> list[float]:
        """Over all tokens, each counted once. values: [] on ranks that have none."""
        total = torch.zeros(count, dtype=torch.float64, device=communication_device())
        if len(values):
            total.copy_(torch.stack([value.double() for value in values]))
        dist.all_reduce(total)
        return (total / self.copies).tolist()


def _suspect_of(divided: Divided, parts: Node, tried: int = 1) -> Suspect:
    name = divided.name(parts) or "/".join(parts)  # of a pass that is no suspect
    sizes = divided.sizes if parts == divided.parts else SWITCHED
    return Suspect(name, partial(divided.changed, parts), sizes, tried, divided.least_fit)


def _part(name: str) -> str:
    """The part of the model that a suspect changes: two changes of one part are one of the other's size."""
    kind, _, part = name.partition("/")
    if kind in LAYOUTS:
        return f"{kind}/{part.partition('/')[0]}"
    return "rotary" if kind.startswith("rotary") else kind


def _line(rest: Rest, base: Tensor, changed: Tensor | None) -> Tensor:
    """[T'] float64: d of a suspect's pass, or of logits times a factor."""
    d = -rest.slope.double() if changed is None else base.double() - changed.double()
    return torch.where(rest.valid & d.isfinite(), d, 0.0)


def _sums(d: Tensor, e: Tensor) -> list[Tensor]:
    both = d * e
    return [both.sum(), d.square().sum(), both.square().sum(), (e - d).abs().sum()]
