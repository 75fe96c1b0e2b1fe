"""The record of running quickstarts, by which --stop ends them."""

import json

from examples.running import Running

ENDED = {"pid": 2**22 + 1, "started": 1.0}
"""A process that can't be: Linux gives numbers up to 2**22."""


def test_stop_of_one_run_when_another_ends_meanwhile_then_the_first_is_stopped(tmp_path):
    own, other = tmp_path / "running-2.json", tmp_path / "running-3.json"
    own.write_text(json.dumps({"driver": ENDED, "out": "/runs/a", "groups": []}))
    other.write_text(json.dumps({"driver": ENDED, "out": "/runs/b", "groups": []}))
    (tmp_path / "running-1.json").symlink_to(tmp_path / "gone")  # listed, and no longer there when it is read
    lines = []
    assert Running(tmp_path).stop(lines.append, "quickstart", "/runs/a") == 0
    assert lines == [f"stopped the quickstart of process {ENDED['pid']}"]
    assert other.is_file() and not own.exists()
    assert Running(tmp_path).stop(lines.append, "quickstart", "/runs/a") == 0
    assert lines[1:] == ["no quickstart is running that writes to /runs/a"]


def test_record_when_a_run_goes_on_then_it_is_whole_and_goes_with_the_run(tmp_path):
    with Running(tmp_path, "/runs/a") as running:
        assert json.loads(running.path.read_text())["out"] == "/runs/a"
        assert [path.name for path in tmp_path.iterdir()] == [running.path.name]
    assert not list(tmp_path.iterdir())
