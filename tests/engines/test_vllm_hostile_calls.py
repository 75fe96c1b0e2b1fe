"""What somebody who reaches a real vLLM server's control endpoint can't do with our extension: bring weights
that the model does not have, or so many that the server ends.
"""

import json
import urllib.error
import urllib.request

import pytest

from megatron_rl_corr.engines.vllm.worker_code import worker_code

HUGE = 2**40


def call(server, method, **kwargs):
    """(status, what the workers answered)."""
    body = json.dumps({"method": method, "kwargs": kwargs, "timeout": 60}).encode()
    request = urllib.request.Request(
        f"{server.url}/collective_rpc", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, json.loads(answer.read())["results"][0]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def bucket(**fields):
    return {"buckets": [fields]}


def entry(name, shape, data="", **more):
    return json.dumps([{"name": name, "dtype": "float32", "shape": shape, "data": data, **more}])


NAME = "model.norm.weight"


@pytest.mark.parametrize(
    ("method", "given", "told"),
    [
        ("rl_corr_begin", {"tensors": {"no.such.weight": [1]}, "code": None}, "none of no.such.weight"),
        ("rl_corr_begin", {"tensors": {NAME: [HUGE, HUGE]}, "code": None}, "has shape"),
        ("rl_corr_begin", {"tensors": {NAME: [-1]}, "code": None}, "has shape [-1]"),
        ("rl_corr_begin", {"tensors": 7, "code": None}, "TypeError"),
        ("rl_corr_begin_changes", {"push": "1", "base": "0", "stages": HUGE}, "no update is open"),
        ("rl_corr_bucket", bucket(serialized=entry(NAME, [64])), "no update is open"),
        ("rl_corr_bucket", {"buckets": []}, "IndexError"),
        ("rl_corr_load_folder", {"path": "/etc", "code": None}, "no safetensors files"),
        ("rl_corr_load_folder", {"path": "/../..//no\x00where", "code": None}, "there is no folder"),
        ("rl_corr_leave", {"name": "../.."}, None),
        (
            "rl_corr_join",
            {
                **{"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
                **{"group_name": "g", "backend": "mpi"},
            },
            "backend must be one of gloo, nccl",
        ),
    ],
)
def test_call_when_it_does_not_fit_then_refused_in_words(vllm_server_fp32, method, given, told):
    if "code" in given:
        given = given | {"code": worker_code()}
    status, answer = call(vllm_server_fp32, method, **given)
    assert status == 200
    assert answer in (None, "None") if told is None else told in answer["error"]


def test_buckets_when_they_bring_what_the_model_lacks_then_refused_and_the_weights_are_as_before(
    vllm_server_fp32,
):
    before = call(vllm_server_fp32, "rl_corr_checksums")[1]["checksums"]
    for serialized, told in (
        (entry("no.such.weight", [1], "AAAAAA=="), "is not part of this update"),
        (entry(NAME, [HUGE, HUGE]), "has shape"),
        (entry(NAME, [-1]), "has shape"),
        ("not JSON", "Expecting value"),
        (json.dumps([{"name": NAME}]), "KeyError"),
    ):
        assert call(vllm_server_fp32, "rl_corr_begin", code=worker_code())[1] in (None, "None")
        answer = call(vllm_server_fp32, "rl_corr_bucket", **bucket(serialized=serialized))[1]
        assert told in answer["error"]
    for fields, told in (
        ({"names": [NAME], "dtypes": ["float32"], "shapes": [[HUGE]], "group_name": "g"}, "has shape"),
        ({"names": [NAME], "dtypes": [], "shapes": [], "group_name": "g"}, "ValueError|zip|shorter"),
    ):
        assert call(vllm_server_fp32, "rl_corr_begin", code=worker_code())[1] in (None, "None")
        answer = call(vllm_server_fp32, "rl_corr_bucket", **bucket(**fields))[1]
        assert any(one in answer["error"] for one in told.split("|"))
    status, answer = call(vllm_server_fp32, "rl_corr_state")
    assert (status, answer) == (200, {"open": False, "mixed": False})
    assert call(vllm_server_fp32, "rl_corr_checksums")[1]["checksums"] == before
