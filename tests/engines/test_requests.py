"""What is sent to a server: bodies, and what is refused before it is sent."""

import asyncio

import numpy as np
import pytest

from megatron_rl_corr.config.flags import name_flags
from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.sglang import requests
from megatron_rl_corr.engines.types import checked_prompt_ids
from megatron_rl_corr.rollout import RolloutClient, SamplingParams
from megatron_rl_corr.rollout.seeds import Draw


def check(ids, prompt_index=0):
    return checked_prompt_ids(ids, vocab_size=100, prompt_index=prompt_index)


def test_prompt_ids_when_on_the_limits_then_returned_as_python_integers():
    ids = check(np.array([0, 99], dtype=np.uint16))
    assert ids == [0, 99] and all(type(i) is int for i in ids)


@pytest.mark.parametrize("bad, position", [([5, 100], 1), ([-1, 5], 0), ([7, 8, 2**40], 2)])
def test_prompt_ids_when_outside_the_vocabulary_then_error_names_prompt_position_id_and_limit(bad, position):
    with pytest.raises(ValueError) as error:
        check(bad, prompt_index=3)
    assert f"prompt 3 has token id {bad[position]} at position {position}" in str(error.value)
    assert "[0, 100)" in str(error.value)


@pytest.mark.parametrize(
    "bad, named",
    [
        ([], "non-empty"),
        ([[1, 2]], "non-empty"),
        (7, "non-empty"),
        ([1.0, 2.0], "float64"),
        (["1"], "integer"),
        ([True, False], "bool"),
        ([1, 2**70], "integer"),
    ],
)
def test_prompt_ids_when_not_a_list_of_integers_then_error_says_so(bad, named):
    with pytest.raises(ValueError, match=f"prompt 0 .*{named}"):
        check(bad)


def test_prompt_ids_when_ragged_then_error_names_the_prompt():
    with pytest.raises(ValueError, match="prompt 2"):
        check([[1], [2, 3]], prompt_index=2)


def test_generate_request_when_built_then_samples_from_the_whole_softmax():
    sampling = SamplingParams(8, temperature=0.7, stop=["</a>"], stop_token_ids=[3, 4], ignore_eos=True)
    request = requests.generate_request([1, 2], sampling, request_id="r1", seed=2**63 - 1)
    assert (request.method, request.endpoint) == ("POST", "/generate")
    assert request.json["input_ids"] == [1, 2] and request.json["rid"] == "r1"
    assert request.json["return_logprob"] is True and request.json["return_text_in_logprobs"] is False
    # What a server's --preferred-sampling-params could set is all there, at the value that changes nothing.
    assert request.json["sampling_params"] == {
        "max_new_tokens": 8,
        "temperature": 0.7,
        "stop": ["</a>"],
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "sampling_seed": 2**63 - 1,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }


def test_generate_request_when_not_truncated_then_no_sampling_mask_is_asked_for():
    sampling = SamplingParams(8)
    body = requests.generate_request([1], sampling, seed=0).json
    assert not sampling.truncated and "return_sampling_mask" not in body


@pytest.mark.parametrize(
    "top_p, top_k, min_p", [(0.8, 20, 0.0), (1.0, 2, 0.0), (0.05, 4096, 0.0), (1.0, 20, 0.1)]
)
def test_generate_request_when_truncated_then_asks_for_the_ids_each_token_is_drawn_from(top_p, top_k, min_p):
    sampling = SamplingParams(8, top_p=top_p, top_k=top_k, min_p=min_p)
    body = requests.generate_request([1], sampling, seed=0).json
    assert sampling.truncated and body["return_sampling_mask"] is True and body["return_logprob"] is True
    assert (body["sampling_params"]["top_p"], body["sampling_params"]["top_k"]) == (top_p, top_k)
    assert body["sampling_params"]["min_p"] == min_p
    # the rest stays at the value that changes nothing
    assert body["sampling_params"]["repetition_penalty"] == 1.0


def test_generate_request_when_likeliest_ids_are_wanted_then_as_many_and_room_for_them():
    plain = requests.generate_request([1, 2], SamplingParams(8), seed=0)
    asked = requests.generate_request([1, 2], SamplingParams(8, top_logprobs=16), seed=0)
    assert asked.json == plain.json | {"top_logprobs_num": 16}
    assert asked.max_bytes - plain.max_bytes == 8 * 16 * 256


def test_generate_request_when_no_rid_is_given_then_none_is_sent():
    assert "rid" not in requests.generate_request([1], SamplingParams(1), seed=0).json


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` .* at least 1, got 0"),
        ({"max_new_tokens": 1.5}, "`max_new_tokens` .* got 1.5"),
        ({"max_new_tokens": True}, "`max_new_tokens` .* got True"),
        ({"max_new_tokens": 1, "temperature": -0.1}, "`temperature` .* got -0.1"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "`temperature` .* got nan"),
        ({"max_new_tokens": 1, "temperature": "1"}, "`temperature` .* got '1'"),
        ({"max_new_tokens": 1, "stop_token_ids": (-2,)}, "`stop_token_ids` .* got -2"),
        ({"max_new_tokens": 1, "stop_token_ids": ("</s>",)}, "`stop_token_ids` .* got '</s>'"),
        ({"max_new_tokens": 1, "stop": "</s>"}, "`stop` must be a tuple of texts, got the text '</s>'"),
        ({"max_new_tokens": 1, "stop": ("a", "")}, "`stop` must be texts of at least one character, got ''"),
        ({"max_new_tokens": 1, "min_p": 1, "top_k": 20}, "`min_p` must be in .0, 1., got 1; use 0"),
        ({"max_new_tokens": 1, "min_p": float("nan"), "top_k": 20}, "`min_p` .* got nan"),
        (
            {"max_new_tokens": 1, "temperature": 0, "min_p": 0.1},
            "no effect on greedy .* `min_p` 0.1 .* leave",
        ),
        ({"max_new_tokens": 1, "top_p": 0}, "`top_p` must be in .0, 1., got 0; use 1"),
        ({"max_new_tokens": 1, "top_p": 1.01, "top_k": 20}, "`top_p` must be in .0, 1., got 1.01"),
        ({"max_new_tokens": 1, "top_p": float("nan"), "top_k": 20}, "`top_p` .* got nan"),
        ({"max_new_tokens": 1, "top_p": "0.9", "top_k": 20}, "`top_p` .* got '0.9'"),
        ({"max_new_tokens": 1, "top_p": True}, "`top_p` .* got True"),
        ({"max_new_tokens": 1, "top_k": 0}, "`top_k` must be -1 .off. or an integer of at least 2, got 0"),
        ({"max_new_tokens": 1, "top_k": 1}, "`top_k` .* got 1"),
        ({"max_new_tokens": 1, "top_k": 20.0}, "`top_k` .* got 20.0"),
        ({"max_new_tokens": 1, "temperature": 0, "top_k": 20}, "no effect on greedy .* `top_k` 20 .* leave"),
    ],
)
def test_sampling_params_when_out_of_bounds_then_error_names_field_and_value(arguments, named):
    with pytest.raises(ValueError, match=named):
        SamplingParams(**arguments)


def test_pause_generation_when_the_mode_is_unknown_then_error_lists_the_modes():
    with pytest.raises(ValueError, match="abort, in_place, retract, got 'inplace'"):
        requests.pause_generation("inplace")


def test_update_weights_when_lengths_differ_then_refused_before_it_can_hang():
    with pytest.raises(ValueError, match="2 names have 1 dtypes and 2 shapes"):
        requests.update_weights_from_distributed(["a", "b"], ["float32"], [[1], [2]], group_name="g")


def test_update_weights_when_built_then_their_name_stays_and_no_cache_is_dropped_bucket_by_bucket():
    request = requests.update_weights_from_distributed(("a",), ("bfloat16",), ((2, 3),), group_name="g")
    assert request.json == {
        "names": ["a"],
        "dtypes": ["bfloat16"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "flush_cache": False,
    }


def test_update_weight_version_when_built_then_running_requests_are_not_aborted():
    assert requests.update_weight_version("v2").json == {"new_version": "v2", "abort_all_requests": False}


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"temperature": 1e-7}, "`temperature` must be 0 .greedy. or at least 1e-06 with SGLang, got 1e-07"),
        (
            {"top_k": 4097},
            "`top_k` must be -1 .off. or in .2, 4096., for which SGLang .* got 4097; use 4096 or less",
        ),
        (
            {"top_p": 0.9},
            "`top_p` below 1 needs a `top_k` in .2, 4096. with SGLang: .* got `top_p` 0.9 with `top_k` -1; "
            "give `top_k` 4096 beside it, or the vocabulary size",
        ),
    ],
)
def test_sampling_when_the_engine_does_not_support_it_then_refused_before_anything_is_sent(arguments, named):
    sampling = SamplingParams(1, **arguments)
    with pytest.raises(ValueError, match=named) as error:
        load_engine("sglang").check_sampling(sampling)
    [field] = arguments
    # as the launcher prints it
    assert name_flags(error.value).startswith(f"--rollout-{field.replace('_', '-')} ")

    async def generate():
        async with RolloutClient(["http://127.0.0.1:1"], vocab_size=10) as client:
            with pytest.raises(ValueError, match=named):
                await client.generate([[1]], sampling)
            with pytest.raises(ValueError, match=named):
                await client.turn([1], sampling, Draw(0, 0, 0))

    asyncio.run(generate())


@pytest.mark.parametrize("arguments", [{}, {"temperature": 0}, {"top_p": 0.9, "top_k": 4096}, {"top_k": 2}])
def test_sampling_when_the_engine_supports_it_then_accepted(arguments):
    load_engine("sglang").check_sampling(SamplingParams(1, **arguments))
