"""Which parts of the model a server has of the version before: halves of the layers, and halves of those.

e of a token is the rest; d of a node, which is some parts in a row, is what its log-prob moves by where these
parts alone are of the version before. Steps are small, so d of a node is about the sum of its parts', and e
that of the stale ones: of several nodes at a time, regression of e on their d says how much of each is stale.
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
"""Parts of the model in a row, as `parts_of_model` names them."""

ALL = (0.8, 1.25)
"""Coefficients between which a whole node is stale."""
ONE = (0.5, 2.0)
"""Those of a single part."""
SURE, LIKELY = 2.5, 1.0
"""Standard errors of a node's coefficient from which on it is stale, and from which on the halves of the
likeliest one are tried: of one layer of many much is small before it is found.
"""
WIDTH = 2
"""Nodes of a level whose halves are tried, at most: a row of stale layers has two ends."""
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

    def left(self, at: int) -> float:
        """Share of sum(e^2) that does not lie along d of one node."""
        own, both = float(self.gram[at, at]), float(self.both[at])
        return 1 - both * both / (own * self.square) if own and self.square else 1.0


def parts_of_model(num_layers: int) -> Node:
    """Names of its parts, from the first to the last: ("embedding", "0", "1", "output")."""
    return (EMBEDDING, *map(str, range(num_layers)), OUTPUT)


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
def find_old_parts(parts: Node, sums_of: Callable[[Sequence[Node]], NodeSums]) -> tuple[Node, int]:
    """(the parts that look stale, how many nodes were tried); all of them where no part stands out.

    One stale layer of L costs about 2 log2(L) passes. Whether it is evidence, the search for causes says.

    Args:
        parts: of the model, in their order.
        sums_of: sums_of(nodes), a pass for each node that is new. Collective.
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
            least, most = ONE if len(node) == 1 else ALL
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
    chosen = {part for node in taken for part in node}
    stale = tuple(part for part in parts if part in chosen)
    if not stale or stale == parts:
        return parts, tried
    sums = sums_of([parts, stale])
    of_all, of_stale = sums.left(0), sums.left(1)
    stands_out = of_all > CLEARER * of_stale or 1 - of_stale > CLEARER * (1 - of_all)
    return (stale if stands_out else parts), tried + 1


def _children(node: Node) -> list[Node]:
    """The first and the last part of a model by themselves, and its layers; halves of layers."""
    if node[0] == EMBEDDING and len(node) > 2:
        return [node[:1], node[1:-1], node[-1:]]
    half = (len(node) + 1) // 2
    return [node[:half], node[half:]] if len(node) > 1 else []


def name_of(stale: Node, parts: Node) -> str:
    """As a suspect is called: previous, or layer_3, or embedding+layers_3-7+output."""
    if stale == parts:
        return "previous"
    rows: list[list[str]] = []
    for part in stale:
        goes_on = part.isdigit() and rows and rows[-1][-1].isdigit() and int(rows[-1][-1]) + 1 == int(part)
        if goes_on:
            rows[-1].append(part)
        else:
            rows.append([part])
    return "+".join(_row_name(row) for row in rows)


def _row_name(row: list[str]) -> str:
    if not row[0].isdigit():
        return row[0]
    return f"layer_{row[0]}" if len(row) == 1 else f"layers_{row[0]}-{row[-1]}"
