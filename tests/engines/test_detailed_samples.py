"""Bodies of the doctor's requests to SGLang, and what is read of their answers."""

import base64

import numpy as np
import pytest

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.inspection import KeptIds, ServedModel
from megatron_rl_corr.engines.sglang.server_version import version_key
from megatron_rl_corr.engines.trajectory import SamplingParams, VersionSpan
from megatron_rl_corr.rollout import RolloutProtocolError

SGLANG = load_engine("sglang")
NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


def test_detailed_sample_when_plain_then_only_what_every_request_needs():
    request = SGLANG.detailed_sample([1, 2], SamplingParams(3, ignore_eos=True), likeliest=8)
    assert (request.method, request.endpoint) == ("POST", "/generate")
    assert request.json == {
        "input_ids": [1, 2],
        "return_logprob": True,
        "top_logprobs_num": 8,
        "sampling_params": NEUTRAL
        | {
            "max_new_tokens": 3,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "stop": [],
            "stop_token_ids": [],
            "ignore_eos": True,
        },
    }


def test_detailed_sample_when_it_has_options_then_each_in_its_field():
    sampling = SamplingParams(3, temperature=0.5, top_p=0.9, top_k=8, ignore_eos=True)
    body = SGLANG.detailed_sample(
        [1, 2],
        sampling,
        seed=7,
        likeliest=16,
        sampling_mask=True,
        routed_experts=True,
        request_id="x",
        cache_key="v3",
    ).json
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 8, "sampling_seed": 7}
    assert expected.items() <= body["sampling_params"].items()
    expected = {
        "top_logprobs_num": 16,
        "return_sampling_mask": True,
        "return_routed_experts": True,
        "rid": "x",
        "extra_key": "v3",
    }
    assert expected.items() <= body.items()


def test_score_then_of_every_token_and_so_none_from_the_cache():
    request = SGLANG.score([1, 2], [3], likeliest=8, cache_key="v3")
    assert request.json == {
        "input_ids": [1, 2, 3],
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 8,
        "sampling_params": NEUTRAL | {"max_new_tokens": 1, "temperature": 0.0},
        "extra_key": "v3",
    }


def parsed(**meta):
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0, 7, None]],
        "output_top_logprobs": [[[-0.5, 4, None]]],
    } | meta
    answer = {"output_ids": [7], "meta_info": meta}
    return SGLANG.parse_detailed_sample(answer, server="u", prompt_ids=[1, 2], tokens=1)


def test_parse_when_nothing_more_came_then_the_sample_says_so():
    sample = parsed()
    assert sample.kept == "the answer holds no output_token_sampling_mask"
    assert sample.routed_ids is sample.version_spans is None and sample.retractions == 0


def test_parse_when_all_came_then_each_is_read():
    routes = base64.b64encode(np.arange(8, dtype=np.int32).tobytes()).decode()  # 2 of 3 tokens, 4 ids each
    sample = parsed(
        output_token_sampling_mask=[[7, 9]],
        output_token_sampling_logprobs=[-0.4],
        routed_experts=routes,
        num_retractions=2,
        weight_versions=[{"version": "a", "start": 0, "end": 1}],
    )
    assert sample.kept == KeptIds([[7, 9]], [-0.4]) and sample.routed_ids == 8 and sample.retractions == 2
    assert sample.version_spans == (VersionSpan("a", 0, 1),)
    assert parsed(routed_experts="no base64!").routed_ids.startswith("rule base64")


def test_parse_when_spans_are_malformed_then_protocol_error():
    with pytest.raises(
        RolloutProtocolError, match="1 sampled tokens are missing or malformed .*weight_versions"
    ):
        parsed(weight_versions=[{"version": "a"}])


def test_served_model_when_told_then_initial_until_a_push():
    info = {
        "model_path": "m",
        "served_model_name": "n",
        "model_type": "qwen3_moe",
        "weight_version": "default",
    }
    assert SGLANG.served_model(info, {}) == ServedModel("m", "n", "qwen3_moe", "default", is_initial=True)
    assert not SGLANG.served_model(info | {"weight_version": "1"}, {}).is_initial


def test_context_length_when_not_listed_then_protocol_error():
    assert SGLANG.context_length("u", {"data": [{"max_model_len": 512}]}) == 512
    for answer in ({}, {"data": []}, {"data": [{"max_model_len": None}]}):
        with pytest.raises(RolloutProtocolError, match="/v1/models: no max_model_len"):
            SGLANG.context_length("u", answer)


@pytest.mark.parametrize(
    ("told", "longest"),
    [
        ((506, 16384, 1), 506),  # a context of 512
        ((294, 300, 1), 294),  # a cache of 300 tokens
        ((314, 320, 64), 192),
        ((506, 600, 64), 472),
        ((506, 700, 64), 506),
        ((3, 9, 64), 1),
    ],
)
def test_longest_sequence_when_the_cache_is_smaller_than_the_context_then_what_finds_room_there(
    told, longest
):
    names = ("max_req_input_len", "max_total_num_tokens", "page_size")
    assert SGLANG.sequence_limit().endpoint == "/server_info"
    assert SGLANG.longest_sequence("u", dict(zip(names, told, strict=True))) == longest


@pytest.mark.parametrize("told", [{}, {"max_req_input_len": 5, "max_total_num_tokens": None, "page_size": 1}])
def test_longest_sequence_when_a_server_does_not_tell_then_protocol_error(told):
    with pytest.raises(RolloutProtocolError, match="/server_info: no limits of a request"):
        SGLANG.longest_sequence("u", told)


def test_all_checksums_when_a_rank_has_none_then_protocol_error():
    assert SGLANG.all_checksums("u", {"ranks": [{"checksums": {"draft.w": "1"}}]}) == [{"draft.w": "1"}]
    with pytest.raises(RolloutProtocolError, match="/weights_checker: no checksums"):
        SGLANG.all_checksums("u", {"ranks": [{}]})


def test_version_key_when_sorted_then_posts_follow_their_release():
    assert version_key("0.5.6") < version_key("0.5.6.post2") < version_key("0.5.19") < version_key("0.5.23")
    assert version_key("0.5.3rc0") == version_key("0.5.3") and version_key("main") == ()


def test_score_ids_then_one_token_at_temperature_1_without_truncation():
    request = SGLANG.score_ids([1, 2], [7, 3], cache_key="v3")
    assert (request.method, request.endpoint) == ("POST", "/generate")
    assert request.json["token_ids_logprob"] == [7, 3] and request.json["extra_key"] == "v3"
    assert request.json["input_ids"] == [1, 2] and request.json["return_logprob"] is True
    expected = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert expected.items() <= request.json["sampling_params"].items()
    assert request.max_bytes > SGLANG.score_ids([1, 2], [7]).max_bytes


def id_scores(rows):
    meta = {"finish_reason": {"type": "length"}, "output_token_ids_logprobs": rows}
    return SGLANG.parse_id_scores({"meta_info": meta}, server="u", ids=[7, 3])


def test_parse_id_scores_then_in_the_order_of_the_ids_and_null_has_no_mass():
    assert id_scores([[[-1.5, 7, None], [None, 3, None]]]).tolist() == [-1.5, -np.inf]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [],
        [[[-1.5, 3, None], [-2.0, 7, None]]],
        [[[-1.5, 7, None]]],
        [[[-1.5, 7, None], [0.5, 3, None]]],
        [[["-1.5", 7, None], [-1.0, 3, None]]],
    ],
)
def test_parse_id_scores_when_malformed_then_protocol_error(rows):
    with pytest.raises(RolloutProtocolError, match="log-probs of 2 chosen ids are missing or malformed"):
        id_scores(rows)


def test_parse_scores_then_the_likeliest_ids_beside_their_log_probs():
    meta = {
        "finish_reason": {"type": "length"},
        "input_token_logprobs": [[None, 1, None], [-1.0, 5, None]],
        "input_top_logprobs": [None, [[-0.5, 4, None], [-1.0, 5, None]]],
    }
    scores = SGLANG.parse_scores({"meta_info": meta}, server="u", output_ids=[5], vocab_size=10)
    assert scores.top.tolist() == [[-0.5, -1.0]] and scores.top_ids.tolist() == [[4, 5]]
    assert SGLANG.most_likeliest({}) > 10**6
