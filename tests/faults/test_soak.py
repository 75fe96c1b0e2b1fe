"""The soak's own parts: faults come, one at a time, and go; its accounts find what is lost or doubled."""

import json
import signal
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.faults import soak_faults
from tests.faults.soak_faults import Faults
from tests.faults.soak_report import Seen, accounted, growth, write_report


class FakeServer:
    def __init__(self, number, log):
        self.number, self._log = number, log
        self.door = types.SimpleNamespace(delay_s=0.0, nonsense=False)
        self.server = types.SimpleNamespace(wait_ready=lambda: log.append("ready"))

    def signal(self, number):
        self._log.append(signal.Signals(number).name)

    def start_again(self):
        self._log.append("start")


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(soak_faults.time, "monotonic", lambda: now.s)
    return now


def test_faults_when_steps_go_by_then_each_kind_comes_once_in_turn_and_is_undone_before_the_next(clock):
    log = []
    servers = [FakeServer(number, log) for number in (0, 1)]
    training = types.SimpleNamespace(ranks=lambda: [types.SimpleNamespace(kill=lambda: log.append("rank"))])
    faults = Faults(servers, training, every=10, last=70, seed=3)
    broken = []
    for step in range(100):
        faults.at_step(step)
        broken.append(sum(server.door.delay_s > 0 or server.door.nonsense for server in servers))
        clock.s += 4
        if faults._waits is not None:
            faults._waits.join()
    faults.close()
    assert [fault.step for fault in faults.done] == [10, 20, 30, 40, 50, 60, 70]
    assert sorted(fault.kind for fault in faults.done[:6]) == sorted(Faults.KINDS)
    assert max(broken) == 1 and broken[-1] == 0
    assert log.count("SIGKILL") == log.count("start") == log.count("ready")
    assert log.count("SIGSTOP") == log.count("SIGCONT") and "rank" in log


def write_groups(folder, steps):
    (folder / "samples").mkdir(parents=True)
    for step, groups in steps.items():
        rows = [group for group in groups for _ in range(8)]
        pq.write_table(pa.table({"group": rows}), folder / f"samples/step_{step:06d}_replica_0.parquet")


def test_accounts_when_groups_are_lost_doubled_or_dropped_then_each_is_told(tmp_path):
    write_groups(tmp_path, {1: [0, 1], 2: [3, 1], 3: [5]})
    lines = [{"time": 1.0, "kind": "group_dropped", "reason": "", "group": 2}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = accounted(tmp_path)
    assert found["lost"] == [4] and found["twice"] == [1] and found["dropped"] == [2] and found["not whole"] == []


def test_growth_then_medians_of_the_first_steps_without_the_start_and_of_the_last():
    points = [(step, 900.0 if step < 5 else 100.0 + step / 10) for step in range(1, 1001)]
    assert growth(points, 1000) == pytest.approx((105.55, 195.05), abs=0.01)


@pytest.mark.parametrize(("last", "good"), [(110.0, True), (400.0, False)])
def test_report_when_memory_grows_then_it_fails_and_names_the_process(last, good, tmp_path):
    write_groups(tmp_path / "faults", {step: range(8 * (step - 1), 8 * step) for step in range(1, 31)})
    (tmp_path / "faults/events.jsonl").write_text("")
    rows = [{"step": step, "reward/mean": 0.5} for step in range(1, 31)]
    seen = Seen(steps=rows, starts=1, seconds=60.0)
    seen.memory["rank 0"] = [(step, 100.0 if step < 20 else last) for step in range(1, 31)]
    compared = Seen(steps=rows, starts=1)
    options = types.SimpleNamespace(steps=30, seed=0)
    assert write_report(tmp_path, options, seen, [], compared) is good
    text = (tmp_path / "soak.md").read_text()
    assert f"| 100 in the first steps, {last:.0f} in the last | {'PASS' if good else 'FAIL'} |" in text
    assert "| 240 trained, 0 dropped and told, 0 lost, 0 trained twice, 0 not whole | PASS |" in text
    assert (tmp_path / "soak.png").stat().st_size > 10_000
