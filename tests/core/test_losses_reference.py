"""Every loss, penalty and aggregation against autograd of a naive one: float64, one sequence after the other.

Log-probs are multiples of 2^-16 below 64, so that float32 subtracts them exactly, as float64 does: what
differs is the formulas' own rounding. Errors are shares of the sum of the sizes of all terms and not of
their sum: where terms of unlike signs cancel, as e^-d and 1 in k3's gradient or A and b log r in dro's,
float32 has lost the digits below.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.losses import AGGREGATIONS, KL_TYPES, LOSS_KINDS, LOSSES
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import Correction, Lengths
from megatron_rl_corr.core.losses import policy_loss
from tests.core.naive import bernoulli_kl

CAP = 20.0
LOGPROBS = ("now", "old", "reference", "rollout")
PRECISION = 1e-6
"""Largest error, as a share of the sum of the sizes of all terms: 17 roundings of float32."""


def surrogate(ratio, advantage, config):
    low, high = config.clip
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if config.kind.dual_clip and config.clip_ratio_c is not None and advantage < 0:
        value = torch.maximum(value, torch.tensor(config.clip_ratio_c * advantage, dtype=value.dtype))
    return value


def naive_token(now, old, advantage, weight, config):
    """The loss of one token; of dro the term of the advantage."""
    low, high = config.clip
    ratio = (now - old).exp()
    if config.loss in ("reinforce", "rloo"):
        return -weight * advantage * now
    if config.loss == "cispo":
        return -weight * advantage * min(max(ratio.item(), 1 - low), 1 + high) * now
    if config.loss == "sapo":
        temperature = config.sapo_temperature_pos if advantage > 0 else config.sapo_temperature_neg
        return -weight * advantage * 4 / temperature / (1 + (-temperature * (ratio - 1)).exp())
    if config.loss == "dro":
        return -weight * advantage * now
    if config.loss == "dppo_kl":
        outwards = now > old if advantage > 0 else now < old
        if outwards and bernoulli_kl(old, now.item()) > (high if advantage > 0 else low):
            return 0.0 * now
        return -weight * advantage * min(ratio.item(), CAP) * now
    if config.loss == "dppo_tv":
        gain = math.exp(now.item()) - math.exp(old)
        if gain > high if advantage > 0 else gain < -low:
            return 0.0 * now
        return -weight * advantage * min(ratio.item(), CAP) * now
    return -weight * surrogate(ratio, advantage, config)


def naive_policy(tokens, now, case, config):
    """Terms of one sequence's kept tokens; GSPO's in its sequence form, through the mean of log-ratios."""
    old, weights, advantages = case["old"], case["weights"], case["advantages"]
    if config.loss != "gspo" or not tokens:
        terms = [naive_token(now[t], old[t], advantages[t], weights[t], config) for t in tokens]
        if config.loss == "dro":
            terms += [weights[t] * config.dro_beta / 2 * (now[t] - old[t]) ** 2 for t in tokens]
        return terms
    mean = sum(now[t] - old[t] for t in tokens) / len(tokens)
    return [-len(tokens) * weights[tokens[0]] * surrogate(mean.exp(), advantages[tokens[0]], config)]


def bounded_k3(d):
    """The terms of e^-d - 1 + d, at most 10."""
    return [(-d).exp(), d - 1] if (-d).exp() - 1 + d <= 10 else [torch.full_like(d, 10.0).detach()]


def naive_reference_kl(now, t, case, config):
    """Terms. k1, k2, k3 as they read; the gradients of k3+ and unbiased through the probability of
    the token itself.

    The score function of an expectation: grad (pi k3) = pi (k3 + 1 - e^-d) psi = pi d psi, with pi /
    sg(pi) = 1 for k3+ and pi over the policy that sampled for unbiased. The bound of 10 is on values, and
    leaves their gradients alone.
    """
    d = now - case["reference"][t]
    if config.kl_loss_type in ("k1", "k2", "k3"):
        return {"k1": [d], "k2": [d * d / 2], "k3": bounded_k3(d)}[config.kl_loss_type]
    log_scale = now - now.item()
    if config.kl_loss_type == "unbiased":
        log_scale = now - case["old"][t] + (0.0 if config.bypass_mode else math.log(case["weights"][t]))
    free = log_scale.exp() * ((-d).exp() - 1 + d)
    bound = log_scale.exp().item() * sum(bounded_k3(d)).item()
    return [free + (bound - free.item())]


def naive_terms(tokens, now, case, config):
    """All terms of the loss of one sequence's kept tokens."""
    terms = naive_policy(tokens, now, case, config)
    for t in tokens:
        d = now[t] - case["rollout"][t]
        pull = [d * d] if config.sampler_kl_type == "squared" else bounded_k3(-d)
        terms += [config.kl_loss_coef * term for term in naive_reference_kl(now[t], t, case, config)]
        terms += [config.sampler_kl_coef * term for term in pull] + [-config.entropy_coef * (now[t] * now[t])]
    return terms


def naive_total(now, case, config):
    """The aggregated loss, as its definition reads, as a list of the terms that it is the sum of."""
    valid, kept, ids = case["valid"], case["kept"], case["seq_ids"]
    counted = valid if config.loss_denominator == "valid" else kept
    total, sequences = [], {s for s, c in zip(ids, counted, strict=True) if c}
    for s in sorted(set(ids)):
        inside = [t for t, i in enumerate(ids) if i == s and kept[t]]
        length = sum(counted[t] for t, i in enumerate(ids) if i == s)
        divisor = {
            "token-mean": max(sum(counted), 1),
            "seq-mean-token-mean": max(length, 1) * max(len(sequences), 1),
        }.get(config.aggregation, max(len(sequences), 1) * (config.loss_scale_length or 1))
        total += [term / divisor for term in naive_terms(inside, now, case, config)]
    return total


@st.composite
def cases(draw):
    """Interleaved sequences of unlike lengths with holes and rejected tokens; NaN wherever
    nothing may be read.
    """
    generator = random.Random(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    spread, hole = draw(st.sampled_from([0.05, 0.3, 1.5])), draw(st.sampled_from([0.0, 0.3, 1.0]))
    seq_ids = [s for s, length in enumerate(lengths) for _ in range(length)]
    generator.shuffle(seq_ids)
    of_sequence = [(generator.gauss(0, 1), generator.expovariate(1)) for _ in lengths]
    one_weight = draw(st.booleans())
    case = {"seq_ids": seq_ids, "num_sequences": len(lengths), "valid": [], "kept": []}
    case |= {name: [] for name in ("now", "old", "reference", "rollout", "advantages", "weights")}
    for s in seq_ids:
        valid = generator.random() >= hole
        kept = valid and generator.random() < 0.8
        old = -generator.expovariate(0.5) - 0.01
        values = {
            "old": old,
            **{
                name: min(old + generator.gauss(0, spread), -1e-3) for name in ("now", "reference", "rollout")
            },
            "advantages": of_sequence[s][0],
            "weights": of_sequence[s][1] if one_weight else generator.expovariate(1),
        }
        for name, value in values.items():
            value = round(value * 2**16) / 2**16 if name in LOGPROBS else torch.tensor(value).item()
            case[name].append(value if kept else math.nan)
        case["valid"].append(valid)
        case["kept"].append(kept)
    return case | {"one_weight": one_weight}


@st.composite
def loss_configs(draw):
    loss, aggregation = draw(st.sampled_from(LOSSES)), draw(st.sampled_from([None, *AGGREGATIONS]))
    norm = (aggregation or LOSS_KINDS[loss].aggregation) == "seq-mean-token-sum-norm"
    kl, pull = draw(st.sampled_from([0.0, 0.2])), draw(st.sampled_from([0.0, 0.3]))
    own = {"dro_beta": draw(st.sampled_from([0.05, 1.5]))} if loss == "dro" else {}
    if loss == "sapo":
        own = dict.fromkeys(
            ["sapo_temperature_pos", "sapo_temperature_neg"], draw(st.sampled_from([0.7, 1.3]))
        )
        own |= {"sapo_temperature_neg": draw(st.sampled_from([1.05, 2.5]))}
    bypass = draw(st.booleans())
    return RolloutCorrectionConfig(
        loss=loss,
        loss_aggregation=aggregation,
        loss_scale_length=5 if norm else None,
        bypass_mode=bypass,
        loss_denominator="valid" if bypass else draw(st.sampled_from(["valid", "kept"])),
        kl_loss_coef=kl,
        kl_loss_type=draw(st.sampled_from(KL_TYPES)) if kl else "k3",
        sampler_kl_coef=pull,
        sampler_kl_type=draw(st.sampled_from(["squared", "k3"])) if pull else "squared",
        entropy_coef=draw(st.sampled_from([0.0, 0.1])),
        **own,
    )


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(cases(), loss_configs())
def test_loss_and_gradient_when_configured_at_random_then_autograd_of_the_naive_one(case, config):
    assert_as_naive(case, config)


@pytest.mark.parametrize("bypass_mode", [False, True])
@pytest.mark.parametrize("kind", KL_TYPES)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_reference_penalty_when_of_each_kind_then_autograd_of_the_naive_one(kind, bypass_mode, case):
    assert_as_naive(
        case,
        RolloutCorrectionConfig(
            loss="reinforce", kl_loss_coef=2.0, kl_loss_type=kind, bypass_mode=bypass_mode
        ),
    )


@pytest.mark.parametrize("kind", ["squared", "k3"])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_pull_to_the_sampler_when_of_each_kind_then_autograd_of_the_naive_one(kind, case):
    assert_as_naive(
        case, RolloutCorrectionConfig(loss="reinforce", sampler_kl_coef=2.0, sampler_kl_type=kind)
    )


def assert_as_naive(case, config):
    if config.loss == "gspo" and not case["one_weight"]:
        # With unequal weights inside a sequence the two forms differ: the token form weighs each
        # gradient by its own.
        case["weights"] = [0.5] * len(case["weights"])
    naive = torch.tensor(case["now"], dtype=torch.float64, requires_grad=True)
    terms = naive_total(naive, case, config)
    gradients = [term_gradient(term, naive) for term in terms]

    total, gradient = packed(case, config)
    sizes = sum(abs(term.item()) for term in terms)
    assert total == pytest.approx(sum(term.item() for term in terms), rel=0, abs=PRECISION * sizes + 1e-30)
    for t, found in enumerate(gradient):
        shares = [of_term[t] for of_term in gradients]
        assert found == pytest.approx(sum(shares), rel=0, abs=PRECISION * sum(map(abs, shares)) + 1e-30), t


def term_gradient(term, naive):
    """d term / d log pi_theta [T]; 0 where the term does not depend on it."""
    if not term.requires_grad:
        return [0.0] * len(naive)
    return torch.autograd.grad(term, naive, retain_graph=True)[0].nan_to_num(0.0).tolist()


def packed(case, config):
    """(aggregated loss, its gradient [T]) of the code under test."""
    now = torch.tensor(case["now"], dtype=torch.float32, requires_grad=True)
    mask, valid = (torch.tensor(case[name], dtype=torch.bool) for name in ("kept", "valid"))
    seq_ids, sequences = torch.tensor(case["seq_ids"], dtype=torch.int64), case["num_sequences"]
    counted = valid if config.loss_denominator == "valid" else mask
    tokens = torch.zeros(sequences, dtype=torch.float64).index_add_(0, seq_ids, counted.double())
    correction = Correction(
        torch.tensor(case["weights"]),
        mask,
        valid,
        torch.ones(sequences, dtype=torch.bool),
        valid.sum().double(),
        mask.sum().double(),
        Lengths(config.loss_denominator, tokens, (tokens > 0).sum().double()),
        torch.ones(sequences).double(),
    )
    losses = policy_loss(
        config.loss,
        now,
        torch.tensor(case["old"]),
        torch.tensor(case["advantages"]),
        correction,
        config,
        seq_ids=seq_ids,
        num_sequences=sequences,
        ref_logprobs=torch.tensor(case["reference"]),
        rollout_logprobs=torch.tensor(case["rollout"]),
        entropy=torch.where(mask, now, 0.0).square(),
        metrics={},
    )
    total = (losses * token_coefficients(correction, seq_ids, config)).sum()
    total.backward()
    return total.item(), now.grad.tolist()
