"""Rows of JSON lines, Parquet and datasets folders: what they say, in which order they come, and
what is refused.
"""

import json
import os
import shutil
import types
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl_corr.data import order, rows
from megatron_rl_corr.data.order import MixedOrder
from megatron_rl_corr.data.prompt_files import open_prompts
from megatron_rl_corr.data.prompt_format import PromptFormat
from megatron_rl_corr.data.rows import BadRow, ChangedFile, JsonLines
from megatron_rl_corr.data.sources import open_rows

SAVED = Path(__file__).parent / "saved_dataset"
"""Written by the library itself, see its README."""
IDS = PromptFormat()


def jsonl(path, ids, **keys):
    path.write_text("".join(json.dumps({"input_ids": [i], **keys}) + "\n" for i in ids))
    return str(path)


def parquet(path, ids, group=None):
    pq.write_table(pa.table({"input_ids": [[i] for i in ids]}), path, row_group_size=group)
    return str(path)


def saved(folder, ids):
    """A folder of `datasets`."""
    folder.mkdir()
    table = pa.table({"input_ids": [[i] for i in ids]})
    with pa.ipc.new_stream(folder / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return str(folder)


def drawn(data, numbers):
    return [data.at(number).input_ids[0] for number in numbers]


@pytest.mark.parametrize("chunk", [1, 3, 7, 1 << 24])
@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1}\n{"a": 2}\n',
        b'{"a": 1}\n{"a": 2}',
        b'{"a": 1}\r\n{"a": 2}\r\n',
        b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n',
        b'\n\n {"a": 1}\n\r\n \t \n{"a": 2}\n\n',
        b'\xef\xbb\xbf\n{"a": 1}\n{"a": 2}\n \t  ',
    ],
)
def test_json_lines_when_lines_end_or_are_blank_in_any_way_then_the_rows_and_their_lines(
    tmp_path, monkeypatch, text, chunk
):
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk)
    path = tmp_path / "p.jsonl"
    path.write_bytes(text)
    found = JsonLines(path)
    assert [found.read(row) for row in range(len(found))] == [{"a": 1}, {"a": 2}]
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for row in (0, 1):
        number = int(found.where(row).removeprefix(f"{path}:"))
        assert json.loads(lines[number - 1]) == {"a": row + 1}


def test_json_lines_when_a_line_is_longer_than_what_is_read_at_a_time_then_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 100)
    path = tmp_path / "p.jsonl"
    wanted = [{"a": "x" * length} for length in (1, 95, 300, 0, 1000)]
    path.write_text(" " * 700 + "\n" + "\n".join(map(json.dumps, wanted)))
    found = JsonLines(path)
    assert [found.read(row) for row in range(len(found))] == wanted and found.where(0) == f"{path}:2"


def test_json_lines_when_their_file_is_changed_then_error_before_a_row_of_it_is_used(tmp_path):
    path = tmp_path / "p.jsonl"
    data = open_prompts([jsonl(path, range(5))], IDS)
    with path.open("a") as file:
        file.write('{"input_ids": [7]}\n')
    with pytest.raises(ChangedFile, match=f"{path} changed while the run reads it"):
        data.at(0)
    path.unlink()
    with pytest.raises(ChangedFile):
        data.at(0)


@pytest.mark.parametrize("change", ["written anew", "removed"])
@pytest.mark.parametrize("form", ["json lines", "parquet", "datasets"])
def test_data_when_their_file_is_changed_after_a_draw_then_error_for_rows_that_are_kept_too(
    tmp_path, form, change
):
    path, write = tmp_path / "p", {"json lines": jsonl, "parquet": parquet, "datasets": saved}[form]
    data = open_prompts([write(path, range(5))], IDS)
    changed = path / "data.arrow" if form == "datasets" else path
    drawn(data, range(len(data)))
    if change == "removed":
        changed.unlink()
    else:
        os.utime(changed, ns=(1, 1))
    with pytest.raises(ChangedFile, match=f"{changed} changed while the run reads it"):
        for number in range(len(data)):
            data.at(number)


def test_parquet_when_changed_after_its_row_group_was_decoded_then_error_for_another_row_of_it(tmp_path):
    rows = open_rows(parquet(tmp_path / "p", range(5), 5))
    rows.read(0)
    os.utime(tmp_path / "p", ns=(1, 1))
    with pytest.raises(ChangedFile):
        rows.read(1)


def test_saved_dataset_when_cut_between_two_batches_then_error(tmp_path):
    folder = shutil.copytree(SAVED / "train", tmp_path / "train")
    last = folder / "data-00001-of-00002.arrow"
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(ValueError, match="data-00001-of-00002.arrow: .*it ends in the middle; copy it anew"):
        open_rows(folder)


def test_parquet_folder_when_shards_are_missing_then_error_and_when_files_lie_elsewhere_then_a_line(tmp_path):
    for number in (0, 2):
        parquet(tmp_path / f"train-0000{number}-of-00003.parquet", [1])
    with pytest.raises(
        ValueError, match="lacks 1 of 3 files, train-00001-of-00003 the first; bring them, or"
    ):
        open_rows(tmp_path)
    parquet(tmp_path / "train-00001-of-00003.parquet", [1])
    assert open_rows(tmp_path).notes == []
    for number in (1, 2):  # as some count them
        parquet(tmp_path / f"part-{number}-of-2.parquet", [1])
    assert open_rows(tmp_path).notes == []
    (tmp_path / "sub").mkdir()
    parquet(tmp_path / "sub" / "b.parquet", [1])
    parquet(tmp_path / "c.PARQUET", [1])
    assert open_rows(tmp_path).notes == [
        f"{tmp_path}: 2 Parquet files in it are not read; name them too: c.PARQUET, sub/b.parquet"
    ]


@pytest.mark.parametrize(
    "kind, cell",
    [
        (pa.binary(), b"x"),
        (pa.list_(pa.binary()), [b"x"]),
        (pa.struct([("bytes", pa.binary())]), {"bytes": b"x"}),
    ],
)
def test_rows_when_a_text_has_a_place_for_an_image_that_no_json_has_then_bad(tmp_path, kind, cell):
    words = types.SimpleNamespace(
        has_template=False, bos_id=None, eos_id=None, encode=lambda text, special_tokens=True: [1, 2]
    )
    columns = {"prompt": ["What is <image>?", "1+1"], "images": pa.array([cell, None], kind)}
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    data = open_prompts([str(tmp_path / "p.parquet")], PromptFormat(words))
    with pytest.raises(BadRow, match='row 0: "prompt" has <image> for the row\'s "images", and prompts'):
        data.rows[0]
    assert data.rows[1].text == "1+1"


def test_order_when_one_file_of_json_lines_then_that_of_earlier_versions(tmp_path):
    # Noted down with an earlier version, as that of the list in test_prompts.py.
    data = open_prompts([jsonl(tmp_path / "p", range(8))], IDS, seed=3)
    assert drawn(data, range(8)) == [1, 4, 2, 0, 3, 5, 7, 6] and data.identity == ""


def test_saved_dataset_when_read_then_its_rows_in_its_order():
    found = open_rows(SAVED / "train")
    rows = [found.read(row) for row in range(len(found))]
    assert [row["extra_info"]["index"] for row in rows] == [5, 0, 1, 4, 2, 6, 3]
    assert rows[1] == {
        "prompt": [
            {"content": "Answer with a number.", "role": "system"},
            {"content": "0 + 1 =", "role": "user"},
        ],
        "data_source": "sums",
        "reward_model": {"ground_truth": "1", "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }
    assert found.where(6) == f"{SAVED / 'train'}: row 6"


def test_saved_dataset_when_a_shard_is_changed_or_missing_then_error(tmp_path):
    folder = shutil.copytree(SAVED / "train", tmp_path / "train")
    found = open_rows(folder)
    last = folder / "data-00001-of-00002.arrow"
    last.rename(tmp_path / "away")
    assert found.read(0)["data_source"] == "sums"
    with pytest.raises(ChangedFile, match="data-00001-of-00002.arrow changed"):
        found.read(6)
    with pytest.raises(ValueError, match="data-00001-of-00002.arrow: there is no such file"):
        open_rows(folder)


def test_parquet_when_in_shards_and_row_groups_then_every_row_once_an_epoch(tmp_path):
    for number in range(3):
        parquet(tmp_path / f"train-0000{number}-of-00003.parquet", range(10 * number, 10 * number + 10), 4)
    data = open_prompts([str(tmp_path)], IDS, seed=5)
    one = open_prompts([jsonl(tmp_path / "one", range(30))], IDS, seed=5)
    assert [data.rows[i].input_ids[0] for i in range(30)] == list(range(30))
    assert drawn(data, range(90)) == drawn(one, range(90))  # small enough for one window


def test_parquet_when_larger_than_a_window_then_its_row_groups_are_shuffled_and_each_is_decoded_once(
    tmp_path, monkeypatch
):
    path = parquet(tmp_path / "p", range(400), 20)
    [(_, size)] = set(open_rows(path).groups)
    monkeypatch.setattr(order, "WINDOW_BYTES", 3 * size)
    data = open_prompts([path], IDS, seed=5)
    source, decoded = data.rows._sources[0], []
    read, keep = source._group, lambda group: decoded.append(group) or read(group)
    source._group = keep
    epochs = [drawn(data, range(epoch * 400, epoch * 400 + 400)) for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(400))] * 2 and epochs[0] != epochs[1]
    windows = [set(decoded[start : start + 60]) for start in range(0, 400, 60)]
    assert all(len(window) == 3 for window in windows[:-1]) and len(windows[-1]) == 2
    assert set.union(*windows) == set(range(20))  # so no window has a group of another one
    # and is mixed
    assert any(first > second for first, second in zip(decoded[:60], decoded[1:60], strict=False))
    again = open_prompts([path], IDS, seed=5)
    assert drawn(again, [799, 0, 430]) == [epochs[1][399], epochs[0][0], epochs[1][30]]
    other = open_prompts([parquet(tmp_path / "other", range(400), 40)], IDS, seed=5)
    assert data.identity.startswith(" in 20 row groups ") and other.identity != data.identity


def test_parquet_when_more_is_decoded_than_is_kept_then_the_oldest_row_group_goes(tmp_path, monkeypatch):
    from megatron_rl_corr.data import columns

    found = open_rows(parquet(tmp_path / "p", range(100), 10))
    monkeypatch.setattr(columns, "CACHE_BYTES", 3 * found._group(0).nbytes)
    assert [found.read(row)["input_ids"] for row in (99, 0, 55, 12, 99)] == [[99], [0], [55], [12], [99]]
    assert list(found._decoded) == [5, 1, 9]


def test_parquet_when_a_column_has_no_json_values_then_it_is_left_out_with_a_line(tmp_path):
    at = pa.array([0], "timestamp[ms]")
    table = pa.table({"input_ids": [[1]], "image": [{"bytes": b"x", "at": at[0]}], "at": at})
    pq.write_table(table, tmp_path / "p.parquet")
    lines = []
    data = open_prompts([str(tmp_path / "p.parquet")], IDS, warn=lines.append)
    assert data.at(0).metadata == {} and lines == [
        f"{tmp_path / 'p.parquet'}: columns and fields that JSON has no values for are left out: image "
        "(struct<bytes: binary, at: timestamp[ms]>), at (timestamp[ms])"
    ]


def test_parquet_when_numbers_have_4_bytes_or_2_then_they_are_as_they_were_written(tmp_path):
    path, values = tmp_path / "p.parquet", [123.1, None, 1e30, 2.0]
    columns = {"a": pa.array(values, pa.float32()), "b": pa.array([0.1, None, 1, 2], pa.float16())}
    pq.write_table(pa.table({"input_ids": [[1]] * 4, **columns}), path)
    found = [open_rows(path).read(row) for row in range(4)]
    assert [row["a"] for row in found] == values and [row["b"] for row in found] == [0.1, None, 1, 2]


def test_order_when_there_are_several_sources_then_every_row_of_all_comes_once_an_epoch(tmp_path):
    paths = [
        jsonl(tmp_path / "a", range(30)),
        parquet(tmp_path / "b", range(30, 40)),
        jsonl(tmp_path / "c", [40]),
    ]
    data = open_prompts(paths, IDS, seed=1)
    epochs = [drawn(data, range(epoch * 41, epoch * 41 + 41)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(41)) for epoch in epochs) and len(set(map(tuple, epochs))) == 3
    assert drawn(open_prompts(paths, IDS, seed=1), [122, 5, 50]) == [
        epochs[2][40],
        epochs[0][5],
        epochs[1][9],
    ]
    assert drawn(open_prompts(paths, IDS, seed=2), range(41)) != epochs[0]
    # Mixed: of the first half about half of each.
    assert 8 <= sum(row < 30 for row in epochs[0][:20]) <= 20
    assert data.identity == "30 + 10 + 1"


def test_order_when_sources_have_weights_then_each_has_its_share_and_its_own_epochs(
    tmp_path,
):
    paths = [
        jsonl(tmp_path / "a", range(300)),
        jsonl(tmp_path / "b", range(300, 310)),
        jsonl(tmp_path / "c", [310]),
    ]
    data = open_prompts(paths, IDS, seed=1, weights=[1, 2, 0.01])
    # 1000 / 3.01 = 332.2, 664.5 and 3.3: the largest remainder is b's.
    assert data.identity == "300 + 10 + 1, shares 332:665:3"
    of_all = drawn(data, range(2000))
    for thousand in (of_all[:1000], of_all[1000:]):
        assert Counter(0 if row < 300 else 1 if row < 310 else 2 for row in thousand) == {
            0: 332,
            1: 665,
            2: 3,
        }
    of_a, of_b = [row for row in of_all if row < 300], [row for row in of_all if 300 <= row < 310]
    assert sorted(of_a[:300]) == sorted(of_a[300:600]) == list(range(300)) and of_a[:300] != of_a[300:600]
    assert all(sorted(of_b[start : start + 10]) == list(range(300, 310)) for start in range(0, 1330, 10))
    assert drawn(open_prompts(paths, IDS, seed=1, weights=[100, 200, 1]), [1999, 3, 1000]) == [
        of_all[1999],
        of_all[3],
        of_all[1000],
    ]
    # Every replica of 2 draws both: sources do not alternate with the numbers.
    assert 130 < sum(row < 300 for row in of_all[:1000:2]) < 200


@pytest.mark.parametrize(
    "weights, named",
    [
        ([1, 2, 3], "`prompts_weights`: 3 weights for 2 of `prompts`"),
        ([1, 0.0001], "`prompts_weights` 0.0001 is less than 1 in 1000 of all"),
    ],
)
def test_order_when_weights_can_not_be_kept_then_error(weights, named):
    with pytest.raises(ValueError, match=named):
        MixedOrder([5, 5], [[], []], seed=0, weights=weights)


def test_shares_when_weights_are_rounded_then_they_are_a_thousand():
    for weights in np.random.RandomState(0).uniform(0.01, 1, (50, 7)):
        shares = MixedOrder([5] * 7, [[]] * 7, seed=0, weights=weights).shares
        assert sum(shares) == 1000
        assert np.abs(np.array(shares) - weights / weights.sum() * 1000).max() < 1


def folder_of(tmp_path, *files):
    for file in files:
        parquet(tmp_path / file, [1])
    return tmp_path


def written(tmp_path, content):
    (tmp_path / "p").write_bytes(content)
    return tmp_path / "p"


def cached(tmp_path):
    (tmp_path / "x-train.arrow").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    "made, named",
    [
        (lambda at: at / "none", "none: there is no such file or folder"),
        (
            lambda at: at,
            "neither Parquet files .* nor a folder of datasets' save_to_disk .*; give a file, or such",
        ),
        (
            lambda at: SAVED,
            "saved_dataset: holds the splits train, test; give one of them: .*/saved_dataset/train",
        ),
        (
            lambda at: folder_of(at, "train-0.parquet", "test-0.parquet"),
            "holds the splits test, train; name the files",
        ),
        (cached, "a cache of datasets, which has no state.json; write the data set with save_to_disk"),
        (lambda at: written(at, b"\x1f\x8b\x08\x00"), "p: is compressed with gzip; gunzip it"),
        (lambda at: written(at, '{"a": 1}'.encode("utf-16")), "p: is UTF-16; save it as UTF-8"),
        (lambda at: written(at, b"PAR1 and no more"), "p: not a Parquet file that can be read"),
        (lambda at: written(at, b""), "p: no prompts in it; expected one JSON object a line"),
        (lambda at: written(at, b"\n \n"), "p: no prompts in it"),
    ],
)
def test_open_rows_when_it_is_no_data_then_error_names_it_and_the_remedy(tmp_path, made, named):
    with pytest.raises(ValueError, match=named):
        open_rows(made(tmp_path))


def test_parquet_folder_when_a_shard_has_other_columns_then_error_names_both(tmp_path):
    parquet(tmp_path / "a.parquet", [1])
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(
        ValueError, match=r"b.parquet: has not the columns of .*a.parquet \(input_ids, text\)"
    ):
        open_rows(tmp_path)


def test_digest_when_worked_out_by_hand_then_size_and_crc_of_all_small_files_and_of_pieces_of_a_large_one(
    tmp_path, monkeypatch
):
    for name, text in (("whole", b"abc"), ("ab", b"ab"), ("c", b"c"), ("empty", b"")):
        (tmp_path / name).write_bytes(text)
    # CRC-32 of "abc" is 352441c2, however many files it lies in.
    assert rows.digest_of([str(tmp_path / "whole")]) == "3:352441c2"
    assert rows.digest_of([str(tmp_path / name) for name in ("ab", "empty", "c")]) == "3:352441c2"
    # 4 pieces of 10 bytes of 100: the last begins at 90, so they begin at 0, 30, 60 and 90.
    monkeypatch.setattr(rows, "DIGEST_PIECES", 4)
    monkeypatch.setattr(rows, "DIGEST_BYTES", 10)
    text, large = bytes(range(100)), tmp_path / "large"
    large.write_bytes(text)
    wanted = zlib.crc32(text[0:10] + text[30:40] + text[60:70] + text[90:100])
    assert rows.digest_of([str(large)]) == f"100:{wanted:08x}"
    # Of five files two pieces each: the first and the last.
    wanted = zlib.crc32((text[0:10] + text[90:100]) * 5)
    assert rows.digest_of([str(large)] * 5) == f"500:{wanted:08x}"


@pytest.mark.parametrize("form", ["json lines", "parquet", "datasets"])
def test_digest_when_one_byte_of_the_data_is_another_then_another_and_the_same_in_another_folder(
    tmp_path, form
):
    found = []
    for folder, last in (("a", 2), ("b", 2), ("edited", 3)):
        at = tmp_path / folder
        at.mkdir()
        if form == "datasets":
            shutil.copytree(SAVED / "train", at / "p")
            if last == 3:
                file = at / "p/data-00001-of-00002.arrow"
                file.write_bytes(file.read_bytes().replace(b"3 + 4 =", b"3 + 5 ="))
        else:
            (jsonl if form == "json lines" else parquet)(at / "p", [1, last])
        found.append(open_rows(at / "p").digest())
    assert found[0] == found[1] != found[2]
