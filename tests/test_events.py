import json

import pytest

from megatron_rl_corr.events import Events


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
    assert told == {"rank": 0, "kind": "server_left_out", "reason": "connection\nrefused", "server": "http://a:1"}
    assert events.counts == {"push_repeated": 1, "server_left_out": 2}


def test_events_when_the_kind_is_unknown_then_refused():
    with pytest.raises(KeyError, match="KINDS"):
        Events().tell("oops", "")
