"""vLLM's answers, made by hand after those of real servers (0.32, 0.33): what is read, and each
way to be wrong.
"""

import base64
import copy
import io

import numpy as np
import orjson
import pytest
import torch

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.routes import ExpertShape, no_routes
from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.trajectory import SamplingParams, VersionSpan
from megatron_rl_corr.engines.vllm.routed_experts import decode
from tests.faults.door import NONSENSE

ENGINE, URL = load_engine("vllm"), "http://host:1"
PROMPT = torch.tensor([3, 1, 4])
SHAPE = ExpertShape(num_layers=2, layers=(0, 1), top_k=2, experts=4)
# P + R - 1 = 4
ROUTES = np.array([[[0, 1], [2, 3]], [[1, 0], [3, 1]], [[2, 0], [0, 3]], [[3, 2], [1, 2]]], np.uint8)


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64.b64encode(file.getvalue()).decode()


def answer():
    return {
        "request_id": "generate-tokens-r1",
        "model": "m",
        "created": 1,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": [14, 31],
                "routed_experts": npy(ROUTES),
                "sampling_mask": [[14, 20], [2, 31]],
                "weight_versions": [
                    {"version": "7", "start": 0, "end": 1},
                    {"version": "8", "start": 1, "end": 2},
                ],
                "logprobs": {
                    "content": [
                        {"token_id": 14, "logprob": -4.05, "rank": 14, "top_logprobs": []},
                        {"token_id": 31, "logprob": -0.25, "rank": 1, "top_logprobs": []},
                    ]
                },
            }
        ],
    }


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4"])
def test_routes_when_written_in_a_wider_type_then_the_same(dtype):
    assert decode(npy(ROUTES.astype(dtype)), tokens=5, shape=SHAPE).tolist() == ROUTES.tolist()
    short = base64.b64encode(base64.b64decode(npy(ROUTES.astype(dtype)))[:-1]).decode()
    with pytest.raises(ValueError, match="rule npy: routed_experts of shape .4, 2, 2. have"):
        decode(short, tokens=5, shape=SHAPE)


def changed(path, value):
    made = copy.deepcopy(answer())
    *steps, last = path
    place = made
    for step in steps:
        place = place[step]
    place[last] = value
    return made


def parse(made, **options):
    body = made if isinstance(made, bytes) else orjson.dumps(made)
    own = {name: options.pop(name) for name in ("vocab_size", "experts", "routes_from") if name in options}
    asked = SampleRequest(
        PROMPT,
        SamplingParams(**({"max_new_tokens": 2, "top_p": 0.9} | options)),
        "r1",
        seed=0,
        prompt_index=5,
        sample_index=6,
        **({"vocab_size": 83, "experts": SHAPE} | own),
    )
    return ENGINE.parse(body, asked, server=URL)


CHOICE = ("choices", 0)
CONTENT = (*CHOICE, "logprobs", "content")


def test_parse_when_answer_is_right_then_every_field_is_there():
    sample = parse(answer())
    assert sample.output_ids.tolist() == [14, 31] and sample.prompt_ids is PROMPT
    assert sample.rollout_logprobs.tolist() == pytest.approx([-4.05, -0.25])
    assert (sample.prompt_index, sample.sample_index, sample.server) == (5, 6, URL)
    assert sample.finish_reason == "length" and sample.cached_tokens == 2
    assert sample.weight_versions == (VersionSpan("7", 0, 1), VersionSpan("8", 1, 2))
    assert sample.support.ids.tolist() == [14, 20, 2, 31] and sample.support.lengths.tolist() == [2, 2]
    assert sample.routed_experts.dtype == torch.uint8 and sample.routed_experts.tolist() == ROUTES.tolist()


def test_parse_when_likeliest_ids_were_asked_for_then_the_k_with_or_without_the_sampled_one():
    made, low, high = answer(), {"token_id": 14, "logprob": -4.05}, {"token_id": 31, "logprob": -0.25}
    rows = made["choices"][0]["logprobs"]["content"]
    # The sampled id comes first, wherever it ranks; where it is among the likeliest, one more of them comes.
    rows[0]["top_logprobs"] = [low, {"token_id": 2, "logprob": -0.5}, {"token_id": 3, "logprob": -1.5}]
    rows[1]["top_logprobs"] = [high, {"token_id": 2, "logprob": -3.0}, {"token_id": 3, "logprob": -9999.0}]
    top = parse(made, top_logprobs=2).top_logprobs
    assert top.ids.tolist() == [[2, 3], [31, 2]] and top.logprobs.tolist() == [[-0.5, -1.5], [-0.25, -3.0]]
    assert parse(made).top_logprobs is None
    rows[1]["top_logprobs"] = [high]
    with pytest.raises(RolloutProtocolError, match="at position 1 has 1 ids, and 2 were asked for"):
        parse(made, top_logprobs=2)
    rows[1]["top_logprobs"] = None
    with pytest.raises(RolloutProtocolError, match="is not a list of token_id and logprob"):
        parse(made, top_logprobs=2)


def test_parse_when_a_part_of_the_routes_is_known_then_the_answer_has_the_rest():
    made = changed((*CHOICE, "routed_experts"), npy(ROUTES[3:]))
    assert parse(made, routes_from=3).routed_experts.tolist() == ROUTES[3:].tolist()
    with pytest.raises(RolloutProtocolError, match="rule rows.*from token 3 on"):
        parse(answer(), routes_from=3)


@pytest.mark.parametrize("known, start, cached", [(0, 0, 1), (0, 0, 2), (1, 1, 2), (2, 2, 3)])
def test_parse_when_routes_of_cached_tokens_are_left_out_then_refused_by_the_option_that_does_it(
    known, start, cached
):
    """Rows from max(routed_experts_prompt_start, num_cached_tokens) on, as the option is
    proposed for vLLM.
    """
    made = changed((*CHOICE, "routed_experts"), npy(ROUTES[max(start, cached) :]))
    made["usage"]["prompt_tokens_details"]["cached_tokens"] = cached
    with pytest.raises(RolloutProtocolError) as refused:
        parse(made, routes_from=known)
    told = f"rule rows: routed_experts of {4 - cached} rows, where {4 - known} belong to 5 tokens"
    assert told in str(refused.value) and f"from token {known} on" in str(refused.value)
    assert "start it without --enable-omit-prefix-routed-experts" in str(refused.value)
    assert "another model" not in str(refused.value)


def test_parse_when_what_was_cached_is_what_was_not_asked_for_then_the_rows_are_the_rest():
    made = changed((*CHOICE, "routed_experts"), npy(ROUTES[2:]))  # cached 2, asked for from 2 on
    assert parse(made, routes_from=2).routed_experts.tolist() == ROUTES[2:].tolist()


def test_parse_when_not_asked_for_mask_and_routes_then_they_are_left_out():
    sample = parse(answer(), top_p=1.0, experts=None)
    assert sample.support is None and sample.routed_experts is None


@pytest.mark.parametrize("value", [None, -9999.0, -1e39, "NaN", "-Infinity"])
def test_parse_when_a_logprob_is_not_finite_then_nan(value):
    body = orjson.dumps(changed((*CONTENT, 1, "logprob"), value))
    for text in (b"NaN", b"-Infinity"):
        body = body.replace(b'"' + text + b'"', text)
    logprobs = parse(body).rollout_logprobs
    assert logprobs[0] == pytest.approx(-4.05) and logprobs[1].isnan()


def test_parse_when_aborted_before_the_first_token_then_an_empty_response():
    made = changed((*CHOICE, "finish_reason"), "abort")
    made["usage"] |= {"completion_tokens": 0, "prompt_tokens_details": None}
    made["choices"][0] |= {
        "token_ids": [],
        "weight_versions": None,
        "logprobs": {"content": []},
        "routed_experts": None,
        "sampling_mask": None,
    }
    sample = parse(made)
    assert sample.output_ids.numel() == 0 and sample.cached_tokens == 0
    assert torch.equal(sample.routed_experts, no_routes(SHAPE, 2))
    made["choices"][0]["finish_reason"] = "stop"
    with pytest.raises(RolloutProtocolError, match="finish_reason stop has no output_ids"):
        parse(made)


WRONG = [
    (("choices",), [], "choices must hold one response"),
    (("choices",), None, "choices must hold one response"),
    ((*CHOICE, "finish_reason"), "repetition", "finish_reason must be stop, length or abort"),
    ((*CHOICE, "finish_reason"), None, "finish_reason must be"),
    ((*CHOICE, "token_ids"), [14], "completion_tokens is 2 where 1 token_ids"),
    ((*CHOICE, "token_ids"), [14, 30], "differ at 1 of 2 positions, first at 1: 30 and 31"),
    ((*CHOICE, "token_ids"), [14, 83], r"outside \[0, 83\)"),
    ((*CHOICE, "token_ids"), [14, 1.5], "token_ids is not a list of integers"),
    (("usage", "prompt_tokens"), 4, "prompt_tokens is 4 where 3 ids were sent"),
    ((*CHOICE, "logprobs"), None, "2 output_ids have no list in logprobs.content"),
    (CONTENT, [], "2 output_ids have 0 entries"),
    ((*CONTENT, 0), {"token_id": 14}, "logprobs.content is not a list of token_id and logprob"),
    ((*CONTENT, 0, "token_id"), 15, "differ at 1 of 2 positions, first at 0: 14 and 15"),
    ((*CONTENT, 0, "logprob"), "x", "no number"),
    ((*CONTENT, 0, "logprob"), "-1", "no number"),
    ((*CONTENT, 0, "logprob"), True, "no number"),
    ((*CONTENT, 0, "logprob"), 0.5, "0.5 at position 0 is above 0"),
    ((*CONTENT, 0, "token_id"), True, "logprobs.content is not a list of integers"),
    ((*CHOICE, "logprobs"), [1], "logprobs must be an object, got .1."),
    ((*CHOICE, "finish_reason"), ["stop"], "finish_reason must be stop, length or abort, got .'stop'."),
    ((*CHOICE, "token_ids"), [14, True], "token_ids is not a list of integers"),
    ((*CHOICE, "token_ids"), {}, "token_ids is not a list of integers"),
    ((*CHOICE, "weight_versions", 1, "end"), 2.0, "do not partition"),
    ((*CHOICE, "weight_versions", 0, "start"), False, "do not partition"),
    (("usage",), [1], "usage must be an object, got .1."),
    (("usage", "completion_tokens"), 2.0, "completion_tokens is 2.0 where 2 token_ids"),
    (("usage", "prompt_tokens_details"), [1], "prompt_tokens_details must be an object"),
    (
        ("usage", "prompt_tokens_details", "cached_tokens"),
        [1],
        r"cached_tokens must be an integer in .0, 3., got .1.",
    ),
    (("usage", "prompt_tokens_details", "cached_tokens"), "x", "cached_tokens must be an integer"),
    (("usage", "prompt_tokens_details", "cached_tokens"), 4, "cached_tokens must be an integer"),
    (("error",), [1], "[1]"),
    ((*CHOICE, "weight_versions"), None, "use vLLM 0.32 or newer"),
    ((*CHOICE, "weight_versions"), [], "do not partition the 2 output_ids"),
    ((*CHOICE, "weight_versions", 1, "start"), 0, "do not partition"),
    ((*CHOICE, "weight_versions", 1, "end"), 3, "do not partition"),
    ((*CHOICE, "weight_versions", 0, "version"), 7, "do not partition"),
    ((*CHOICE, "sampling_mask"), None, "--return-sampling-mask"),
    ((*CHOICE, "sampling_mask"), [[14]], "2 output_ids have 1 entries in sampling_mask"),
    ((*CHOICE, "sampling_mask", 1), [2, 30], "sampling_mask at position 1 has not the token 31"),
    ((*CHOICE, "sampling_mask", 1), [], "sampling_mask is empty at position 1"),
    ((*CHOICE, "sampling_mask", 1), [31, 31], "has id 31 twice"),
    ((*CHOICE, "sampling_mask", 1), [31, 83], r"sampling_mask with id 83, outside \[0, 83\)"),
    ((*CHOICE, "routed_experts"), None, "rule presence.*--enable-return-routed-experts"),
    ((*CHOICE, "routed_experts"), 5, "rule base64"),
    ((*CHOICE, "routed_experts"), "?", "rule base64"),
    ((*CHOICE, "routed_experts"), base64.b64encode(ROUTES.tobytes()).decode(), "rule npy"),
    ((*CHOICE, "routed_experts"), npy(np.array([{}]), allow_pickle=True), "rule type"),
    ((*CHOICE, "routed_experts"), npy(ROUTES.astype(np.float32)), "rule type"),
    ((*CHOICE, "routed_experts"), npy(ROUTES[:3]), "rule rows"),
    ((*CHOICE, "routed_experts"), npy(ROUTES[:, :1]), "rule rows"),
    ((*CHOICE, "routed_experts"), npy(ROUTES + np.uint8(1)), r"rule range: expert 4 .*outside \[0, 4\)"),
    ((*CHOICE, "routed_experts"), npy(np.zeros_like(ROUTES)), "rule distinct ids"),
]


@pytest.mark.parametrize("path, value, message", WRONG, ids=[message[:40] for *_, message in WRONG])
def test_parse_when_one_field_is_wrong_then_the_error_says_which(path, value, message):
    with pytest.raises(RolloutServerError if path == ("error",) else RolloutProtocolError, match=message):
        parse(changed(path, value))


def test_parse_when_there_are_more_tokens_than_were_asked_for_then_refused():
    with pytest.raises(RolloutProtocolError, match="2 output_ids were returned where 1 were asked for"):
        parse(answer(), max_new_tokens=1)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (True, 16), }",
        "{'descr': '|u1', 'fortran_order': True, 'shape': (4, 4), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (16,), 'x': 1}",
        "{",
        "(" * 5000,
        "'",
        "1j",
        "\x00",
    ],
)
def test_parse_when_an_npy_header_is_wrong_then_refused_before_anything_is_made_of_it(header):
    text = header.encode() + b" " * 20 + b"\n"
    raw = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16)
    with pytest.raises(RolloutProtocolError, match="rule (npy|rows)"):
        parse(changed((*CHOICE, "routed_experts"), base64.b64encode(raw).decode()))


def test_parse_when_npy_is_followed_by_bytes_or_cut_then_the_error_says_so():
    raw = base64.b64decode(npy(ROUTES))
    for wrong in (raw + b"x", raw[:-1]):
        with pytest.raises(RolloutProtocolError, match="rule npy"):
            parse(changed((*CHOICE, "routed_experts"), base64.b64encode(wrong).decode()))


@pytest.mark.parametrize("body", [b"", b"oops", b"[1]"])
def test_parse_when_answer_is_no_object_then_the_error_shows_it(body):
    with pytest.raises(RolloutProtocolError, match="not JSON|expected a JSON object"):
        parse(body)


def test_parse_when_answer_is_an_error_then_it_is_the_servers():
    with pytest.raises(RolloutServerError, match="HTTP 500: engine died") as failed:
        parse(
            {"error": {"message": "engine died", "type": "InternalServerError", "param": None, "code": 500}}
        )
    assert failed.value.status == 500


@pytest.mark.parametrize(
    "endpoint",
    [
        "/pause?mode=keep",
        "/resume",
        "/update_weight_version",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/weight_info",
    ],
)
def test_parse_control_when_a_proxy_answers_for_the_server_then_it_passes_for_no_success(endpoint):
    for body in (*NONSENSE, b"true", b'"ok"', b"{}", b'{"status": 200}', b'{"success": 1}'):
        with pytest.raises(RolloutProtocolError) as error:
            ENGINE.parse_control(body, server=URL, endpoint=endpoint, status=200)
        assert (error.value.url, error.value.endpoint) == (URL, endpoint)


def test_parse_control_when_empty_failed_or_an_error():
    def control(body, endpoint="/x"):
        return ENGINE.parse_control(body, server=URL, endpoint=endpoint, status=200)

    assert control(b"", "/health") == {} and control(b'{"success": true}') == {"success": True}
    for path, wrong, named in (
        ("/collective_rpc", {"results": 5}, "results must be a list, got 5"),
        (
            "/server_info?config_format=json",
            {"vllm_config": 5},
            "vllm_config must be an object or null, got 5",
        ),
        (
            "/server_info",
            {"vllm_config": {"parallel_config": {"world_size": 0}}},
            "parallel_config.world_size must be",
        ),
        ("/weight_info", {"weight_version": 1}, "weight_version must be a text of .*, got 1"),
        ("/is_paused", {"is_paused": "no"}, "is_paused must be true, false or null, got no"),
    ):
        with pytest.raises(RolloutProtocolError, match=named):
            ENGINE.parse_control(orjson.dumps(wrong), server=URL, endpoint=path, status=200)
    for body in (b'{"success": false}', b'{"error": "Failed to pause"}'):
        with pytest.raises(RolloutServerError, match="success|Failed to pause"):
            control(body)
