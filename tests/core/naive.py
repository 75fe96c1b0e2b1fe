"""The correction done naively: Python floats, one sequence after the other, one metric after the other.

What the packed code is compared with; it shares nothing with it but the configuration.
"""

import math
import struct
from dataclasses import dataclass

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig

CLAMP = 20.0
# Where e^D - 1 - D is 10.
LOW, HIGH = -10.999983298020256, 2.610868638149876
LONGEST = math.log(100)
EDGES = sorted([*(digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5)), 100.0, math.log(2)])
TURN_NUMBERS = {
    "1": range(1, 2),
    "2_to_3": range(2, 4),
    "4_to_15": range(4, 16),
    "16+": range(16, 1 << 30),
}
BANDS = {
    "below_1e-4": (0.0, 1e-4),
    "1e-4_to_1e-3": (1e-4, 1e-3),
    "1e-3_to_1e-2": (1e-3, 1e-2),
    "1e-2_to_1e-1": (1e-2, 1e-1),
    "above_1e-1": (1e-1, math.inf),
}


@dataclass
class Batch:
    """Packed tokens in any order, log-probs as float32 holds them."""

    train: list[float]
    rollout: list[float]
    mask: list[bool]
    seq_ids: list[int]
    num_sequences: int
    turn_ids: list[int]
    advantages: list[float]
    routing: list[float] | None = None
    lags: list[int] | None = None


@dataclass
class Answer:
    weights: list[float]
    mask: list[bool]
    kept_sequences: list[bool]
    kept_tokens: int
    metrics: dict[str, float]


def single(value: float) -> float:
    """The nearest float32: log-probs are subtracted, and compared with bounds, in it."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def clamp(value: float, low: float = -CLAMP, high: float = CLAMP) -> float:
    return min(max(value, low), high)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def std(values) -> float:
    values = list(values)
    centre = mean(values)
    return math.sqrt(mean((value - centre) ** 2 for value in values)) if values else math.nan


def k3(d: float, linear: float) -> float:
    """e^D - 1 - D, with a clamp on either D or on that of the exponent alone."""
    return math.expm1(d) - linear


class Token:
    """One valid token and all that is derived from it alone."""

    def __init__(self, batch: Batch, t: int):
        self.t, self.seq, self.turn, self.advantage = (
            t,
            batch.seq_ids[t],
            batch.turn_ids[t],
            batch.advantages[t],
        )
        self.train, self.rollout = batch.train[t], batch.rollout[t]
        self.routing = None if batch.routing is None else batch.routing[t]
        self.exact = single(self.train - self.rollout)
        self.d = clamp(self.exact)
        self.d_clamped = clamp(self.exact, LOW, HIGH)
        self.size, self.size_clamped = abs(self.exact), min(abs(self.exact), HIGH)
        self.k3, self.k3_clamped = k3(self.d, min(self.exact, 1e8)), k3(self.d_clamped, self.d_clamped)
        self.p_train, self.p_rollout = math.exp(self.train), math.exp(self.rollout)
        self.prob_diff = self.p_train - self.p_rollout

    def divergence(self, kind: str) -> float:
        if kind == "routing":
            return self.routing
        if kind == "rollout_prob":
            return self.rollout  # its bound is compared in log space
        return {
            "ratio": self.exact,
            "opsm": -self.exact,
            "k2": self.exact**2 / 2,
            "k3": self.k3,
            "abs_diff": abs(self.prob_diff),
            "exp_abs": math.exp(abs(self.d)),
            "vaco": abs(math.exp(self.d) - 1),
            "binary_kl": bernoulli_kl(self.rollout, self.train),
        }[kind]


def bernoulli_kl(log_mu: float, log_p: float) -> float:
    """KL of two coins that fall on this token with mu and p, each at most 1 - 2^-24."""
    others, others_now = (max(-math.expm1(logprob), 2.0**-24) for logprob in (log_mu, log_p))
    return math.exp(log_mu) * (log_mu - log_p) + others * math.log(others / others_now)


def jsd(d: float) -> float:
    """Half of log(r / m) and of rho log(t / m), where r is 1, t is rho and m their mean."""
    rho = math.exp(d)
    middle = (1 + rho) / 2
    return (math.log(1 / middle) + rho * math.log(rho / middle)) / 2


def inside(rule: RejectionRule, value: float) -> bool:
    if rule.divergence == "exp_abs":
        return single(value - 1) <= single(rule.upper - 1)
    bound = math.log if rule.divergence in ("ratio", "rollout_prob") else float
    value = single(value)
    return (rule.lower is None or value >= single(bound(rule.lower))) and (
        rule.upper is None or value <= single(bound(rule.upper))
    )


def passes(rule: RejectionRule, token: Token, sequence: list[Token]) -> bool:
    """Whether the rule keeps the token; sequence holds the valid tokens of the token's sequence."""
    if rule.level == "token":
        return inside(rule, token.divergence(rule.divergence))
    if rule.level == "turn_mean":
        return inside(rule, mean(o.divergence(rule.divergence) for o in sequence if o.turn == token.turn))
    values = [other.divergence(rule.divergence) for other in sequence]
    if rule.level == "seq_max":
        return all(inside(rule, value) for value in values)
    if rule.divergence == "opsm" and sum(other.advantage for other in sequence) >= 0:
        return True
    if rule.divergence == "vaco" and token.advantage * token.exact <= 0:
        return True  # the update brings it back
    return inside(rule, sum(values) if rule.level == "seq_sum" else mean(values))


def within_second_moment(tokens: list[Token], bound: float) -> set[int]:
    """Tokens in the bins of D^2, 4096 in 54 octaves from 2^-40, up to the last whose running mean
    is within bound.
    """
    bins: dict[int, list[Token]] = {}
    for token in tokens:
        exponent = math.log2(token.exact**2) if token.exact else -math.inf
        bins.setdefault(int(clamp((exponent + 40) * 4096 / 54, 0, 4095)), []).append(token)
    kept, total, count = set(), 0.0, 0
    for at in sorted(bins):
        total += sum(token.exact**2 for token in bins[at])
        count += len(bins[at])
        if total <= bound * count:
            kept |= {token.t for token in bins[at]}
    return kept


def raw_weight(level: str, token: Token, sequence: list[Token], *, normalized: bool) -> float:
    if level == "token":
        return math.exp(token.d)
    if level == "turn":
        sequence = [other for other in sequence if other.turn == token.turn]
    total = sum(other.exact for other in sequence)
    if level == "geometric":
        return math.exp(clamp(total / len(sequence)))
    # What is divided by the batch's mean keeps its size against the others.
    return math.exp(clamp(total, -340.0, 340.0) if normalized else clamp(total))


def unit_of(level: str, token: Token) -> tuple[int, ...]:
    """What has one weight of this level: a token, a turn or a sequence."""
    return {"token": (token.t,), "turn": (token.seq, token.turn)}.get(level, (token.seq,))


def gamma(weight: float, advantage: float) -> float:
    """VESPO's; 0 where float32 has no normal number that small."""
    k, rate = (2, 3) if advantage >= 0 else (3, 2)
    unbounded = weight**k * math.exp(rate * (1 - weight))
    return unbounded if unbounded > 2.0**-126 else 0.0


def weight_bounds(config: RolloutCorrectionConfig) -> tuple[float, float]:
    low = -math.inf if config.rollout_is_lower is None else single(config.rollout_is_lower)
    return low, single(config.rollout_is_upper)


def is_outside(config: RolloutCorrectionConfig, weight: float) -> bool:
    low, high = weight_bounds(config)
    return not low <= single(weight) <= high


def bounded(config: RolloutCorrectionConfig, weight: float) -> float:
    if config.rollout_is_mode == "mask":
        return 0.0 if is_outside(config, weight) else weight
    return clamp(weight, *weight_bounds(config))


def correct(batch: Batch, config: RolloutCorrectionConfig, *, with_turns: bool = True) -> Answer:
    """All that compute_correction gives."""
    finite = [math.isfinite(a) and math.isfinite(b) for a, b in zip(batch.train, batch.rollout, strict=True)]
    tokens = [Token(batch, t) for t in range(len(batch.train)) if batch.mask[t] and finite[t]]
    sequences = [[token for token in tokens if token.seq == s] for s in range(batch.num_sequences)]
    valid = {token.t for token in tokens}

    kept, kept_sequences = set(valid), [bool(sequence) for sequence in sequences]
    rejected: dict[str, int] = {}
    for rule in config.rollout_rs:
        gone = {token.t for token in tokens if not passes(rule, token, sequences[token.seq])}
        rejected[rule.name] = len(gone)
        kept -= gone
        if rule.level.startswith("seq_") and rule.divergence != "vaco":
            for token in tokens:
                kept_sequences[token.seq] &= token.t not in gone
    if config.rollout_m2_threshold is not None:
        gone = valid - within_second_moment(tokens, config.rollout_m2_threshold)
        rejected["m2"] = len(gone)
        kept -= gone

    metrics = token_metrics(tokens) | sequence_metrics([s for s in sequences if s], sum(kept_sequences))
    metrics["nonfinite_tokens"] = sum(batch.mask) - len(tokens)
    metrics["padded_tokens"] = len(batch.mask) - sum(batch.mask)
    metrics["kept_fraction"] = mean(t in kept for t, inside in enumerate(batch.mask) if inside)
    metrics |= {
        f"rejected_fraction/{name}": n / len(tokens) if tokens else math.nan for name, n in rejected.items()
    }
    for band, (low, high) in BANDS.items():
        # Edges as float32 log-probs have them.
        low, high = single(math.log(low)) if low else -math.inf, single(math.log(high))
        metrics |= part_metrics(f"by_prob/{band}", [token for token in tokens if low <= token.rollout < high])
    for lag, ages in (("0", {0}), ("1", {1}), ("2+", set(batch.lags or ()) - {0, 1})):
        if batch.lags is not None:
            metrics |= part_metrics(
                f"by_lag/{lag}", [token for token in tokens if batch.lags[token.t] in ages]
            )
    if with_turns:
        metrics |= part_metrics("by_turn/first", [token for token in tokens if token.turn == 0])
        metrics |= part_metrics("by_turn/later", [token for token in tokens if token.turn != 0])
        for name, turns in TURN_NUMBERS.items():
            found = part_metrics(f"by_turn/{name}", [token for token in tokens if token.turn in turns])
            metrics |= {
                f"by_turn/{name}/{one}": found[f"by_turn/{name}/{one}"]
                for one in ("tokens", "k3_kl", "log_ratio_abs_mean")
            }

    weights = dict.fromkeys(valid, 1.0)
    if config.rollout_is is not None:
        raw = {
            token.t: raw_weight(
                config.rollout_is, token, sequences[token.seq], normalized=config.rollout_is_batch_normalize
            )
            for token in tokens
        }
        if config.rollout_is_mode == "gamma":
            weights = {token.t: gamma(raw[token.t], token.advantage) for token in tokens}
            outside = 0.0 if tokens else math.nan
        else:
            weights = {t: bounded(config, weight) for t, weight in raw.items()}
            outside = mean(is_outside(config, weight) for weight in raw.values())
        if config.rollout_is_batch_normalize and sum(weights.values()) > 0:
            # Each unit's weight once, however many tokens share it.
            scale = mean({unit_of(config.rollout_is, token): weights[token.t] for token in tokens}.values())
            weights = {t: weight / scale for t, weight in weights.items()}
        metrics |= weight_metrics(list(weights.values())) | {"weight_out_of_bounds": outside}

    kept_tokens = len(kept)
    if config.rollout_batch_filter_kl is not None:
        filtered = mean(token.k3 for token in tokens) > config.rollout_batch_filter_kl
        metrics["batch_filtered"] = float(filtered)
        kept_tokens = 0 if filtered else kept_tokens
    if config.diagnostics_only:
        weights, kept, kept_sequences = (
            dict.fromkeys(valid, 1.0),
            valid,
            [bool(sequence) for sequence in sequences],
        )
        kept_tokens = len(valid)
    positions = range(len(batch.train))
    return Answer(
        [weights.get(t, 0.0) for t in positions],
        [t in kept for t in positions],
        kept_sequences,
        kept_tokens,
        metrics,
    )


def token_metrics(tokens: list[Token]) -> dict[str, float]:
    p, q = [token.p_train for token in tokens], [token.p_rollout for token in tokens]
    together = mean((a - mean(p)) * (b - mean(q)) for a, b in zip(p, q, strict=True))
    return {
        "valid_tokens": len(tokens),
        "kl": mean(-token.exact for token in tokens),
        "kl_clamped": mean(-token.d_clamped for token in tokens),
        "k3_kl": mean(token.k3 for token in tokens),
        "k3_kl_clamped": mean(token.k3_clamped for token in tokens),
        "log_ratio_abs_mean": mean(token.size for token in tokens),
        "log_ratio_abs_mean_clamped": mean(token.size_clamped for token in tokens),
        "log_ratio_abs_max": max((token.size for token in tokens), default=math.nan),
        "token_mult_prob_error": mean(math.exp(abs(token.d)) for token in tokens),
        "token_mult_prob_error_clamped": mean(math.exp(token.size_clamped) for token in tokens),
        "prob_diff_abs_mean": mean(abs(token.prob_diff) for token in tokens),
        "prob_diff_abs_max": max((abs(token.prob_diff) for token in tokens), default=math.nan),
        "prob_diff_std": std(token.prob_diff for token in tokens),
        "chi2_token": mean(math.expm1(2 * token.d) for token in tokens),
        "chi2_token_clamped": mean(math.expm1(2 * token.d_clamped) for token in tokens),
        "jsd": mean(jsd(token.d) for token in tokens),
        "jsd_clamped": mean(jsd(token.d_clamped) for token in tokens),
        "pearson": together / (std(p) * std(q)) if tokens and std(p) * std(q) else math.nan,
    } | distribution([token.size for token in tokens])


def distribution(sizes: list[float]) -> dict[str, float]:
    """Percentiles of |D| as the end of the bin that each falls in, and the share of tokens in each bin."""
    ends = [next((edge for edge in EDGES if size <= single(edge)), math.inf) for size in sorted(sizes)]
    found = {"log_ratio_large_fraction": mean(size > single(math.log(2)) for size in sizes)}
    found["exact_fraction"] = mean(size == 0 for size in sizes)
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        at = math.ceil(share * len(ends)) - 1
        found[f"log_ratio_abs_{name}"] = min(ends[at], EDGES[-1]) if ends else math.nan
    names = [f"upto_{edge:.3g}" for edge in EDGES] + ["above_100"]
    for name, edge in zip(names, [*EDGES, math.inf], strict=True):
        found[f"log_ratio_abs_bin/{name}"] = mean(end == edge for end in ends)
    return found


def part_metrics(prefix: str, tokens: list[Token]) -> dict[str, float]:
    return {
        f"{prefix}/tokens": len(tokens),
        f"{prefix}/kl": mean(-token.exact for token in tokens),
        f"{prefix}/kl_clamped": mean(-token.d_clamped for token in tokens),
        f"{prefix}/k3_kl": mean(token.k3 for token in tokens),
        f"{prefix}/k3_kl_clamped": mean(token.k3_clamped for token in tokens),
        f"{prefix}/log_ratio_abs_mean": mean(token.size for token in tokens),
        f"{prefix}/log_ratio_abs_mean_clamped": mean(token.size_clamped for token in tokens),
    }


def sequence_metrics(present: list[list[Token]], kept: int) -> dict[str, float]:
    gaps = [-mean(token.exact for token in sequence) for sequence in present]
    train = [-mean(token.train for token in sequence) for sequence in present]
    rollout = [-mean(token.rollout for token in sequence) for sequence in present]
    totals = [sum(token.exact for token in sequence) for sequence in present]

    def exponentials(values: list[float], *, bound: float = CLAMP) -> float:
        return mean(math.exp(clamp(value, -bound, bound)) for value in values)

    return {
        "sequences": len(present),
        "kept_sequence_fraction": kept / len(present) if present else math.nan,
        "training_log_ppl": mean(train),
        "training_log_ppl_clamped": mean(min(value, LONGEST) for value in train),
        "rollout_log_ppl": mean(rollout),
        "rollout_log_ppl_clamped": mean(min(value, LONGEST) for value in rollout),
        "training_ppl": exponentials(train, bound=2 * CLAMP),
        "training_ppl_clamped": exponentials(train, bound=LONGEST),
        "rollout_ppl": exponentials(rollout, bound=2 * CLAMP),
        "rollout_ppl_clamped": exponentials(rollout, bound=LONGEST),
        "ppl_ratio": exponentials(gaps),
        "ppl_ratio_clamped": exponentials(gaps, bound=HIGH),
        "log_ppl_diff": mean(gaps),
        "log_ppl_diff_clamped": mean(clamp(gap, -HIGH, HIGH) for gap in gaps),
        "log_ppl_diff_abs": mean(map(abs, gaps)),
        "log_ppl_diff_abs_clamped": mean(min(abs(gap), HIGH) for gap in gaps),
        "log_ppl_diff_max": max(gaps, default=math.nan),
        "log_ppl_diff_min": min(gaps, default=math.nan),
        "ess_sequences": effective(math.exp(clamp(total, -340.0, 340.0)) for total in totals),
    } | {
        name + suffix: mean(math.expm1(2 * clamp(value, -bound, bound)) for value in values)
        for name, values in (("chi2_seq", totals), ("chi2_geo", [-gap for gap in gaps]))
        for suffix, bound in (("", CLAMP), ("_clamped", HIGH))
    }


def effective(weights) -> float:
    """The share of weights [n], n > 0, that as many equal ones would need for the same spread of a mean."""
    weights = list(weights)
    return 1 / mean((weight / mean(weights)) ** 2 for weight in weights) if weights else math.nan


def weight_metrics(weights: list[float]) -> dict[str, float]:
    average = mean(weights)
    return {
        "weight_mean": average,
        "weight_std": std(weights),
        "weight_max": max(weights, default=math.nan),
        "weight_min": min(weights, default=math.nan),
        "ess": 1 / mean((weight / average) ** 2 for weight in weights) if weights and average else math.nan,
    }
