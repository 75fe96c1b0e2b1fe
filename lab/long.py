"""Longer responses than can be listed: their true gradient is still exact, bias and variance are sampled.

The policy is a table whose row is the token before, and the reward the share of right tokens, so that J is a
sum over places and contexts. S sampled responses of T tokens, V vocabulary, C = V + 1 contexts, N responses
in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.estimators import Samples, pull_of_tokens
from lab.mismatch import KINDS, OTHER_SPREAD, heavy_tailed
from lab.policies import right_share
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.core.auto_weights import AutoWeights, MeasuredMismatch

VOCABULARY = 4
LENGTHS = (16, 64, 256)
DRAWN_RESPONSES = {16: 30_000, 64: 20_000, 256: 8_000}
"""Length -> S."""
SIZES: dict[str, tuple[float, ...]] = {
    "rounding": (0.03, 0.1, 0.3, 1.0),
    "tail": (0.1, 0.3, 1.0, 2.0),
    "routing": (0.01, 0.03, 0.1, 0.3),
    "lag": (1, 2, 4, 8, 16),
}
STEPS, RATE = 16, 4.0
"""A policy has made so many steps of exact ascent."""
BATCHES = (64, 1024)
ARMS = ("none", "token", "turn", "sequence")
"""Levels; but for `none` each is truncated at the bound that --rollout-correction auto has for the batch."""
NO_STEP = "no step"


@dataclass(frozen=True)
class LongCell:
    """A place of the map of longer responses."""

    kind: str
    size: float
    length: int
    seed: int


@dataclass(frozen=True)
class LongRow:
    """What a cell's arms do, and what a trainer would have measured there."""

    cell: LongCell
    mismatch: MeasuredMismatch
    errors: dict[int, dict[str, float]]
    """N -> arm -> bias2 + variance / N; doing nothing has 1."""

    def chosen(self, batch: int) -> str:
        """The arm that the rule takes for the next batch, coming from token weights."""
        return AutoWeights(batch).after(self.mismatch).level


def expected_share(theta: Tensor, length: int) -> Tensor:
    """J of a table [C, V]: the expected share of tokens that count on from the one before; the first is right
    where it is 0.
    """
    vocabulary = theta.shape[1]
    p, contexts = theta.softmax(dim=-1), torch.arange(vocabulary + 1)
    right = torch.zeros_like(p)
    right[contexts, (contexts + 1) % (vocabulary + 1) % vocabulary] = 1.0
    at = torch.zeros(vocabulary + 1, dtype=p.dtype)
    at[vocabulary] = 1.0
    total = torch.zeros((), dtype=p.dtype)
    for _ in range(length):
        joint = at[:, None] * p
        total = total + (joint * right).sum()
        at = torch.cat([joint.sum(dim=0), torch.zeros(1, dtype=p.dtype)])
    return total / length


def gradient(theta: Tensor, length: int) -> Tensor:
    """grad J: [C, V]."""
    leaf = theta.detach().clone().requires_grad_()
    expected_share(leaf, length).backward()
    return leaf.grad


def sampler_logprobs(theta: Tensor, cell: LongCell, generator: torch.Generator) -> Tensor:
    """log mu of the next token: [T, C, V]; noise is drawn for each place and context."""
    shape = (cell.length, *theta.shape)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    noise = {
        "normal": normal(*shape),
        "heavy": heavy_tailed(normal, shape),
        "other": OTHER_SPREAD * normal(*shape),
        "uniform": torch.rand(shape[:2], generator=generator, dtype=torch.float64),
    }
    later = torch.ones(shape[:2], dtype=torch.bool)
    logits = KINDS[cell.kind].logits(theta.expand(shape), noise.__getitem__, later, cell.size)
    return logits.log_softmax(dim=-1)


def policies(cell: LongCell, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The trainer's table [C, V], and the sampler's log mu [T, C, V]."""
    history = [torch.randn((VOCABULARY + 1, VOCABULARY), generator=generator, dtype=torch.float64)]
    for _ in range(STEPS):
        history.append(history[-1] + RATE * gradient(history[-1], cell.length))
    older = history[-1 - int(cell.size)] if KINDS[cell.kind].of_older_weights else history[-1]
    return history[-1], sampler_logprobs(older, cell, generator)


def measured(cell: LongCell, responses: int | None = None) -> LongRow:
    """Monte Carlo of all arms in a cell, on the same responses: so many, or those of DRAWN_RESPONSES."""
    generator = torch.Generator().manual_seed(cell.seed)
    theta, log_mu = policies(cell, generator)
    log_p = theta.log_softmax(dim=-1)
    contexts, tokens = _draw(log_mu, responses or DRAWN_RESPONSES[cell.length], generator)
    places = torch.arange(cell.length)
    train, rollout = log_p[contexts, tokens], log_mu[places, contexts, tokens]
    rewards = right_share(tokens, VOCABULARY)
    advantages = rewards - rewards.mean()  # as the means of groups and batches are: of what was sampled
    samples = Samples(train, rollout, advantages, places >= cell.length // 2, torch.zeros_like(train))
    truth = gradient(theta, cell.length).flatten()
    errors = {}
    for batch in BATCHES:
        moments = {
            name: _moments(pull_of_tokens(samples, config), contexts, tokens, log_p.exp(), truth)
            for name, config in arms_of(batch).items()
        }
        found = {name: bias2 + variance / batch for name, (bias2, variance) in moments.items()}
        errors[batch] = found | {NO_STEP: 1.0}
    return LongRow(cell, measured_mismatch(train - rollout), errors)


def measured_mismatch(d: Tensor) -> MeasuredMismatch:
    """What a trainer measures of log-ratios [S, T]."""
    products = d.sum(dim=1).exp()
    ess = products.sum() ** 2 / products.square().sum() / len(products)
    return MeasuredMismatch(ess.item(), products.mean().item())


def arms_of(batch: int) -> dict[str, RolloutCorrectionConfig]:
    """The arms for a batch of N."""
    plain = RolloutCorrectionConfig(loss="reinforce", loss_aggregation="seq-mean-token-sum", advantage="raw")
    cap = AutoWeights(batch).cap
    levels = {name: plain.with_settings({"rollout_is": name, "rollout_is_upper": cap}) for name in ARMS[1:]}
    return {"none": plain} | levels


def _draw(log_mu: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Contexts and tokens of sampled responses, [S, T] each."""
    context = torch.full((count,), VOCABULARY)
    contexts, tokens = [], []
    for place in range(len(log_mu)):
        token = torch.multinomial(log_mu[place].exp()[context], 1, generator=generator)[:, 0]
        contexts.append(context)
        tokens.append(token)
        context = token
    return torch.stack(contexts, dim=1), torch.stack(tokens, dim=1)


def _moments(
    pulls: Tensor, contexts: Tensor, tokens: Tensor, p: Tensor, truth: Tensor
) -> tuple[float, float]:
    """bias2, less the part that the scatter of S responses adds, and the variance of one response, as shares
    of |g|^2.
    """
    count = len(pulls)
    sums = torch.zeros((count, p.numel()), dtype=torch.float64)
    sums.scatter_add_(1, contexts * p.shape[1] + tokens, pulls)
    by_context = torch.zeros((count, len(p)), dtype=torch.float64).scatter_add_(1, contexts, pulls)
    estimates = sums - (by_context[:, :, None] * p).flatten(start_dim=1)
    variance = estimates.var(dim=0).sum()
    bias2 = (estimates.mean(dim=0) - truth).square().sum() - variance / count
    norm2 = truth.square().sum()
    return max(0.0, (bias2 / norm2).item()), (variance / norm2).item()


def long_cells(kinds: Iterable[str], seeds: int = 2) -> list[LongCell]:
    """All cells of these kinds, the longest first."""
    return [
        LongCell(kind, size, length, seed)
        for length in reversed(LENGTHS)
        for kind in kinds
        for size in SIZES.get(kind, ())
        for seed in range(seeds)
    ]


ZONES = (0.0, 0.003, 0.03, 0.3, 0.5, 0.9, 1.01)
"""Bounds of ESS / n, by which cells are put together."""


def table_of_long(rows: Iterable[LongRow]) -> str:
    """Markdown: in each zone of the ESS, how many times an arm's error is the least of all arms'."""
    rows, names = list(rows), (*ARMS, NO_STEP)
    lines = [
        "Error over the least error of the arms beside it, geometric mean over cells, and the most. auto: "
        "what --rollout-correction auto takes in the cell.",
        "",
        f"| N | ESS / n | cells | least error | {' | '.join(names)} | auto | auto, most |",
        "|" + "---|" * (len(names) + 6),
    ]
    for batch in BATCHES:
        for low, high in zip(ZONES, ZONES[1:], strict=False):
            zone = [row for row in rows if low <= row.mismatch.ess < high]
            if zone:
                lines.append(
                    f"| {batch} | {low:g} to {min(high, 1):g} | " + " | ".join(_columns(zone, batch)) + " |"
                )
    return "\n".join(lines) + "\n"


def _columns(rows: list[LongRow], batch: int) -> Iterator[str]:
    least = [min(row.errors[batch].values()) for row in rows]
    yield str(len(rows))
    yield f"{_mean(least):.3g}"
    for name in (*ARMS, NO_STEP):
        yield f"{_mean(row.errors[batch][name] / one for row, one in zip(rows, least, strict=True)):.2f}"
    chosen = [row.errors[batch][row.chosen(batch)] / one for row, one in zip(rows, least, strict=True)]
    yield f"{_mean(chosen):.2f}"
    yield f"{max(chosen):.2f}"


def _mean(values: Iterable[float]) -> float:
    """Geometric."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
