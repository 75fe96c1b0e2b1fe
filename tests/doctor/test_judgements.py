"""How the doctor decides, on numbers worked out by hand."""

import asyncio
import base64
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl_corr.commands.doctor.command import as_json, as_table
from megatron_rl_corr.commands.doctor.full_check import _weights
from megatron_rl_corr.commands.doctor.reference_model import experts_shape, hypotheses, judge_model
from megatron_rl_corr.commands.doctor.update_judgements import judge_spans, judge_update
from megatron_rl_corr.doctor import DEFECTS, KINDS, Examination, Expected, Row, exit_status
from megatron_rl_corr.doctor.distances import by_probability, distance, grid_step, slope, switch_position
from megatron_rl_corr.doctor.distribution import (
    judge_mask,
    judge_seeds,
    judge_temperature,
    judge_top_p,
    judge_top_p_kept,
)
from megatron_rl_corr.doctor.findings import found
from megatron_rl_corr.doctor.judgements import (
    is_half,
    judge_cache,
    judge_decode,
    judge_precision,
    judge_repeats,
    judge_routes,
    judge_updates,
    judge_version,
)
from megatron_rl_corr.doctor.questions import Facts, routes_row
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.inspection import DetailedSample, KeptIds, ServedModel, TokenScores
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.sglang.detailed_samples import routed_ids
from megatron_rl_corr.engines.trajectory import VersionSpan
from megatron_rl_corr.models.quantization import BlockFP8
from megatron_rl_corr.rollout import RolloutProtocolError, RolloutServerError, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SGLANG, VLLM = load_engine("sglang"), load_engine("vllm")


def array(*values):
    return np.array(values, dtype=np.float64)


def answer(logprobs, top=None, output=None, top_ids=None, **more):
    logprobs = np.array(logprobs, dtype=np.float64)
    top = logprobs[:, None] if top is None else np.array(top, dtype=np.float64)
    top_ids = np.zeros(top.shape, np.int64) if top_ids is None else np.array(top_ids)
    output = [0] * len(logprobs) if output is None else output
    return DetailedSample([1, 2], output, logprobs, top, top_ids, **more)


def scores(logprobs, top=None):
    logprobs = np.array(logprobs, dtype=np.float64)
    top = logprobs[:, None] if top is None else np.array(top, dtype=np.float64)
    return TokenScores(logprobs, top, np.zeros(top.shape, dtype=np.int64))


# Distances


def test_distance_when_two_tokens_differ_then_max_mean_and_k3_of_reference_less_measured():
    # D = reference - measured = 0, ln 2, -1. k3 = e^D - 1 - D: 0, 1 - ln 2, 1/e.
    far = distance(array(-1, -2, -1), array(-1, -2 + math.log(2), -2))
    assert far.max == pytest.approx(1) and far.tokens == 3
    assert far.mean == pytest.approx((math.log(2) + 1) / 3)
    assert far.k3 == pytest.approx((1 - math.log(2) + math.exp(-1)) / 3)


@pytest.mark.parametrize(
    "d, half, rounding",
    [
        (9e-4, False, True),
        (2e-3, False, False),
        (2e-3, True, True),  # k3 = D^2 / 2 = 2e-6
        (0.076, True, True),  # 2.888e-3 + D^3 / 6 = 2.96e-3
        (0.08, True, False),  # 3.2e-3
        (math.nan, False, False),
        (math.nan, True, False),
    ],
)
def test_is_rounding_when_float32_then_by_the_largest_and_in_16_bits_by_k3(d, half, rounding):
    assert distance(array(-1, -1), array(-1 + d, -1 + d)).is_rounding(half) is rounding


def test_distance_when_lengths_differ_or_there_is_nothing_then_error():
    with pytest.raises(ValueError, match="reference"):
        distance(array(-1), array(-1, -2))
    with pytest.raises(ValueError, match="reference"):
        distance(array(), array())


def test_by_probability_when_tokens_lie_in_three_buckets_then_the_empty_ones_are_left_out():
    measured = np.log(array(5e-5, 2e-3, 5e-3, 0.5))
    buckets = by_probability(measured, measured + array(0, 1, 2, 4))
    assert {name: (b.tokens, b.mean) for name, b in buckets.items()} == {
        "<0.0001": (1, 0),
        "<0.01": (2, pytest.approx(1.5)),
        ">=0.1": (1, pytest.approx(4)),
    }


def test_slope_when_the_softmax_is_scaled_then_one_over_the_temperature():
    # z = [3, 1, 0]; samples 1 and 2, the likeliest is 0: raw gaps -2 and -3, at T = 4 a quarter of them.
    # Evidence 4 + 9.
    raw = torch.log_softmax(torch.tensor([3.0, 1, 0], dtype=torch.float64), 0).numpy()
    hot = torch.log_softmax(torch.tensor([3.0, 1, 0], dtype=torch.float64) / 4, 0).numpy()
    found_slope, evidence = slope(hot[[1, 2]], hot[[0, 0]], raw[[1, 2]], raw[[0, 0]])
    assert found_slope == pytest.approx(0.25) and evidence == pytest.approx(13)


def test_slope_when_only_the_likeliest_were_sampled_then_no_evidence():
    found_slope, evidence = slope(array(-1), array(-1), array(-2), array(-2))
    assert math.isnan(found_slope) and evidence == 0


@pytest.mark.parametrize("bits, step", [(8, 2**-7), (6, 2**-5)])
def test_grid_step_when_logits_are_rounded_then_the_step_of_the_smallest(bits, step):
    # Logits in [1, 2) with `bits` significant bits are multiples of 2^(1 - bits); the log-softmax adds one
    # constant. All their differences are multiples too, and one of them is the step itself.
    units = 2 ** (bits - 1)
    logits = torch.arange(units, 2 * units, dtype=torch.float32) / units
    logprobs = torch.log_softmax(logits, 0).double().numpy()
    assert grid_step(logprobs[-1] - logprobs[:-1]) == step


def test_grid_step_when_logits_are_float32_then_none():
    logits = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 3
    logprobs = torch.log_softmax(logits, 0).double().numpy()
    assert grid_step(logprobs.max() - logprobs) is None


def test_switch_position_when_two_tokens_fit_the_old_weights_then_2():
    # Costs of the cuts 0..4: |lp - new| after the cut, |lp - old| before it.
    # lp - old = 0 0 5 5, lp - new = 3 3 0 0: 6, 3, 0, 5, 10.
    position, costs = switch_position(array(-1, -1, -1, -1), array(-1, -1, -6, -6), array(-4, -4, -1, -1))
    assert position == 2 and costs.tolist() == [6, 3, 0, 5, 10]


# Temperature, top-p and the mask


def tempered(hot_slope, cold_gap, matters=True):
    """cold_gap: at temperature 1. A server that scales reports it a thousandfold at 0.001."""
    raw, best = array(-2, -3, -1.5), array(-1, -1, -1)
    hot = answer(-2 + hot_slope * (raw - best), top=[[-2.0]] * 3)
    reported = cold_gap * 1000 if abs(hot_slope - 0.5) < 0.05 else cold_gap
    cold = answer([-1 - reported, -1, -1], top=[[-1.0]] * 3)
    return judge_temperature(hot, scores(raw, top=best[:, None]), cold, 1e-3, matters)


@pytest.mark.parametrize(
    "hot_slope, cold_gap, defect",
    [
        (0.5, 0.0, None),
        (0.54, 0.09, None),
        (0.5, 0.2, "temperature_ignored"),  # a sample at 0.001 lies 200 temperatures below the likeliest id
        (1.0, 0.2, "temperature_ignored"),
        (1.0, 0.0, "logprobs_without_temperature"),
        (0.7, 0.0, "logprobs_of_another_temperature"),
    ],
)
def test_temperature_when_slope_and_cold_samples_are_known_then_what_is_wrong(hot_slope, cold_gap, defect):
    row = tempered(hot_slope, cold_gap)
    assert row.defect == defect and row.numbers["slope"] == pytest.approx(hot_slope)
    assert row.numbers["gap"] == pytest.approx(cold_gap)


def test_temperature_when_the_run_samples_at_1_then_unscaled_logprobs_are_a_note():
    assert tempered(1.0, 0.0, matters=False).status == "note"
    assert tempered(1.0, 0.2, matters=False).defect == "temperature_ignored"


def test_temperature_when_the_model_is_certain_then_it_cannot_be_told():
    certain = scores([-1e-9] * 3)
    row = judge_temperature(answer([-1e-9] * 3), certain, answer([0.0] * 3), 1e-3, True)
    assert row.status == "note" and "unknown: " in row.message


@pytest.mark.parametrize(
    "rise, defect", [(0.0, None), (0.05, None), (math.log(2), "logprobs_of_another_set")]
)
def test_top_p_when_logprobs_rise_by_the_kept_half_then_filtered(rise, defect):
    assert (
        judge_top_p(answer([-2 + rise, -3 + rise]), scores([-2, -3]), half=False, matters=True).defect
        == defect
    )


def masked(logprob, mask=(7, 9), output=7):
    # p(7) = 0.4, p(9) = 0.2, p(5) = 0.1: on {7, 9} id 7 has 2/3.
    return answer(
        [math.log(0.4)],
        top=[np.log([0.4, 0.2, 0.1])],
        top_ids=[[7, 9, 5]],
        output=[output],
        kept=KeptIds([list(mask)], [logprob]),
    )


def test_mask_when_logprobs_are_renormalised_on_it_then_ok_and_else_found():
    assert judge_mask(masked(math.log(2 / 3)), needed=True).status == "ok"
    assert judge_mask(masked(math.log(0.4)), needed=True).defect == "sampling_mask_wrong"
    assert judge_mask(masked(math.log(2 / 3), mask=(7, 11)), needed=True).defect == "sampling_mask_wrong"
    assert judge_mask(masked(math.log(2 / 3), output=5), needed=True).defect == "sampling_mask_wrong"
    assert judge_mask(masked(None), needed=True).defect == "sampling_mask_wrong"
    assert (
        judge_mask(answer([-1.0], kept=KeptIds([None], [-1.0])), needed=True).defect == "sampling_mask_wrong"
    )
    assert judge_mask(masked(math.log(2 / 3), mask=()), needed=True).defect == "sampling_mask_wrong"


@pytest.mark.parametrize("reply", ["HTTP 400", answer([-1])], ids=["refused", "absent"])
def test_mask_when_missing_then_found_only_where_it_is_needed(reply):
    assert judge_mask(reply, needed=True).defect == "sampling_mask_missing"
    assert judge_mask(reply, needed=False).status == "note"


# Seeds


def seeded(*outputs, logprob=-3.0):
    """Answers of these responses, each token of the same log-prob."""
    return [answer([logprob] * len(output), output=list(output)) for output in outputs]


def test_seeds_when_responses_differ_and_one_repeats_then_a_run_can_be_drawn_again():
    row = judge_seeds(seeded("abcd", "abce", "xbcd"), *seeded("abcd"))
    assert (row.status, row.message) == (
        "ok",
        "3 seeds gave 3 responses of 4 tokens, one seed twice gave one",
    )


def test_seeds_when_one_seed_gives_two_responses_then_ignored_is_a_note():
    row = judge_seeds(seeded("abcd", "abce", "xbcd"), *seeded("abcf"))
    assert row.status == "note" and row.message.startswith("seeds are ignored: 3 seeds gave 3 responses")


# 4 tokens of -3.5 nats: a response of probability e^-14 = 8e-7 is drawn twice once in a million;
# e^-13.6 = 1.2e-6.
@pytest.mark.parametrize("outputs", [("abcd", "abcd", "abcd"), ("abcd", "xyzw", "xyzw")])
@pytest.mark.parametrize("logprob, status", [(-3.5, "finding"), (-3.4, "note"), (-0.01, "note")])
def test_seeds_when_two_responses_are_one_then_an_error_only_where_chance_cannot_explain_it(
    outputs, logprob, status
):
    row = judge_seeds(seeded(*outputs, logprob=logprob), *seeded("abcd", logprob=logprob))
    assert row.status == status and row.defect == ("one_response" if status == "finding" else None)
    assert status == "finding" or row.message.startswith("unknown: ")


def test_seeds_when_only_one_of_two_equal_pairs_is_likely_then_the_unlikely_one_is_found():
    sure, unsure = seeded("aaaa", "aaaa", logprob=-0.01), seeded("bbbb", "bbbb", logprob=-9)
    assert judge_seeds([*sure, *unsure], sure[0]).defect == "one_response"


# Numerics


@pytest.mark.parametrize(
    "reported, step, expected, defect",
    [
        ("float32", None, "float32", None),
        ("bfloat16", 2**-4, "bfloat16", None),
        ("bfloat16", None, "bfloat16", None),  # a float32 head
        ("half", 2**-6, "float16", None),
        ("bfloat16", 2**-4, None, None),
        ("auto", 2**-4, "bfloat16", None),
        ("bfloat16", 2**-4, "float32", "dtype_differs"),
        ("float16", 2**-6, "bfloat16", "dtype_differs"),
        ("float32", 2**-4, "float32", "dtype_differs"),  # what it reports is not what it computes
        ("auto", 2**-4, "float32", "dtype_differs"),
    ],
)
def test_precision_when_report_or_grid_contradict_the_trainer_then_found(reported, step, expected, defect):
    assert judge_precision(reported, step, expected).defect == defect


@pytest.mark.parametrize(
    "reported, step, float32_head, half",
    [
        ("bfloat16", None, True, True),
        ("float32", None, False, False),
        ("auto", 2**-4, False, True),
        ("auto", None, True, True),
        ("auto", None, False, False),
    ],
)
def test_is_half_when_the_report_is_auto_then_the_grid_or_a_float32_head_shows_it(
    reported, step, float32_head, half
):
    assert is_half(reported, step, float32_head) is half


def test_decode_when_a_sampled_logprob_is_not_the_scored_one_then_found():
    assert judge_decode(answer([-1, -2]), scores([-1, -2.0005]), half=False).status == "ok"
    assert (
        judge_decode(answer([-1, -2]), scores([-1, -2.1]), half=False).defect == "decode_prefill_difference"
    )


def test_repeats_when_bit_equal_rounded_or_different_then_ok_note_or_found():
    first = answer([-1, -2], output=[3, 4])
    assert judge_repeats(first, answer([-1, -2], output=[3, 4]), half=False).status == "ok"
    row = judge_repeats(first, answer([-1, -2.0001], output=[3, 4]), half=False)
    assert row.status == "note" and row.numbers["max"] == pytest.approx(1e-4)
    assert judge_repeats(first, answer([-1, -2.1], output=[3, 4]), half=False).defect == "not_deterministic"


def test_repeats_when_an_id_differs_then_what_follows_does_not_count():
    first = answer([-1, -2, -3], output=[3, 4, 5], top=[[-1, -9], [-2, -2.0005], [-3, -9]])
    row = judge_repeats(first, answer([-1, -9, -9], output=[3, 8, 8]), half=False)
    assert row.status == "note" and row.numbers["same_ids"] == 1 and row.numbers["max"] == 0


@pytest.mark.parametrize(
    "lead, half, status",
    [(5e-4, False, "note"), (0.01, False, "finding"), (0.2, True, "note"), (0.3, True, "finding")],
)
def test_repeats_when_the_first_id_differs_then_found_unless_rounding_explains_it(lead, half, status):
    first = answer([-1, -2], output=[3, 4], top=[[-1, -1 - lead], [-2, -9]])
    row = judge_repeats(first, answer([-1, -2], output=[6, 4]), half)
    assert (
        row.status == status and row.numbers["lead"] == pytest.approx(lead) and row.numbers["same_ids"] == 0
    )


def kept_top_p(rises, likeliest, half=False, matters=True):
    """The row of answers whose log-probs lie above their scores by `rises`, at tokens whose
    likeliest id has these.
    """
    scored = scores([-3.0] * len(rises), top=np.log(np.array(likeliest))[:, None])
    return judge_top_p_kept(answer([-3.0 + rise for rise in rises]), scored, half, matters)


@pytest.mark.parametrize(
    "rises, likeliest, status, words",
    [
        # The likeliest has 0.2: kept are 0.5 to 0.7, so log-probs rise by 0.357 to 0.693. It has 0.8:
        # alone, by 0.223.
        ([0.36, 0.69], [0.2, 0.2], "ok", "rise by"),
        ([0.5, -math.log(0.8)], [0.2, 0.8], "ok", "rise by"),
        ([0.34, 0.69], [0.2, 0.2], "finding", "50% of the log-probs"),
        ([0.36, 0.70], [0.2, 0.2], "finding", "50% of the log-probs"),
        ([0.5, 0.3], [0.2, 0.8], "finding", "50% of the log-probs"),
        ([0.0, 0.0], [0.2, 0.2], "finding", "of the whole vocabulary"),
        ([0.0, 0.0], [0.9995, 0.9999], "note", "unknown"),
    ],
)
def test_top_p_when_log_probs_are_of_what_it_kept_then_they_rise_by_what_the_likeliest_id_allows(
    rises, likeliest, status, words
):
    row = kept_top_p(rises, likeliest)
    assert row.status == status and words in row.message
    assert row.defect == ("logprobs_of_another_set" if status == "finding" else None)


def test_top_p_when_log_probs_are_raw_and_the_run_does_not_truncate_then_a_note():
    row = kept_top_p([0.0, 0.0], [0.2, 0.2], matters=False)
    assert row.status == "note" and row.message.startswith("the run does not truncate")


def test_temperature_when_the_engine_has_a_lowest_one_then_the_gap_is_measured_in_it():
    # At 0.01 a sample 0.9 nats (at temperature 1) below the likeliest has a chance of e^-90, one of
    # 1.1 nats e^-110.
    raw, best = array(-3, -2, -4), array(-1, -1, -1)
    hot = answer(raw / 2, top=(best / 2)[:, None])
    for gap, defect in ((0.9, None), (1.1, "temperature_ignored")):
        cold = answer([-gap / 0.01], top=[[0.0]])
        row = judge_temperature(hot, scores(raw, top=best[:, None]), cold, 0.01, True)
        assert row.defect == defect and row.numbers["gap"] == pytest.approx(gap)


def test_cache_when_cached_scores_differ_then_stale_and_without_cache_nothing_is_said():
    assert judge_cache(answer([-1], cached_tokens=9), scores([-1]), half=False).status == "ok"
    assert (
        judge_cache(answer([-1], cached_tokens=9), scores([-1.1]), half=False).defect == "stale_prefix_cache"
    )
    assert judge_cache(answer([-1], cached_tokens=0), scores([-1.1]), half=False).status == "note"


def test_cache_when_the_server_does_not_tell_what_was_cached_then_stale_is_found_and_right_is_a_note():
    assert judge_cache(answer([-1]), scores([-1.1]), half=False).defect == "stale_prefix_cache"
    row = judge_cache(answer([-1]), scores([-1]), half=False)
    assert row.status == "note" and "does not tell how many" in row.message


# Identity


@pytest.mark.parametrize(
    "version, status, words",
    [
        ("0.5.6", "finding", "no pauses"),
        ("0.5.6.post2", "finding", "no weight versions by token"),
        ("0.5.18", "finding", "no weight versions by token"),
        ("0.5.19", "note", "--rollout-max-lag above 0 needs 0.5.21"),
        ("0.5.20", "note", "can't drop cached prefixes while retracted requests wait"),
        ("0.5.21", "ok", "in 0.5.19 to 0.5.23"),
        ("0.5.23", "ok", ""),
        ("0.6.0", "note", "newer than 0.5.23"),
        (None, "note", "SGLang 'None' is no release"),
    ],
)
def test_version_when_judged_then_by_what_it_can_do(version, status, words):
    row = judge_version("SGLang", SGLANG.version_support({"version": version}))
    assert row.status == status and words in row.message
    assert "--rollout-pause-mode abort" not in row.message  # which the launcher refuses


def test_endpoints_when_listed_then_the_transports_and_whether_there_is_a_session():
    def judged(*paths):
        return judge_updates(SGLANG.update_support("u", {"paths": dict.fromkeys(paths, {})}, {}))

    row = judged("/begin_weight_update", "/update_weights_from_disk", "/update_weights_from_distributed")
    assert row.status == "ok" and row.message == "distributed, disk, in a session"
    assert row.numbers == {"transports": ["distributed", "disk"], "session": True}
    assert (
        judged("/update_weights_from_distributed").message
        == "distributed, without a session (SGLang <= 0.5.20)"
    )
    assert judged("/update_weights_from_disk").defect == "no_weight_updates"
    support = SGLANG.update_support("u", {"paths": {"/update_weights_from_distributed": {}}}, {})
    assert judge_updates(support, BlockFP8("ue8m0", frozenset({"mlp"}))).message.endswith(
        "; weights in FP8 with ue8m0 scales, 1 modules spared, and so are pushes"
    )
    refused = judge_updates(support, "its weights are quantised (awq)")
    assert (refused.defect, refused.message) == (
        "quantisation_unsupported",
        "its weights are quantised (awq)",
    )
    assert judge_updates("HTTP 404").message == "the server does not list its endpoints: HTTP 404"
    with pytest.raises(RolloutProtocolError, match="no paths in /openapi.json"):
        SGLANG.update_support("u", {}, {})


SHAPE = ExpertShape(num_layers=3, layers=(0, 1, 2), top_k=2, experts=4)


def encoded(*ids):
    return base64.b64encode(np.array(ids, dtype=np.int32).tobytes()).decode()


@pytest.mark.parametrize(
    "routes, shape, expected, defect",
    [
        (encoded(*[0, 3] * 6), SHAPE, True, None),  # 2 rows of 3 layers of 2 experts
        (encoded(*[0, 3] * 6), None, True, None),
        (encoded(*[0, 4] * 6), SHAPE, True, "routed_experts_wrong"),  # there is no expert 4
        (encoded(*[0, 3] * 9), SHAPE, True, "routed_experts_wrong"),  # 3 rows
        (encoded(*[0] * 5), None, True, "routed_experts_wrong"),
        ("no base64!", None, True, "routed_experts_wrong"),
        ("AAA=", None, True, "routed_experts_wrong"),  # 2 bytes
        (None, SHAPE, True, "routed_experts_missing"),
        (None, SHAPE, False, None),
    ],
)
def test_routes_when_of_three_tokens_then_two_rows_of_the_models_shape(routes, shape, expected, defect):
    sample = answer([-1], routed_ids=routed_ids(routes, tokens=3, shape=shape))
    assert judge_routes(sample, shape, expected).defect == defect


@pytest.mark.parametrize("refused", [False, True])
def test_routes_when_the_server_says_that_it_leaves_some_out_then_found_though_a_new_prompts_are_whole(
    refused,
):
    sample = answer([-1], routed_ids=12)
    problem = VLLM.routes_problem(
        {"vllm_config": {"aux_output_config": {"enable_omit_prefix_routed_experts": True}}}
    )
    error = RolloutServerError("u", "/inference/v1/generate", 400, "X-Session-ID header is required")
    row = routes_row(error if refused else sample, problem, Expected(experts=SHAPE))
    assert row.defect == "routed_experts_wrong" and "--enable-omit-prefix-routed-experts" in row.message
    assert routes_row(sample, None, Expected(experts=SHAPE)).status == "ok"
    assert routes_row(error, None, Expected(experts=SHAPE)).status == "failed"


def test_experts_shape_when_dense_then_none():
    moe = {"num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert experts_shape(moe) == ExpertShape(4, (0, 1, 2, 3), 2, 8)
    assert experts_shape(moe | {"first_k_dense_replace": 3}) == ExpertShape(4, (3,), 2, 8)
    assert experts_shape({"num_hidden_layers": 4}) is None


# In flight


def spans_of(*starts):
    ends = [*starts[1:], 4]
    return tuple(VersionSpan(str(i), a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True)))


@pytest.mark.parametrize(
    "spans, status",
    [
        (spans_of(0, 2), "ok"),
        (spans_of(0, 1), "finding"),
        (spans_of(0, 3), "finding"),
        (spans_of(0), "finding"),
        (None, "finding"),
    ],
)
def test_spans_when_logprobs_switch_at_2_then_only_that_is_right(spans, status):
    sampled = answer([-1, -1, -1, -1], version_spans=spans)
    row = judge_spans("spans", sampled, array(-1, -1, -6, -6), array(-4, -4, -1, -1), half=False)
    assert row.status == status and row.numbers["true"] == 2
    assert row.numbers["spans"] == (None if spans is None else [vars(span) for span in spans])
    json.dumps(row.numbers)


def test_spans_when_a_token_has_one_logprob_under_both_weights_then_either_switch_is_right():
    def judged(start):
        sampled = answer([-1, -1, -1, -1], version_spans=spans_of(0, start))
        return judge_spans("spans", sampled, array(-1, -1, -6, -6), array(-4, -1, -1, -1), half=False)

    assert judged(1).status == judged(2).status == "ok"
    assert judged(3).defect == "version_spans_wrong"


def test_spans_when_no_token_is_of_the_new_weights_then_nothing_is_said():
    sampled = answer([-1, -1], version_spans=spans_of(0))
    row = judge_spans("spans", sampled, array(-1, -1), array(-4, -4), half=False)
    assert row.status == "note"


def test_update_when_logprobs_stay_or_the_cache_is_old_then_found():
    old, new, sample = scores([-1]), scores([-2]), answer([-3], cached_tokens=9)
    assert judge_update(old, new, sample, scores([-3]), half=False).status == "ok"
    assert judge_update(old, old, sample, scores([-3]), half=False).defect == "update_without_effect"
    assert judge_update(old, new, sample, scores([-4]), half=False).defect == "stale_prefix_cache"


# Against the model


@pytest.mark.parametrize(
    "d, defect",
    [
        (5e-4, None),
        (0.03, "model_difference"),
        (0.05, "another_checkpoint"),
        (math.nan, "another_checkpoint"),
    ],
)
def test_model_when_bfloat16_moves_it_by_a_hundredth_then_four_times_that_is_rounding(d, defect):
    reference = array(-1, -2)
    row = judge_model(reference - d, reference, reference + 0.01, half=True)
    assert row.defect == defect


@pytest.mark.parametrize("d, defect", [(2e-3, "model_difference"), (3e-3, "another_checkpoint")])
def test_model_when_the_server_is_in_float32_then_a_quarter_of_what_bfloat16_does_is_another_checkpoint(
    d, defect
):
    reference = array(-1, -2)
    # as one expert of many makes them differ: few tokens, by much less than 16 bits
    measured = reference - array(0, d)
    assert judge_model(measured, reference, reference + 0.01, half=False).defect == defect


def test_hypotheses_when_the_answer_is_of_one_then_its_mean_is_zero():
    # z = ln [0.5, 0.3, 0.2]. At T = 2 p ~ sqrt: id 1 has 0.5477 / (0.7071 + 0.5477 + 0.4472). Top-p 0.6 keeps
    # 0 and 1, for 0.5 <= 0.6 < 0.8: id 1 has 0.3 / 0.8.
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    hot = math.sqrt(0.3) / (math.sqrt(0.5) + math.sqrt(0.3) + math.sqrt(0.2))
    means = hypotheses("", answer([math.log(hot)], output=[1]), logits, 2.0, 1.0).numbers
    assert means["temperature-scaled"] == pytest.approx(0, abs=1e-6)
    assert means["raw"] == pytest.approx(abs(math.log(hot) - math.log(0.3)), abs=1e-6)
    means = hypotheses("", answer([math.log(0.375)], output=[1]), logits, 1.0, 0.6).numbers
    assert means["filtered"] == pytest.approx(0, abs=1e-6)
    assert means["raw"] == pytest.approx(math.log(0.375 / 0.3), abs=1e-6)


# What is said


def test_expected_when_the_run_samples_at_1_or_greedily_then_the_temperature_does_not_matter():
    assert Expected().temperature_matters and Expected(SamplingParams(1, temperature=0.7)).temperature_matters
    assert not Expected(SamplingParams(1)).temperature_matters
    assert not Expected(SamplingParams(1, temperature=0)).temperature_matters
    assert Expected(SamplingParams(1, top_k=5)).truncated and not Expected().truncated


OK, NOTE, FAILED = Row("a", "ok", "fine"), Row("b", "note", "so"), Row("c", "failed", "refused")
FOUND = found("d", "stale_prefix_cache", "old", worst=math.inf)


@pytest.mark.parametrize(
    "rows, status", [([OK, NOTE], 0), ([OK, FOUND], 1), ([FAILED], 2), ([FOUND, FAILED], 2), ([], 0)]
)
def test_exit_status_when_something_could_not_be_asked_then_2_before_1(rows, status):
    assert exit_status([Examination("u", [OK]), Examination("v", rows)]) == status


def test_table_when_one_server_is_wrong_and_one_is_gone_then_findings_by_kind_with_what_mends_them():
    wrong = found("precision", "dtype_differs", "reports bfloat16")
    remedies = {"dtype_differs": "another --dtype"}
    table = as_table(
        [Examination("http://a:1", [OK, wrong, FOUND], remedies), Examination("http://b:2", [FAILED])]
    )
    assert table.splitlines() == [
        "http://a:1",
        "  ok      a          fine",
        "  FOUND   precision  reports bfloat16",
        "  FOUND   d          old",
        "",
        "http://b:2",
        "  FAILED  c  refused",
        "",
        f"inference-path mismatch: {KINDS['inference-path']}",
        "  dtype_differs (http://a:1)",
        f"    {DEFECTS['dtype_differs'].means}",
        "    measured: reports bfloat16",
        "    fix: another --dtype",
        "",
        f"objective mismatch: {KINDS['objective']}",
        "  stale_prefix_cache (http://a:1)",
        f"    {DEFECTS['stale_prefix_cache'].means}",
        "    measured: old",
        "    fix: none is known",
        "",
        "2 findings; could not ask everything of http://b:2",
    ]


def test_json_when_a_number_is_not_finite_then_null():
    answer = json.loads(as_json([Examination("u", [OK, FOUND])]), parse_constant=pytest.fail)
    assert answer["exit_status"] == 1
    (server,) = answer["servers"]
    (finding,) = server["findings"]
    assert (finding["name"], finding["kind"]) == ("stale_prefix_cache", "objective")
    assert finding["numbers"] == {"worst": None} and [row["status"] for row in server["rows"]] == [
        "ok",
        "finding",
    ]


def test_update_when_one_address_hides_replicas_then_a_note_says_so_and_no_weights_change(tiny_moe_dir):
    probe = SimpleNamespace(engine=load_engine("sglang"), url="http://a")
    info = {"dp_size": 2, "enable_dp_attention": False, "tp_size": 1, "pp_size": 1}
    model = ServedModel(str(tiny_moe_dir), "m", "qwen3_moe", "default", is_initial=True)
    row = asyncio.run(_weights(probe, Facts(info, model, half=False, plain=None), str(tiny_moe_dir)))
    assert (row.check, row.status) == ("update", "note")
    assert row.message.startswith("not asked: it runs --dp-size 2 replicas; start as many servers")
