"""Bodies of the doctor's requests to vLLM, and what is read of their answers."""

import base64
import io

import numpy as np
import pytest

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.inspection import KeptIds, ServedModel, UpdateSupport
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams, VersionSpan
from megatron_rl_corr.engines.vllm.detailed_samples import routed_ids
from megatron_rl_corr.engines.vllm.seeds import server_seed
from megatron_rl_corr.rollout import RolloutProtocolError

VLLM = load_engine("vllm")


def test_detailed_sample_when_it_has_options_then_each_in_its_field():
    sampling = SamplingParams(3, temperature=0.5, top_p=0.9, top_k=8, min_p=0.1, ignore_eos=True)
    request = VLLM.detailed_sample([1, 2], sampling, seed=7, likeliest=16, request_id="x", cache_key="v3")
    assert (request.method, request.endpoint) == ("POST", "/inference/v1/generate")
    assert {
        "token_ids": [1, 2],
        "request_id": "x",
        "cache_salt": "v3",
        "stream": False,
    }.items() <= request.json.items()
    params = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 8,
        "min_p": 0.1,
        "ignore_eos": True,
        "logprobs": 17,
        "seed": server_seed(7),
    }
    assert params.items() <= request.json["sampling_params"].items()
    plain = VLLM.detailed_sample([1], SamplingParams(3), likeliest=8).json
    assert plain["sampling_params"]["top_k"] == 0 and "seed" not in plain["sampling_params"]


def test_server_seed_when_only_high_bits_differ_then_the_low_ones_that_a_cpu_keeps_do():
    seeds = [-(2**63), -5, -1, 0, 1, 2**32 + 1, 2**62 + 1, 2**63 - 1]
    sent = [server_seed(seed) for seed in seeds]
    assert len(set(sent)) == len(seeds) and all(0 <= seed < 2**31 for seed in sent)


def entry(token, logprob, rank):
    return {"token_id": token, "logprob": logprob, "rank": rank}


def parsed(**changes):
    choice = {
        "token_ids": [7, 4],
        "logprobs": {
            "content": [
                # Asked for 3: of an id outside the first two come two beside it, of one inside come three.
                entry(7, -2.0, 9)
                | {"top_logprobs": [entry(7, -2.0, 9), entry(4, -0.5, 1), entry(5, -1.0, 2)]},
                entry(4, -0.9, 2)
                | {"top_logprobs": [entry(4, -0.9, 2), entry(6, -0.8, 1), entry(9, -3.0, 3)]},
            ]
        },
    } | changes
    answer = {"choices": [choice], "usage": {"prompt_tokens_details": changes.get("details")}}
    return VLLM.parse_detailed_sample(answer, server="u", prompt_ids=[1, 2], tokens=2)


def test_parse_when_the_sampled_id_is_likely_or_not_then_the_likeliest_in_falling_order():
    sample = parsed()
    assert sample.output == [7, 4] and sample.logprobs.tolist() == [-2.0, -0.9]
    assert sample.top.tolist() == [[-0.5, -1.0], [-0.8, -0.9]] and sample.top_ids.tolist() == [[4, 5], [6, 4]]
    assert sample.kept == "the answer holds no sampling_mask"
    assert sample.routed_ids is sample.version_spans is sample.cached_tokens is sample.retractions is None
    full = parsed(
        sampling_mask=[[4, 7], [4]],
        weight_versions=[{"version": "a", "start": 0, "end": 2}],
        details={"cached_tokens": 1},
    )
    assert full.kept == KeptIds([[4, 7], [4]], [-2.0, -0.9]) and full.cached_tokens == 1
    assert full.version_spans == (VersionSpan("a", 0, 2),)


@pytest.mark.parametrize("sets", [[[4, 7.5], [4]], [[4, 7], ["4"]], [[4, 7]]])
def test_parse_when_a_sampling_mask_is_no_list_of_ids_a_token_then_refused(sets):
    with pytest.raises(RolloutProtocolError, match="sampling_mask"):
        parsed(sampling_mask=sets)


def test_parse_when_the_lists_are_not_cut_as_at_0_33_then_as_many_likeliest_as_were_asked_for():
    """Asked for 3, it has the sampled id in front of the first 3, which may hold it."""
    sample = parsed(
        logprobs={
            "content": [
                entry(7, -2.0, 9)
                | {
                    "top_logprobs": [
                        entry(7, -2.0, 9),
                        entry(4, -0.5, 1),
                        entry(5, -1.0, 2),
                        entry(8, -1.5, 3),
                    ]
                },
                entry(4, -0.9, 2)
                | {"top_logprobs": [entry(4, -0.9, 2), entry(6, -0.8, 1), entry(9, -3.0, 3)]},
            ]
        }
    )
    assert sample.top.tolist() == [[-0.5, -1.0, -1.5], [-0.8, -0.9, -3.0]]
    assert sample.top_ids.tolist() == [[4, 5, 8], [6, 4, 9]] and sample.logprobs.tolist() == [-2.0, -0.9]


def test_parse_when_aborted_before_the_first_token_then_empty():
    sample = parsed(token_ids=[], logprobs=None)
    assert sample.output == [] and sample.logprobs.shape == (0,) and sample.top.shape == (0, 0)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"token_ids": [7, 5]}, "are of different tokens"),
        ({"logprobs": None}, "are of different tokens"),
        (
            {"token_ids": [7], "logprobs": {"content": [entry(7, None, 1) | {"top_logprobs": []}]}},
            "1 of 1 log-probs",
        ),
        ({"token_ids": [7], "logprobs": {"content": [7]}}, "TypeError"),
    ],
)
def test_parse_when_logprobs_are_of_something_else_then_error_names_the_endpoint(changes, words):
    with pytest.raises(RolloutProtocolError, match="/inference/v1/generate") as error:
        parsed(**changes)
    assert words in str(error.value)


def test_scores_when_parsed_then_of_the_ids_after_the_prompt_and_never_from_the_cache():
    body = VLLM.score([1, 2], [3, 4], likeliest=2, cache_key="v3").json
    assert body["token_ids"] == [1, 2, 3, 4] and body["cache_salt"] == "v3"
    params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 2}
    assert params.items() <= body["sampling_params"].items()
    rows = [
        None,
        {"2": {"logprob": -9.0, "rank": 1}},
        {
            "3": {"logprob": -4.0, "rank": 40},
            "8": {"logprob": -0.5, "rank": 1},
            "9": {"logprob": -0.7, "rank": 2},
        },
        {"4": {"logprob": -0.6, "rank": 1}, "9": {"logprob": -0.8, "rank": 2}},
    ]
    spans = [{"version": "v3", "start": 0, "end": 1}]
    answer = {"prompt_logprobs": rows, "choices": [{"weight_versions": spans}]}
    scores = VLLM.parse_scores(answer, server="u", output_ids=[3, 4], vocab_size=10)
    assert scores.version == "v3"
    assert scores.logprobs.tolist() == [-4.0, -0.6] and scores.top.tolist() == [[-0.5, -0.7], [-0.6, -0.8]]
    for broken in (rows[:3], rows[:3] + [{"5": {"logprob": -1.0, "rank": 1}}], None):
        with pytest.raises(RolloutProtocolError, match="2 scored tokens are missing"):
            VLLM.parse_scores(
                answer | {"prompt_logprobs": broken}, server="u", output_ids=[3, 4], vocab_size=10
            )
    rows[2]["3"]["logprob"] = -9999.0  # what the server writes for -inf: no log-prob to compute a KL with
    with pytest.raises(RolloutProtocolError, match="1 of 2 log-probs are not finite"):
        VLLM.parse_scores(answer, server="u", output_ids=[3, 4], vocab_size=10)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def test_routed_ids_when_the_shape_is_not_the_models_then_it_says_so():
    ids = np.array([[[0, 1]] * 2] * 3, np.uint8)
    shape = ExpertShape(2, (0, 1), 2, 8)
    assert routed_ids(None, tokens=4, shape=shape) is None
    assert routed_ids(npy(ids), tokens=4, shape=shape) == routed_ids(npy(ids), tokens=4, shape=None) == 12
    assert routed_ids(npy(ids), tokens=5, shape=None) == "3 x 2 x 2 ids for 4 tokens"
    assert "rule rows" in routed_ids(npy(ids), tokens=4, shape=ExpertShape(2, (0, 1), 4, 8))
    assert "rule range: expert 8" in routed_ids(npy(ids + 8), tokens=4, shape=shape)
    assert "rule base64" in routed_ids("no base64!", tokens=4, shape=shape)
    assert "rule npy" in routed_ids(base64.b64encode(b"no npy").decode(), tokens=4, shape=shape)


# What a server tells of itself


def info(version="0.32.0", **sections):
    return {"vllm_config": sections, "system_env": {"vllm_version": version}}


@pytest.mark.parametrize(
    "version, lacks, note",
    [
        ("0.31.2", "weight versions by token", ""),
        ("0.32.0", "", ""),
        ("0.32.0rc1", "", ""),
        ("0.32.1", "", ""),
        ("0.33.0", "", ""),
        ("0.33.0+cpu", "", ""),
        ("0.33.1", "", "vLLM 0.33.1 is newer than 0.33.0, the newest tested"),
        ("0.34.0rc2", "", "vLLM 0.34.0rc2 is newer than 0.33.0, the newest tested"),
        ("1.0", "", "vLLM 1.0 is newer than 0.33.0, the newest tested"),
        ("0.33.1.dev7+g12", "", "vLLM '0.33.1.dev7+g12' is no release; 0.33.0 is the newest tested"),
    ],
)
def test_version_support_when_asked_then_what_the_version_lacks(version, lacks, note):
    support = VLLM.version_support(info(version))
    assert (support.version, support.tested, support.lacks, support.note) == (
        version,
        "0.32.0 to 0.33.0",
        lacks,
        note,
    )


def test_facts_when_told_then_model_tokenizer_head_and_block():
    config = {"model": "m", "served_model_name": ["n"], "hf_overrides": {"head_dtype": "float32"}}
    told = info(model_config=config, cache_config={"block_size": 128})
    assert VLLM.served_model({"weight_version": "default"}, told) == ServedModel(
        "m", "n", None, "default", True
    )
    assert not VLLM.served_model({"weight_version": "7"}, told).is_initial
    assert VLLM.has_tokenizer(told) and VLLM.has_float32_head(told) and VLLM.cache_block(told) == 128
    other = info(model_config={"skip_tokenizer_init": True, "hf_overrides": {}})
    assert not VLLM.has_tokenizer(other) and not VLLM.has_float32_head(other)


EXTENSION = "megatron_rl_corr.engines.vllm.worker.Extension"
STARTED = {
    "model_config": {"quantization": None},
    "kv_transfer_config": None,
    "lora_config": None,
    "weight_transfer_config": {"backend": "rl_corr"},
    "parallel_config": {
        "worker_extension_cls": EXTENSION,
        "data_parallel_size": 1,
        "enable_eplb": False,
        "pipeline_parallel_size": 1,
    },
}
"""As /server_info of 0.32 and 0.33 tells it."""


@pytest.mark.parametrize(
    ("section", "told", "remark"),
    [
        ("model_config", {"quantization": "fp8"}, "quantised weights (fp8)"),
        ("kv_transfer_config", {"kv_connector": "LMCacheConnectorV1"}, "LMCacheConnectorV1"),
        ("lora_config", {"max_lora_rank": 16}, "--enable-lora"),
        ("weight_transfer_config", None, "--weight-transfer-config"),
        ("parallel_config", STARTED["parallel_config"] | {"enable_eplb": True}, "--enable-eplb"),
        ("parallel_config", STARTED["parallel_config"] | {"pipeline_parallel_size": 2}, "pipeline stages"),
    ],
)
def test_update_support_when_every_push_would_be_refused_then_none_with_the_reason(section, told, remark):
    listed = {"paths": dict.fromkeys(["/update_weight_version", "/pause", "/resume", "/collective_rpc"])}
    support = VLLM.update_support("u", listed, info(**STARTED | {section: told}))
    assert support.transports == () and remark in support.remark


def test_update_support_when_the_configuration_lacks_a_field_then_the_field_is_named():
    listed, without = {"paths": {}}, {name: STARTED[name] for name in STARTED if name != "lora_config"}
    with pytest.raises(RolloutProtocolError, match="no lora_config in its vllm_config"):
        VLLM.update_support("u", listed, info(**without))


def test_update_support_when_the_extension_is_missing_then_none():
    paths = ["/update_weight_version", "/pause", "/resume", "/collective_rpc"]
    extended = info(**STARTED)
    listed = {"paths": dict.fromkeys(paths)}
    assert VLLM.update_support("u", listed, extended) == UpdateSupport(
        ("distributed", "tensor", "disk"), True
    )
    alone = VLLM.update_support("u", listed, info(parallel_config={"worker_extension_cls": ""}))
    assert alone == UpdateSupport((), True, "worker extension none")
    assert VLLM.update_support("u", {"paths": {}}, extended).transports == ()
    with pytest.raises(RolloutProtocolError, match="no paths"):
        VLLM.update_support("u", {}, extended)


def test_requests_when_named_then_vllms_endpoints():
    assert VLLM.abort_request("x").json == {"request_ids": ["generate-tokens-x"]}
    assert VLLM.tokenize("hi").json == {"prompt": "hi"} and VLLM.tokenized({"tokens": [3]}) == [3]
    assert VLLM.list_models().endpoint == "/v1/models" and VLLM.list_endpoints().endpoint == "/openapi.json"
    assert VLLM.context_length("u", {"data": [{"max_model_len": 512}]}) == 512
    with pytest.raises(RolloutProtocolError, match="max_model_len"):
        VLLM.context_length("u", {"data": []})


def test_most_likeliest_then_what_the_server_was_started_with_and_it_scores_no_chosen_ids():
    def most(**model):
        return VLLM.most_likeliest({"vllm_config": {"model_config": model}})

    assert [most(max_logprobs=64), most(), most(max_logprobs=-1) > 10**6] == [64, 20, True]
    assert VLLM.most_scored_ids == 0
