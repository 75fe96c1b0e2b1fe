"""Whether a server's routes are those of these tokens, layers and weights: held against Megatron's own choice.

N samples of this replica, t tokens of a row on this rank, b rows of a microbatch, M layers with experts of this rank, k
experts a token, E experts a layer.

Routes of the right shape may still be those of the token before, of another layer or of another model, and training on
them would look healthy. A layer's agreement is Cohen's kappa, (a - c) / (1 - c), where a is the share of the server's
experts that Megatron would choose too, and c what two choices that know nothing of each other would share, as often as
each takes each expert: 1 for the same choices, 0 for unrelated ones, however unevenly the experts are used. Tokens that
Megatron routes alike repeat each other: a set of experts weighs no more than a few tokens, so that one near tie in
long repeated text, or in a router that takes hardly anything else, says no more than it knows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group
from megatron_rl_corr.engines.sglang.routed_experts import has_routes
from megatron_rl_corr.parallel.failure import StartupError

ENOUGH = 32
"""Experts in which unrelated choices would differ, that a judgement needs: at a kappa of 0.8, 6 are expected to differ,
and a refusal takes 24."""
REPEATS = 8
"""Tokens that a set of experts of Megatron's weighs at most, in a row and layer."""
FOLLOWING = 16
"""Pairs of tokens, times layers, that it takes to tell a shift."""
SHIFT_MARGIN = 0.1
"""Routes are shifted if the neighbour's fit by so much more of all experts than the token's own."""
TOKENS, OVERLAP, SAME_SET, PAIRS, IN_PLACE, LATER, EARLIER, GATES_APART, WEIGHT, SHARED = range(10)


class RoutesRefused(StartupError):
    """A trajectory's routes are not those of its tokens under this model."""


class RouteAgreement:
    """Collects, pass by pass and without reading from the device, what `judge` needs of every row and layer."""

    def __init__(
        self, rows: int, layers: int, experts: int, positions: Tensor, *, softmax: bool = True, parts: int = 1
    ):
        """positions [t] int64: where this rank's tokens stand in the row.

        softmax: the chosen experts' weights are the softmax of their scores; else the scores' shares of their sum.
        parts: ranks that share a row's tokens.
        """
        self.sums = torch.zeros(rows, layers, 10, device=positions.device)
        self._repeats = max(1, REPEATS / parts)
        codes = torch.randint(2**62, (experts,), generator=torch.Generator().manual_seed(0))
        self._codes = codes.to(positions.device)
        self._softmax = softmax
        self.apart = torch.zeros(rows, len(positions), device=positions.device)
        """[N, t]: how many experts of a token, over this rank's layers, only the server chose."""
        self.counts = torch.zeros(rows, layers, 2, experts, device=positions.device)
        """How often the server, and Megatron, chose each expert, as the tokens weigh."""
        self._follows = (positions[1:] == positions[:-1] + 1)[:, None]

    def observe(self, first: int, place: int, routes: Tensor, natural: Tensor, scores: Tensor) -> None:
        """Rows from `first` on in layer `place`: the server's routes [t, b, k], Megatron's own [t, b, k], scores."""
        experts = scores.shape[-1]
        known = has_routes(routes, experts)
        routes = routes.long().where(known[..., None], 0)
        own, top_k = overlap(routes, natural), routes.shape[-1]
        weight = known * self._weights(known, natural)
        pairs = known[1:] & known[:-1] & self._follows
        values = [
            (known, None), (known, own), (known, own == top_k), (pairs, None),
            (pairs, (own[1:] + own[:-1]) / 2), (pairs, overlap(routes[1:], natural[:-1])),
            (pairs, overlap(routes[:-1], natural[1:])),
            (known, self._gates_apart(routes, natural, scores)), (weight, None), (weight, own),
        ]  # fmt: skip
        part = slice(first, first + routes.shape[1])
        self.sums[part, place] = torch.stack(
            [(mask if value is None else mask * value).sum(dim=0) for mask, value in values], dim=1
        ).float()
        self.apart[part] += (known * (top_k - own)).float().t()
        weight = weight[..., None].expand_as(routes)
        for side, ids in enumerate((routes, natural)):
            table = self.counts.new_zeros(routes.shape[1], experts)
            table.scatter_add_(1, ids.transpose(0, 1).flatten(1), weight.transpose(0, 1).flatten(1))
            self.counts[part, place, side] = table

    def _weights(self, known: Tensor, natural: Tensor) -> Tensor:
        """[t, b] float32: 1, but of a set that many tokens share, so much that together they weigh the most allowed."""
        # A sum of random 62-bit numbers tells sets apart.
        sets = self._codes[natural].sum(dim=-1).where(known, -1).t().contiguous()
        ordered = sets.sort(dim=1).values
        alike = torch.searchsorted(ordered, sets, right=True) - torch.searchsorted(ordered, sets)
        return (self._repeats / alike.t()).clamp(max=1.0)

    def _gates_apart(self, routes: Tensor, natural: Tensor, scores: Tensor) -> Tensor:
        """[t, b]: the weight that Megatron would give to experts that the server did not choose."""
        chosen = scores.float().gather(-1, natural)
        gates = chosen.softmax(dim=-1) if self._softmax else chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return (gates * ~(natural[..., None] == routes[..., None, :]).any(dim=-1)).sum(dim=-1)

    def all_reduce(self, group: ProcessGroup | None) -> None:
        """Sum over the ranks that hold other tokens of the same rows: one collective."""
        if group is not None and group.size() > 1:
            both = torch.cat([self.sums.flatten(), self.counts.flatten()])
            dist.all_reduce(both, group=group)
            sums, counts = both.split([self.sums.numel(), self.counts.numel()])
            self.sums, self.counts = sums.view_as(self.sums), counts.view_as(self.counts)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """[..., k] and [..., k] ids, distinct in a row -> [...]: how many are in both."""
    return (a[..., :, None] == b[..., None, :]).sum(dim=(-1, -2))


def kappa(agreeing: Tensor, counts: Tensor, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(agreement beyond chance, room above chance), of each [...]: kappa is their quotient.

    agreeing [...]: experts in both choices; counts [..., 2, E]; tokens [...]: each as the tokens weigh.
    """
    slots = (tokens * top_k).clamp(min=1)
    chance = (counts[..., 0, :] * counts[..., 1, :]).sum(dim=-1) / (tokens.clamp(min=1) * slots)
    return agreeing / slots - chance, 1 - chance


def judge(
    agreement: RouteAgreement, layers: tuple[int, ...], top_k: int, minimum: float
) -> tuple[int, str] | None:
    """(row, what is wrong with its routes) of the first row that can't be right; None where all may be.

    layers are the numbers of the M; minimum: the least kappa. Reads from the device, once.
    """
    sums, counts = agreement.sums.cpu().double(), agreement.counts.cpu().double()
    beyond, room = kappa(sums[..., SHARED], counts, sums[..., WEIGHT], top_k)
    # Where all tokens take the same experts, chance agrees on them too, and nothing can be told.
    by_chance = room * sums[..., WEIGHT] * top_k
    judged = (by_chance >= ENOUGH) & (room > 0.05)
    wrong_layers = judged & (beyond < minimum * room)
    whole_beyond, whole_room = ((x * (sums[..., TOKENS] > 0)).sum(dim=1) for x in (beyond, room))
    wrong_rows = (by_chance.sum(dim=1) >= ENOUGH) & (whole_room > 0.05 * len(layers))
    wrong_rows &= whole_beyond < minimum * whole_room
    slots = sums[..., PAIRS].sum(dim=1) * top_k
    fits = [sums[..., name].sum(dim=1) / slots.clamp(min=1) for name in (IN_PLACE, LATER, EARLIER)]
    best = torch.maximum(fits[1], fits[2])
    shifted = (best > fits[0] + SHIFT_MARGIN) & (slots >= FOLLOWING * top_k)
    # Of routes that fit nowhere, one neighbour is a little nearer by chance.
    shifted &= best > 1 - room.mean(dim=1) / 2
    wrong = (shifted | wrong_rows | wrong_layers.any(dim=1)).nonzero()
    if not len(wrong):
        return None
    row = int(wrong[0])
    if shifted[row]:
        later = bool(fits[1][row] > fits[2][row])
        return row, (
            f"rule shift: Megatron would choose {fits[0][row]:.0%} of the experts of its tokens, and "
            f"{best[row]:.0%} of those of the tokens {'behind' if later else 'before'} them"
        )
    if wrong_rows[row]:
        where, value = "all layers of a stage", whole_beyond[row] / whole_room[row]
    else:
        place = int((beyond / room).where(wrong_layers, torch.inf)[row].argmin())
        where, value = f"layer {layers[place]}", beyond[row, place] / room[row, place]
    return row, (
        f"rule agreement: beyond chance, Megatron would choose {value:.0%} of the same experts in {where}, and must "
        f"{minimum:.0%} (--router-replay-min-agreement): are these routes of other layers, or of another model?"
    )


R3 = "--router-replay R3"
METRICS = in_group(
    "Expert routing",
    MetricSpec(
        "router_replay/disagreement",
        "tokens sent to other experts than Megatron would choose, the layers before replayed",
        "tokens x layers whose experts are not the same set / tokens x layers", "routes differ",
        UsualRange(
            "servers and Megatron route many tokens to different experts",
            "Compare the router's dtype on both sides (--moe-router-dtype fp32, and the server's), and the age of the "
            "samples. If single layers stand out, look for weights that only one side has, as a router's bias.",
            high=0.1,
        ),
        only_with=R3,
    ),
    MetricSpec(
        "router_replay/overlap", "share of the server's experts that Megatron would choose too",
        "experts that both chose / experts", only_with=R3,
    ),
    MetricSpec(
        "router_replay/gate_mass_apart", "weight that Megatron would give to experts the server did not choose",
        "sum of those weights / tokens", only_with=R3,
    ),
    MetricSpec(
        "router_replay/disagreement/", "the same in one layer",
        "tokens whose experts are not the same set / tokens with routes", only_with=R3,
    ),
    MetricSpec(
        "router_replay/overlap/", "the same in one layer", "experts that both chose / experts of the tokens",
        only_with=R3,
    ),
    MetricSpec(
        "router_replay/gate_mass_apart/", "the same in one layer", "sum of those weights / tokens", only_with=R3
    ),
)
