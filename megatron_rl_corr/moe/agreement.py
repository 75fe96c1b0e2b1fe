"""Whether a server's routed experts are those of these tokens, layers and weights: compared with
Megatron's own choice.

Experts of the right shape may still be those of the previous token, of another layer or of another model, and
training on them would look healthy. A layer's agreement is Cohen's kappa, (a - c) / (1 - c): a is the share
of the server's experts that Megatron would choose too; c is the share on which two independent choices agree,
each with its own frequencies of experts. So 1 means the same choices and 0 unrelated ones, however unevenly
the experts are used. Tokens with the same set of experts repeat each other, so a set weighs no more than a
few tokens: one near tie in long repeated text, or in a router that uses few experts, can't decide alone.

S samples of this replica, T tokens of them on this context-parallel rank, [t, b] of those of a microbatch
that this rank's routers see, L layers with experts of this rank, K experts a token, E experts a layer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group
from megatron_rl_corr.engines.routes import has_routes
from megatron_rl_corr.reduce.collectives import collective
from megatron_rl_corr.reduce.failure import StartupError
from megatron_rl_corr.reduce.metrics import Mean, Metric

MIN_EVIDENCE = 32
"""Experts on which independent choices would differ, before anything is judged: at a kappa of 0.8, 6 are
expected to differ, and a refusal takes 24.
"""
MAX_SET_WEIGHT = 8
"""Tokens that one set of Megatron's experts weighs at most, in a sample and layer."""
MIN_PAIRS = 16
"""Pairs of adjacent tokens, times layers, before a shift is judged."""
SHIFT_MARGIN = 0.1
"""Experts count as shifted if the adjacent token's fit better than the token's own by this
share of all experts.
"""
TOKENS, OVERLAP, SAME_SET, PAIRS, IN_PLACE, LATER, EARLIER, GATES_APART, WEIGHT, WEIGHTED_OVERLAP = range(10)


class RoutesRefused(StartupError):
    """A sample's routed experts are not those of its tokens under this model."""


class RouteAgreement:
    """Collects, pass by pass and without reading from the device, what `judge` needs of every
    sample and layer.
    """

    def __init__(
        self,
        seq_ids: Tensor,
        positions: Tensor,
        *,
        samples: int,
        layers: int,
        experts: int,
        softmax: bool = True,
        parts: int = 1,
    ):
        """Start with no tokens.

        Args:
            seq_ids: [T] int64, the sample of each token.
            positions: [T] int64, where it stands in its sample.
            samples: S.
            layers: L.
            experts: E.
            softmax: the chosen experts' weights are the softmax of their scores; else the scores'
                shares of their sum.
            parts: number of ranks that share a sample's tokens.
        """
        device = positions.device
        # What is no token belongs to a sample behind the last one, and nothing follows it.
        self._seq_ids = torch.cat([seq_ids, seq_ids.new_full((1,), samples)])
        self._positions = torch.cat([positions, positions.new_full((1,), -2)])
        self._sums = torch.zeros(layers, samples + 1, 10, device=device)
        self._counts = torch.zeros(layers, 2, samples + 1, experts, device=device)
        self._max_set_weight = max(1, MAX_SET_WEIGHT / parts)
        codes = torch.randint(2**62, (experts + samples + 1,), generator=torch.Generator().manual_seed(0)).to(
            device
        )
        self._codes, self._sample_codes = codes[:experts], codes[experts:]
        self._softmax = softmax
        self._apart = torch.zeros(len(seq_ids) + 1, device=device)

    @property
    def sums(self) -> Tensor:
        """[S, L, 10] float32, columns TOKENS to WEIGHTED_OVERLAP."""
        return self._sums[:, :-1].transpose(0, 1)

    @property
    def counts(self) -> Tensor:
        """[S, L, 2, E]: how often the server, and Megatron, chose each expert, by the tokens' weights."""
        return self._counts[:, :, :-1].permute(2, 0, 1, 3)

    @property
    def apart(self) -> Tensor:
        """[T]: how many experts of a token, over this rank's layers, only the server chose."""
        return self._apart[:-1]

    def observe(self, places: Tensor, layer: int, given: Tensor, own: Tensor, scores: Tensor) -> None:
        """Add the pass of one layer over one microbatch, which has all that this rank sees of its samples.

        Args:
            places: [t, b] int64, the tokens' places among the T; T for one that is no token.
            layer: its place among this rank's L.
            given: [t, b, K], the server's experts.
            own: [t, b, K], Megatron's.
            scores: [t, b, E], Megatron's.
        """
        experts, top_k = scores.shape[-1], given.shape[-1]
        ids, positions = self._seq_ids[places], self._positions[places]
        known = has_routes(given, experts) & (positions >= 0)
        given = given.long().where(known[..., None], 0)
        shared = overlap(given, own)
        weight = known * self._weights(known, own, ids)
        pairs = known[1:] & known[:-1] & (ids[1:] == ids[:-1]) & (positions[1:] == positions[:-1] + 1)
        both = [
            (known, None),
            (known, shared),
            (known, shared == top_k),
            (pairs, None),
            (pairs, (shared[1:] + shared[:-1]) / 2),
            (pairs, overlap(given[1:], own[:-1])),
            (pairs, overlap(given[:-1], own[1:])),
            (known, self._gates_apart(given, own, scores)),
            (weight, None),
            (weight, shared),
        ]
        values = torch.zeros(*places.shape, len(both), device=given.device)
        for column, (mask, value) in enumerate(both):
            values[: len(mask), :, column] = mask if value is None else mask * value
        flat = ids.flatten()
        # Put there, not added to: Megatron may run a microbatch again.
        self._sums[layer].index_fill_(0, flat, 0).index_add_(0, flat, values.flatten(0, 1))
        self._apart.index_add_(0, places.flatten(), (known * (top_k - shared)).float().flatten())
        for table, chosen in zip(self._counts[layer], (given, own), strict=True):
            table.index_fill_(0, flat, 0)
            cells = (ids[..., None] * experts + chosen).flatten()
            table.view(-1).scatter_add_(0, cells, weight[..., None].expand_as(chosen).float().flatten())

    def _weights(self, known: Tensor, own: Tensor, ids: Tensor) -> Tensor:
        """[t, b] float32: 1, or less for tokens of a set that is frequent in its sample:
        together MAX_SET_WEIGHT.
        """
        # A sum of random 62-bit numbers identifies a set of experts and the sample.
        sets = (self._codes[own].sum(dim=-1) + self._sample_codes[ids]).where(known, -1).flatten()
        ordered = sets.sort().values
        alike = torch.searchsorted(ordered, sets, right=True) - torch.searchsorted(ordered, sets)
        return (self._max_set_weight / alike.view_as(ids)).clamp(max=1.0)

    def _gates_apart(self, given: Tensor, own: Tensor, scores: Tensor) -> Tensor:
        """[t, b]: the weight that Megatron would give to experts that the server did not choose."""
        chosen = scores.float().gather(-1, own)
        gates = (
            chosen.softmax(dim=-1) if self._softmax else chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        )
        return (gates * ~(own[..., None] == given[..., None, :]).any(dim=-1)).sum(dim=-1)

    @collective
    def all_reduce(self, group: ProcessGroup | None) -> None:
        """Sum over the ranks that hold other tokens of the same samples: one collective."""
        if group is not None and group.size() > 1:
            both = torch.cat([self._sums.flatten(), self._counts.flatten()])
            dist.all_reduce(both, group=group)
            sums, counts = both.split([self._sums.numel(), self._counts.numel()])
            self._sums, self._counts = sums.view_as(self._sums), counts.view_as(self._counts)

    def totals(self, layers: tuple[int, ...], num_layers: int) -> Tensor:
        """[num_layers, 4] float64 over all samples: TOKENS, OVERLAP, SAME_SET, GATES_APART of
        `layers`, 0 elsewhere.
        """
        own = self.sums[..., [TOKENS, OVERLAP, SAME_SET, GATES_APART]].double().sum(dim=0)
        by_layer = own.new_zeros(num_layers, 4)
        by_layer[list(layers)] = own
        return by_layer


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """[..., K] and [..., K] ids, distinct in a token -> [...]: how many are in both."""
    return (a[..., :, None] == b[..., None, :]).sum(dim=(-1, -2))


def kappa(agreeing: Tensor, counts: Tensor, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(a - c, 1 - c), [...] each: Cohen's kappa is their quotient.

    Args:
        agreeing: [...] experts in both choices.
        counts: [..., 2, E] how often each side chose each expert.
        tokens: [...] number of tokens; all three by the tokens' weights.
        top_k: K.
    """
    slots = (tokens * top_k).clamp(min=1)
    chance = (counts[..., 0, :] * counts[..., 1, :]).sum(dim=-1) / (tokens.clamp(min=1) * slots)
    return agreeing / slots - chance, 1 - chance


def judge(
    agreement: RouteAgreement, layers: tuple[int, ...], top_k: int, minimum: float
) -> tuple[int, str] | None:
    """The first sample whose experts can't be right, and why; None if there is none. Reads from
    the device, once.

    Args:
        agreement: of all tokens of the samples.
        layers: the numbers of the L layers.
        top_k: K.
        minimum: the smallest kappa, --router-replay-min-agreement.
    """
    sums, counts = agreement.sums.cpu().double(), agreement.counts.cpu().double()
    beyond, room = kappa(sums[..., WEIGHTED_OVERLAP], counts, sums[..., WEIGHT], top_k)
    # Where all tokens take the same experts, independent choices agree too, and nothing can be judged.
    evidence = room * sums[..., WEIGHT] * top_k
    judged = (evidence >= MIN_EVIDENCE) & (room > 0.05)
    wrong_layers = judged & (beyond < minimum * room)
    row_beyond, row_room = ((x * (sums[..., TOKENS] > 0)).sum(dim=1) for x in (beyond, room))
    wrong_rows = (evidence.sum(dim=1) >= MIN_EVIDENCE) & (row_room > 0.05 * len(layers))
    wrong_rows &= row_beyond < minimum * row_room
    slots = sums[..., PAIRS].sum(dim=1) * top_k
    fits = [sums[..., column].sum(dim=1) / slots.clamp(min=1) for column in (IN_PLACE, LATER, EARLIER)]
    best = torch.maximum(fits[1], fits[2])
    shifted = (best > fits[0] + SHIFT_MARGIN) & (slots >= MIN_PAIRS * top_k)
    # Experts that fit nowhere still fit one neighbour a little better by chance.
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
        where, value = "all layers of a stage", row_beyond[row] / row_room[row]
    else:
        place = int((beyond / room).where(wrong_layers, torch.inf)[row].argmin())
        where, value = f"layer {layers[place]}", beyond[row, place] / room[row, place]
    return row, (
        f"rule agreement: beyond chance, Megatron would choose {value:.0%} of the same experts in {where}, "
        f"and must {minimum:.0%} (--router-replay-min-agreement): are these routes of other layers, or of "
        "another model?"
    )


def agreement_metrics(by_layer: Tensor, layers: tuple[int, ...], top_k: int) -> dict[str, Metric]:
    """Metrics of how far servers and Megatron chose other experts, over all layers and of each.

    Args:
        by_layer: [H, 4] float64, `RouteAgreement.totals` of all H layers of the model.
        layers: those with experts.
        top_k: K.
    """

    def named(tokens: Tensor, shared: Tensor, same: Tensor, apart: Tensor, suffix: str) -> dict[str, Metric]:
        return {
            f"router_replay/disagreement{suffix}": Mean(torch.stack([tokens - same, tokens])),
            f"router_replay/overlap{suffix}": Mean(torch.stack([shared / top_k, tokens])),
            f"router_replay/gate_mass_apart{suffix}": Mean(torch.stack([apart, tokens])),
        }

    metrics = named(*by_layer.sum(dim=0), "")
    for layer in layers:
        metrics |= named(*by_layer[layer], f"/layer_{layer:03d}")
    return metrics


R3 = "--router-replay R3"
METRICS = in_group(
    "Expert routing",
    MetricSpec(
        "router_replay/disagreement",
        "tokens sent to other experts than Megatron would choose, the layers before replayed",
        "tokens x layers whose experts are not the same set / tokens x layers",
        "routes differ",
        UsualRange(
            "servers and Megatron route many tokens to different experts",
            "Compare the router's dtype on both sides (--moe-router-dtype fp32, and the server's), and the "
            "age of the samples. If single layers stand out, look for weights that only one side has, as a "
            "router's bias.",
            high=0.1,
        ),
        only_with=R3,
    ),
    MetricSpec(
        "router_replay/overlap",
        "share of the server's experts that Megatron would choose too",
        "experts that both chose / experts",
        only_with=R3,
    ),
    MetricSpec(
        "router_replay/gate_mass_apart",
        "weight that Megatron would give to experts the server did not choose",
        "sum of those weights / tokens",
        only_with=R3,
    ),
    MetricSpec(
        "router_replay/disagreement/",
        "the same in one layer",
        "tokens whose experts are not the same set / tokens with routes",
        only_with=R3,
    ),
    MetricSpec(
        "router_replay/overlap/",
        "the same in one layer",
        "experts that both chose / experts of the tokens",
        only_with=R3,
    ),
    MetricSpec(
        "router_replay/gate_mass_apart/",
        "the same in one layer",
        "sum of those weights / tokens",
        only_with=R3,
    ),
)
