"""The map: bias, variance and their sum of every arm, over kinds and sizes of mismatch and lengths.

B policies a cell, S responses of T tokens, N responses in a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lab import transformer
from lab.estimators import Arm, Samples, all_arms, pull_of_tokens
from lab.exact import Distance, Moments, Objective, ascent, distance, moments, true_gradient
from lab.mismatch import KINDS, Noise, disturbed, later_turn
from lab.policies import TASKS, World, expected_reward, random_tables

VOCABULARY = 4
LENGTHS = (1, 2, 4, 6, 8)
POLICIES = {1: 8, 2: 8, 4: 4, 6: 2, 8: 1}
"""Length -> policies a cell, with a table and noise of their own; fewer where there is more to add up."""
SPREAD = 1.0
STEPS, RATE = 16, 0.5
"""A policy of the map has made so many steps of exact ascent: it has learned a part of its task."""


DRAWN = (
    "none",
    "token_truncate",
    "token_mask",
    "token_unbounded",
    "turn_truncate",
    "sequence_truncate",
    "sequence_mask",
    "sequence_unbounded",
    "geometric_truncate",
    "rule:seq_mean_ratio",
    "preset:decoupled_geo_rs_token_tis",
    "bypass:ppo_clip",
)
"""The arms that the picture of the map tells apart, and the only ones that its other tasks have."""
BATCHES = (64, 1024, 16384)
"""Batches for which bias and variance are added up."""
Row = dict[str, float | int | str]


@dataclass(frozen=True)
class Cell:
    """A place of the map."""

    task: str
    kind: str
    size: float
    length: int
    vocabulary: int = VOCABULARY
    policy_kind: str = "table"
    """One of POLICY_KINDS."""


@dataclass(frozen=True)
class PolicyKind:
    """What a policy is: functions of a world and of its weights theta [B, ...]."""

    start: Callable[[World, int, int], Tensor]
    """(world, B, seed) -> theta."""
    objective: Objective
    logprobs: Callable[[World, Tensor], Tensor]
    """(world, theta) -> log p of the next tokens, [B, W, V]."""
    scores: Callable[[World, Tensor], Tensor]
    """(world, theta of one policy) -> psi [S, T, P]."""
    rate: float = RATE
    """Of the exact ascent: a transformer's parameters move each logit more."""
    seed: int = 0


def _table(seed: int) -> PolicyKind:
    return PolicyKind(
        lambda world, count, seed: random_tables(world, count, spread=SPREAD, seed=seed),
        expected_reward,
        World.log_conditionals,
        lambda world, theta: world.scores(theta[None])[0],
        seed=seed,
    )


POLICY_KINDS: dict[str, PolicyKind] = {
    "table": _table(0),
    "another table": _table(100_000),
    "transformer": PolicyKind(
        lambda world, count, seed: transformer.random_weights(world, count, spread=SPREAD, seed=seed),
        transformer.expected_reward,
        transformer.log_conditionals,
        transformer.scores,
        rate=0.05,
    ),
}
"""The map is of the first; another table, of other seeds, shows what chance changes by itself."""


@dataclass(frozen=True)
class Case:
    """One policy and its sampler, listed: what an arm is measured on."""

    world: World
    samples: Samples
    scores: Tensor
    probabilities: Tensor
    collisions: Tensor
    """sum_v p(v)^2 of each token's distribution, [S, T]."""
    truth: Tensor
    distance: Distance
    reach: float
    """max |A|, also over responses that the sampler never draws."""

    def measure(self, arm: Arm) -> Moments:
        """The arm's moments, by enumeration.

        Raises:
            ValueError: an arm whose responses are not counted one by one.
        """
        if arm.couples_samples:
            raise ValueError(f"{arm.name} couples the samples of a batch: lab/sampled.py estimates it")
        return moments(pull_of_tokens(self.samples, arm.config), self.scores, self.probabilities, self.truth)


def cases_of(cell: Cell, policies: int | None = None) -> Iterator[Case]:
    """The policies of a cell: of one length they are the same ones for all kinds and sizes."""
    world, policies = World(cell.vocabulary, cell.length), policies or POLICIES[cell.length]
    rewards, kind = TASKS[cell.task](world.responses, world.vocabulary), POLICY_KINDS[cell.policy_kind]
    seed = 1000 * cell.length + cell.vocabulary + kind.seed
    start = kind.start(world, policies, seed)
    history = ascent(world, start, rewards, steps=STEPS, rate=kind.rate, objective=kind.objective)
    noise = Noise.drawn(world, policies, seed + 1)
    theta = history[-1]
    older = history[-1 - int(cell.size)] if KINDS[cell.kind].of_older_weights else theta
    p = kind.logprobs(world, theta)
    mu = disturbed(world, kind.logprobs(world, older), noise, cell.kind, cell.size)
    truth = true_gradient(world, theta, rewards, kind.objective)
    routes = flipped(world, noise, cell)
    for one in range(policies):
        scores = kind.scores(world, theta[one])
        yield case_of(world, scores, truth[one], p[one], mu[one], rewards, routes[one])


def flipped(world: World, noise: Noise, cell: Cell) -> Tensor:
    """[B, W]: 1 where the prefix has other experts at the sampler."""
    share = cell.size if cell.kind == "routing" else 0.0
    return (noise.uniform < share).double()


def case_of(
    world: World,
    scores: Tensor,
    truth: Tensor,
    p: Tensor,
    mu: Tensor,
    rewards: Tensor,
    routes: Tensor | None = None,
) -> Case:
    """Lists one policy and its sampler; responses that the sampler never draws are left out.

    Args:
        scores: psi, [S, T, P].
        truth: grad J, [P].
        p, mu: [W, V], log-probs of next tokens.
        rewards: [S].
        routes: [W], 1 where other experts were chosen; None: nowhere.
    """
    log_p, log_mu = (world.token_logprobs(one[None])[0] for one in (p, mu))
    drawn = log_mu.sum(dim=1) > -torch.inf
    prefixes = world.prefixes_of(world.responses)
    routing = torch.zeros_like(log_p) if routes is None else routes[prefixes]
    baseline = log_p.sum(dim=1).exp() @ rewards
    samples = Samples(
        log_p[drawn],
        log_mu[drawn],
        (rewards - baseline)[drawn],
        later_turn(world, torch.arange(world.length)),
        routing[drawn],
    )
    return Case(
        world,
        samples,
        scores[drawn],
        log_mu[drawn].sum(dim=1).exp(),
        (2 * p).exp().sum(dim=-1)[prefixes][drawn],
        truth,
        distance(world, p, mu),
        (rewards - baseline).abs().max().item(),
    )


def rows_of(cell: Cell, arms: Iterable[Arm], policies: int | None = None) -> list[Row]:
    """A row an arm and policy: where, the distances, and the moments."""
    rows: list[Row] = []
    for number, case in enumerate(cases_of(cell, policies)):
        where = asdict(cell) | {"policy": number} | asdict(case.distance)
        where |= {"norm": case.truth.norm().item(), "reach": case.reach}
        rows += [where | {"arm": arm.name} | asdict(case.measure(arm)) for arm in arms]
    return rows


def cells_of(tasks: Iterable[str], kinds: Iterable[str], lengths: Iterable[int] = LENGTHS) -> list[Cell]:
    """All cells of these, the longest responses first."""
    places = [(task, kind, length) for task in tasks for kind in kinds for length in lengths]
    cells = [Cell(task, kind, size, length) for task, kind, length in places for size in KINDS[kind].sizes]
    return sorted(cells, key=lambda cell: -cell.length)


Means = dict[Cell, dict[str, Moments]]


def means_of(rows: Iterable[Row]) -> Means:
    """Moments of each arm in each cell, the mean over the cell's policies."""
    found: dict[Cell, dict[str, list[Row]]] = {}
    for row in rows:
        cell = Cell(**{field.name: row[field.name] for field in dataclasses.fields(Cell)})
        found.setdefault(cell, {}).setdefault(row["arm"], []).append(row)
    return {
        cell: {
            arm: Moments(
                *(sum(row[name] for row in of_arm) / len(of_arm) for name in ("bias2", "variance", "along"))
            )
            for arm, of_arm in arms.items()
        }
        for cell, arms in found.items()
    }


def enumerable_arms() -> list[Arm]:
    """The arms whose expectation is a sum over single responses."""
    return [arm for arm in all_arms().values() if not arm.couples_samples]
