"""The ledger's arithmetic by hand: a chain of policies, shares that add up to 1, and what is blamed when."""

import math

import numpy as np
import pytest
import torch

from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.core.ledger_places import LEAST_TOKENS
from megatron_rl_corr.core.ledger_verdict import (
    NOISE,
    blamed_terms,
    sampling_line,
    verdict_line,
)
from megatron_rl_corr.features.ledger.chain import split_log_ratio
from megatron_rl_corr.features.ledger.distances import ListedTokens, distance_metrics
from megatron_rl_corr.features.ledger.draw import draw_order, drawn_count
from megatron_rl_corr.features.ledger.metrics import ledger_metrics, surplus_metrics, temperature_metrics

REQUIRED = ["--rollout-url", "http://a:1", "--rollout-prompts", "p", "--rollout-hf-checkpoint", "m"]
REQUIRED += ["--rollout-reward-function", "math"]
NAN = math.nan


def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def test_chain_of_two_tokens_then_each_step_is_the_difference_of_neighbours():
    # p_0 = -1, -2; behind staleness -1.25, -2.5; behind rounding -1.5, -2; prefill -1.75, -3; sampled -2, -2.
    passes = {"rounding": values(-1.5, -2.0), "staleness": values(-1.25, -2.5)}
    terms = split_log_ratio(values(-1.0, -2.0), passes, values(-1.75, -3.0), values(-2.0, -2.0))
    assert {name: term.tolist() for name, term in terms.items()} == {
        "staleness": [0.25, 0.5],
        "rounding": [0.25, -0.5],
        "rest": [0.25, 1.0],
        "decode": [0.25, -1.0],
    }
    assert list(terms) == ["staleness", "rounding", "rest", "decode"]


def test_chain_when_a_policy_is_unknown_then_its_part_is_in_the_next_term():
    # The first token has no weights at sampling, the second no prefill.
    passes = {"staleness": values(NAN, -2.5), "head": values(-1.5, -2.0)}
    terms = split_log_ratio(values(-1.0, -2.0), passes, values(-1.75, NAN), values(-2.0, -3.0))
    assert {name: term.tolist() for name, term in terms.items()} == {
        "staleness": [0.0, 0.5],
        "head": [0.5, -0.5],
        "rest": [0.25, 1.0],
        "decode": [0.25, 0.0],
    }


def test_chain_of_random_log_probs_then_terms_add_up_to_the_log_ratio():
    generator = torch.Generator().manual_seed(0)
    trained, stale, routed, head, rounded, prefill, sampled = -20 * torch.rand(7, 1000, generator=generator)
    stale[::3], prefill[::2] = NAN, NAN
    passes = {"staleness": stale, "routing": routed, "head": head, "rounding": rounded}
    for given in (prefill, None):
        terms = split_log_ratio(trained, passes, given, sampled)
        total = sum(terms.values())
        assert (total - (trained.double() - sampled.double())).abs().max() < 1e-12
        assert ("decode" in terms) == (given is not None)


def numbers_of(terms, valid, third=(0, 1, 2), known=None):
    tensors = {name: torch.tensor(term, dtype=torch.float64) for name, term in terms.items()}
    known = {name: torch.tensor(tokens) for name, tokens in (known or {}).items()}
    made = ledger_metrics(tensors, torch.tensor(valid), torch.tensor(third), known)
    return {name: metric.value() for name, metric in made.items()}


def test_metrics_of_three_tokens_then_the_numbers_by_hand():
    # Two valid tokens: D = 1 + 2 = 3 and -2 + 1 = -1, so sum D^2 = 10; staleness 1 * 3 + -2 * -1 = 5, rest
    # 2 * 3 + 1 * -1 = 5.
    found = numbers_of(
        {"staleness": [1.0, 7.0, -2.0], "rest": [2.0, 7.0, 1.0]},
        [True, False, True],
        known={"staleness": [True, True, False]},
    )
    assert found == pytest.approx(
        {
            "ledger/tokens": 2,
            "ledger/mean": 1.0,
            "ledger/mean_abs": 2.0,
            "ledger/mean_square": 5.0,
            "ledger/staleness/share": 0.5,
            "ledger/staleness/mean": -0.5,
            "ledger/staleness/mean_abs": 1.5,
            "ledger/staleness/known": 0.5,
            "ledger/rest/share": 0.5,
            "ledger/rest/mean": 1.5,
            "ledger/rest/mean_abs": 1.5,
            "ledger/rest/by_position/first": 2.0,
            "ledger/rest/by_position/middle": NAN,
            "ledger/rest/by_position/last": 1.0,
        },
        nan_ok=True,
    )


def test_metrics_when_terms_oppose_each_other_then_shares_add_up_to_one_and_one_is_negative():
    found = numbers_of({"head": [-1.0, 0.5, 0.0], "rest": [2.0, -1.0, 0.0]}, [True, True, True])
    assert found["ledger/head/share"] == -1.0 and found["ledger/rest/share"] == 2.0


def test_temperature_when_the_sampler_is_hotter_then_it_is_found_from_its_log_probs():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4000, 50, generator=generator, dtype=torch.float64)
    policy, sampler = logits.log_softmax(1), (logits / 1.05).log_softmax(1)
    labels = sampler.exp().multinomial(1, generator=generator)
    decode = (policy - sampler).gather(1, labels)[:, 0]
    slope = policy.gather(1, labels)[:, 0] - (policy.exp() * policy).sum(1)
    found = temperature_metrics(decode, slope, torch.ones(4000, dtype=torch.bool))
    assert found["ledger/decode/as_temperature"].value() == pytest.approx(1.05, abs=2e-3)
    assert found["ledger/decode/as_temperature_share"].value() > 0.99
    other = temperature_metrics(0.05 * torch.randn(4000, generator=generator), slope, decode.isfinite())
    assert other["ledger/decode/as_temperature_share"].value() < 0.01


def logged(tokens, mean_abs, **terms):
    found = {"ledger/tokens": tokens, "ledger/mean_abs": mean_abs, "ledger/noise": NOISE["bfloat16"]}
    for name, (share, size) in terms.items():
        found |= {f"ledger/{name}/share": share, f"ledger/{name}/mean_abs": size}
    return found


def test_blame_when_the_mismatch_is_more_than_rounding_then_the_terms_that_carry_it():
    numbers = logged(500, 0.1, staleness=(0.7, 0.08), rest=(0.05, 0.02), routing=(0.25, 0.03))
    assert blamed_terms(numbers) == [("staleness", 0.7), ("routing", 0.25)]
    line = verdict_line(numbers, ["decode"])
    assert line == (
        "mismatch: 70 % staleness (mean size 0.08), 25 % routing (mean size 0.03); 500 tokens, mean |D| 0.1, "
        "all parts: staleness 70 %, routing 25 %, rest 5 %; in the rest, as no pass takes them: decode"
    )


@pytest.mark.parametrize(
    ("tokens", "mean_abs", "words"),
    [
        (500, NOISE["bfloat16"], "no more than rounding (mean |D| up to 0.015), nothing is blamed"),
        (LEAST_TOKENS - 1, 1.0, "too few tokens for a verdict"),
        (500, NAN, "not known, as a log-prob is no number"),
        (0, NAN, "no token with log-probs of both sides"),
    ],
)
def test_blame_when_rounding_explains_it_or_tokens_are_few_then_nothing(tokens, mean_abs, words):
    numbers = logged(tokens, mean_abs, staleness=(0.9, 1.0), rest=(0.1, 0.1))
    assert blamed_terms(numbers) == []
    assert words in verdict_line(numbers)


def test_blame_when_a_second_term_is_within_the_noise_then_the_largest_alone():
    numbers = logged(500, 0.02, rest=(0.85, 0.018), head=(0.15, 0.004))
    assert blamed_terms(numbers) == [("rest", 0.85)]


def test_flags_when_they_have_no_effect_or_no_meaning_then_refused_by_name():
    for flags, words in {
        ("--rollout-ledger-share", "0.5"): "--rollout-ledger-share.*--rollout-ledger-interval",
        ("--rollout-ledger-interval", "0"): "--rollout-ledger-interval must be positive",
        ("--rollout-ledger-interval", "1", "--rollout-ledger-share", "2"): "--rollout-ledger-share must be",
    }.items():
        with pytest.raises(ValueError, match=words):
            parse([*REQUIRED, *flags])
    options = parse([*REQUIRED, "--rollout-ledger-interval", "20"])[1]
    assert options.ledger_interval == 20 and options.ledger_share == 1 / 64
    assert parse(REQUIRED)[1].ledger_interval is None


def test_draw_when_samples_are_long_then_the_share_rounded_up_to_the_unit():
    assert drawn_count(1 / 64, np.array([2000] * 128), 1) == 2
    assert drawn_count(1 / 64, np.array([2000] * 130), 1) == 3
    assert drawn_count(1 / 64, np.array([2000] * 130), 4) == 4
    assert drawn_count(1.0, np.array([2000] * 6), 1) == 6


def test_draw_when_samples_are_short_then_as_many_as_have_tokens_enough_for_a_verdict():
    assert drawn_count(1 / 64, np.array([100] * 128), 1) == 11
    assert drawn_count(1 / 64, np.array([100] * 128), 4) == 12
    assert drawn_count(1 / 64, np.array([1024] * 128), 1) == 2
    assert drawn_count(1 / 64, np.array([1000, 24, 500]), 1) == 2
    assert drawn_count(1 / 64, np.array([100] * 4), 1) == 4
    assert drawn_count(1 / 64, np.array([], dtype=np.int64), 1) == 0


def test_draw_then_each_seed_batch_and_replica_has_its_own():
    which = [
        {"seed": 1, "batch": 0, "replica": 0} | one for one in ({}, {"seed": 2}, {"batch": 1}, {"replica": 1})
    ]
    draws = [draw_order(100, **one).tolist() for one in which]
    assert len(set(map(tuple, draws))) == 4 and all(sorted(one) == list(range(100)) for one in draws)
    assert draw_order(100, **which[0]).tolist() == draws[0]


def drawn(seed, *, tokens=4000, top_p=1.0, heat=1.0, noise=0.0):
    """(log p + entropy, D) of tokens that a sampler with top-p draws, and gives untruncated log-probs of."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, 50, generator=generator, dtype=torch.float64)
    policy = logits.log_softmax(1)
    server = (logits + noise * torch.randn(tokens, 50, generator=generator, dtype=torch.float64)).log_softmax(
        1
    )
    chances = (server / heat).softmax(1)
    likeliest, order = chances.sort(dim=1, descending=True)
    kept = torch.zeros_like(chances).scatter(1, order, (likeliest.cumsum(1) - likeliest < top_p) * likeliest)
    labels = kept.multinomial(1, generator=generator)
    slope = policy.gather(1, labels)[:, 0] - (policy.exp() * policy).sum(1)
    return slope, (policy - server).gather(1, labels)[:, 0]


def surplus_of(slope, difference):
    found = {name: metric.value() for name, metric in surplus_metrics(slope, slope.isfinite()).items()}
    sizes = {"ledger/tokens": len(slope), "ledger/mean_square": difference.square().mean().item()}
    return sampling_line(found | sizes)


def test_surplus_of_two_tokens_then_the_numbers_by_hand():
    found = surplus_metrics(torch.tensor([0.5, 7.0, -0.25]), torch.tensor([True, False, True]))
    assert {name: metric.value() for name, metric in found.items()} == {
        "ledger/sampling/surplus": 0.125,
        "ledger/sampling/surplus_square": 0.15625,
    }
    numbers = {"ledger/tokens": 100, "ledger/mean_square": 0.01, "ledger/sampling/surplus_square": 4.0}
    # 0.1 * 2 may be of D, and 5 * 2 / 10 of chance.
    assert sampling_line(numbers | {"ledger/sampling/surplus": 1.19}) == ""
    assert "by 1.2 nats each (6 standard errors)" in sampling_line(
        numbers | {"ledger/sampling/surplus": 1.21}
    )
    assert sampling_line(numbers | {"ledger/sampling/surplus": 1.21, "ledger/tokens": LEAST_TOKENS - 1}) == ""


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 1.0])
def test_surplus_when_tokens_are_of_their_policy_then_nothing_is_said_with_any_mismatch(noise):
    assert [seed for seed in range(40) if surplus_of(*drawn(seed, tokens=1000, noise=noise))] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_p": 0.9}, "more probable"),
        ({"heat": 0.8}, "more probable"),
        ({"heat": 1.25}, "less probable"),
    ],
)
def test_surplus_when_the_sampler_draws_otherwise_then_told_though_log_probs_agree(change, words):
    for seed in range(20):
        slope, difference = drawn(seed, **change)
        assert difference.abs().max() == 0 and words in surplus_of(slope, difference)


def listed(q, p, ids, label, valid):
    rollout, train = (torch.tensor(one).log() for one in (q, p))
    return ListedTokens(torch.tensor(ids), rollout, train, values(*label), torch.tensor(valid))


def test_distances_of_three_tokens_then_means_over_those_that_count_and_ids_by_name(one_rank):
    # The first has TV 0.2: 0.05 of either id, 0.1 of what is outside, 0.3 against 0.5; the second none. The
    # third is not known, as no server scored it. Means are over two.
    tokens = listed(
        [[0.5, 0.2], [0.5, 0.2], [0.9, 0.1]],
        [[0.4, 0.1], [0.5, 0.2], [0.1, 0.9]],
        [[4, 7], [4, 7], [4, 7]],
        [0.0, 1e-6, NAN],
        [True, True, True],
    )
    found = {name: metric.value() for name, metric in distance_metrics(tokens, 83, 1e-5).items()}
    kl = 0.5 * math.log(5 / 4) + 0.2 * math.log(2) + 0.3 * math.log(3 / 5)
    assert found == pytest.approx(
        {
            "ledger/dist/kl": kl / 2,
            "ledger/dist/kl_max": kl,
            "ledger/dist/reverse_kl": (0.4 * math.log(4 / 5) + 0.1 * math.log(1 / 2) + 0.5 * math.log(5 / 3))
            / 2,
            "ledger/dist/tv_least": (0.1 + 0.1) / 2,
            "ledger/dist/tv_least_max": 0.2,
            "ledger/dist/tv_most": (0.1 + 0.4 + 0.3) / 2,
            "ledger/dist/mass": 0.7,
            "ledger/dist/label_mean_abs": 5e-7,
            "ledger/dist/by_id/4": 0.025,
            "ledger/dist/by_id/7": 0.025,
        },
        abs=1e-6,
    )


def test_distances_when_rounding_explains_them_then_no_id_is_named(one_rank):
    tokens = listed([[0.5, 0.5]], [[0.5 + 1e-6, 0.5 - 1e-6]], [[4, 7]], [1e-6], [True])
    assert not [name for name in distance_metrics(tokens, 83, 1e-5) if "by_id" in name]
    assert [name for name in distance_metrics(tokens, 83, 1e-7) if "by_id" in name]


def test_distances_when_a_server_lists_ids_that_the_model_lacks_then_they_are_one(one_rank):
    tokens = listed([[0.6, 0.2, 0.2]], [[1.0, 0.0, 0.0]], [[4, 90, 91]], [0.0], [True])
    found = {name: metric.value() for name, metric in distance_metrics(tokens, 83, 1e-5).items()}
    assert found["ledger/dist/by_id/outside"] == pytest.approx(0.2, abs=1e-6)
    assert found["ledger/dist/by_id/4"] == pytest.approx(0.2, abs=1e-6)
    assert math.isfinite(found["ledger/dist/kl"])


def test_distances_when_no_token_counts_then_none(one_rank):
    tokens = listed([[0.6, 0.4]], [[0.4, 0.6]], [[4, 7]], [0.0], [False])
    found = {name: metric.value() for name, metric in distance_metrics(tokens, 83, 1e-5).items()}
    assert math.isnan(found["ledger/dist/tv_least"]) and "ledger/dist/by_id/4" not in found
    assert distance_metrics(None, 83, 1e-5) == {}


def distances(least, label, **by_id):
    found = {"ledger/dist/tv_least": least, "ledger/dist/label_mean_abs": label}
    return found | {f"ledger/dist/by_id/{name.removeprefix('id_')}": value for name, value in by_id.items()}


def test_verdict_when_distributions_differ_and_sampled_tokens_do_not_then_it_is_said_with_the_ids():
    numbers = logged(500, 0.004, rest=(1.0, 0.004)) | distances(0.02, 0.004, id_17=0.012, id_outside=0.006)
    assert verdict_line(numbers).endswith(
        "rest 100 %; the distributions differ by at least TV 0.02, although sampled tokens agree: 60 % at id "
        "17, 30 % at ids outside of the vocabulary"
    )


@pytest.mark.parametrize(("least", "label"), [(0.0074, 0.004), (0.02, 0.016), (NAN, NAN)])
def test_verdict_when_rounding_explains_it_or_sampled_tokens_show_it_then_nothing_more_is_said(least, label):
    assert "TV" not in verdict_line(logged(500, 0.004, rest=(1.0, 0.004)) | distances(least, label))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rollout-ledger-top", "8"], "--rollout-ledger-top.*--rollout-ledger-interval"),
        (["--rollout-ledger-top", "0"], "--rollout-ledger-top must be positive, got 0; 64, for example"),
        (["--rollout-temperature", "0.7"], "--rollout-temperature 0.7: servers score at temperature 1"),
        (["--rollout-top-k", "20"], "servers score over the whole vocabulary"),
        (["--rollout-colocate"], "servers have no memory while the trainer computes"),
        (
            ["--rollout-linear-logprobs"],
            "--rollout-linear-logprobs, which gives log-probs of the sampled ids",
        ),
    ],
)
def test_flags_of_lists_when_they_have_no_effect_then_refused_by_name(flags, words):
    given = flags if "--rollout-ledger-top" in flags else ["--rollout-ledger-top", "8", *flags]
    more = [] if words.endswith("interval") else ["--rollout-ledger-interval", "1"]
    with pytest.raises(ValueError, match=words):
        parse([*REQUIRED, *given, *more])
    assert (
        parse([*REQUIRED, "--rollout-ledger-interval", "1", "--rollout-ledger-top", "8"])[1].ledger_top == 8
    )
