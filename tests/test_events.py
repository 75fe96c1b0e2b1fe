import json
import os
import resource
from contextlib import contextmanager

import pytest

from megatron_rl_corr.events import Events, file_of_host, read_events
from tests.faults.drills import drill


def test_events_when_told_then_counted_and_written_as_lines_once_a_file_is_open(tmp_path):
    events = Events()
    events.tell("push_repeated", "a server died", servers=["http://a:1"])
    events.open(tmp_path / "events.jsonl")
    events.tell("server_left_out", "connection\nrefused", server="http://a:1")
    events.close()
    events.tell("server_left_out", "too late", server="http://a:1")
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert told.pop("time") > 1.7e9
    assert told == {
        "rank": 0,
        "step": None,
        "kind": "server_left_out",
        "reason": "connection\nrefused",
        "server": "http://a:1",
    }
    assert events.counts == {"push_repeated": 1, "server_left_out": 2}


def test_events_when_a_reason_has_half_a_surrogate_pair_then_written_without_it(tmp_path):
    events = Events()
    events.open(tmp_path / "events.jsonl")
    events.tell("sample_failed", "a reward's \ud800 text")
    assert read_events(tmp_path / "events.jsonl")[0]["reason"] == "a reward's ? text"


def test_events_when_the_kind_is_unknown_then_refused():
    with pytest.raises(KeyError, match="KINDS"):
        Events().tell("oops", "")


@drill("a crash in the middle of an event's line", promised="the next attempt appends after it")
def test_events_when_the_run_is_started_again_then_appended_after_a_line_that_a_crash_cut_short(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "kind": "run_started", "reason": "", "rank": 0}\n{"time": 2.0, "ki')
    events = Events()
    events.open(path)
    events.step = 5
    events.tell("run_restarted", "restart 1 of torchrun")
    (tmp_path / "events.jsonl.host1").write_text(
        '{"time": 1.5, "kind": "prompt_skipped", "reason": "", "rank": 8}\n'
    )
    (tmp_path / "events.jsonl.host1.orig").write_text(
        '{"time": 1.5, "kind": "prompt_skipped", "reason": ""}\n'
    )
    told = read_events(path)
    assert [event["kind"] for event in told] == ["run_started", "prompt_skipped", "run_restarted"]
    assert told[2]["step"] == 5


@drill("the disk of the events' file is full", promised="lines are counted as lost, and the run goes on")
def test_events_when_lines_are_lost_to_a_full_disk_then_counted_and_the_run_goes_on(tmp_path, caplog):
    path, events, other_rank = tmp_path / "events.jsonl", Events(), Events()
    events.open(path)
    other_rank.open(path)
    events.tell("run_started", "")
    with room_for(path, 50):
        events.tell("server_left_out", "connection refused")  # cut after 50 bytes
        events.tell("server_left_out", "connection refused")  # refused
    assert events.lost == 2 and events.counts == {"run_started": 1, "server_left_out": 2}
    assert [record.message for record in caplog.records] == [
        "`events`: a line could not be written, and is lost (further ones unnamed): the disk is full"
    ]
    other_rank.tell("server_readmitted", "there is room")
    events.tell("run_ended", "")
    assert [event["kind"] for event in read_events(path)] == ["run_started", "server_readmitted", "run_ended"]
    assert (events.lost, other_rank.lost) == (2, 0)


@contextmanager
def room_for(path, further):
    """No file of this process may grow beyond so many bytes more than this one has."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + further, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("rotated", [True, False])
@drill(
    "the events' file is moved away, or deleted", promised="all ranks go on in a new one, and nothing is lost"
)
def test_events_when_their_file_is_moved_or_deleted_then_all_ranks_write_a_new_one(tmp_path, rotated):
    path, ranks = tmp_path / "events.jsonl", (Events(), Events())
    for rank in ranks:
        rank.open(path)
        rank.tell("run_started", "")
    path.rename(tmp_path / "events.jsonl.1") if rotated else path.unlink()
    for rank in (*ranks, *ranks):
        rank.tell("server_left_out", "connection refused")
    assert [event["kind"] for event in read_events(path)] == ["server_left_out"] * 4
    if rotated:
        assert [event["kind"] for event in read_events(tmp_path / "events.jsonl.1")] == ["run_started"] * 2
    assert [rank.lost for rank in ranks] == [0, 0]


@drill(
    "a link in the place of the events' file that was moved away",
    promised="not followed; lines are counted as lost",
)
def test_events_when_a_link_takes_the_place_of_their_file_then_lines_are_lost_until_it_is_gone(
    tmp_path, caplog
):
    path, events = tmp_path / "events.jsonl", Events()
    events.open(path)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    events.tell("server_left_out", "connection refused")
    assert events.lost == 1 and not (tmp_path / "moved").read_bytes()
    assert "symbolic links" in caplog.text
    path.unlink()
    events.tell("server_readmitted", "")
    assert [event["kind"] for event in read_events(path)] == ["server_readmitted"]


def test_events_when_the_file_is_a_link_or_no_file_then_refused(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            Events().open(tmp_path / name)


@pytest.mark.parametrize(
    ("rank", "per_host", "name"),
    [(0, 8, "e"), (7, 8, "e"), (8, 8, "e.host1"), (31, 8, "e.host3"), (5, None, "e")],
)
def test_file_when_of_another_host_then_another_name(rank, per_host, name, monkeypatch):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if per_host is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_host))
    assert str(file_of_host("e")) == name


@pytest.mark.parametrize(("rank", "local", "name"), [(3, 3, "e"), (8, 0, "e.host8"), (31, 7, "e.host24")])
def test_file_when_ranks_were_not_started_by_torchrun_then_each_host_has_its_own_all_the_same(
    rank, local, name, monkeypatch
):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for variable, value in {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": 32}.items():
        monkeypatch.setenv(variable, str(value))
    assert str(file_of_host("e")) == name
