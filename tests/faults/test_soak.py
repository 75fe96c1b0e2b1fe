"""The soak's own parts: faults come, one at a time, and go; servers come and go; each line of its report can
fail.
"""

import json
import random
import signal
import threading
import time
import types
import urllib.request
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.faults import soak_faults, soak_report
from tests.faults.door import Door
from tests.faults.soak_faults import KINDS, OF_RANKS, UNTIL, Changes, Faults, Fleet, Moments
from tests.faults.soak_report import (
    NAMES,
    accounted,
    exit_status,
    growth,
    judged,
    last_step,
    read_run,
    write_report,
)


class FakeServer:
    def __init__(self, number, log):
        self.number, self._log = number, log
        self.door = types.SimpleNamespace(
            url=f"http://127.0.0.1:{10000 + number}",
            delay_s=0.0,
            nonsense=False,
            spread_s=0.0,
            losing=False,
            met={},
            failing={},
            spoiled={},
        )

    def is_ill(self):
        door = self.door
        return bool(
            door.delay_s
            or door.nonsense
            or door.spread_s
            or door.losing
            or door.met
            or door.failing
            or door.spoiled
        )

    def wait_ready(self):
        self._log.append("ready")

    def signal(self, number):
        self._log.append(signal.Signals(number).name)

    def start_again(self):
        self._log.append("start")

    def close(self):
        self._log.append(f"closed {self.number}")


class FakeTraining:
    def __init__(self, log):
        self._log = log

    def ranks(self):
        return [types.SimpleNamespace(kill=lambda: self._log.append("rank"))]

    def kill(self):
        self._log.append("job")


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(soak_faults.time, "monotonic", lambda: now.s)
    return now


@pytest.fixture
def fleet(tmp_path):
    log = []
    made = Fleet(
        [FakeServer(number, log) for number in (0, 1)],
        tmp_path / "servers.txt",
        lambda number: FakeServer(number, log),
    )
    made.log = log
    return made


def test_faults_when_steps_go_by_then_each_kind_comes_and_is_undone_before_the_next(clock, fleet):
    log = fleet.log
    faults = Faults(fleet, FakeTraining(log), every=10, seed=3)
    ill = []
    for step in range(1, 1001):
        faults.at_step(step, step / 1000)
        ill.append(sum(server.is_ill() for server in fleet.listed))
        for server in fleet.listed:  # pushes come in half of the time, and the server is killed in one
            if step % 60 < 30 and server.door.met:
                server.door.met.popitem()[1]()
        clock.s += 4
        if faults._waits is not None:
            faults._waits.join()
    faults.close()
    kinds = Counter(fault.kind for fault in faults.done)
    assert set(kinds) == set(KINDS) and 80 <= len(faults.done) <= 105
    assert max(ill) == 1 and ill[-1] == 0
    assert max(fault.step for fault in faults.done if fault.kind in OF_RANKS) < 1000 * UNTIL
    assert log.count("rank") == kinds["rank killed"] and log.count("job") == kinds["job killed"]
    assert log.count("SIGKILL") == log.count("start") == log.count("ready")
    assert log.count("start") >= kinds["killed"] + kinds["restarted"] > 0
    assert log.count("SIGSTOP") == log.count("SIGCONT") == kinds["stopped"]


def test_changes_when_steps_go_by_then_two_to_three_are_listed_and_the_ill_one_stays(clock, fleet):
    faults = types.SimpleNamespace(victim=None)
    changes = Changes(fleet, faults, every=5, least=2, most=3, seed=0)
    counts = Counter()
    for step in range(1, 1001):
        faults.victim = fleet.listed[0] if step % 3 else None
        before = {server.number for server in fleet.listed}
        changes.at_step(step, step / 1000)
        after = {server.number for server in fleet.listed}
        assert faults.victim is None or faults.victim.number in after
        assert len(before ^ after) == len(changes.done) - sum(counts.values()) <= 1
        counts = Counter(change.kind for change in changes.done)
        written = (fleet._file).read_text().splitlines()[1:]
        assert written == [server.door.url for server in fleet.listed] and 2 <= len(written) <= 3
        clock.s += 4
    assert sum(counts.values()) >= 150 and abs(counts["join"] - counts["leave"]) <= 2
    ended = [line for line in fleet.log if line.startswith("closed")]
    fresh = [change for change in changes.done if change.is_new]
    assert len(ended) == len(set(ended)) >= 10  # only those that were to end
    assert {change.kind for change in fresh} == {"join", "leave"}


def test_moments_when_passed_then_the_next_is_half_to_one_and_a_half_away():
    moments, due = Moments(random.Random(0), 14), []
    for step in range(1, 10_001):
        if moments.due(step):
            due.append(step)
            moments.passed(step)
    gaps = [later - earlier for earlier, later in zip(due, due[1:], strict=False)]
    assert due[0] == 7 and min(gaps) == 7 and max(gaps) == 21
    assert sum(gaps) / len(gaps) == pytest.approx(14, rel=0.1)


def life(pid, first, last, mib_per_step, start=500.0):
    """A process's memory at each step of its life: large while it starts, then growing
    evenly from 100 MiB.
    """
    return [
        (step, start if step <= first + 20 else 100.0 + mib_per_step * (step - first), pid)
        for step in range(first, last + 1)
    ]


def test_growth_when_processes_are_started_again_then_a_leak_is_seen_within_each_life():
    # 0.5 MiB a step are 50 in 100 steps. Every life ends where the one before did, at 250 MiB: first hundred
    # steps and last hundred have the same median.
    leaks = [point for pid in range(8) for point in life(pid, 300 * pid, 300 * pid + 299, 0.5)]
    assert growth(leaks) == pytest.approx([50.0] * 8)
    assert growth(life(1, 0, 249, 0.5)) == []  # 99 steps behind its start


def test_growth_when_memory_jumps_or_peaks_once_then_flat_and_of_two_processes_each_has_its_own():
    # Behind its start the life has steps 151 to 330, 130 before the jump of 300 MiB and 50 behind it: of
    # 180 * 179 / 2 = 16110 pairs 130 * 50 = 6500 have a slope, fewer than half, so that the median is 0.
    jumps = [(step, mib + 300.0 * (step > 280), pid) for step, mib, pid in life(1, 0, 330, 0.0)]
    peaks = [(step, mib + 900.0 * (step % 50 == 0), pid) for step, mib, pid in life(2, 0, 330, 0.1)]
    assert growth(jumps) == [0.0]
    assert growth([*peaks, *jumps]) == pytest.approx([0.0, 10.0], abs=1.0)
    twice = [(step, mib, 3) for step, mib, _ in life(3, 0, 330, 0.2) for mib in (mib - 1.0, mib + 1.0)]
    assert growth(twice) == pytest.approx([20.0])  # two readings of a step: their median


def write_samples(folder, step, groups, version=None):
    """A step's file: four rows of each group, of the weights of the step before, or of this version."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    rows = [group for group in groups for _ in range(4)]
    spans = [[{"start": 0, "end": 6, "version": f"ab12-{step - 1 if version is None else version}"}]] * len(
        rows
    )
    table = pa.table({"group": rows, "weight_versions": spans})
    pq.write_table(table, folder / f"samples/step_{step:06d}_replica0.parquet")


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_accounts_when_groups_are_lost_doubled_stale_or_dropped_then_each_is_told(tmp_path):
    write_samples(tmp_path, 1, [0, 1])
    write_samples(tmp_path, 2, [3, 1])
    write_samples(tmp_path, 3, [5], version=1)
    write_samples(tmp_path, 4, [6, 9])  # it was under way when the soak ended
    write_lines(tmp_path / "events.jsonl", [{"time": 1.0, "kind": "group_dropped", "reason": "", "group": 2}])
    found = accounted(tmp_path, 3, 4)
    assert found["lost"] == [4] and found["twice"] == [1] and found["dropped"] == [2]
    assert found["not whole"] == [1] and found["stale"] == [3] * 4 and found["trained"] == [0, 1, 3, 5]


STEPS = 1000


class Planted:
    """A soak as it should be; each test spoils one thing in the files of one run."""

    def __init__(self, out):
        self.out = out
        facts = {"steps": STEPS, "hours": None, "seed": 0, "ranks": 2, "groups": 1, "group_size": 4}
        self.facts = facts | {"commit": "0", "date": "2026-01-01", "machine": "2 cores"}
        self.steps = {name: self._steps() for name in NAMES}
        # with faults 1000 steps take 1100 s, without 1000 s: 91 % of the speed
        self.pace = {"faults": 1.1, "compared": 1.0}
        self.growth, self.files = dict.fromkeys(NAMES, 0.02), dict.fromkeys(NAMES, 40)
        self.leak = dict.fromkeys(NAMES, 0.0)
        kinds = list(KINDS)
        self.faults = [
            {"step": 10 * n, "at": 11.0 * n, "kind": kinds[n % len(kinds)], "victim": "server 0"}
            for n in range(1, 61)
        ]
        self.changes = [
            {
                "step": 30 * n,
                "at": 33.0 * n,
                "kind": "join" if n % 2 else "leave",
                "url": "http://a:1",
                "is_new": n < 4,
            }
            for n in range(1, 31)
        ]
        jobs = sum(fault["kind"] == "job killed" for fault in self.faults)
        self.end = {"faults": {"starts": 1 + jobs}, "compared": {"starts": 1}}
        self.end = {name: own | {"status": 0, "stuck": False} for name, own in self.end.items()}
        self.events = [
            {
                "time": change["at"] + 2.0,
                "kind": "server_joined" if change["kind"] == "join" else "server_removed",
                "reason": soak_report.LEFT + " of servers",
                "server": change["url"],
            }
            for change in self.changes
        ]
        self.groups = {name: {step: ([step - 1], None) for step in (1, 2, STEPS)} for name in NAMES}

    @staticmethod
    def _steps():
        return [{"step": n, "reward/mean": 0.9, "rollout_corr/k3_kl": 1e-5} for n in range(1, STEPS + 1)]

    def write(self, monkeypatch):
        monkeypatch.setattr(soak_report, "accounted", self._accounted)
        (self.out / "soak.json").write_text(json.dumps(self.facts))
        for name in NAMES:
            folder = self.out / name
            folder.mkdir()
            write_lines(folder / "metrics.jsonl", self.steps[name])
            write_lines(folder / "watch.jsonl", self._watch(name))
            if self.end[name] is not None:
                (folder / "end.json").write_text(json.dumps(self.end[name]))
            is_hit = name == "faults"
            write_lines(folder / "events.jsonl", self.events if is_hit else [])
            write_lines(folder / "faults.jsonl", self.faults if is_hit else [])
            write_lines(folder / "changes.jsonl", self.changes if is_hit else [])

    def _watch(self, name):
        rows = []
        for step in range(1, STEPS + 1, 5):
            pid = 1 if step < 500 else 2
            memory = {
                f"rank {rank}": [
                    400.0 + self.growth[name] * step + self.second * max(0, step - 500),
                    pid,
                    self.files[name] + int(self.leak[name] * step),
                ]
                for rank in (0, 1)
            }
            memory["server 0"] = [600.0 + 0.3 * step, 9, 0]
            rows.append(
                {
                    "time": self.pace[name] * step,
                    "step": step,
                    "listed": 2,
                    "well": 1 + step % 2,
                    "memory": memory,
                }
            )
        return rows

    def _accounted(self, folder, last, group_size):
        empty = {key: [] for key in ("lost", "twice", "not whole", "dropped", "stale")}
        return empty | {"trained": list(range(last))} | self.bad.get(folder.name, {})

    second = 0.0
    """MiB a step of the later processes."""
    bad = {}
    """Run -> what `accounted` says otherwise."""


@pytest.fixture
def planted(tmp_path):
    return Planted(tmp_path)


def lines_of(planted):
    return judged(planted.facts, *(read_run(planted.out / name, 4) for name in NAMES))


def verdicts(planted):
    return {line.what: line.verdict for line in lines_of(planted)}


def test_report_when_all_is_well_then_every_line_passes_and_both_are_side_by_side(planted, monkeypatch):
    planted.write(monkeypatch)
    assert write_report(planted.out) == 0
    text = (planted.out / "soak.md").read_text()
    assert "FAIL" not in text and "not judged" not in text
    for line in (
        "| steps | each of 1000 once | 1000; 0 restarts by torchrun, 5 by the soak | 1000; 0 restarts by "
        "torchrun, 0 by the soak | PASS |",
        "| faults | at least 60 | 60 | 0 | PASS |",
        "| joins and leaves of servers | at least 30 that the run tells | 30 of 30 | 0 | PASS |",
        "| mean reward of the last 100 steps | within 0.02 of each other | 0.9000 | 0.9000 | PASS |",
        "| steps a minute, while both run | with faults at least 80% | 54.5, 91% | 60.0 | PASS |",
        "| memory of rank 1, MiB in 100 steps | flat: +10 at most | +2.0 to +2.0, of 2 | +2.0 to +2.0, of 2 "
        "| PASS |",
        "| open files of rank 0 in 100 steps | flat: +1 at most | +0.0 to +0.0, of 2 | +0.0 to +0.0, of 2 "
        "| PASS |",
        "| told: it is the server's own | +30.0 | +30.0 | told |",
    ):
        assert line in text
    assert (planted.out / "soak.png").stat().st_size > 20_000


SPOILED = {
    "a step is missing": ("steps", lambda soak: soak.steps["faults"].pop(500)),
    "a step is done twice": (
        "steps",
        lambda soak: soak.steps["compared"].insert(5, soak.steps["compared"][4]),
    ),
    "one hung": ("steps", lambda soak: soak.end["compared"].update(stuck=True)),
    "one ended with an error": ("steps", lambda soak: soak.end["faults"].update(status=1)),
    "one was started again without a fault": ("steps", lambda soak: soak.end["faults"].update(starts=7)),
    "one has not ended": ("steps", lambda soak: soak.end.update(faults=None)),
    **{
        f"a group is {name} {run}": (
            "groups of samples lost or doubled",
            lambda soak, run=run, name=name: setattr(soak, "bad", {run: {name: [7]}}),
        )
        for name in ("lost", "twice", "not whole")
        for run in NAMES
    },
    "too few groups": (
        "groups of samples lost or doubled",
        lambda soak: setattr(soak, "bad", {"faults": {"trained": [0]}}),
    ),
    **{
        f"a sample is stale {run}": (
            "samples of other weights than their step's",
            lambda soak, run=run: setattr(soak, "bad", {run: {"stale": [7]}}),
        )
        for run in NAMES
    },
    "59 faults": ("faults", lambda soak: soak.faults.remove(soak.faults[0])),
    "29 joins and leaves": ("joins and leaves of servers", lambda soak: soak.changes.pop()),
    "a join that the run does not tell": ("joins and leaves of servers", lambda soak: soak.events.pop()),
    "a server that was lost, not let go": (
        "joins and leaves of servers",
        lambda soak: soak.events[1].update(reason="it missed a push of weights"),
    ),
    "a join that comes too late": (
        "joins and leaves of servers",
        lambda soak: soak.events[0].update(time=soak.changes[1]["at"] + 1.0),
    ),
    "a lower reward": (
        "mean reward of the last 100 steps",
        lambda soak: [row.update({"reward/mean": 0.879}) for row in soak.steps["faults"][900:]],
    ),
    "a higher reward": (
        "mean reward of the last 100 steps",
        lambda soak: [row.update({"reward/mean": 0.921}) for row in soak.steps["faults"][900:]],
    ),
    "a step of another policy": (
        "largest mismatch (k3) of a step",
        lambda soak: soak.steps["faults"][321].update({"rollout_corr/k3_kl": 1.1e-4}),
    ),
    "four fifths of the speed are missed": (
        "steps a minute, while both run",
        lambda soak: soak.pace.update(faults=1.26),
    ),
    **{
        f"memory grows {run}": (
            "memory of rank 0, MiB in 100 steps",
            lambda soak, run=run: soak.growth.update({run: 0.11}),
        )
        for run in NAMES
    },
    "memory of the second of two processes grows": (
        "memory of rank 1, MiB in 100 steps",
        lambda soak: setattr(soak, "second", 0.2),
    ),
    **{
        f"files stay open {run}": (
            "open files of rank 1 in 100 steps",
            lambda soak, run=run: soak.leak.update({run: 0.03}),
        )
        for run in NAMES
    },
}


@pytest.mark.parametrize(("line", "spoil"), SPOILED.values(), ids=SPOILED.keys())
def test_report_when_one_thing_is_not_as_promised_then_its_line_fails(line, spoil, planted, monkeypatch):
    spoil(planted)
    planted.write(monkeypatch)
    found = lines_of(planted)
    failed = {one.what for one in found if one.verdict == "FAIL"}
    of_both_ranks = {line, *(line.replace(f"rank {n}", f"rank {1 - n}") for n in (0, 1))}
    assert line in failed and failed <= of_both_ranks
    assert exit_status(found) == 1


def test_report_when_no_rank_lives_long_enough_then_memory_fails_and_of_a_short_soak_is_not_judged(
    planted, monkeypatch
):
    monkeypatch.setattr(soak_report, "WARM_UP", 700)
    planted.write(monkeypatch)
    assert verdicts(planted)["memory of rank 0, MiB in 100 steps"] == "FAIL"
    planted.facts["steps"] = 300
    assert verdicts(planted)["memory of rank 0, MiB in 100 steps"] == "not judged"
    lines = [line for line in lines_of(planted) if line.verdict != "FAIL"]  # the files have more steps
    assert exit_status(lines) == 3


def test_report_when_it_is_under_way_then_it_says_so_and_a_clock_ends_it_where_it_is(planted, monkeypatch):
    planted.facts.update(steps=None, hours=6)
    planted.write(monkeypatch)
    with (planted.out / "faults/metrics.jsonl").open("a") as file:
        file.write('{"step": 1001, "rew')  # it is being written
    assert last_step(planted.out / "faults/metrics.jsonl") == 1000
    assert write_report(planted.out) == 0
    (planted.out / "faults/end.json").unlink()
    assert write_report(planted.out) == 1
    assert "5 by the soak; has not ended" not in (planted.out / "soak.md").read_text()
    assert "; has not ended" in (planted.out / "soak.md").read_text()


@contextmanager
def answering(body):
    """The address of a server that answers each POST with this body, and what it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def post(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the loopback, without a proxy
    with opener.open(urllib.request.Request(url, method="POST", data=b"{}"), timeout=20) as answer:
        return answer.read()


def test_door_when_it_spreads_loses_or_is_met_then_the_server_is_asked_once_and_the_answer_is_so():
    body, met = b"0123456789" * 10, []
    with answering(body) as (url, asked):
        door = Door(url)
        try:
            door.spread_s, begun = 0.7, time.monotonic()
            assert post(f"{door.url}/generate") == body and time.monotonic() - begun >= 0.7
            door.met["/pause"] = lambda: met.append(len(asked))
            begun = time.monotonic()
            assert post(f"{door.url}/pause") == post(f"{door.url}/pause") == body
            assert met == [1] and time.monotonic() - begun < 0.7  # called once, before; samples alone drip
            door.spread_s, door.losing = 0.0, True
            with pytest.raises(OSError):
                post(f"{door.url}/generate")
            assert post(f"{door.url}/pause") == body
        finally:
            door.close()
    assert asked == ["/generate", "/pause", "/pause", "/generate", "/pause"]
