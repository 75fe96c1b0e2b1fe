"""JSON whose whole numbers have any size, and what is refused with a remedy."""

import json

import orjson
import pytest

from megatron_rl_corr.data import json_text
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat
from megatron_rl_corr.data.reward_worker import LENGTH_BYTES, frame
from megatron_rl_corr.data.sources import open_rows

WHOLE = [
    0,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    2**64 + 1,
    10**30 + 7,
    10**400 + 3,
    -(2**63),
    -(2**63) - 1,
    -(10**25) - 9,
]


@pytest.mark.parametrize("number", WHOLE)
def test_loads_when_a_whole_number_has_any_size_then_every_digit(number):
    spaced = f'{{"a": [{number}, {{"b": {number}}}], "c": "{number}", "d": 1.5}}'
    for text in (spaced, f'{{"a":[{number},{{"b":{number}}}]}}'):
        value = json_text.loads(text.encode())
        assert value == json_text.loads(text) and value["a"] == [number, {"b": number}]
        assert (
            type(value["a"][0]) is int
            and value.get("d", 1.5) == 1.5
            and value.get("c", str(number)) == str(number)
        )
    assert json_text.loads(json_text.dumps({"a": number, "b": "é"})) == {"a": number, "b": "é"}


def test_loads_when_texts_have_many_digits_then_as_orjson_reads_them():
    text = '{"a": "123456789012345678901", "b": 0.12345678901234567890, "c": 1e3, "d": [true, null, -0.0]}'
    assert json_text.loads(text) == orjson.loads(text)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "nan", "-inf", "inf", "+Infinity"])
@pytest.mark.parametrize(
    "form", ['{"a": %s}', '{"a":%s, "b": 12345678901234567890123}', '{"a": [1, %s]}', '[{"b":[%s]}]']
)
def test_loads_when_a_writer_wrote_nan_or_infinity_then_error_has_the_remedy(form, word):
    with pytest.raises(ValueError) as raised:
        json_text.loads(form % word)
    assert f"{word} is not a number in JSON: write null, or leave its key out" in str(raised.value)


@pytest.mark.parametrize(
    "text, named",
    [
        ('{"a": 1e400}', "1e400 is too large for a 64-bit float; write it as text"),
        ('{"a": -1e999, "b": 123456789012345678901}', "-1e999 is too large"),
        (
            '{"a": ' + "9" * 400 + ', "b": NaN}',
            "NaN is not a number in JSON; write null, or leave its key out",
        ),
        ('{"a": ' + "9" * 5000 + "}", "a number has 5000 digits; write one of more than 4300 as text"),
        ('{"a": nancy}', "expected 'null': line 1 column 7 .char 6.$"),
        ('{"a": "NaN" x}', r"line 1 column 13 .char 12.$"),
    ],
)
def test_loads_when_it_can_not_be_read_whole_then_error(text, named):
    with pytest.raises(ValueError, match=named):
        json_text.loads(text)


TWICE = [
    '{"a":1,"a":1}',
    '{"a": 1, "b": {"c": [1, {"d": 2, "e": 3, "d": 2}]}}',
    '{"a" : 1, "a": 2, "b": "x"}',
    '{"a":1,"b":"say \\":","a" :2}',
    '[[{"k":1,"k":2}]]',
    '{"b":1, "a":{"b":1}, "c\\u0000":3,\n"a"\t:4}',
    '{"n": 123456789012345678901, "a": 1, "a": 2}',
    '{"\\u0061":1,"a":2}',
    '[1, {"a":1,"a":2}]',
    '[null,[{"a":1,"a":2}]]',
    '{"":1,"":2}',
]


@pytest.mark.parametrize("text", TWICE)
def test_loads_when_a_key_comes_twice_in_an_object_then_error_names_it(text):
    with pytest.raises(
        ValueError, match='the key ".?" comes twice in an object, whose readers take different ones'
    ):
        json_text.loads(text)
    assert json_text.loads(text, unique_keys=False) == json.loads(text)


def test_loads_when_a_key_comes_twice_and_a_value_is_none_then_error():
    with pytest.raises(ValueError, match="NaN is not a number in JSON"):
        json_text.loads('{"a":1,"a":NaN}')


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"a": {"a": 1}}, "b": [{"a": 1}, {"a": 2}]},
        {"text": '{"a":1,"a":2}', "b": '":":":'},
        [],
        {},
        1,
        "a",
        {"a :": 1, "a": " :", ":": '"'},
        [[], [{"a": 1}], 3, {"a": 1}],
        {"A": 1, "a": 2},
        {"é": 1, "e\u0301": 2},
        {"n": 2**70, "m": {"n": 2**70}},
        {'a"': 1, "a": {'":': 2}},
    ],
)
@pytest.mark.parametrize(
    "form", [{}, {"indent": 1}, {"separators": (",", ":")}, {"separators": (" , ", " : ")}]
)
def test_loads_when_each_key_comes_once_then_the_value_however_it_is_written(value, form):
    assert json_text.loads(json.dumps(value, **form)) == value


def test_rows_when_a_key_comes_twice_then_error_has_file_line_and_key(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "a", "label": 1, "label": 2}\n')
    with pytest.raises(ValueError, match='p.jsonl:3: .*the key "label" comes twice'):
        open_rows(path).read(1)


def test_dumps_when_a_part_has_no_form_then_the_error_of_orjson():
    for value in ({"a": object()}, {"a": 2**70, "b": object()}, {1: 2**70}):
        with pytest.raises(orjson.JSONEncodeError):
            json_text.dumps(value)


def test_rows_when_labels_and_metadata_are_large_whole_numbers_then_they_reach_the_reward(tmp_path):
    path = tmp_path / "p.jsonl"
    row = {"input_ids": [1], "label": 2**64 + 1, "reward_model": {"ground_truth": [-(2**65)]}}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"label": float("nan")}) + "\n")
    prompts = open_prompts([str(path)], PromptFormat()).rows
    assert (
        prompts[0].label == 18446744073709551617
        and prompts[0].metadata["reward_model"] == row["reward_model"]
    )
    sent = frame({"samples": [vars(prompts[0])]})
    assert int.from_bytes(sent[:LENGTH_BYTES], "big") == len(sent) - LENGTH_BYTES
    received = json_text.loads(sent[LENGTH_BYTES:])["samples"][0]
    assert Prompt(**received) == prompts[0]
    with pytest.raises(
        ValueError, match="p.jsonl:2: not JSON: .*; NaN is not a number in JSON: write null, or leave"
    ):
        open_rows(path).read(1)
