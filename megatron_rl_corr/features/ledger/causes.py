"""Which changes of the trainer's model make it compute what the server has: the rest, taken apart.

e of a token is the part of its D that lies between two ways to compute the same weights: the rest, and with
--router-replay compare the routing, as another epsilon moves the choice of experts, too. A suspect's pass
has log p_h in the place of the trainer's log p, and d = log p - log p_h is what e would be if the suspect
were all there is. T' tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl_corr.core.ledger_verdict import LEAST_TOKENS
from megatron_rl_corr.features.ledger.suspects import Suspect
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import communication_device

MOST = 3
"""Causes that are looked for at a time."""
LEAST_FIT = 0.3
"""Share of the rest's square along a suspect's d from which on it is a cause. By chance a suspect has about
1 / tokens.
"""
SAME = (0.9, 1.1)
"""Factors between which a change is as large as the one that was tried."""
ABOUT = (0.5, 2.0)
"""Factors between which it may be, beside another cause."""
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
    log_probs: Tensor
    """[T'] of the trainer's policy."""
    entropy: Tensor
    """[T'] of its distributions."""


@dataclass(frozen=True)
class _Found:
    """Causes that were taken out one after the other, and what is left behind them."""

    causes: tuple[Cause, ...]
    taken: tuple[Suspect, ...]
    """Those whose own passes took them out: later passes are made under them."""
    rest: Rest | None
    square: float
    """sum(e^2) of what is left."""
    is_noise: bool
    """What is left needs no cause."""


@dataclass(frozen=True)
class _Tried:
    """A suspect's pass over what is left."""

    suspect: Suspect
    log_probs: Tensor | None
    both: float
    """sum(de)."""
    own: float
    """sum(d^2)."""

    @property
    def times(self) -> float:
        return self.both / self.own if self.own else 0.0

    def fit(self, square: float) -> float:
        """Share of sum(e^2) that lies along d; 0 of a change in the other direction than its name says."""
        wrong = self.suspect.changed is not None and self.both <= 0
        return 0.0 if wrong or not self.own else self.both * self.both / (self.own * square)


@dataclass(frozen=True)
class CauseSearch:
    """Looks for the suspects that explain a rest; every rank calls its methods, with the same suspects."""

    suspects: Sequence[Suspect]
    log_probs: Callable[[Sequence[Suspect]], Tensor | None]
    """Makes a pass under these changes; None on stages but the last. Collective."""
    noise: float
    """mean |e| that needs no cause."""
    copies: int
    """Ranks that hold each token, which are the tensor-parallel ones."""

    @collective
    def causes(self, rest: Rest | None) -> tuple[Cause, ...]:
        """The causes of a rest that is more than noise, in the order in which they are taken out.

        The suspect whose d has the largest share of the square of e along it, (sum de)^2 / (sum d^2 sum e^2),
        is a cause from LEAST_FIT on. It is taken out, by its own pass if its size fits and else by its line,
        and what is left is tried again under it. Where that leaves something, other beginnings are tried, as
        two changes at a time may look most like a third one; the one that leaves least holds.

        Args:
            rest: None on ranks of other stages.
        """
        start = self._found((), (), rest)
        if start.is_noise:
            return ()
        tried = self._try(start)
        best = start
        for first, by_pass in self._beginnings(tried, start.square):
            found = self._greedy(self._without(start, first, by_pass, start.square), start.square)
            best = min(best, found, key=lambda one: one.square)
            if best.is_noise:
                break
        return best.causes

    @collective
    def _greedy(self, found: _Found, whole: float) -> _Found:
        """Further causes taken out until nothing fits."""
        while not found.is_noise and len(found.causes) < MOST:
            [best, *_] = _fitting(self._try(found), found.square) or [None]
            if best is None:
                break
            found = self._without(found, best, _is_same(best), whole)
        return found

    @staticmethod
    def _beginnings(tried: Sequence[_Tried], square: float) -> list[tuple[_Tried, bool]]:
        """(suspect, whether its own pass takes it out), the most likely first."""
        likely = [(one, _is_same(one)) for one in _fitting(tried, square)[:BEGINNINGS]]
        # Beside another cause the size of one looks wrong.
        return likely + [
            (one, True)
            for one, same in likely
            if not same and one.suspect.changed and ABOUT[0] < one.times < ABOUT[1]
        ]

    @collective
    def _try(self, found: _Found) -> list[_Tried]:
        gone = {_part(cause.name) for cause in found.causes}
        left = [one for one in self.suspects if _part(one.name) not in gone]
        passes = [None if one.changed is None else self.log_probs([*found.taken, one]) for one in left]
        sums = []
        if found.rest is not None:
            for one in passes:
                d = _line(found.rest, one)
                sums += [(d * found.rest.e).sum(), d.square().sum()]
        totals = _summed(sums, 2 * len(left))
        return [_Tried(*one) for one in zip(left, passes, totals[::2], totals[1::2], strict=True)]

    @collective
    def _without(self, found: _Found, one: _Tried, by_pass: bool, whole: float) -> _Found:
        """What is left without this cause: of the changed model, or without d times its size."""
        rest = found.rest
        if rest is not None:
            e = rest.e - (1.0 if by_pass else one.times) * _line(rest, one.log_probs)
            rest = replace(rest, e=e, log_probs=one.log_probs if by_pass else rest.log_probs)
        taken = (*found.taken, one.suspect) if by_pass else found.taken
        after = self._found(found.causes, taken, rest)
        size = one.times if one.suspect.changed else 1 + one.times
        cause = Cause(one.suspect.name, (found.square - after.square) / whole, size)
        return replace(after, causes=(*found.causes, cause))

    @collective
    def _found(self, causes: tuple[Cause, ...], taken: tuple[Suspect, ...], rest: Rest | None) -> _Found:
        sizes = [] if rest is None else [rest.valid.sum(), rest.e.abs().sum(), rest.e.square().sum()]
        tokens, size, square = _summed(sizes, 3)
        is_noise = tokens < LEAST_TOKENS * self.copies or size <= self.noise * tokens
        return _Found(causes, taken, rest, square, is_noise)


def _fitting(tried: Sequence[_Tried], square: float) -> list[_Tried]:
    """Those along whose d enough of e lies, most first."""
    fitting = [one for one in tried if one.fit(square) >= LEAST_FIT]
    return sorted(fitting, key=lambda one: -one.fit(square))


def _part(name: str) -> str:
    """The part of the model that a suspect changes: two changes of one part are one of the other's size."""
    kind = name.partition("/")[0]
    return "rotary" if kind.startswith("rotary") else kind


def _is_same(one: _Tried) -> bool:
    return one.suspect.changed is not None and SAME[0] <= one.times <= SAME[1]


def _line(rest: Rest, changed: Tensor | None) -> Tensor:
    """[T'] float64: d of a suspect's pass; of logits times b, d log p / d log b = log p + H."""
    if changed is None:
        d = -(rest.log_probs.double() + rest.entropy.double())
    else:
        d = rest.log_probs.double() - changed.double()
    return torch.where(rest.valid & d.isfinite(), d, 0.0)


@collective
def _summed(values: Sequence[Tensor], count: int) -> list[float]:
    """Over all ranks; [] on those that have none."""
    total = torch.zeros(count, dtype=torch.float64, device=communication_device())
    if values:
        total.copy_(torch.stack([value.double() for value in values]))
    dist.all_reduce(total)
    return total.tolist()
