"""Trainings of small policies under a mismatch, many seeds side by side, and how often they collapse.

B seeds, N responses a step of each, T tokens, V vocabulary. The step is the package's: correction, advantages
over the kept responses, policy loss, average; the optimiser is Adam, with the gradient's norm clipped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.estimators import Arm, Samples, corrected, pull_of_tokens
from lab.exact import ascent
from lab.mismatch import KINDS, Noise, later_turn
from lab.policies import TASKS, World, expected_reward, random_tables
from megatron_rl_corr.core.advantages import group_advantages
from megatron_rl_corr.core.ratios import k3
from megatron_rl_corr.observability.collapse import FRACTION, STAYS

BETAS, EPSILON = (0.9, 0.95), 1e-8
CLIP_GRAD = 1.0
SPREAD = 0.5
START_RATE = 2.0


@dataclass(frozen=True)
class Setting:
    """What all arms of a training have in common.

    Example: Setting("outcome", "rounding", 1.0) trains 150 steps of 32 responses of 6 tokens.
    """

    task: str
    kind: str
    size: float
    length: int = 6
    vocabulary: int = 4
    batch: int = 32
    steps: int = 200
    rate: float = 0.1
    advantage: str = "group_mean"
    lag: int = 0
    """Steps that the sampler's weights are old, beside its kind of mismatch."""
    start: int = 0
    """Steps of exact gradient ascent behind the first table, as RL begins with a model that can do a part."""
    shift: float = 0.0
    """Added to every reward; with advantage raw it is a baseline that is wrong by as much."""

    @property
    def name(self) -> str:
        """Its differences from the defaults, in one word each."""
        fields = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields)


class SeedwiseAdam:
    """Adam for B policies that know nothing of each other: each has its own norm and skipped steps."""

    def __init__(self, theta: Tensor, rate: float):
        self.theta, self.rate = theta, rate
        self.mean, self.square = torch.zeros_like(theta), torch.zeros_like(theta)
        self.taken = torch.zeros(len(theta), 1, 1, dtype=torch.float64)

    def ascend(self, gradient: Tensor) -> None:
        """A step along the gradient [B, C, V], its norm at most CLIP_GRAD; a policy whose gradient is 0 stays
        as it is, as the package skips such a step.
        """
        norm = gradient.flatten(start_dim=1).norm(dim=1)[:, None, None]
        gradient = gradient * (CLIP_GRAD / norm.clamp(min=CLIP_GRAD))
        acts = norm > 0
        self.taken += acts
        self.mean = torch.where(acts, BETAS[0] * self.mean + (1 - BETAS[0]) * gradient, self.mean)
        self.square = torch.where(acts, BETAS[1] * self.square + (1 - BETAS[1]) * gradient**2, self.square)
        taken = self.taken.clamp(min=1)
        root = (self.square / (1 - BETAS[1] ** taken)).sqrt() + EPSILON
        step = self.rate * self.mean / (1 - BETAS[0] ** taken) / root
        self.theta = torch.where(acts, self.theta + step, self.theta)


def sample(
    world: World, theta: Tensor, noise: Noise, setting: Setting, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Responses of the sampler: tokens [B, N, T], its log-probs [B, N, T], prefixes [B, N, T].

    Args:
        theta: [B, C, V], the weights that sample.
        noise: of the B policies.
    """
    count, width = len(theta), setting.batch
    who = torch.arange(count)[:, None].expand(count, width)
    context, digits = torch.full_like(who, world.vocabulary), torch.zeros_like(who)
    tokens, logprobs, prefixes = [], [], []
    make = KINDS[setting.kind].logits
    for place in range(world.length):
        prefix = world.first_prefix(place) + digits
        later = later_turn(world, torch.tensor(place)).expand(who.shape)

        def at_prefix(name: str, prefix: Tensor = prefix) -> Tensor:
            return getattr(noise, name)[who, prefix]

        logits = make(theta[who, context], at_prefix, later, setting.size)
        log_mu = logits.log_softmax(dim=-1)
        # Gumbel's maximum is a draw from mu
        gumbel = -torch.empty_like(log_mu).exponential_(generator=generator).log()
        token = (log_mu + gumbel).argmax(dim=-1)
        tokens.append(token)
        logprobs.append(log_mu.gather(-1, token[..., None])[..., 0])
        prefixes.append(prefix)
        context, digits = token, digits * world.vocabulary + token
    return tuple(torch.stack(one, dim=-1) for one in (tokens, logprobs, prefixes))


def gradient_of_step(
    world: World,
    theta: Tensor,
    drawn: tuple[Tensor, Tensor, Tensor],
    noise: Noise,
    arm: Arm,
    setting: Setting,
) -> Tensor:
    """The direction [B, C, V] that the package's loss gives each policy, of its own N responses."""
    tokens, rollout, prefixes = drawn
    count, width, length = tokens.shape
    who = torch.arange(count)[:, None, None]
    contexts = world.contexts_of(tokens)
    log_p = theta.log_softmax(dim=-1)
    train = log_p[who, contexts, tokens]
    rewards = TASKS[setting.task](tokens, world.vocabulary) + setting.shift
    routes = (noise.uniform[who, prefixes] < (setting.size if setting.kind == "routing" else 0.0)).double()

    def samples_with(advantages: Tensor) -> Samples:
        flat = (one.reshape(count * width, length) for one in (train, rollout))
        places = later_turn(world, torch.arange(length))
        return Samples(*flat, advantages.double(), places, routes.reshape(count * width, length))

    groups = torch.arange(count).repeat_interleave(width)

    def advantages_of(kept: Tensor | None) -> Tensor:
        return group_advantages(
            rewards.reshape(-1), groups, num_groups=count, kind=setting.advantage, in_baseline=kept
        )

    samples = samples_with(advantages_of(None))
    correction = corrected(samples, arm.config)
    if not arm.config.bypass_mode and setting.advantage != "raw":  # rejected responses leave the baseline
        samples = samples_with(advantages_of(correction.kept_sequences))
    pulls = pull_of_tokens(samples, arm.config, correction).view(count, width, length) / width
    rows = who * world.contexts + contexts
    gradient = torch.zeros(count * world.contexts, world.vocabulary, dtype=torch.float64)
    gradient.index_put_((rows.flatten(), tokens.flatten()), pulls.flatten(), accumulate=True)
    total = torch.zeros(len(gradient), dtype=torch.float64).index_add_(0, rows.flatten(), pulls.flatten())
    return (gradient - total[:, None] * log_p.exp().flatten(end_dim=1)).view_as(theta)


@dataclass(frozen=True)
class Runs:
    """What came of an arm's seeds."""

    rewards: Tensor
    """[steps + 1, B]: J, exact, before each step and at the end."""
    gap: Tensor
    """[steps, B]: mean of k3 = e^D - 1 - D over the step's tokens, as the package measures it."""

    @property
    def collapsed(self) -> Tensor:
        """bool [B]: J is below FRACTION of its best before in each of the last STAYS steps."""
        best = self.rewards.cummax(dim=0).values
        return (self.rewards < FRACTION * best)[-STAYS:].all(dim=0)

    def steps_to(self, share: float) -> list[float]:
        """The first step of each seed at which J is at least this; inf where it never is."""
        there = self.rewards >= share
        first = there.int().argmax(dim=0)
        return [
            float(step) if any_ else math.inf
            for step, any_ in zip(first.tolist(), there.any(dim=0).tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Begun:
    """A training before its first step: the same in all arms."""

    world: World
    rewards: Tensor
    """[S], of all responses."""
    noise: Noise
    optimiser: SeedwiseAdam
    generator: torch.Generator
    """Draws the samples, one stream for all seeds."""

    @classmethod
    def of(cls, setting: Setting, seeds: range) -> Begun:
        """A seed decides the policy's first table and the sampler's noise."""
        world = World(setting.vocabulary, setting.length)
        rewards = TASKS[setting.task](world.responses, world.vocabulary)
        tables = [random_tables(world, 1, spread=SPREAD, seed=2 * seed) for seed in seeds]
        drawn = [Noise.drawn(world, 1, 2 * seed + 1) for seed in seeds]
        noise = Noise(
            *(torch.cat([getattr(one, field.name) for one in drawn]) for field in dataclasses.fields(Noise))
        )
        theta = ascent(world, torch.cat(tables), rewards, steps=setting.start, rate=START_RATE)[-1]
        generator = torch.Generator().manual_seed(seeds.start)
        return cls(world, rewards, noise, SeedwiseAdam(theta, setting.rate), generator)


def train(
    setting: Setting, arm: Arm, *, seeds: range, progress: Callable[[int], None] = lambda step: None
) -> Runs:
    """Train one policy a seed with this arm.

    A seed decides the policy's first table and the sampler's noise, the same in all arms. The draws of the
    samples are one stream for all seeds, begun alike in all arms.

    Raises:
        ValueError: an arm whose batch normalisation would couple the seeds.
    """
    if arm.couples_samples:
        raise ValueError(f"{arm.name} couples the samples of a batch, and seeds share one here")
    begun = Begun.of(setting, seeds)
    world, rewards, noise, optimiser = begun.world, begun.rewards, begun.noise, begun.optimiser
    lag = setting.lag + (int(setting.size) if KINDS[setting.kind].of_older_weights else 0)
    history, reached, gaps = [optimiser.theta], [], []
    for step in range(setting.steps):
        theta = optimiser.theta
        reached.append(expected_reward(world, theta, rewards))
        samples = sample(world, history[max(0, len(history) - 1 - lag)], noise, setting, begun.generator)
        optimiser.ascend(gradient_of_step(world, theta, samples, noise, arm, setting))
        history = [*history[-lag:], optimiser.theta] if lag else [optimiser.theta]
        gaps.append(sampled_k3(world, theta, samples))
        progress(step)
    reached.append(expected_reward(world, optimiser.theta, rewards))
    return Runs(torch.stack(reached), torch.stack(gaps))


def log_ratios(world: World, theta: Tensor, drawn: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """D = log p - log mu of what `sample` has drawn: [B, N, T]."""
    tokens, rollout, _ = drawn
    who = torch.arange(len(theta))[:, None, None]
    return theta.log_softmax(dim=-1)[who, world.contexts_of(tokens), tokens] - rollout


def sampled_k3(world: World, theta: Tensor, drawn: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean of e^D - 1 - D over the tokens of each policy: [B]."""
    return k3(log_ratios(world, theta, drawn)).mean(dim=(1, 2))
