"""What a server's answers become: log-probs, versions and finish reasons, and which answers are refused."""

import math

import orjson
import pytest
import torch

from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.secrets import HIDDEN, keep_secret
from megatron_rl_corr.engines.sglang.responses import parse_control, parse_generate
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout import RolloutProtocolError, RolloutServerError, VersionSpan
from tests.faults.door import NONSENSE
from tests.faults.drills import drill

URL = "http://rollout-3:30000"

# Prompt of 2 tokens, response of 3; the weights changed after the second token.
BODY = b"""{"text": "", "output_ids": [7, 0, 9], "meta_info": {
    "id": "a1", "finish_reason": {"type": "stop", "matched": 9},
    "prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1, "weight_version": "v2",
    "weight_versions": [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3}],
    "output_token_logprobs": [[-0.5, 7, null], [-1.25, 0, null], [-0.0, 9, null]]}}"""


def body(top=None, drop=(), **meta):
    """BODY with other values in meta_info, fewer of them, or other values at the top."""
    answer = orjson.loads(BODY)
    answer["meta_info"] |= meta
    for name in drop:
        del answer["meta_info"][name]
    return orjson.dumps(answer | (top or {}))


def truncated(drop=(), **meta):
    """BODY as the answer to a request with top_p or top_k, its tokens drawn from {7, 1},
    {0} and {3, 9, 8}.
    """
    kept = {
        "output_token_sampling_mask": [[7, 1], [0], [3, 9, 8]],
        "output_token_sampling_logprobs": [-0.25, -0.0, -0.75],
    }
    return body(drop=drop, **(kept | meta))


def parse(data, **options):
    """options: of the sampling, or of the request."""
    own = {name: options.pop(name) for name in ("vocab_size", "experts") if name in options}
    asked = SampleRequest(
        torch.tensor([1, 2]),
        SamplingParams(**({"max_new_tokens": 3} | options)),
        "r1",
        seed=0,
        prompt_index=4,
        sample_index=1,
        **({"vocab_size": 10} | own),
    )
    return parse_generate(data, asked, server=URL)


def test_generate_when_well_formed_then_every_field_is_taken_over():
    trajectory = parse(BODY)
    assert (trajectory.prompt_index, trajectory.sample_index) == (4, 1)
    assert trajectory.prompt_ids.tolist() == [1, 2]
    assert trajectory.output_ids.dtype == torch.int64 and trajectory.output_ids.tolist() == [7, 0, 9]
    assert trajectory.rollout_logprobs.dtype == torch.float32
    assert trajectory.rollout_logprobs.tolist() == [-0.5, -1.25, 0.0]
    assert trajectory.finish_reason == "stop"
    assert trajectory.weight_versions == (VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 3))
    assert trajectory.oldest_version == "v1"
    assert trajectory.cached_tokens == 1 and trajectory.server == URL


@pytest.mark.parametrize("missing", [b"null", b"NaN", b"-Infinity", b"Infinity", b"-1e99"])
def test_logprob_when_absent_or_not_finite_in_float32_then_nan_in_its_place_only(missing):
    trajectory = parse(BODY.replace(b"[-1.25, 0", b"[" + missing + b", 0"))
    first, second, third = trajectory.rollout_logprobs.tolist()
    assert (first, third) == (-0.5, 0.0) and math.isnan(second)
    assert trajectory.output_ids.tolist() == [7, 0, 9]


def test_logprobs_when_their_ids_differ_then_error_names_server_position_and_ids():
    with pytest.raises(RolloutProtocolError) as error:
        parse(body(output_token_logprobs=[[-1, 7, None], [-1, 5, None], [-1, 6, None]]))
    assert URL in str(error.value) and "differ at 2 of 3 positions, first at 1: 0 and 5" in str(error.value)


@pytest.mark.parametrize(
    "data, named",
    [
        (body(output_token_logprobs=[[-1, 7, None]]), "3 output_ids have 1 entries in output_token_logprobs"),
        (body(drop=["output_token_logprobs"]), "3 output_ids have 0 entries in output_token_logprobs"),
        (body(output_token_logprobs=[-1, -1, -1]), "not a list of .log-prob, id, text."),
        (body(output_token_logprobs=[[-1], [-1], [-1]]), "not a list of .log-prob, id, text."),
        (body(output_token_logprobs=[["a", 7], ["b", 0], ["c", 9]]), "not a list of .log-prob, id, text."),
        (body(prompt_tokens=3), "prompt_tokens is 3 where 2 ids were sent"),
        (body(completion_tokens=2), "completion_tokens is 2 where 3 output_ids were returned"),
        (body({"output_ids": [7, 0, 10]}), "token id 10, outside .0, 10."),
        (body({"output_ids": [7, 0, -1]}), "token id -1, outside .0, 10."),
        (body({"output_ids": [7, 0, 9.5]}), "output_ids is not a list of integers"),
        (body({"output_ids": [[7], [0, 9]]}), "output_ids is not a list of integers"),
        (body({"output_ids": "7"}), "output_ids is not a list of integers"),
        (body(finish_reason=None), "finish_reason must be stop, length or abort, got None"),
        (body(finish_reason={"type": "tool_calls"}), "finish_reason must be .* 'tool_calls'"),
        (body({"meta_info": None}), "no output_ids or meta_info"),
        (b"[" + BODY + b"]", "expected a JSON object"),
        (BODY[:-5], "not JSON"),
        (b"<html>bad gateway</html>", "not JSON .*<html>bad gateway</html>"),
    ],
)
def test_generate_when_the_answer_contradicts_itself_then_protocol_error_says_how(data, named):
    with pytest.raises(RolloutProtocolError, match=named) as error:
        parse(data)
    assert (error.value.url, error.value.endpoint) == (URL, "/generate")


@pytest.mark.parametrize(
    "data, named",
    [
        (
            body(output_token_logprobs=[["-1.0", 7, None], [-1, 0, None], [-1, 9, None]]),
            "not a list of .log-prob, id",
        ),
        (
            body(output_token_logprobs=[[True, 7, None], [-1, 0, None], [-1, 9, None]]),
            "not a list of .log-prob, id",
        ),
        (
            body(output_token_logprobs=[[-1, 7, None], [0.5, 0, None], [-1, 9, None]]),
            "0.5 at position 1 is above 0",
        ),
        (
            body(output_token_logprobs=[[-1, 7, None], [1e30, 0, None], [-1, 9, None]]),
            "1e.30 at position 1 is above",
        ),
        (body(output_token_logprobs=["ab", "cd", "ef"]), "output_token_logprobs is not a list of integers"),
        (body({"output_ids": [7, False, 9]}), "output_ids is not a list of integers"),
        (body({"output_ids": 0}, completion_tokens=0), "output_ids is not a list of integers"),
        (body(completion_tokens=3.0), "completion_tokens is 3.0 where 3 output_ids"),
        *(
            (body(cached_tokens=wrong), "cached_tokens must be an integer in .0, 2., got")
            for wrong in ("x", 1e30, -1, 3, True, 1.5, [1])
        ),
        (
            body({"output_ids": []}, completion_tokens=0, output_token_logprobs=[]),
            "finish_reason stop has no outp",
        ),
        (
            body(
                weight_versions=[
                    {"version": "a", "start": 0, "end": 5},
                    {"version": "b", "start": 5, "end": 3},
                ]
            ),
            "weight_versions .* do not partition",
        ),
        (
            body(weight_versions=[{"version": "a", "start": False, "end": 3}]),
            "weight_versions .* do not partition",
        ),
        (
            body(weight_versions=[{"version": "a", "start": 0, "end": 3.0}]),
            "weight_versions .* do not partition",
        ),
        (body(weight_versions=[5]), "weight_versions .* do not partition"),
        (b"[" * 200_000, "not JSON"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not JSON"),
        (b'{"x":NaN,"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not JSON"),
        (b'{"x":NaN,"y":' + b"9" * 5000 + b"}", "not JSON"),
        (
            BODY.replace(b"-0.5, 7", b"9" * 400 + b", 7").replace(b"-1.25", b"NaN"),
            "not a list of .log-prob, id, text",
        ),
    ],
)
def test_generate_when_a_field_is_of_another_kind_than_json_or_the_request_allow_then_refused_by_name(
    data, named
):
    with pytest.raises(RolloutProtocolError, match=named) as error:
        parse(data)
    assert (error.value.url, error.value.endpoint) == (URL, "/generate") and len(str(error.value)) < 1000


def test_generate_when_there_are_more_tokens_than_were_asked_for_then_refused():
    with pytest.raises(RolloutProtocolError, match="3 output_ids were returned where 2 were asked for"):
        parse(BODY, max_new_tokens=2)


def test_generate_when_reading_fails_in_a_way_that_nobody_foresaw_then_the_server_is_named(monkeypatch):
    monkeypatch.setattr("megatron_rl_corr.engines.answers.check_vocabulary", lambda *_: {}["no such field"])
    with pytest.raises(
        RolloutProtocolError, match=f"{URL} .* /generate: it can't be read .KeyError: 'no such field'"
    ):
        parse(BODY)


def test_generate_when_a_server_sends_a_novel_then_the_message_is_short():
    for told in ("x" * 1_000_000, ["x"] * 100_000):
        for wrong in (
            {"weight_versions": told},
            {"cached_tokens": told},
            {"prompt_tokens": told},
            {"finish_reason": told},
            {"output_token_logprobs": told},
        ):
            with pytest.raises(RolloutProtocolError) as error:
                parse(body(**wrong))
            assert len(str(error.value)) < 1000
        with pytest.raises(RolloutServerError) as error:
            parse(body(finish_reason={"type": "abort", "err_type": told, "message": told}))
        assert len(str(error.value)) < 3000


@pytest.mark.parametrize("status", [401, 404, 302, -1, 10**18, True, "500"])
def test_abort_when_its_status_can_not_be_one_of_a_request_that_was_taken_then_that_of_the_answer(status):
    reason = {"type": "abort", "message": "no", "status_code": status, "err_type": "x"}
    with pytest.raises(RolloutServerError) as error:
        parse(body(finish_reason=reason))
    assert error.value.status == 200  # 401 would end the run: every other request would get it too


def test_truncated_when_well_formed_then_the_ids_and_the_logprobs_renormalised_on_them_are_taken():
    trajectory = parse(truncated(), top_p=0.9)
    assert trajectory.support.ids.dtype == trajectory.support.lengths.dtype == torch.int32
    assert trajectory.support.ids.tolist() == [7, 1, 0, 3, 9, 8]
    assert trajectory.support.lengths.tolist() == [2, 1, 3]
    assert trajectory.rollout_logprobs.dtype == torch.float32
    # not the -0.5, -1.25, 0 of the whole softmax
    assert trajectory.rollout_logprobs.tolist() == [-0.25, 0.0, -0.75]


def test_truncated_when_not_asked_for_then_no_support_and_the_logprobs_of_the_whole_softmax():
    for data in (BODY, truncated()):
        trajectory = parse(data)
        assert trajectory.support is None and trajectory.rollout_logprobs.tolist() == [-0.5, -1.25, 0.0]


TOP = [
    [[-0.5, 7, None], [-1.5, 1, None]],
    [[-0.75, 3, None], [-1.25, 0, None]],
    [[-0.0, 9, None], [-20.0, 8, None]],
]


def test_top_logprobs_when_asked_for_then_those_of_each_token():
    top = parse(body(output_top_logprobs=TOP), top_logprobs=2).top_logprobs
    assert top.ids.dtype == torch.int32 and top.ids.tolist() == [[7, 1], [3, 0], [9, 8]]
    assert top.logprobs.dtype == torch.float32
    assert top.logprobs.tolist() == [[-0.5, -1.5], [-0.75, -1.25], [0.0, -20.0]]
    # One that nobody asked for is not looked at.
    assert parse(body(output_top_logprobs=TOP)).top_logprobs is None
    aborted = body({"output_ids": []}, ["output_token_logprobs", "weight_versions"], completion_tokens=0)
    aborted = aborted.replace(b'"type":"stop"', b'"type":"abort"')
    assert parse(aborted, top_logprobs=2).top_logprobs.ids.numel() == 0


@pytest.mark.parametrize(
    "top, named",
    [
        (None, "3 output_ids have 0 entries in output_top_logprobs"),
        (TOP[:2], "3 output_ids have 2 entries in output_top_logprobs"),
        ([TOP[0][:1], *TOP[1:]], "output_top_logprobs at position 0 has 1 ids, and 2 were asked for"),
        ([*TOP[:2], [[-1.0, 9, None], [-1.0, 9, None]]], "has an id twice for one token"),
        (
            [*TOP[:2], [[-1.0, 9, None], [-1.0, 10, None]]],
            r"output_top_logprobs with id 10, outside \[0, 10\)",
        ),
        ([*TOP[:2], [[None, 9, None], [-1.0, 8, None]]], "1 of 6 log-probs are not finite"),
        ([*TOP[:2], [[0.5, 9, None], [-1.0, 8, None]]], "0.5 is above 0"),
        ([*TOP[:2], 3], "is not a list of lists of"),
    ],
)
def test_top_logprobs_when_they_are_wrong_then_refused_by_the_field(top, named):
    with pytest.raises(RolloutProtocolError, match=named):
        parse(body(output_top_logprobs=top), top_logprobs=2)


@pytest.mark.parametrize("missing", [b"null", b"NaN", b"-Infinity", b"-1e99"])
def test_truncated_when_a_logprob_is_absent_or_not_finite_then_nan_in_its_place_only(missing):
    trajectory = parse(truncated().replace(b"-0.75", missing), top_p=0.9)
    *others, last = trajectory.rollout_logprobs.tolist()
    assert others == [-0.25, 0.0] and math.isnan(last) and trajectory.support.lengths.tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    "data, named",
    [
        (
            truncated(output_token_sampling_mask=[[7], [0]]),
            "3 output_ids have 2 entries in output_token_sampling_mask",
        ),
        (
            truncated(output_token_sampling_mask="7"),
            "3 output_ids have no list in output_token_sampling_mask",
        ),
        (truncated(output_token_sampling_mask=[7, 0, 9]), "mask is not a list of lists: .7, 0, 9"),
        (truncated(output_token_sampling_mask=[[7], None, [9]]), "mask is not a list of lists"),
        (truncated(output_token_sampling_mask=[[7], [0], [9.5]]), "mask is not a list of integers"),
        (truncated(output_token_sampling_mask=[[7], [0], ["9"]]), "mask is not a list of integers"),
        (truncated(output_token_sampling_mask=[[7], [0], [9, [8]]]), "mask is not a list of integers"),
        (truncated(output_token_sampling_mask=[[7], [0, 10], [9]]), "mask with id 10, outside .0, 10."),
        (truncated(output_token_sampling_mask=[[7, -1], [0], [9]]), "mask with id -1, outside .0, 10."),
        (truncated(output_token_sampling_mask=[[7, 1], [], [9]]), "mask is empty at position 1"),
        (truncated(output_token_sampling_mask=[[], [], []]), "mask is empty at position 0"),
        # Both sets hold the other's token, so it must be looked for in the right one.
        (truncated(output_token_sampling_mask=[[7], [9], [9, 0]]), "mask at position 1 has not the token 0"),
        (
            truncated(output_token_sampling_mask=[[7, 1], [0], [9, 8, 3, 8]]),
            "mask at position 2 has id 8 twice",
        ),
        (truncated(output_token_sampling_mask=[[7, 7], [0], [9]]), "mask at position 0 has id 7 twice"),
        (
            truncated(output_token_sampling_logprobs=[-1]),
            "3 output_ids have 1 entries in output_token_sampling_logp",
        ),
        (
            truncated(output_token_sampling_logprobs={}),
            "3 output_ids have no list in output_token_sampling_logprobs",
        ),
        (
            truncated(output_token_sampling_logprobs=[-1, -1, "a"]),
            "sampling_logprobs is not a list of log-probs",
        ),
        (
            truncated(output_token_sampling_logprobs=[[-1], [-1], [-1]]),
            "sampling_logprobs is not a list of log-pr",
        ),
        (
            truncated(output_token_sampling_logprobs=[[-1], [-1], [-1, -2]]),
            "sampling_logprobs is not a list of",
        ),
        (
            truncated(output_token_logprobs=[[-1, 7], [-1, 5], [-1, 9]]),
            "differ at 1 of 3 positions, first at 1",
        ),
    ],
)
def test_truncated_when_the_support_is_not_one_then_protocol_error_says_how(data, named):
    with pytest.raises(RolloutProtocolError, match=named) as error:
        parse(data, top_p=0.9)
    assert (error.value.url, error.value.endpoint) == (URL, "/generate")


@pytest.mark.parametrize("name", ["output_token_sampling_mask", "output_token_sampling_logprobs"])
def test_truncated_when_the_server_is_too_old_to_send_it_then_error_names_the_remedy(name):
    with pytest.raises(RolloutProtocolError) as error:
        parse(truncated(drop=[name]), top_p=0.9)
    assert URL in str(error.value) and f"it sent no {name}" in str(error.value)
    assert "use SGLang 0.5.16 or newer, or leave them out" in str(error.value)
    assert all(name in str(error.value) for name in ("`top_p`", "`top_k`", "`min_p`"))


def test_truncated_when_aborted_before_the_first_token_then_an_empty_support():
    data = b"""{"output_ids": [], "meta_info": {"weight_version": "v2", "completion_tokens": 0,
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}}"""
    trajectory = parse(data, top_p=0.9)
    assert (
        trajectory.support.ids.shape
        == trajectory.support.lengths.shape
        == trajectory.rollout_logprobs.shape
        == (0,)
    )


def test_truncated_when_the_vocabulary_is_not_known_then_ids_up_to_int32_are_taken():
    big = 2**31 - 2
    data = truncated(output_token_sampling_mask=[[7, big], [0], [9]])
    assert parse(data, top_p=0.9, vocab_size=None).support.ids.tolist() == [7, big, 0, 9]
    with pytest.raises(RolloutProtocolError, match=f"mask with id {big + 1}, outside"):
        parse(data.replace(b"2147483646", b"2147483647"), top_p=0.9, vocab_size=None)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{"version": "v1", "start": 0, "end": 2}],  # the last token has none
        [{"version": "v1", "start": 1, "end": 3}],  # nor the first here
        [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 2, "end": 3}],  # a hole
        [{"version": "v1", "start": 0, "end": 4}],
        [{"version": "v1"}],
        [{"version": 1, "start": 0, "end": 3}],
        "v1",
    ],
)
def test_weight_versions_when_they_do_not_partition_the_response_then_protocol_error(spans):
    with pytest.raises(RolloutProtocolError, match="weight_versions .* 3 output_ids"):
        parse(body(weight_versions=spans))


def test_weight_versions_when_absent_then_one_span_of_the_last_version():
    assert parse(body(drop=["weight_versions"])).weight_versions == (VersionSpan("v2", 0, 3),)


def test_weight_version_when_absent_altogether_then_protocol_error():
    with pytest.raises(RolloutProtocolError, match="weight_version must be a string, got None"):
        parse(body(drop=["weight_versions", "weight_version"]))


def test_abort_when_by_request_then_a_trajectory_with_the_tokens_so_far():
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    trajectory = parse(body(finish_reason=reason))
    assert trajectory.finish_reason == "abort" and trajectory.output_ids.tolist() == [7, 0, 9]


def test_abort_when_before_the_first_token_then_an_empty_trajectory():
    # The shape of an abort in the waiting queue: no prompt_tokens, cached_tokens or log-probs.
    data = b"""{"text": "", "output_ids": [], "meta_info": {"id": "a1", "weight_version": "v2",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "completion_tokens": 0}}"""
    trajectory = parse(data)
    assert trajectory.output_ids.shape == trajectory.rollout_logprobs.shape == (0,)
    assert (trajectory.output_ids.dtype, trajectory.rollout_logprobs.dtype) == (torch.int64, torch.float32)
    assert trajectory.weight_versions == (VersionSpan("v2", 0, 0),) and trajectory.cached_tokens == 0


@pytest.mark.parametrize("told, status", [(400, 400), ("400", 200), (None, 200)])
def test_abort_when_the_request_failed_then_server_error(told, status):
    reason = {"type": "abort", "message": "too long", "status_code": told, "err_type": "BadRequestError"}
    with pytest.raises(RolloutServerError) as error:
        parse(body(finish_reason=reason))
    assert error.value.status == status and URL in str(error.value)
    assert "request a1 was aborted (BadRequestError): too long" in str(error.value)


def test_control_when_success_is_false_then_server_error_shows_the_start_of_the_body():
    data = b'{"success": false, "message": "' + b"x" * 1000 + b'"}'
    with pytest.raises(RolloutServerError) as error:
        parse_control(data, server=URL, endpoint="/begin_weight_update", status=200)
    assert "answered POST /begin_weight_update with HTTP 200" in str(error.value)
    assert "x" * 100 in str(error.value) and len(str(error.value)) < 700


@pytest.mark.parametrize(
    "endpoint, data, parsed",
    [
        ("/abort_request", b"", {}),
        ("/end_weight_update", b'{"success": true, "message": ""}', {"success": True, "message": ""}),
        ("/flush_cache", b"Cache flushed.\nPlease check backend logs", {}),
    ],
)
def test_control_when_json_text_or_nothing_then_always_a_dict(endpoint, data, parsed):
    assert parse_control(data, server=URL, endpoint=endpoint, status=200) == parsed


ACTIONS = (
    "/pause_generation",
    "/continue_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/flush_cache",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/weights_checker",
    "/model_info",
)


@drill(
    "a proxy's page, or nothing, with HTTP 200 for a control request",
    promised="refused by server and endpoint",
)
@pytest.mark.parametrize("endpoint", ACTIONS)
def test_control_when_a_proxy_answers_for_the_server_then_it_passes_for_no_success(endpoint):
    for body in (
        *NONSENSE,
        b"true",
        b'"ok"',
        b"<!DOCTYPE html><html>maintenance</html>",
        b"{}",
        b'{"success": 1}',
    ):
        with pytest.raises(RolloutProtocolError) as error:
            parse_control(body, server=URL, endpoint=endpoint, status=200)
        assert (error.value.url, error.value.endpoint) == (URL, endpoint)


@pytest.mark.parametrize(
    "endpoint, answer, named",
    [
        ("/server_info", {"tp_size": 0}, "tp_size must be an integer of at least 1, got 0"),
        ("/server_info", {"tp_size": True}, "tp_size must be an integer of at least 1, got True"),
        ("/server_info", {"dp_size": [1]}, "dp_size must be an integer"),
        (
            "/server_info",
            {"enable_dp_attention": "no"},
            "enable_dp_attention must be true, false or null, got no",
        ),
        ("/server_info", {"moe_runner_backend": {}}, "moe_runner_backend must be a text, a number"),
        ("/model_info", {"weight_version": 5}, "weight_version must be a text of .*, got 5"),
        ("/weights_checker", {"success": True, "ranks": [[]]}, "ranks must be a list of objects"),
        ("/v1/models", {"data": {}}, "data must be a list of objects"),
        ("/v1/tokenize", {"tokens": [1, True]}, "tokens must be a list of integers"),
        ("/openapi.json", {"paths": []}, "paths must be an object"),
    ],
)
def test_control_when_a_field_is_of_another_kind_then_refused_by_server_endpoint_and_field(
    endpoint, answer, named
):
    with pytest.raises(RolloutProtocolError, match=named) as error:
        parse_control(orjson.dumps(answer), server=URL, endpoint=endpoint, status=200)
    assert (error.value.url, error.value.endpoint) == (URL, endpoint)


@pytest.mark.parametrize("quoted", ["sk-Zr7/ab", "Bearer sk-Zr7/ab", r"sk-Zr7\/ab"])
def test_control_when_an_answer_quotes_a_key_then_no_text_of_it_has_it(quoted):
    class Holder:
        pass

    holder = Holder()
    keep_secret(holder, "sk-Zr7/ab")
    body = f'{{"weight_version": "unfinished {quoted}", "model_type": "{quoted}"}}'.encode()
    answer = parse_control(body, server=URL, endpoint="/model_info", status=200)
    assert HIDDEN in answer["weight_version"] and HIDDEN in answer["model_type"]
    assert "Zr7" not in repr(answer)
