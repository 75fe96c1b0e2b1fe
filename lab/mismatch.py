"""How a sampler comes to differ from the policy that is trained, one function for each kind.

B policies, W prefixes, V tokens. Each kind turns the trainer's logits into the sampler's, by noise that is
drawn once and stays with its prefix: a server that is asked the same twice answers the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.policies import World

IMPROBABLE = 0.1
"""Tokens below this probability are the tail."""
LARGEST_LIFT = 12.0
"""A token of the tail is lifted by at most this: e^12 = 160,000 times as likely."""
FIRST_TURN = 0.1
"""Share of the noise that the first turn has, where later turns are out of distribution."""
OTHER_SPREAD = 2.0
"""Standard deviation of the logits that other experts give."""


def heavy_tailed(normal: Callable[..., Tensor], shape: Sequence[int]) -> Tensor:
    """|t| with 2 degrees of freedom, at most LARGEST_LIFT, from normal(*shape)."""
    return (normal(*shape).abs() / normal(2, *shape).square().mean(dim=0).sqrt()).clamp(max=LARGEST_LIFT)


@dataclass(frozen=True)
class Noise:
    """What is drawn once for B policies: [B, W, V] each, or [B, W]; float64."""

    normal: Tensor
    heavy: Tensor
    """|t| with 2 degrees of freedom, at most LARGEST_LIFT: most are near 1, one in a hundred is above 10."""
    other: Tensor
    """Logits of the experts that a flipped route takes."""
    uniform: Tensor
    """[B, W]: a prefix is flipped where it is below the flips' probability, so more flips hold the fewer."""

    @classmethod
    def drawn(cls, world: World, batch: int, seed: int) -> Noise:
        """Noise for a world's prefixes, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, world.prefixes, world.vocabulary)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        heavy = heavy_tailed(normal, shape)
        return cls(
            normal(*shape),
            heavy,
            OTHER_SPREAD * normal(*shape),
            torch.rand(shape[:2], generator=generator, dtype=torch.float64),
        )


Drawn = Callable[[str], Tensor]
"""The name of a field of Noise -> its values at the prefixes in question."""
Logits = Callable[[Tensor, Drawn, Tensor, float], Tensor]
"""(trainer's logits [..., V], noise at their prefixes, bool [...]: in a later turn, size) -> sampler's."""


def _rounding(logits: Tensor, drawn: Drawn, later: Tensor, size: float) -> Tensor:
    return logits + size * drawn("normal")


def _relative(logits: Tensor, drawn: Drawn, later: Tensor, size: float) -> Tensor:
    return logits + size * drawn("normal") * (logits - logits.mean(dim=-1, keepdim=True)).abs()


def _tail(logits: Tensor, drawn: Drawn, later: Tensor, size: float) -> Tensor:
    return logits + torch.where(logits.softmax(dim=-1) < IMPROBABLE, size * drawn("heavy"), 0.0)


def _routing(logits: Tensor, drawn: Drawn, later: Tensor, size: float) -> Tensor:
    return torch.where((drawn("uniform") < size)[..., None], drawn("other"), logits)


def _top_p(logits: Tensor, drawn: Drawn, later: Tensor, size: float) -> Tensor:
    p, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    before = p.cumsum(dim=-1) - p
    cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= 1.0 - size)
    return logits.masked_fill(cut, -torch.inf)


def _turns(logits: Tensor, drawn: Drawn, later: Tensor, size: float) -> Tensor:
    share = torch.where(later, 1.0, FIRST_TURN)
    return logits + size * share[..., None] * drawn("normal")


def _lag(logits: Tensor, drawn: Drawn, later: Tensor, size: float) -> Tensor:
    return logits


@dataclass(frozen=True)
class Kind:
    """A kind of mismatch, and the sizes that the map has of it."""

    doc: str
    unit: str
    sizes: tuple[float, ...]
    logits: Logits
    of_older_weights: bool = False
    """Its size is how many steps old the sampler's weights are; its logits are those weights' own."""


KINDS: dict[str, Kind] = {
    "rounding": Kind(
        "a normal number added to every logit, fixed for its prefix, as another number type does",
        "standard deviation of a logit",
        (0.01, 0.03, 0.1, 0.3, 1.0),
        _rounding,
    ),
    "relative": Kind(
        "the same, times the logit's distance from the mean of its context: it grows as the policy gets sure",
        "standard deviation, as a share of the logit",
        (0.01, 0.03, 0.1, 0.3, 1.0),
        _relative,
    ),
    "tail": Kind(
        f"tokens below {IMPROBABLE} are lifted by heavy-tailed amounts, as a faulty kernel does",
        "scale of the lift of a logit",
        (0.03, 0.1, 0.3, 1.0, 2.0),
        _tail,
    ),
    "routing": Kind(
        "the logits of some prefixes are those of other experts, drawn without regard to the policy",
        "share of prefixes",
        (0.003, 0.01, 0.03, 0.1, 0.3),
        _routing,
    ),
    "lag": Kind(
        "the weights of some steps ago", "steps of exact gradient ascent", (1, 2, 4, 8, 16), _lag, True
    ),
    "top_p": Kind(
        "top-p sampling, of which the trainer does not know",
        "1 - p",
        (0.01, 0.03, 0.1, 0.2, 0.3),
        _top_p,
    ),
    "turns": Kind(
        f"as rounding, {FIRST_TURN:g} times as large in the first half of a response, its first turn",
        "standard deviation of a logit of the later turn",
        (0.03, 0.1, 0.3, 1.0, 2.0),
        _turns,
    ),
}


def later_turn(world: World, places: Tensor) -> Tensor:
    """bool: in the second half of the response; a single token is in the later turn."""
    return places >= world.length // 2


def sampler_conditionals(world: World, theta: Tensor, noise: Noise, kind: str, size: float) -> Tensor:
    """`disturbed` of a table theta [B, C, V]."""
    return disturbed(world, theta[:, world.context_of_prefix], noise, kind, size)


def disturbed(world: World, logits: Tensor, noise: Noise, kind: str, size: float) -> Tensor:
    """log mu(v | prefix): [B, W, V]; -inf where the sampler never draws the token.

    Args:
        logits: [B, W, V], the trainer's; for a kind `of_older_weights` those of the older weights.
        noise: of these policies.
        kind: one of KINDS.
        size: in the kind's unit.
    """
    later = later_turn(world, world.place_of_prefix).expand(logits.shape[:-1])
    return KINDS[kind].logits(logits, lambda name: getattr(noise, name), later, size).log_softmax(dim=-1)
