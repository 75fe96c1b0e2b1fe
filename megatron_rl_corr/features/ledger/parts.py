"""Which parts of the model a change is in that the rest looks like: halves of them, and halves of those.

The parts are the layers, of which a server may have some of the version before, or the experts, of which it
may have others in some places. e of a token is the rest; d of a node, which is some parts in a row, is what
its log-prob moves by where these parts alone are changed. Changes are small, so d of a node is about the sum
of its parts', and e that of the changed ones: of several nodes at a time, regression of e on their d says how
much of each is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl_corr.models.hybrid import gpt_name
from megatron_rl_corr.models.mtp import PREFIX as MTP
from megatron_rl_corr.models.names import global_name
from megatron_rl_corr.models.shards import LocalParameter
from megatron_rl_corr.reduce.collectives import collective

EMBEDDING, OUTPUT = "embedding", "output"
"""The parts of a model beside its decoder layers: the final norm is of the output."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
Node = tuple[str, ...]
"""Parts of the model in a row, as `layers_of_model` and `experts_of_model` name them."""

ALL, ABOUT_ALL = (0.8, 1.25), (0.6, 1.6)
"""Coefficients between which a whole node is changed: where d is the very change, and where it is a part."""
ONE = (0.5, 2.0)
"""Those of a single part."""
SURE, LIKELY = 2.5, 1.0
"""Standard errors of a node's coefficient from which on it is changed, and from which on the halves of the
likeliest one are tried: of one layer of many much is small before it is found.
"""
WIDTH = 2
"""Nodes of a level whose halves are tried, at most: a row of changed layers has two ends."""
CLEARER = 1.5
"""Parts stand out that explain so many times as much as all parts together do, or leave the less by it."""


@dataclass(frozen=True)
class NodeSums:
    """Sums over all tokens, of n nodes."""

    gram: Tensor
    """[n, n] float64: sum(d_i d_j)."""
    both: Tensor
    """[n]: sum(d_i e)."""
    square: float
    """sum(e^2)."""
    tokens: float
    explains: tuple[bool, ...]
    """e - d is noise, of each node."""

    def coefficients(self) -> tuple[list[float], list[float]]:
        """(Coefficients of the regression of e on all d, each in standard errors)."""
        inverse = torch.linalg.pinv(self.gram)
        found = inverse @ self.both
        left = max(self.square - float(self.both @ found), 0.0) / max(self.tokens - len(found), 1.0)
        errors = (left * inverse.diagonal()).clamp(min=1e-300).sqrt()
        return found.tolist(), (found / errors).tolist()

    def times(self, at: int) -> float:
        """How much of one node's change e has, sum(d e) / sum(d^2)."""
        own = float(self.gram[at, at])
        return float(self.both[at]) / own if own else 0.0

    def left(self, at: int) -> float:
        """Share of sum(e^2) that does not lie along d of one node."""
        own, both = float(self.gram[at, at]), float(self.both[at])
        return 1 - both * both / (own * self.square) if own and self.square else 1.0


def layers_of_model(num_layers: int) -> Node:
    """Names of its parts, from the first to the last: ("embedding", "0", "1", "output")."""
    return (EMBEDDING, *map(str, range(num_layers)), OUTPUT)


def experts_of_model(num_experts: int) -> Node:
    """Names of its experts, each of which is that of all layers: ("0", "1")."""
    return tuple(map(str, range(num_experts)))


def part_of(parameter: LocalParameter) -> str | None:
    """The part that a parameter belongs to; None: to layers that predict further tokens."""
    name = global_name(parameter.local_name, layer_offset=parameter.layer_offset, expert_offset=0)
    name = gpt_name(name) if parameter.is_hybrid else name
    if name.startswith(MTP):
        return None
    layer = _LAYER.match(name)
    if layer is not None:
        return layer[1]
    # The output layer of tied embeddings is their copy on the last stage.
    is_embedding = name.startswith("embedding.") or parameter.rule(0).is_copy
    return EMBEDDING if is_embedding else OUTPUT


@collective
def find_changed_parts(
    parts: Node, sums_of: Callable[[Sequence[Node]], NodeSums], whole: tuple[float, float] = ALL
) -> tuple[Node, int]:
    """(the parts that look changed, how many nodes were tried); all of them where no part stands out.

    One changed layer of L costs about 2 log2(L) passes. Whether it is evidence, the search for causes says.

    Args:
        parts: of the model, in their order.
        sums_of: sums_of(nodes), a pass for each node that is new. Collective.
        whole: coefficients between which a node of several parts is changed as a whole.
    """
    if sums_of([parts]).explains[0]:
        return parts, 1
    tried, taken, level, before = 1, [], _children(parts), 0
    waiting: list[Node] = []  # single parts that may stand out once others are known
    while level or len(taken) > before:
        nodes, before = [*taken, *waiting, *level], len(taken)
        tried += len(level)
        coefficients, errors = sums_of(nodes).coefficients()
        further = []
        for node, size, error in zip(nodes, coefficients, errors, strict=True):
            least, most = ONE if len(node) == 1 else whole
            if node in taken:
                continue
            if error >= SURE and least <= size <= most:
                taken.append(node)
            elif len(node) > 1 and error >= LIKELY:
                further.append((error, node))
        waiting = [node for node in nodes if len(node) == 1 and node not in taken]
        further.sort(key=lambda pair: -pair[0])
        likely = [node for error, node in further[:WIDTH] if error >= min(SURE, further[0][0])]
        level = [child for node in likely for child in _children(node)]
    chosen = {part for node in _still_changed(taken, sums_of, whole[0]) for part in node}
    changed = tuple(part for part in parts if part in chosen)
    if not changed or changed == parts:
        return parts, tried
    sums = sums_of([parts, changed])
    of_all, of_changed = sums.left(0), sums.left(1)
    stands_out = of_all > CLEARER * of_changed or 1 - of_changed > CLEARER * (1 - of_all)
    if not stands_out and of_changed < of_all:
        # Beside another cause both leave much, and only one of them may be the very change.
        of_whole, of_part = (whole[0] <= sums.times(at) <= whole[1] for at in (0, 1))
        stands_out = of_part and not of_whole
    return (changed if stands_out else parts), tried + 1


@collective
def _still_changed(
    taken: Sequence[Node], sums_of: Callable[[Sequence[Node]], NodeSums], of_whole: float
) -> list[Node]:
    """Those of them that are changed beside the others: one that was taken before the layer that it resembles
    was tried has nothing left. No pass is new.
    """
    left = list(taken)
    while len(left) > 1:
        coefficients, errors = sums_of(left).coefficients()
        least = min(range(len(left)), key=errors.__getitem__)
        if errors[least] >= SURE and coefficients[least] >= (ONE[0] if len(left[least]) == 1 else of_whole):
            break
        del left[least]
    return left


def _children(node: Node) -> list[Node]:
    """The first and the last part of a model by themselves, and its layers; halves of layers."""
    if node[0] == EMBEDDING and len(node) > 2:
        return [node[:1], node[1:-1], node[-1:]]
    half = (len(node) + 1) // 2
    return [node[:half], node[half:]] if len(node) > 1 else []


def name_of_layers(changed: Node, parts: Node, whole: str) -> str:
    """As a suspect is called: layer_3, or embedding+layers_3-7+output; `whole` of all parts."""
    return whole if changed == parts else _name(changed, "layer")


def name_of_experts(changed: Node, parts: Node, ranks: int) -> str | None:
    """As a suspect is called: experts/experts_2-4, or experts/rank_1/experts_5-6 where these are of one
    expert-parallel rank, or experts/rank_1 where they are all of its; None of all experts, which would say
    nothing.

    Args:
        changed: some of them.
        parts: all of them, of which each of the ranks holds as many in a row.
        ranks: expert-parallel ranks.
    """
    if changed == parts:
        return None
    each = len(parts) // ranks
    holders = {parts.index(one) // each for one in changed}
    if ranks == 1 or len(holders) > 1:
        return f"experts/{_name(changed, 'expert')}"
    rank = f"experts/rank_{holders.pop()}"
    return rank if len(changed) == each else f"{rank}/{_name(changed, 'expert')}"


def _name(parts: Node, noun: str) -> str:
    rows: list[list[str]] = []
    for part in parts:
        goes_on = part.isdigit() and rows and rows[-1][-1].isdigit() and int(rows[-1][-1]) + 1 == int(part)
        if goes_on:
            rows[-1].append(part)
        else:
            rows.append([part])
    return "+".join(_row_name(row, noun) for row in rows)


def _row_name(row: list[str], noun: str) -> str:
    if not row[0].isdigit():
        return row[0]
    return f"{noun}_{row[0]}" if len(row) == 1 else f"{noun}s_{row[0]}-{row[-1]}"
