"""Every loss and aggregation against autograd of a naive one: float64, one sequence after the other."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.losses import AGGREGATIONS, LOSS_KINDS, LOSSES
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import Correction, Lengths
from megatron_rl_corr.core.losses import policy_loss
from tests.core.naive import bernoulli_kl

CAP = 20.0


def surrogate(ratio, advantage, config):
    low, high = config.clip
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if config.kind.dual_clip and config.clip_ratio_c is not None and advantage < 0:
        value = torch.maximum(value, torch.tensor(config.clip_ratio_c * advantage, dtype=value.dtype))
    return value


def naive_token(now, old, advantage, weight, config):
    """The loss of one token."""
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
        return -weight * (advantage * now - config.dro_beta / 2 * (now - old) ** 2)
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


def naive_sequence(tokens, now, case, config):
    """Sum of the losses of one sequence's kept tokens; GSPO's in its sequence form, through the mean of log-ratios."""
    if not tokens:
        return now.new_zeros(())
    advantage = case["advantages"][tokens[0]]
    if config.loss == "gspo":
        mean = sum(now[t] - case["old"][t] for t in tokens) / len(tokens)
        total = -len(tokens) * case["weights"][tokens[0]] * surrogate(mean.exp(), advantage, config)
    else:
        total = sum(naive_token(now[t], case["old"][t], advantage, case["weights"][t], config) for t in tokens)
    for t in tokens:
        d = now[t] - case["reference"][t]
        kl = {"k1": d, "k2": d * d / 2, "k3": ((-d).exp() - 1 + d).clamp(max=10)}[config.kl_loss_type]
        total = total + config.kl_loss_coef * kl - config.entropy_coef * (now[t] * now[t])
    return total


def naive_total(now, case, config):
    """The aggregated loss, as its definition reads."""
    valid, kept, ids = case["valid"], case["kept"], case["seq_ids"]
    counted = valid if config.loss_denominator == "valid" else kept
    total, sequences = now.new_zeros(()), {s for s, c in zip(ids, counted, strict=True) if c}
    for s in sorted(set(ids)):
        inside = [t for t, i in enumerate(ids) if i == s and kept[t]]
        length = sum(counted[t] for t, i in enumerate(ids) if i == s)
        value = naive_sequence(inside, now, case, config)
        if config.aggregation == "token-mean":
            total = total + value / max(sum(counted), 1)
        elif config.aggregation == "seq-mean-token-mean":
            total = total + value / max(length, 1) / max(len(sequences), 1)
        else:
            total = total + value / max(len(sequences), 1) / (config.loss_scale_length or 1)
    return total


@st.composite
def cases(draw):
    """Interleaved sequences of unlike lengths with holes and rejected tokens; NaN wherever nothing may be read."""
    generator = random.Random(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    spread, hole = draw(st.sampled_from([0.05, 0.3, 1.5])), draw(st.sampled_from([0.0, 0.3, 1.0]))
    seq_ids = [s for s, length in enumerate(lengths) for _ in range(length)]
    generator.shuffle(seq_ids)
    of_sequence = [(generator.gauss(0, 1), generator.expovariate(1)) for _ in lengths]
    one_weight = draw(st.booleans())
    case = {"seq_ids": seq_ids, "num_sequences": len(lengths), "valid": [], "kept": []}
    case |= {name: [] for name in ("now", "old", "reference", "advantages", "weights")}
    for s in seq_ids:
        valid = generator.random() >= hole
        kept = valid and generator.random() < 0.8
        old = -generator.expovariate(0.5) - 0.01
        values = {
            "now": min(old + generator.gauss(0, spread), -1e-3), "old": old,
            "reference": old + generator.gauss(0, spread),
            "advantages": of_sequence[s][0],
            "weights": of_sequence[s][1] if one_weight else generator.expovariate(1),
        }
        for name, value in values.items():
            case[name].append(torch.tensor(value, dtype=torch.float32).item() if kept else math.nan)
        case["valid"].append(valid)
        case["kept"].append(kept)
    return case | {"one_weight": one_weight}


@st.composite
def loss_configs(draw):
    loss, aggregation = draw(st.sampled_from(LOSSES)), draw(st.sampled_from([None, *AGGREGATIONS]))
    norm = (aggregation or LOSS_KINDS[loss].aggregation) == "seq-mean-token-sum-norm"
    kl = draw(st.sampled_from([0.0, 0.2]))
    own = {"dro_beta": draw(st.sampled_from([0.05, 1.5]))} if loss == "dro" else {}
    if loss == "sapo":
        own = dict.fromkeys(["sapo_temperature_pos", "sapo_temperature_neg"], draw(st.sampled_from([0.7, 1.3])))
        own |= {"sapo_temperature_neg": draw(st.sampled_from([1.05, 2.5]))}
    return RolloutCorrectionConfig(
        loss=loss, loss_aggregation=aggregation, loss_scale_length=5 if norm else None,
        loss_denominator=draw(st.sampled_from(["valid", "kept"])), kl_loss_coef=kl,
        kl_loss_type=draw(st.sampled_from(["k1", "k2", "k3"])) if kl else "k3",
        entropy_coef=draw(st.sampled_from([0.0, 0.1])), **own,
    )


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(cases(), loss_configs())
def test_loss_and_gradient_when_configured_at_random_then_autograd_of_the_naive_one(case, config):
    if config.loss == "gspo" and not case["one_weight"]:
        # With unequal weights inside a sequence the two forms differ: the token form weighs each gradient by its own.
        case["weights"] = [0.5] * len(case["weights"])
    naive = torch.tensor(case["now"], dtype=torch.float64, requires_grad=True)
    expected = naive_total(naive, case, config)

    now = torch.tensor(case["now"], dtype=torch.float32, requires_grad=True)
    mask, valid = (torch.tensor(case[name], dtype=torch.bool) for name in ("kept", "valid"))
    seq_ids, sequences = torch.tensor(case["seq_ids"], dtype=torch.int64), case["num_sequences"]
    counted = valid if config.loss_denominator == "valid" else mask
    tokens = torch.zeros(sequences, dtype=torch.float64).index_add_(0, seq_ids, counted.double())
    correction = Correction(
        torch.tensor(case["weights"]), mask, valid, torch.ones(sequences, dtype=torch.bool), valid.sum().double(),
        mask.sum().double(), Lengths(config.loss_denominator, tokens, (tokens > 0).sum().double()),
        torch.ones(sequences).double(),
    )
    losses = policy_loss(
        config.loss, now, torch.tensor(case["old"]), torch.tensor(case["advantages"]), correction, config,
        seq_ids=seq_ids, num_sequences=sequences, ref_logprobs=torch.tensor(case["reference"]),
        entropy=torch.where(mask, now, 0.0).square(), metrics={},
    )
    total = (losses * token_coefficients(correction, seq_ids, config)).sum()
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    if expected.requires_grad:
        expected.backward()
        assert now.grad.tolist() == pytest.approx(naive.grad.nan_to_num(0.0).tolist(), rel=1e-3, abs=2e-6)
    else:
        assert now.grad.tolist() == [0.0] * len(now)
