"""The events of a run on its page: marks by kind on the time axis, whose text says more, and a
row for each kind.
"""

import json
import re

import pytest

from megatron_rl_corr.commands.report.page import write_page
from megatron_rl_corr.commands.report.page_events import LOST, MENDED
from megatron_rl_corr.events import KINDS
from tests.commands.report.test_page import read

pytestmark = pytest.mark.usefixtures("figures_drawn_once")


def line(moment, kind, reason="", **facts):
    event = {"time": moment, "rank": 0, "step": facts.pop("step", None), "kind": kind, "reason": reason}
    return json.dumps(event | facts)


def page_of(write_run, make_steps, events):
    """events: the file's text; None: it is gone."""
    folder = write_run(make_steps(8))
    path = folder / "events.jsonl"
    (folder / "run.json").write_text(json.dumps({"rollout": {"events": str(path)}}))
    if events is not None:
        path.write_text(events)
    return write_page(folder)


def test_page_when_the_run_kept_events_then_a_mark_for_each_by_kind_and_time_with_its_reason(
    write_run, make_steps
):
    lines = [
        line(1000.0, "run_started", "at step 1", step=1),
        line(1500.0, "server_left_out", "<b>connection refused</b>", step=4, server="http://a:1"),
        line(2000.0, "server_readmitted", "it is healthy", step=8, server="http://a:1"),
    ]
    page = page_of(write_run, make_steps, "\n".join(lines) + '\n{"time": 20')
    document, text = read(page), page.read_text()
    marks = re.findall(r'<circle class="(\w+)" cx="([\d.]+)" cy="([\d.]+)"', text)
    # In the order of KINDS, 190 to 1100 for 1000 seconds.
    assert [(tone, float(x)) for tone, x, _ in marks] == [
        ("lost", 645.0),
        ("mended", 1100.0),
        ("plain", 190.0),
    ]
    assert len({y for _, _, y in marks}) == 3
    titles = re.findall(r"<title>([^<]*)</title></circle>", text)
    assert titles[0] == (
        "server_left_out\n1970-01-01 00:25:00, step 4: &lt;b&gt;connection refused&lt;/b&gt; "
        "(rank 0, server http://a:1)"
    )
    assert "server_left_out (1)" in document.text and "8:20" in document.text and "16:40" in document.text
    assert "a server failed, and is not sampled from until it answers again" in document.text


def test_page_when_there_are_thousands_of_events_then_neighbours_share_a_mark(write_run, make_steps):
    lines = [line(1000.0 + n, "request_retried", f"reason {n}") for n in range(5000)]
    text = page_of(write_run, make_steps, "\n".join(lines)).read_text()
    titles = re.findall(r"<title>([^<]*)</title></circle>", text)
    assert 50 < len(titles) < 200 and "request_retried (5000)" in text
    assert (
        "reason 5 " in titles[0]
        and "reason 6 " not in titles[0]
        and re.search(r"and \d+ more until", titles[0])
    )


def test_page_when_the_events_are_gone_or_none_then_it_says_so_and_without_the_flag_it_is_silent(
    write_run, make_steps
):
    text = read(page_of(write_run, make_steps, None)).text
    assert "Not shown: [Errno 2]" in text
    assert "has none" in read(page_of(write_run, make_steps, "")).text
    folder = write_run(make_steps(8))
    (folder / "run.json").unlink()
    assert "Events" not in read(write_page(folder)).text


@pytest.mark.parametrize(
    "bad",
    [
        '{"time": NaN, "kind": "run_ended", "reason": ""}',
        '{"time": 1e30, "kind": "run_ended", "reason": ""}',
        '{"time": -Infinity, "kind": "run_ended", "reason": ""}',
        '{"time": 1500, "kind": "run_ended", "reason": null}',
        '{"time": 1500, "kind": ["run_ended"], "reason": ""}',
        '{"time": "1500", "kind": "run_ended"}',
        "[1500]",
        "{",
        "7",
    ],
)
def test_page_when_a_line_is_no_event_then_it_is_left_out(write_run, make_steps, bad):
    text = read(page_of(write_run, make_steps, f"{line(1000.0, 'run_started')}\n{bad}\n")).text
    assert "run_started (1)" in text and "run_ended" not in text


def test_page_when_a_reason_has_a_lone_surrogate_then_its_escape_stands_there(write_run, make_steps):
    page = page_of(write_run, make_steps, line(1000.0, "run_ended", "bad \ud800 token"))
    assert "bad \\ud800 token" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("rollout", ["x", [], 5, {"events": 5, "save_trajectories": 5}, {"events": "a\0b"}])
def test_page_when_settings_name_no_paths_then_a_page_all_the_same(write_run, make_steps, rollout):
    folder = write_run(make_steps(8))
    (folder / "run.json").write_text(json.dumps({"rollout": rollout}))
    assert "Metrics" in read(write_page(folder)).text


def test_page_when_several_runs_appended_then_each_shows_its_own_from_its_start_on(write_run, make_steps):
    lines = [
        line(1000.0, "run_started", "at step 1", step=1),
        *(line(1000.0 + step, "server_left_out", "first", step=step) for step in range(2, 40)),
        line(1100.0, "run_ended", step=40),
        # The second one begins with what is told before its first step, and goes on from a checkpoint.
        line(9000.0, "files_moved", "files of an earlier run", to="earlier-1"),
        line(9001.0, "server_taken_over"),
        line(9002.0, "run_started", "at step 1", step=1),
        line(9003.0, "server_left_out", "second", step=2),
        line(9500.0, "run_started", "at step 3, from a checkpoint", step=3),
    ]
    page = page_of(write_run, make_steps, "\n".join(lines))
    text = read(page).text
    assert "server_left_out (1)" in text and "run_started (2)" in text and "files_moved (1)" in text
    assert "server_taken_over (1)" in text and "run_ended" not in text and "8:20" in text
    earlier = page.parent / "earlier-1"
    earlier.mkdir()
    for name in ("metrics.jsonl", "run.json"):
        (earlier / name).write_bytes((page.parent / name).read_bytes())
    text = read(write_page(earlier)).text
    assert "server_left_out (38)" in text and "run_ended (1)" in text and "files_moved" not in text


def test_tones_then_of_kinds_that_exist():
    assert {*LOST, *MENDED} <= set(KINDS)
