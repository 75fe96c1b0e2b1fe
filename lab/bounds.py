"""Certified bounds of an estimator's bias beside the true bias, on random policies that are listed.

S responses of T tokens over V, W prefixes. Gradients are in the logits: G = sqrt(2). The bounds are proven in
docs/explanation/mathematics.md, section 11.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from lab.estimators import UPPER, Arm, Samples, all_arms, pull_of_tokens
from lab.exact import true_gradient
from lab.map import BATCHES, DRAWN, Case, Cell, case_of, cases_of, enumerable_arms
from lab.mismatch import KINDS, Noise, sampler_conditionals
from lab.policies import World, random_tables
from megatron_rl_corr.core.bias_bound import LONGEST_SCORE, bias_terms, longest_scores, mean_at_most
from megatron_rl_corr.core.ratios import LOG_CLAMP
from megatron_rl_corr.core.weights import bounded

BoundRow = dict[str, Any]
CAP = UPPER
"""Of the products: the largest weight that the lab's bounded arms have."""
LARGEST_WORLD = 4**8
"""Responses of a random case, at most: 8 tokens of 4, 5 of 8."""
WORLDS = tuple(
    World(vocabulary, length)
    for vocabulary in range(4, 9)
    for length in range(1, 9)
    if vocabulary**length <= LARGEST_WORLD
)
REWARDS = ("normal", "uniform", "right", "rare")
"""What random rewards are like: rare is 1 for one response in twenty, right for a random half of them."""
CASES_AT_ONCE, RESPONSES_AT_ONCE = 16, 4096
"""Of one world: at most so many, so far as they have no more responses than that together."""
TOP = 2
"""Ids that are listed at a token, of 4 to 8."""
LAG_STEP = 0.3
"""Standard deviation of what older weights of a random case differ by, for each step of their age."""


@dataclass(frozen=True)
class Shown:
    """One policy and its sampler, with what the bounds take: float64.

    Example: random_cases(3) are the same each time.
    """

    kind: str
    size: float
    case: Case
    p: Tensor
    mu: Tensor
    """Log-probs of next tokens, [W, V] both."""

    @cached_property
    def prefixes(self) -> Tensor:
        """The prefix of each token of the responses that are drawn at all: [S, T]."""
        world = self.case.world
        drawn = world.token_logprobs(self.mu[None])[0].sum(dim=1) > -torch.inf
        return world.prefixes_of(world.responses)[drawn]

    @cached_property
    def norms(self) -> Tensor:
        """||psi_t||, [S, T]."""
        return self.case.scores.norm(dim=-1)

    @cached_property
    def products(self) -> Tensor:
        """w, [S]."""
        samples = self.case.samples
        return (samples.train_logprobs - samples.rollout_logprobs).sum(dim=1).exp()

    @cached_property
    def unlike(self) -> dict[int | None, Tensor]:
        """TV of the next token at each sampled prefix, [S, T]: of whole distributions, and the most that it
        can be where TOP ids are listed.
        """
        return {top: _apart(self.p, self.mu, self.mu.exp(), top)[self.prefixes] / 2 for top in (None, TOP)}

    @cached_property
    def kl(self) -> float:
        """KL(mu || p) of whole responses."""
        gaps = torch.where(self.mu > -torch.inf, self.mu - self.p, 0.0)
        by_prefix = (self.mu.exp() * gaps).sum(dim=-1)
        return (self.case.probabilities @ by_prefix[self.prefixes]).sum().item()

    @property
    def reach(self) -> float:
        """R: the largest |A|, also of responses that the sampler never draws."""
        return self.case.reach

    @property
    def furthest(self) -> float:
        """R G T."""
        return self.reach * LONGEST_SCORE * self.case.world.length


def random_cases(seed: int) -> list[Shown]:
    """Some random tables with a sampler, rewards and fixed baseline each, all over one world.

    Worlds are drawn alike; of the small ones there are more cases at a time, at most CASES_AT_ONCE.
    """
    generator = torch.Generator().manual_seed(seed)
    world = WORLDS[int(torch.randint(len(WORLDS), (), generator=generator))]
    count = max(1, min(CASES_AT_ONCE, RESPONSES_AT_ONCE // len(world.responses)))
    return [_random_case(world, generator) for _ in range(count)]


def _random_case(world: World, generator: torch.Generator) -> Shown:
    def among(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    seed = among(2**30)
    kind = list(KINDS)[among(len(KINDS))]
    size = KINDS[kind].sizes[among(len(KINDS[kind].sizes))]
    theta = random_tables(world, 1, spread=0.2 + 2.8 * uniform(1).item(), seed=2 * seed)
    older = theta
    if KINDS[kind].of_older_weights:
        older = theta + LAG_STEP * size**0.5 * random_tables(world, 1, spread=1.0, seed=2 * seed + 1)
    noise = Noise.drawn(world, 1, seed)
    p, mu = world.log_conditionals(theta)[0], sampler_conditionals(world, older, noise, kind, size)[0]
    draws = uniform(len(world.responses))
    rewards = {
        "normal": lambda: torch.randn(len(draws), generator=generator, dtype=torch.float64),
        "uniform": lambda: draws,
        "right": lambda: (draws < 0.5).double(),
        "rare": lambda: (draws < 0.05).double(),
    }[REWARDS[among(len(REWARDS))]]()
    routes = (noise.uniform < (size if kind == "routing" else 0.0)).double()[0]
    scores, truth = world.scores(theta)[0], true_gradient(world, theta, rewards)[0]
    return Shown(kind, size, case_of(world, scores, truth, p, mu, rewards, routes), p, mu)


def pulls_of(cases: list[Shown], arm: Arm, *, ones: bool = False) -> list[Tensor]:
    """c of all responses of each case, [S, T] each, from one call of the package.

    Its arms do not couple responses, so those of several cases are one batch; this is what makes thousands of
    cases cheap.

    Args:
        ones: advantages of 1, whatever the case's.
    """
    samples = [shown.case.samples for shown in cases]

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(one, name) for one in samples])

    advantages = joined("advantages")
    batch = Samples(
        joined("train_logprobs"),
        joined("rollout_logprobs"),
        torch.ones_like(advantages) if ones else advantages,
        samples[0].later_turn,
        joined("routing"),
    )
    return list(pull_of_tokens(batch, arm.config).split([len(one.advantages) for one in samples]))


@dataclass(frozen=True)
class Bounds:
    """The bias of one arm on one policy and what bounds it: lengths of gradients in the logits.

    `sampled`, `normed` and `limit` are means of `bias_terms`, enumerated.
    """

    bias: float
    """||E_mu g_hat - grad J||."""
    trivial: float
    """E_mu sum_t |c_t| ||psi_t|| + R G T: what is known without a look at the mismatch."""
    sampled: float
    """From the log-probs of sampled tokens on both sides: scores sqrt(2) (1 - p), products capped at CAP."""
    normed: float
    """The same with ||psi_t||, for which the trainer knows its whole distribution."""
    limit: float
    """The same without a cap: what no batch of a long tail shows."""
    distributions: float
    """From both whole distributions at the sampled prefixes."""
    top: float
    """From the TOP likeliest ids of the sampler at them, with the tails as intervals."""


def bounds_of(shown: Shown, arm: Arm, pulls: Tensor) -> Bounds:
    """The arm's bias by enumeration, and its bounds; pulls: c [S, T]."""
    case = shown.case
    bias, trivial = _bias_and_trivial(shown, pulls)
    norms = shown.norms
    terms = {
        "sampled": terms_of(shown, pulls, CAP, longest_scores(case.samples.train_logprobs.flatten())),
        "normed": terms_of(shown, pulls, CAP, norms.flatten()),
        "limit": terms_of(shown, pulls, math.inf, norms.flatten()),
    }
    return Bounds(
        bias,
        trivial,
        **{name: (case.probabilities @ of_responses).item() for name, of_responses in terms.items()},
        distributions=_by_distributions(shown, arm, pulls, None),
        top=_by_distributions(shown, arm, pulls, TOP),
    )


def _bias_and_trivial(shown: Shown, pulls: Tensor) -> tuple[float, float]:
    case = shown.case
    mean = torch.einsum("st,stp->p", case.probabilities[:, None] * pulls, case.scores)
    lengths = (pulls.abs() * shown.norms).sum(dim=1)
    return (mean - case.truth).norm().item(), (case.probabilities @ lengths).item() + shown.furthest


def terms_of(shown: Shown, pulls: Tensor, cap: float, scores: Tensor) -> Tensor:
    """`bias_terms` of all drawn responses: [S]."""
    samples = shown.case.samples
    count, length = samples.train_logprobs.shape
    return bias_terms(
        pulls.flatten(),
        scores,
        samples.advantages,
        shown.products,
        torch.arange(count).repeat_interleave(length),
        cap=cap,
        furthest=shown.furthest,
    )


def _by_distributions(shown: Shown, arm: Arm, pulls: Tensor, top: int | None) -> float:
    """The least of the bound for any weights, and that for weights of tokens.

    any:    E_mu sum_t |c_t - A| ||psi_t|| + 2 R G T min(1, sum_j delta_j, sqrt(1 - e^-KL)), KL of responses
    tokens: R G sum_t { E_mu sum_v |w mu - p| + 2 min(1, sum_{j<t} delta_j + sum_{j>t} E_mu[rho_t TV_j]) },
            and what the package's weights differ by from w in float64
    """
    case, size = shown.case, shown.reach * LONGEST_SCORE
    samples, chance = case.samples, case.probabilities
    prefixes, length = shown.prefixes, case.world.length
    unlike = shown.unlike[top]
    delta = chance @ unlike
    whole = min(1.0, delta.sum().item())
    if top is None:
        whole = min(whole, math.sqrt(-math.expm1(-shown.kl)))
    departure = (pulls - samples.advantages[:, None]).abs() * shown.norms
    found = (chance @ departure.sum(dim=1)).item() + 2 * size * length * whole
    if not _weighs_tokens(arm):
        return found
    weighed = shown.mu.exp() * weights_of(arm, shown.p - shown.mu)
    own = chance @ _apart(shown.p, shown.mu, weighed, top)[prefixes]
    exact = weights_of(arm, samples.train_logprobs - samples.rollout_logprobs) * samples.advantages[:, None]
    rho = (samples.train_logprobs - samples.rollout_logprobs).exp().clamp(max=CAP)
    rounding = chance @ ((pulls - exact).abs() * shown.norms).sum(dim=1)
    total = 0.0
    for place in range(length):
        later = chance @ (rho[:, place, None] * unlike[:, place + 1 :])
        lost = (length - place - 1) * (1 - chance @ rho[:, place]).item()
        others = delta[:place].sum().item() + later.sum().item() + lost
        total += own[place].item() + 2 * min(1.0, others)
    return min(found, size * total + rounding.item())


@cache
def _weighs_tokens(arm: Arm) -> bool:
    """True if c is a function of rho of the token, times A, and nothing else."""
    config, plain = arm.config, all_arms()["token_truncate"].config
    if config.rollout_is != "token":
        return False
    bounds = ("rollout_is_mode", "rollout_is_upper", "rollout_is_lower")
    return config == dataclasses.replace(plain, **{name: getattr(config, name) for name in bounds})


def weights_of(arm: Arm, log_ratios: Tensor) -> Tensor:
    """The weights of single tokens with these D, any shape, without the package's subtraction in float32."""
    ratios = log_ratios.clamp(-LOG_CLAMP, LOG_CLAMP).exp()
    return bounded(arm.config, ratios, torch.ones_like(ratios, dtype=torch.bool))[0]


def _apart(p: Tensor, mu: Tensor, weighed: Tensor, top: int | None) -> Tensor:
    """sum_v |weighed - p| at each prefix [W]; of more than the top ids of mu the most that it can be."""
    apart = (weighed - p.exp()).abs()
    if top is None:
        return apart.sum(dim=-1)
    listed = torch.zeros_like(apart).scatter_(-1, mu.topk(top, dim=-1).indices, 1.0)
    unlisted = 1 - listed
    return (apart * listed + (p.exp() + mu.exp()) * unlisted).sum(dim=-1)


LINEAR = (
    "none",
    "token_truncate",
    "token_mask",
    "token_unbounded",
    "turn_truncate",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
)
"""Arms whose weights do not look at the advantage."""
TURNS_TO_WORST = 20


def worst_bias(shown: Shown, pulls: Tensor) -> float:
    """The bias with signs of A that are chosen against the arm: a lower bound of the largest.

    With D(y) = sum_t (c_t / A - w) psi_t it is the max over s(y) = +-1 of ||E_mu s |A| D||. s = sign(D u),
    where u is the direction of what the last s gave, never gives less than that.

    Args:
        pulls: c / A [S, T], of advantages of 1.
    """
    case = shown.case
    apart = pulls - shown.products[:, None]
    chance = case.probabilities * case.samples.advantages.abs()
    vectors = chance[:, None] * torch.einsum("st,stp->sp", apart, case.scores)
    along = case.samples.advantages.sign() @ vectors
    for _ in range(TURNS_TO_WORST):
        along = (vectors @ along).sign() @ vectors
    return along.norm().item()


@dataclass(frozen=True)
class Certificate:
    """What batches of N say of an arm's bias, as shares of |g|; means over the batches."""

    bias: float
    enumerated: float
    """The bound that an endless batch gives."""
    estimate: float
    """The batch's mean of `bias_terms`."""
    certified: float
    """`mean_at_most` of it."""
    below: int
    """Batches whose certified bound was below the true bias."""
    trivial: float


def certificate(
    shown: Shown, arm: Arm, *, largest: float, batch: int, batches: int, chance: float = 0.05
) -> Certificate:
    """Draws batches and bounds the bias from the log-probs of their tokens alone.

    Args:
        arm: its weights are at most `largest`.
        batch: N.
    """
    case, cap = shown.case, largest
    pulls = pull_of_tokens(case.samples, arm.config)
    bias, trivial = _bias_and_trivial(shown, pulls)
    terms = terms_of(shown, pulls, cap, longest_scores(case.samples.train_logprobs.flatten()))
    lowest, highest = shown.furthest * (1 - cap), shown.furthest * (largest + 1)
    assert lowest <= terms.min() and terms.max() <= highest
    generator = torch.Generator().manual_seed(batch)
    estimates, certified = [], []
    for _ in range(batches):
        drawn = terms[torch.multinomial(case.probabilities, batch, replacement=True, generator=generator)]
        estimates.append(drawn.mean().item())
        certified.append(mean_at_most(drawn, lowest=lowest, highest=highest, chance=chance).item())
    norm = case.truth.norm().item()
    return Certificate(
        bias / norm,
        (case.probabilities @ terms).item() / norm,
        sum(estimates) / batches / norm,
        sum(certified) / batches / norm,
        sum(one < bias for one in certified),
        trivial / norm,
    )


BOUNDS = ("sampled", "normed", "limit", "distributions", "top", "trivial")
"""The bounds that each arm has."""
MEASURED = 1e-6
"""Biases below this share of R G T are float32's rounding of the weights, to which no bound is compared."""
CERTIFIED_ARMS = {"none": 1.0, "token_truncate": UPPER, "sequence_truncate": UPPER}
"""Arm -> its largest weight."""
CERTIFIED_CELLS = tuple(
    Cell("outcome", *where) for where in (("rounding", 0.1, 4), ("rounding", 1.0, 4), ("lag", 8, 8))
)
CERTIFIED_BATCHES = 200


def rows_of_cases(seed: int) -> list[BoundRow]:
    """A row a case and arm: those that are drawn, and one of the others in turn."""
    cases = random_cases(seed)
    others = [arm for arm in enumerable_arms() if arm.name not in DRAWN]
    rows = []
    for arm in (*(all_arms()[name] for name in DRAWN), others[seed % len(others)]):
        worst = [math.nan] * len(cases)
        if arm.name in LINEAR:
            worst = [worst_bias(*one) for one in zip(cases, pulls_of(cases, arm, ones=True), strict=True)]
        for number, (shown, pulls) in enumerate(zip(cases, pulls_of(cases, arm), strict=True)):
            where = {"case": (seed, number), "arm": arm.name, "kind": shown.kind}
            where |= {"length": shown.case.world.length, "furthest": shown.furthest, "worst": worst[number]}
            rows.append(where | dataclasses.asdict(bounds_of(shown, arm, pulls)))
    return rows


def broken(row: BoundRow) -> list[str]:
    """The bounds that this row's bias is above, beyond what float64 rounds."""
    rounded = 1e-12 * row["furthest"] + 1e-14  # rewards are of size one; where they are all alike R is 0
    return [name for name in BOUNDS if row["bias"] > row[name] * (1 + 1e-9) + rounded]


def looseness(rows: list[BoundRow], bound: str, over: str = "bias") -> list[float]:
    """bound / bias of the rows whose bias is more than rounding, in order."""
    measured = [row for row in rows if row[over] > MEASURED * row["furthest"]]
    return sorted(row[bound] / row[over] for row in measured)


def quantile(values: list[float], share: float) -> float:
    """The value that this share of the sorted values is below; NaN of none."""
    return values[min(int(share * len(values)), len(values) - 1)] if values else math.nan


def table_of_bounds(rows: list[BoundRow]) -> str:
    """Markdown: how many cases, in how many a bound was broken, and by what factor the bounds are loose."""
    of_arms = {arm: [row for row in rows if row["arm"] == arm] for arm in DRAWN}
    of_arms["all others"] = [row for row in rows if row["arm"] not in DRAWN]
    cases = len({row["case"] for row in rows})
    wrong = len({row["case"] for row in rows if broken(row)})
    lines = [
        f"{cases} random cases; in {wrong} of them a bound was below the bias of an arm. bound / bias: the "
        "median of the cases whose bias is more than rounding (5 to 95 % of them); worst signs: sampled over "
        "the bias under signs of A chosen against the arm.",
        "",
        "| arm | cases | " + " | ".join(BOUNDS) + " | sampled, worst signs | sampled / trivial |",
        "|---|---|" + "---|" * (len(BOUNDS) + 2),
    ]
    for arm, found in of_arms.items():
        spreads = [_spread(looseness(found, bound)) for bound in BOUNDS]
        against = sorted(row["sampled"] / row["trivial"] for row in found if row["trivial"] > 0)
        measured = len(looseness(found, "sampled"))
        lines.append(
            f"| {arm} | {measured} of {len(found)} | "
            + " | ".join([*spreads, _spread(looseness(found, "sampled", "worst")), _spread(against)])
            + " |"
        )
    lines += ["", "By length, the median of sampled / bias, and of distributions / bias:", ""]
    lengths = sorted({row["length"] for row in rows})
    lines += [
        "| arm | " + " | ".join(str(length) for length in lengths) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for arm in DRAWN:
        columns = []
        for length in lengths:
            found = [row for row in of_arms[arm] if row["length"] == length]
            pair = (quantile(looseness(found, bound), 0.5) for bound in ("sampled", "distributions"))
            columns.append(", ".join(f"{one:.2g}" for one in pair))
        lines.append(f"| {arm} | " + " | ".join(columns) + " |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    low, middle, high = (quantile(values, share) for share in (0.05, 0.5, 0.95))
    return f"{middle:.2g} ({low:.2g} to {high:.2g})"


def certified_rows(cell: Cell) -> list[str]:
    """Lines of Markdown: the certificates of a cell's first policy."""
    case = next(cases_of(cell, 1))
    shown = Shown(cell.kind, cell.size, case, torch.empty(0), torch.empty(0))
    lines = []
    for arm, largest in CERTIFIED_ARMS.items():
        for batch in BATCHES:
            one = certificate(shown, all_arms()[arm], largest=largest, batch=batch, batches=CERTIFIED_BATCHES)
            numbers = (one.bias, one.enumerated, one.estimate, one.certified, one.trivial)
            lines.append(
                f"| {cell.kind} {cell.size:g}, {cell.length} | {arm} | {batch} | "
                + " | ".join(f"{number:.3g}" for number in numbers)
                + f" | {one.below} of {CERTIFIED_BATCHES} |"
            )
    return lines


def table_of_certificates(lines: list[str]) -> str:
    """Markdown of the lines of all cells."""
    head = (
        "| kind, tokens | arm | N | bias | bound, enumerated | of a batch | with 95 % certainty | trivial "
        "| below the bias |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|---|---|---|", *lines]) + "\n"
