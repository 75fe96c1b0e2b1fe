"""The packed code against the naive one over thousands of random configurations and batches.

Also the gradient of the whole loss against autograd of a naive one.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.rules import DIVERGENCES
from megatron_rl_corr.core.correction import Correction, compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.reduce.collectives import all_reduce_metrics
from tests.core.naive import Batch, correct
from tests.tiers import IN_MATRIX, matrix

pytestmark = matrix

RULES = [(level, kind) for kind, row in DIVERGENCES.items() for level in row.levels]
# Bounds with many digits: a random value is never on one.
UPPER = {
    "ratio": [1.0317, 1.413, 3.171],
    "k2": [0.01131, 0.917],
    "k3": [0.01131, 0.917],
    "abs_diff": [0.0317, 0.4113],
    "exp_abs": [1.0517, 2.0713],
    "opsm": [0.00517, 0.3117],
    "routing": [0.1117, 0.6171],
    "binary_kl": [0.00517, 0.2117],
    "vaco": [0.0117, 0.6117],
}
LOWER = {"ratio": [0.3117, 0.9513], "rollout_prob": [0.00217, 0.2713]}


@st.composite
def rules(draw) -> tuple[RejectionRule, ...]:
    chosen = []
    for level, kind in draw(st.lists(st.sampled_from(RULES), unique=True, max_size=3)):
        lower = draw(st.sampled_from([*LOWER[kind], None] if kind == "ratio" else LOWER.get(kind, [None])))
        upper = draw(st.sampled_from(UPPER.get(kind, [None])))
        if kind == "ratio" and lower is not None and draw(st.booleans()):
            upper = None
        chosen.append(RejectionRule(level, kind, lower, upper))
    return tuple(chosen)


@st.composite
def configs(draw) -> RolloutCorrectionConfig:
    fields = {}
    level = draw(st.sampled_from([None, "token", "sequence", "geometric", "turn"]))
    if level is not None:
        mode = draw(st.sampled_from(["truncate", "clip", "mask"]))
        lower = [None] if mode == "truncate" else [0.3117, 0.9171] + [None] * (mode == "mask")
        fields = {
            "rollout_is": level,
            "rollout_is_mode": mode,
            "rollout_is_upper": draw(st.sampled_from([1.3117, 5.171])),
            "rollout_is_lower": draw(st.sampled_from(lower)),
            "rollout_is_batch_normalize": draw(st.booleans()),
        }
    if level == "sequence" and draw(st.booleans()):
        fields = {"rollout_is": level, "rollout_is_mode": "gamma"}
    return RolloutCorrectionConfig(
        rollout_rs=draw(rules()),
        rollout_m2_threshold=draw(st.sampled_from([None, None, 0.0117, 0.5171])),
        rollout_batch_filter_kl=draw(st.sampled_from([None, None, 0.00117, 0.1171])),
        diagnostics_only=draw(st.sampled_from([False, False, False, True])),
        loss_denominator=draw(st.sampled_from(["valid", "kept"])),
        loss_aggregation=draw(st.sampled_from(["token-mean", "seq-mean-token-mean"])),
        **fields,
    )


@st.composite
def batches(draw) -> Batch:
    """Packed tokens in random order: unlike lengths, empty sequences, holes, outliers, NaN and
    infinities anywhere.
    """
    lengths = draw(st.lists(st.integers(0, 9), max_size=6))
    generator = random.Random(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([1e-3, 0.02, 0.4, 3.0]))
    outliers = draw(st.sampled_from([0.0, 0.05]))
    hole, broken = draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.sampled_from([0.0, 0.1]))
    seq_ids = [s for s, length in enumerate(lengths) for _ in range(length)]
    generator.shuffle(seq_ids)
    train, rollout, mask = [], [], []
    for _ in seq_ids:
        higher = -generator.expovariate(0.4) - 0.01
        gap = generator.gauss(0, generator.choice([30.0, 150.0]) if generator.random() < outliers else spread)
        train.append(higher + min(gap, 0.0))
        rollout.append(higher - max(gap, 0.0))
        mask.append(generator.random() >= hole)
        for side in (train, rollout):
            if generator.random() < (broken if mask[-1] else 0.5):
                side[-1] = generator.choice([math.nan, math.inf, -math.inf])
    per_sequence = [generator.choice([-1.5, -0.25, 0.0, 0.75]) for _ in lengths]
    as_float32 = [torch.tensor(side, dtype=torch.float32).tolist() for side in (train, rollout)]
    return Batch(
        *as_float32,
        mask,
        seq_ids,
        len(lengths),
        turn_ids=[generator.choice([0, 0, 1, 5]) for _ in seq_ids],
        advantages=[per_sequence[s] for s in seq_ids],
        routing=[generator.choice([0, 0, 0.25, 0.5, 1.0]) for _ in seq_ids],
    )


def packed(batch: Batch, config: RolloutCorrectionConfig, *, with_turns: bool = True) -> Correction:
    return compute_correction(
        torch.tensor(batch.train),
        torch.tensor(batch.rollout),
        torch.tensor(batch.mask, dtype=torch.bool),
        torch.tensor(batch.seq_ids, dtype=torch.int64),
        num_sequences=batch.num_sequences,
        config=config,
        turn_ids=torch.tensor(batch.turn_ids, dtype=torch.int64) if with_turns else None,
        num_turns=6,
        advantages=torch.tensor(batch.advantages),
        routing=torch.tensor(batch.routing, dtype=torch.float32),
    )


def looks_at_turns(config: RolloutCorrectionConfig) -> bool:
    return config.rollout_is == "turn" or any(rule.level == "turn_mean" for rule in config.rollout_rs)


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Where both sides are a float64's digits, the difference of large sums leaves an absolute error.
        if name == "pearson":
            # Two or three tokens of all but one probability have no digits of a correlation.
            assert math.isnan(found[name]) or found[name] == pytest.approx(value, abs=1e-6), name
        else:
            floor = 2e-8 if "std" in name else 1e-11
            assert found[name] == pytest.approx(value, rel=1e-6, abs=floor, nan_ok=True), name


@settings(max_examples=3000 if IN_MATRIX else 400, deadline=None, derandomize=True, database=None)
@given(batches(), configs(), st.booleans())
def test_correction_when_configured_at_random_then_the_naive_one(batch, config, with_turns):
    with_turns = with_turns or looks_at_turns(config)
    expected = correct(batch, config, with_turns=with_turns)
    correction = packed(batch, config, with_turns=with_turns)
    assert correction.weights.tolist() == pytest.approx(expected.weights, rel=1e-6, abs=1e-15)
    assert correction.mask.tolist() == expected.mask
    assert correction.kept_sequences.tolist() == expected.kept_sequences
    assert correction.valid_tokens.item() == expected.metrics["valid_tokens"]
    assert correction.kept_tokens.item() == expected.kept_tokens
    if config.aggregation != "token-mean":
        counted = expected.mask if config.loss_denominator == "kept" else correction.valid.tolist()
        lengths = [
            sum(batch.seq_ids[t] == s for t, c in enumerate(counted) if c) for s in range(batch.num_sequences)
        ]
        assert correction.lengths.tokens.tolist() == lengths
        assert correction.lengths.sequences.item() == sum(length > 0 for length in lengths)
    assert_same_metrics(all_reduce_metrics(correction.metrics, None), expected.metrics)


def naive_loss(now, old, advantages, weights, kept, denominator, config):
    """Sum over tokens in float64, one by one; now is a leaf."""
    total = now.new_zeros(())
    for t in range(len(old)):
        if kept[t]:
            ratio = (now[t] - old[t]).exp()
            clipped = ratio.clamp(1 - config.clip[0], 1 + config.clip[1])
            surrogate = torch.minimum(ratio * advantages[t], clipped * advantages[t])
            if advantages[t] < 0:
                surrogate = surrogate.clamp(min=config.clip_ratio_c * advantages[t])
            total = total - weights[t] * surrogate
    return total / denominator


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(batches(), configs(), st.integers(0, 2**32))
def test_gradient_when_configured_at_random_then_autograd_of_the_naive_loss(batch, config, seed):
    generator = random.Random(seed)
    old = batch.train
    moved = [logprob + generator.gauss(0, 0.3) for logprob in old]
    expected = correct(batch, config)
    denominator = (
        expected.metrics["valid_tokens"] if config.loss_denominator == "valid" else expected.kept_tokens
    )

    naive = torch.tensor(moved, dtype=torch.float64, requires_grad=True)
    naive_total = naive_loss(
        naive, old, batch.advantages, expected.weights, expected.mask, max(denominator, 1), config
    )
    now = torch.tensor(moved, dtype=torch.float32, requires_grad=True)
    correction = packed(batch, config)
    losses = policy_loss(
        config.loss, now, torch.tensor(old), torch.tensor(batch.advantages), correction, config
    )
    total = losses.sum() / correction.denominator(config.loss_denominator)
    total.backward()
    assert total.item() == pytest.approx(naive_total.item(), rel=1e-4, abs=1e-6)
    if any(expected.mask):
        naive_total.backward()
        assert now.grad.tolist() == pytest.approx(naive.grad.tolist(), rel=1e-4, abs=1e-7)
    else:
        assert now.grad.tolist() == [0.0] * len(old)
