"""What is sent to a vLLM server, what it tells of itself, and what is refused before a
sample is asked for.
"""

import pytest

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.vllm import servers
from megatron_rl_corr.engines.vllm.progress import EngineCounts
from megatron_rl_corr.engines.vllm.seeds import server_seed
from megatron_rl_corr.engines.vllm.server_version import version_key

ENGINE = load_engine("vllm")
INFO = {
    "vllm_config": {
        "model_config": {
            "dtype": "torch.bfloat16",
            "quantization": None,
            "logprobs_mode": "processed_logprobs",
            "max_model_len": 512,
            "return_sampling_mask": False,
            "skip_tokenizer_init": False,
            "logits_processors": None,
        },
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 3,
            "data_parallel_size": 1,
            "world_size": 6,
        },
    },
    "system_env": {"vllm_version": "0.32.0"},
}

PAUSED = (
    '{"error":{"message":"Generation is paused. Please retry after it '
    'resumes.","type":"ServiceUnavailableError",'
    '"param":null,"code":503}}'
)
"""As 0.33.0 answers a new request while it is paused by `abort` or `wait`."""


def info(part=None, **changes):
    if part is None:
        return INFO
    config = INFO["vllm_config"]
    return INFO | {"vllm_config": config | {part: config[part] | changes}}


def test_generate_request_when_built_then_every_field_that_changes_sampling_is_in_it():
    sampling = SamplingParams(8, temperature=0.7, stop_token_ids=[3, 4])
    request = ENGINE.generate(
        [1, 2], sampling, "r1", seed=5, routed_experts=True, routes_from=1, cache_key="v7"
    )
    assert (request.method, request.endpoint) == ("POST", "/inference/v1/generate")
    assert request.json == {
        "token_ids": [1, 2],
        "request_id": "r1",
        "cache_salt": "v7",
        "stream": False,
        "output_mode": "tokens",
        "sampling_params": {
            "n": 1,
            "max_tokens": 8,
            "min_tokens": 0,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "seed": server_seed(5),
            "prompt_logprobs": None,
            "stop": [],
            "stop_token_ids": [3, 4],
            "ignore_eos": False,
            "bad_words": [],
            "logit_bias": None,
            "allowed_token_ids": None,
            "watermarking": False,
            "detokenize": False,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "routed_experts_prompt_start": 1,
        },
    }


def test_generate_request_when_stop_texts_then_the_server_makes_text_and_ignore_eos_ignores_stop_ids():
    fields = ENGINE.generate(
        [1], SamplingParams(8, stop=["</a>"], stop_token_ids=[3], ignore_eos=True), seed=0
    )
    fields = fields.json["sampling_params"]
    assert fields["detokenize"] and fields["stop"] == ["</a>"] and fields["stop_token_ids"] == []


def test_abort_request_when_built_then_the_id_has_the_servers_prefix():
    assert ENGINE.abort_request("r1").json == {"request_ids": ["generate-tokens-r1"]}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": 0.005}, "`temperature` must be 0 .greedy. or at least 0.01 with vLLM, got 0.005"),
        ({"temperature": 2.5}, "`temperature` must be at most 2 with vLLM, got 2.5"),
        (
            {"top_p": 0.9},
            "`top_p` below 1 needs a `top_k` of at least 2 with vLLM.*give `top_k` the vocabulary size",
        ),
        ({"min_p": 0.1}, "`min_p` above 0 needs a `top_k`"),
    ],
)
def test_sampling_when_vllm_would_silently_take_another_or_refuse_then_error(fields, message):
    with pytest.raises(ValueError, match=message):
        ENGINE.check_sampling(SamplingParams(8, **fields))


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 2.0}, {"top_p": 0.9, "top_k": 100_000}]
)
def test_sampling_when_vllm_can_then_no_error(fields):
    ENGINE.check_sampling(SamplingParams(8, **fields))


CASES = [
    ({}, {}, None),
    ({"logprobs_mode": "raw_logprobs"}, {}, None),
    ({"logprobs_mode": "raw_logprobs"}, {"temperature": 0}, None),
    ({"logprobs_mode": "raw_logprobs"}, {"temperature": 2.0}, "--logprobs-mode processed_logprobs"),
    ({"logprobs_mode": "raw_logprobs"}, {"top_k": 5}, "--logprobs-mode processed_logprobs"),
    ({"logprobs_mode": "raw_logprobs"}, {"top_k": 5, "with_support": False}, None),  # an evaluation uses none
    ({"logprobs_mode": "processed_logits"}, {}, "returns no log-probs"),
    ({"logits_processors": ["a.b"]}, {}, "--logits-processors"),
    ({"skip_tokenizer_init": True}, {"stop": ("x",)}, "--skip-tokenizer-init"),
    ({}, {"max_new_tokens": 512}, "--max-model-len 512"),
    ({}, {"top_k": 5}, "--return-sampling-mask"),
    ({"max_logprobs": 20}, {}, None),
    ({"max_logprobs": 0}, {}, None),
    ({"max_logprobs": -1}, {"top_logprobs": 64}, None),  # no limit
    ({"max_logprobs": 20}, {"top_logprobs": 19}, None),
    ({"max_logprobs": 20}, {"top_logprobs": 20}, "its --max-logprobs is 20; start it with more"),
    ({}, {"top_k": 5, "with_support": False}, None),
    ({"return_sampling_mask": True}, {"top_k": 5}, None),
    ({"return_sampling_mask": True}, {}, "HTTP 500"),
    ({"return_sampling_mask": True}, {"temperature": 0}, "HTTP 500"),
    ({"return_sampling_mask": True}, {"temperature": 0, "with_support": False}, "HTTP 500"),
]


@pytest.mark.parametrize("model, fields, message", CASES)
def test_sampling_problem_when_the_server_was_started_so_then_it_is_named_with_the_remedy(
    model, fields, message
):
    problem = ENGINE.sampling_problem(
        info("model_config", **model), SamplingParams(**{"max_new_tokens": 8, **fields})
    )
    assert problem is None if message is None else message in problem


def test_sampling_problem_when_decoding_is_speculative_then_refused_by_its_flag():
    problem = ENGINE.sampling_problem(
        {"vllm_config": INFO["vllm_config"] | {"speculative_config": {"method": "ngram"}}}, SamplingParams(8)
    )
    assert "--speculative-config" in problem and "not proven" in problem and "start it without" in problem


@pytest.mark.parametrize(
    "section, field",
    [
        ("aux_output_config", "enable_omit_prefix_routed_experts"),
        ("model_config", "enable_omit_prefix_routed_experts"),
        ("aux_output_config", "omit_prefix_routed_experts"),
    ],
)
def test_sampling_problem_when_routes_of_cached_tokens_are_left_out_then_refused_by_its_flag(section, field):
    def told(value):
        config = INFO["vllm_config"]
        return {
            "vllm_config": config | {section: config.get(section, {}) | {field: value}, "instance_id": "a"}
        }

    problem = ENGINE.sampling_problem(told(True), SamplingParams(8))
    assert "--enable-omit-prefix-routed-experts leaves out" in problem and "start it without" in problem
    assert ENGINE.routes_problem(told(True)) == problem
    assert ENGINE.sampling_problem(told(False), SamplingParams(8)) is None
    assert ENGINE.routes_problem({}) is ENGINE.routes_problem(INFO) is None


def one_token(logprob):
    return {"choices": [{"logprobs": {"content": [{"token_id": 4, "logprob": logprob}]}}]}


def test_sampling_test_when_temperature_or_truncation_then_one_id_whose_logprob_must_be_0():
    assert all(
        ENGINE.sampling_test(SamplingParams(8, **fields)) is None for fields in ({}, {"temperature": 0})
    )
    for fields in ({"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.9, "top_k": 5}):
        sampling = SamplingParams(8, **fields)
        asked = ENGINE.sampling_test(sampling).json["sampling_params"]
        assert (asked["top_k"], asked["max_tokens"], asked["temperature"]) == (1, 1, sampling.temperature)
        assert ENGINE.sampling_test_problem(one_token(-1e-7), sampling) is None
        problem = ENGINE.sampling_test_problem(one_token(-3.5), sampling)
        assert "log-prob -3.5, not 0" in problem and "--logprobs-mode processed_logprobs" in problem
        assert "has no log-prob" in ENGINE.sampling_test_problem({"choices": []}, sampling)


def test_server_info_when_read():
    assert ENGINE.dtype(INFO) == "bfloat16" and not ENGINE.is_quantized(INFO)
    assert ENGINE.is_quantized(info("model_config", quantization="fp8"))
    assert ENGINE.is_quantized(info("cache_config", cache_dtype="fp8_e4m3"))
    ranks = ENGINE.ranks("u", INFO)
    assert (ranks.tensor, ranks.pipeline) == (2, 3)
    for changes, message in (({"data_parallel_size": 2}, "replicas"), ({"world_size": 12}, "12 ranks")):
        with pytest.raises(RolloutProtocolError, match=message):
            ENGINE.ranks("u", info("parallel_config", **changes))
    with pytest.raises(RolloutProtocolError, match="parallel_config"):
        ENGINE.ranks("u", {})


@pytest.mark.parametrize(
    "version, lacks, noted",
    [
        ("0.31.2", True, False),
        ("0.32.0", False, False),
        ("0.32.0+cpu", False, False),
        ("0.33.0", False, False),
        ("0.33.1", False, True),
        ("0.34.0rc1", False, True),
        ("None", False, True),
    ],
)
def test_version_when_too_old_new_or_unknown_then_it_is_named(version, lacks, noted):
    support = ENGINE.version_support({"system_env": {"vllm_version": version}})
    assert (bool(support.lacks), bool(support.note)) == (lacks, noted)
    assert version_key("0.9.2") < version_key("0.32.0") < version_key("0.32.1")


@pytest.mark.parametrize(
    "endpoint, status, detail, remedy",
    [
        ("/inference/v1/generate", 401, "", "--api-key"),
        ("/inference/v1/generate", 403, "", "--enable-scale-out"),
        ("/weight_info", 404, "", "VLLM_SERVER_DEV_MODE=1"),
        ("/inference/v1/generate", 404, "", "is this the address"),
        (
            "/inference/v1/generate",
            500,
            '{"error":{"message":""}}',
            "--return-sampling-mask samples with `top_k`",
        ),
        ("/inference/v1/generate", 500, "EngineCore encountered an issue", "its engine has died"),
        ("/health", 503, "", "its engine has died"),
        ("/inference/v1/generate", 503, PAUSED, "whoever paused it must POST /resume"),
        ("/inference/v1/generate", 503, "upstream connect error", ""),
        ("/inference/v1/generate", 400, "", ""),
        (
            "/inference/v1/generate",
            400,
            "X-Session-ID header is required",
            "without --enable-omit-prefix-routed",
        ),
    ],
)
def test_remedy_when_status_then_what_to_do(endpoint, status, detail, remedy):
    found = servers.remedy(endpoint, status, detail)
    assert remedy in found and bool(remedy) == bool(found)


METRICS = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:generation_tokens_total{engine="0"} 1e+02
vllm:request_success_total{finished_reason="stop"} 3.0
vllm:request_success_total{finished_reason="length"} 4.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""


def test_counts_when_read_then_summed_over_engines_and_none_without_vllms():
    counts = EngineCounts.parse(METRICS)
    assert (counts.running, counts.waiting, counts.done) == (3, 0, (100, 0, 7, 0, 0.25))
    assert EngineCounts.parse(b"python_info 1.0\n") is None
    # A part of a long prompt, which nothing else counts before its last part.
    assert EngineCounts.parse(METRICS.replace(b"0.25", b"0.26")) != counts
