"""The flat reading of log-probs gives what plain JSON gives, bit for bit, or leaves the
body to plain JSON.
"""

import json

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl_corr.engines.sample_request import SampleRequest
from megatron_rl_corr.engines.sglang.logprob_rows import read_flat
from megatron_rl_corr.engines.sglang.responses import parse_generate
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.rollout import RolloutProtocolError

LOGPROBS = st.one_of(st.none(), st.just(-0.0), st.floats(max_value=0, allow_nan=False, allow_infinity=False))
ROWS = st.lists(st.tuples(LOGPROBS, st.integers(0, 151_935)), min_size=1, max_size=30)


def answer(rows, output_ids=None, **around):
    """A /generate answer with these [log-prob, id, ...] rows, and other fields before and behind them."""
    count = len(rows)
    meta = {
        "id": "a1",
        "finish_reason": {"type": "length", "length": count},
        "prompt_tokens": 1,
        "input_token_logprobs": [[None, 1, None], [-9.5, 2, None]],
        "output_token_logprobs": rows,
        "completion_tokens": count,
        "weight_version": "v1",
    }
    ids = [row[1] for row in rows] if output_ids is None else output_ids
    return {"text": "x", "output_ids": ids, "meta_info": meta | around}


def parse(body):
    asked = SampleRequest(
        torch.tensor([1]),
        SamplingParams(100),
        "r1",
        seed=0,
        prompt_index=0,
        sample_index=0,
        vocab_size=151_936,
    )
    return parse_generate(body, asked, server="http://a:1")


@given(ROWS)
def test_flat_when_rows_are_any_then_float32_of_the_json_number_and_nan_for_null(pairs):
    body = orjson.dumps(answer([[value, token, None] for value, token in pairs]))
    assert (read_flat(body) is not None) == all(value is not None for value, _ in pairs)
    parsed = parse(body)
    with np.errstate(over="ignore"):  # beyond float32 is no log-prob either
        expected = np.array([np.nan if value is None else value for value, _ in pairs]).astype(np.float32)
    expected[np.isinf(expected)] = np.nan
    assert parsed.rollout_logprobs.numpy().tobytes() == expected.tobytes()  # -0.0 is not 0.0 here
    assert parsed.output_ids.tolist() == [token for _, token in pairs]


@given(ROWS)
def test_flat_and_plain_when_given_the_same_answer_then_the_same_trajectory(pairs):
    same = answer([[value, token, None] for value, token in pairs])
    compact, spaced = orjson.dumps(same), json.dumps(same).encode()
    assert read_flat(spaced) is None
    flat, plain = parse(compact), parse(spaced)
    assert flat.rollout_logprobs.numpy().tobytes() == plain.rollout_logprobs.numpy().tobytes()
    assert flat.output_ids.tolist() == plain.output_ids.tolist()
    assert (flat.weight_versions, flat.finish_reason) == (plain.weight_versions, plain.finish_reason)


def test_flat_when_read_then_the_rest_of_the_answer_is_as_it_was():
    whole = answer([[-0.5, 7, None], [-0.25, 3, None]])
    read, ids, logprobs = read_flat(orjson.dumps(whole))
    assert logprobs.tolist() == [-0.5, -0.25] and ids.tolist() == [7, 3] and ids.dtype == np.int64
    assert read.pop("meta_info") == whole["meta_info"] | {"output_token_logprobs": True}
    assert read == {"text": "x", "output_ids": [7, 3]}


def test_flat_when_the_rows_are_the_last_of_the_answer_then_read():
    body = b'{"output_ids":[7],"meta_info":{"output_token_logprobs":[[-0.5,7,null]]}}'
    assert read_flat(body)[2].tolist() == [-0.5]


def test_flat_when_a_string_quotes_an_answer_then_only_the_real_rows_are_read():
    quoted = orjson.dumps(answer([[-9.0, 9, None]])).decode()
    body = answer([[-0.5, 7, None]], id=quoted)
    body["text"] = quoted + '"output_token_logprobs":[[-9.0,9,null]],'
    read, _, logprobs = read_flat(orjson.dumps(body))
    assert logprobs.tolist() == [-0.5] and read["text"] == body["text"] and read["meta_info"]["id"] == quoted


def test_flat_when_another_object_has_the_same_key_first_then_left_to_plain_json():
    body = orjson.dumps({"draft": {"output_token_logprobs": [[-9.0, 7, None]]}} | answer([[-0.5, 7, None]]))
    assert read_flat(body) is None
    assert parse(body).rollout_logprobs.tolist() == [-0.5]


@pytest.mark.parametrize("text", ["a", "]]", '"', "\\", "null]],", "nul"])
def test_rows_when_they_hold_text_then_left_to_plain_json_and_read_alike(text):
    body = orjson.dumps(answer([[-0.5, 7, text], [-1.5, 3, None]]))
    assert read_flat(body) is None
    assert parse(body).rollout_logprobs.tolist() == [-0.5, -1.5]


@pytest.mark.parametrize(
    "wrong, right",
    [
        (b"-1.2l5", b"-1.25"),
        (b"nul", b"-1.25"),
        (b"nulll", b"-1.25"),
        (b"-1n", b"-1.25"),
        (b"u", b"-1.25"),
        (b"-1.25,7,null]],", b"-1.25,7,null],"),
        (b"-1.25,7,null]]],[", b"-1.25,7,null],["),
        (b"-1.25,7],null[", b"-1.25,7,null],["),
        (b"[-1.25,[7,null],-0.5", b"[-1.25,7,null],[-0.5"),
        (b"-1.25,7],[null,-0.5,3,null]", b"-1.25,7,null],[-0.5,3,null]"),
        (b"true", b"-1.25"),
        (b"7.0,null", b"7,null"),
        (b"[null,7,null,null],[3,null]]", b"[-1.25,7,null],[-0.5,3,null]]"),
        (b"-1.25,7 ,null", b"-1.25,7,null"),
    ],
)
def test_flat_when_the_rows_are_no_json_or_no_rows_then_left_to_plain_json(wrong, right):
    body = orjson.dumps(answer([[-1.25, 7, None], [-0.5, 3, None]]))
    assert read_flat(body) is not None and right in body
    changed = body.replace(right, wrong, 1)
    if wrong == b"-1.25,7 ,null":  # a blank inside a row is JSON
        assert parse(changed).rollout_logprobs.tolist() == [-1.25, -0.5]
        return
    assert read_flat(changed) is None
    with pytest.raises(RolloutProtocolError, match="not JSON|output_token_logprobs"):
        parse(changed)


@pytest.mark.parametrize("wrong", [b"[true,1]", b"[1.0,1]", b"[1e0,1]"])
def test_flat_when_output_ids_are_equal_to_ids_and_are_none_then_refused(wrong):
    body = orjson.dumps(answer([[-1.25, 1, None], [-0.5, 1, None]]))
    assert read_flat(body)[1].tolist() == [1, 1]
    changed = body.replace(b'"output_ids":[1,1]', b'"output_ids":' + wrong)
    assert changed != body and read_flat(changed) is None
    with pytest.raises(RolloutProtocolError, match="output_ids is not a list of integers"):
        parse(changed)


def test_flat_when_another_object_has_output_ids_first_then_the_answers_own_are_checked():
    body = orjson.dumps({"draft": {"output_ids": [1]}} | answer([[-0.5, 7, None]]))
    assert read_flat(body)[1].tolist() == [7]
    changed = body.replace(b'"output_ids":[7]', b'"output_ids":[7.0]')
    assert changed != body and read_flat(changed) is None


def test_flat_when_the_key_comes_twice_then_left_to_plain_json():
    body = orjson.dumps(answer([[-1.25, 1, None]]))
    twice = body[:-2] + b',"output_token_logprobs":true}}'
    with pytest.raises(RolloutProtocolError, match="1 output_ids have no list in output_token_logprobs"):
        parse(twice)


@pytest.mark.parametrize("rows", [[[-0.5, 7]], [[-0.5, 7, None, 3]], [[-0.5, 7, {}]]])
def test_rows_when_not_three_numbers_or_null_then_plain_json_takes_their_first_two(rows):
    assert parse(orjson.dumps(answer(rows))).rollout_logprobs.tolist() == [-0.5]


@pytest.mark.parametrize(
    "rows, ids, named",
    [
        ([[-0.5, 7, None], [-1.5, 3, None]], [7, 4], "differ at 1 of 2 positions, first at 1: 4 and 3"),
        ([[-0.5, 7, None], [-1.5, None, None]], [7, 4], "output_token_logprobs is not a list of integers"),
        ([[-0.5, 7, None]], [7, 4], "2 output_ids have 1 entries in output_token_logprobs"),
        ([[]], [], "finish_reason length has no output_ids"),
        ([[[-0.5], 7, None]], [7], r"not a list of \(log-prob, id, text\): \[\[-0.5\]\]"),
        ([[True, 7, None], [{}, 3, None]], [7, 3], r"not a list of \(log-prob, id, text\)"),
        ([[-0.5, 7, None], True], [7, 3], r"not a list of \(log-prob, id, text\)"),
        (True, [7], "1 output_ids have no list in output_token_logprobs"),
    ],
)
def test_rows_when_they_are_wrong_then_protocol_error_says_how(rows, ids, named):
    body = answer([[-0.5, token, None] for token in ids], output_ids=ids, output_token_logprobs=rows)
    with pytest.raises(RolloutProtocolError, match=named):
        parse(orjson.dumps(body))


def test_benchmark_when_run_at_a_small_size_then_both_readings_agree_and_a_row_for_each(monkeypatch, capsys):
    from benchmarks import ingest

    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["ingest.py", "--lengths", "1", "50", "--repeats", "1"])
    try:
        ingest.main()
    finally:
        torch.set_num_threads(threads)
    rows = capsys.readouterr().out.splitlines()[4:]
    names = [row.split(" | ")[0] for row in rows]
    assert names == [
        "| 1 tokens",
        "| 50 tokens",
        "| 1 tokens, with their text",
        "| 50 tokens, with their text",
    ]


def test_benchmark_when_with_routes_then_they_are_checked_and_a_row_for_each_model(monkeypatch, capsys):
    from benchmarks import ingest

    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["ingest.py", "--lengths", "20", "--repeats", "1", "--routes"])
    try:
        ingest.main()
    finally:
        torch.set_num_threads(threads)
    rows = capsys.readouterr().out.splitlines()[4:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in ingest.MODELS]


def test_benchmark_when_the_readings_differ_then_it_ends():
    from benchmarks import ingest

    body = ingest.answer(5, False)
    ids, logprobs = ingest.ours(body)
    with pytest.raises(SystemExit, match="different tensors"):
        ingest.check_equal((ids, logprobs), (ids, logprobs + 1))
