"""Columns of every type of Arrow come in whole, or the one field that JSON has no values for is named."""

import datetime
import decimal
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl_corr.data.arrow_values import columns_of
from megatron_rl_corr.data.messages import chat_of
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat
from megatron_rl_corr.data.rows import BadRow, MapObject
from megatron_rl_corr.data.sources import open_rows

DAY = datetime.date(2026, 1, 2)
PLAIN = {
    "string_view": pa.string_view(),
    "large_string": pa.large_string(),
    "int8": pa.int8(),
    "uint64": pa.uint64(),
    "list_view": pa.list_view(pa.string_view()),
    "large_list_view": pa.large_list_view(pa.string()),
    "large_list": pa.large_list(pa.string_view()),
    "fixed_list": pa.list_(pa.string_view(), 1),
    "struct": pa.struct({"a": pa.string_view(), "b": pa.list_view(pa.struct({"c": pa.large_string()}))}),
    "map": pa.map_(pa.string_view(), pa.string_view()),
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
    "bool": pa.bool_(),
    "null": pa.null(),
}
VALUES = {
    "int8": -5,
    "uint64": 2**64 - 1,
    "bool": True,
    "null": None,
    "map": {"k": "x", "n": None},
    "struct": {"a": "x", "b": [{"c": "y"}, {"c": None}]},
    "list_view": ["x"],
    "large_list_view": ["x"],
    "large_list": ["x"],
    "fixed_list": ["x"],
}


def saved(folder, table):
    """The rows of a table as `datasets` saves it, and as Parquet."""
    folder.mkdir()
    with pa.ipc.new_stream(folder / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return open_rows(folder)


def written(path, table):
    pq.write_table(table, path)
    return open_rows(path)


def both(tmp_path, table):
    return [saved(tmp_path / "saved", table), written(tmp_path / "p.parquet", table)]


@pytest.mark.parametrize("name", PLAIN)
def test_column_when_its_type_has_json_values_then_whole_in_parquet_and_datasets(tmp_path, name):
    value = VALUES.get(name, "x")
    cells = pa.array([list(value.items()) if name == "map" else value, None], PLAIN[name])
    nested = pa.StructArray.from_arrays([cells], ["in"])
    table = pa.table(
        {"a": cells, "b": nested, "c": pa.array([[{"x": 1}], []], pa.list_(pa.struct({"x": pa.int8()})))}
    )
    for rows in both(tmp_path, table):
        assert rows.notes == [] and rows.fills_nulls
        assert [rows.read(0), rows.read(1)] == [
            {"a": value, "b": {"in": value}, "c": [{"x": 1}]},
            {"a": None, "b": {"in": None}, "c": []},
        ]


def test_column_when_runs_or_dictionaries_of_views_then_their_values(tmp_path):
    runs = pa.RunEndEncodedArray.from_arrays(
        pa.array([2, 3], pa.int32()), pa.array(["x", None], pa.string_view())
    )
    words = pa.DictionaryArray.from_arrays(
        pa.array([1, 0, None], pa.int8()), pa.array(["x", None], pa.string_view())
    )
    shorts = pa.RunEndEncodedArray.from_arrays(pa.array([3], pa.int32()), pa.array([0.1], pa.float32()))
    rows = saved(tmp_path / "saved", pa.table({"runs": runs, "words": words, "shorts": shorts}))
    assert [rows.read(row) for row in range(3)] == [
        {"runs": "x", "words": None, "shorts": 0.1},
        {"runs": "x", "words": "x", "shorts": 0.1},
        {"runs": None, "words": None, "shorts": 0.1},
    ]


def test_column_when_one_field_has_no_json_values_then_the_others_come_in_and_it_is_named(tmp_path):
    value = {
        "answer": "7",
        "at": datetime.datetime(2026, 1, 2),
        "price": decimal.Decimal("1.50"),
        "raw": b"x",
        "more": {"day": DAY, "level": 3, "images": [{"bytes": b"x", "path": "p"}], "raws": [b"x"]},
    }
    table = pa.table(
        {"id": ["a", "b"], "info": [value, None], "day": [DAY, None], "days": [[{"x": DAY}], []]}
    )
    for rows in both(tmp_path, table):
        expected = {"answer": "7", "more": {"level": 3, "images": [{"path": "p"}]}}
        assert [rows.read(0), rows.read(1)] == [{"id": "a", "info": expected}, {"id": "b", "info": None}]
        [line] = rows.notes
        for named in (
            "info.at (timestamp[us])",
            "info.price (decimal128(3, 2))",
            "info.raw (binary)",
            "info.more.day (date32[day])",
            "info.more.images[].bytes (binary)",
            "info.more.raws (list<",
            " day (date32[day])",
            "days (list<",
        ):
            assert named in line
        assert "answer" not in line and "level" not in line and "path" not in line
    # What is left out is not read from the file.
    assert rows._group(0).column("info").type.names == ["answer", "more"]


@pytest.mark.parametrize(
    "kind, cells, value",
    [
        (pa.decimal128(38, 0), [decimal.Decimal(10**37 + 1)], 10**37 + 1),
        (pa.decimal256(70, 0), [decimal.Decimal(-(2**200))], -(2**200)),
        (pa.float32(), [123.1], 123.1),
        (pa.float16(), [0.1], 0.1),
    ],
)
def test_column_when_whole_decimals_or_short_floats_are_nested_then_every_digit(tmp_path, kind, cells, value):
    nested = pa.array([[{"x": cells[0], "y": "a"}]], pa.list_(pa.struct({"x": kind, "y": pa.string_view()})))
    for rows in both(tmp_path, pa.table({"a": pa.array(cells, kind), "b": nested})):
        assert rows.read(0) == {"a": value, "b": [{"x": value, "y": "a"}]} and rows.notes == []
        assert type(rows.read(0)["a"]) is type(value)


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.float16()], ids=str)
@pytest.mark.parametrize("place", ["a", "a[]", "a.b", "a.b[][]", "a[].b"])
def test_row_when_a_float_is_none_that_json_has_then_error_has_file_row_field_and_remedy(
    tmp_path, word, kind, place
):
    def in_place(value):
        for part in reversed(re.findall(r"\[\]|\.\w", place)):
            value = [value] if part == "[]" else {part[1:]: value}
        return value

    own = kind
    for part in reversed(re.findall(r"\[\]|\.\w", place)):
        own = pa.list_(own) if part == "[]" else pa.struct({part[1:]: own})
    good, bad = (np.float16(value) if kind == pa.float16() else float(value) for value in ("0.1", word))
    table = pa.table(
        {"a": pa.array([in_place(good), in_place(bad), in_place(None), None], own), "b": [1, 2, 3, 4]}
    )
    for rows in both(tmp_path, table):
        assert [rows.read(row) for row in (0, 2, 3)] == [
            {"a": in_place(0.1), "b": 1},
            {"a": in_place(None), "b": 3},
            {"a": None, "b": 4},
        ]
        said = (
            f'row 1: "a" cannot be read: {place} has {word}, which is not a number in JSON; write null, '
            "or leave it"
        )
        with pytest.raises(BadRow, match=re.escape(said)):
            rows.read(1)


def test_column_when_a_map_has_no_text_as_keys_or_parts_of_values_then_named(tmp_path):
    both_kinds = pa.struct({"n": pa.int8(), "day": pa.date32()})
    table = pa.table(
        {
            "a": pa.array([[(1, "x")]], pa.map_(pa.int8(), pa.string())),
            "b": pa.array([[("k", {"n": 1, "day": DAY})]], pa.map_(pa.string(), both_kinds)),
            "c": pa.array([[("k", DAY)]], pa.map_(pa.string(), pa.date32())),
            "d": ["x"],
        }
    )
    for rows in both(tmp_path, table):
        assert rows.read(0) == {"b": {"k": {"n": 1}}, "d": "x"}
        assert "a (map<int8, string" in rows.notes[0] and "b[].day (date32[day])" in rows.notes[0]
        assert "c (map<string, date32[day]" in rows.notes[0] and " d " not in rows.notes[0]
    assert rows._group(0).column_names == ["b", "d"]


def test_column_when_an_extension_stores_json_values_then_these(tmp_path):
    flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8()))
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * 2, pa.binary(16)))
    shape = pa.fixed_shape_tensor(pa.float32(), [2])
    tensors = pa.ExtensionArray.from_storage(shape, pa.array([[0.1, 2]] * 2, pa.list_(pa.float32(), 2)))
    texts = pa.array(['{"n": 1}', None], pa.json_())
    for rows in both(tmp_path, pa.table({"flag": flags, "id": ids, "tensor": tensors, "text": texts})):
        assert rows.read(0) == {"flag": True, "tensor": [0.1, 2.0], "text": '{"n": 1}'}
        assert rows.read(1) == {"flag": None, "tensor": [0.1, 2.0], "text": None}
        assert rows.notes[0].endswith("left out: id (extension<arrow.uuid>)")


def test_column_when_names_come_twice_then_these_are_named_and_others_come_in():
    struct = pa.struct([("x", pa.int8()), ("x", pa.int8()), ("y", pa.int8())])
    schema = pa.schema([("a", struct), ("b", pa.int8()), ("b", pa.int8()), ("c", pa.int8())])
    found = columns_of(schema)
    assert [one.name for one in found if one.read is not None] == ["a", "c"]
    twice = ["b (of which there are 2)"]
    assert [one.left_out for one in found] == [["a.x (of which there are 2)"] * 2, twice, twice, []]
    assert [one.leaves for one in found] == [[False, False, True], [False], [False], [True]]


def test_row_when_a_cell_can_not_be_read_then_error_names_the_column(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    twice = pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int8()))
    for cells, named in ((broken, "'utf-8' codec"), (twice, "a map has a key twice, of k")):
        rows = written(tmp_path / "p.parquet", pa.table({"fine": [1], "label": cells}))
        with pytest.raises(BadRow, match=f'p.parquet: row 0: "label" cannot be read: {named}'):
            rows.read(0)


def test_parquet_when_shards_have_other_types_then_each_is_read_by_its_own(tmp_path):
    first = {"a": pa.array(["x"], pa.string_view()), "b": [{"n": 1}], "c": pa.array([0.5])}
    second = {"a": pa.array(["y"]), "b": [{"n": 2, "day": DAY}], "c": pa.array([0.1], pa.float32())}
    pq.write_table(pa.table(first), tmp_path / "0.parquet")
    pq.write_table(pa.table(second), tmp_path / "1.parquet")
    rows = open_rows(tmp_path)
    assert rows.read(0) == {"a": "x", "b": {"n": 1}, "c": 0.5}
    assert rows.read(1) == {"a": "y", "b": {"n": 2}, "c": 0.1}
    assert rows.notes == [
        f"{tmp_path}: columns and fields that JSON has no values for are left out: b.day (date32[day])"
    ]


def test_parquet_when_it_has_a_type_that_pyarrow_does_not_know_then_error_names_the_file(
    tmp_path, monkeypatch
):
    def unknown(file):
        raise pa.ArrowNotImplementedError("Integers with more than 64 bits not implemented")

    pq.write_table(pa.table({"a": [1]}), tmp_path / "p.parquet")
    monkeypatch.setattr(pq, "read_metadata", unknown)
    with pytest.raises(
        ValueError, match="p.parquet: not a Parquet file that can be read: Integers .*; write it anew"
    ):
        open_rows(tmp_path / "p.parquet")


def test_nulls_when_a_map_has_them_then_they_were_written():
    def arguments(one):
        calls = [{"function": {"name": "f", "arguments": one}}]
        messages = [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "user", "content": "a"},
        ]
        return chat_of(messages, "m", fills_nulls=True).messages[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments({"a": None, "b": 1}) == {"b": 1}
    assert arguments(MapObject(a=None, b=1)) == {"a": None, "b": 1}


def test_prompts_when_written_as_polars_does_then_they_are_read(tmp_path):
    message = pa.struct({"role": pa.string_view(), "content": pa.string_view()})
    prompts = pa.array([[{"role": "user", "content": "1+1"}]], pa.large_list_view(message))
    answer = pa.struct({"ground_truth": pa.string_view(), "at": pa.date32()})
    truth = pa.array([{"ground_truth": "2", "at": DAY}], answer)
    ids = pa.array([[3, 1]], pa.list_view(pa.int64()))
    pq.write_table(
        pa.table({"prompt": prompts, "reward_model": truth, "input_ids": ids}), tmp_path / "p.parquet"
    )
    form = PromptFormat(input_key="input_ids", label_key="reward_model.ground_truth")
    found = open_prompts([str(tmp_path / "p.parquet")], form).rows[0]
    assert found.input_ids == [3, 1] and found.label == "2"
    assert found.metadata["prompt"] == [{"role": "user", "content": "1+1"}]
