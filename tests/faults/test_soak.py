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
    assert (
        found["lost"] == [4]
        and found["twice"] == [1]
        and found["dropped"] == [2]
        and found["not whole"] == []
    )


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


@pytest.mark.parametrize(
    ("with_faults", "without", "good"),
    [(0.1, 0.1, True), (0.5, 0.1, False), (0.1, 0.5, False), (0.1, None, False)],
    ids=["flat", "leaks", "leaks without faults", "not seen long enough"],
)
def test_report_when_memory_grows_in_either_run_then_it_fails_and_names_the_process(
    with_faults, without, good, tmp_path
):
    write_groups(tmp_path / "faults", {step: range(8 * (step - 1), 8 * step) for step in range(1, 121)})
    (tmp_path / "faults/events.jsonl").write_text("")
    rows = [{"step": step, "reward/mean": 0.5} for step in range(1, 121)]
    seen, compared = Seen(steps=rows, starts=1, seconds=60.0), Seen(steps=rows, starts=1)
    seen.memory["rank 0"] = life(7, 1, 300, with_faults)
    seen.memory["server 0"] = life(9, 1, 300, 3.0)
    compared.memory["rank 1"] = life(8, 1, 30 if without is None else 300, without or 0.0)
    options = types.SimpleNamespace(steps=120, seed=0)
    assert write_report(tmp_path, options, seen, [], compared) is good
    text = (tmp_path / "soak.md").read_text()
    slope, verdict = 100 * with_faults, "PASS" if with_faults < 0.2 else "FAIL"
    assert (
        f"| memory of rank 0, with faults, MiB per 100 steps | flat: +20 at most | {slope:+.1f} to " in text
    )
    assert f"{slope:+.1f}, of 1 processes that lived long enough | {verdict} |" in text
    assert ("| no process lived long enough | FAIL |" in text) is (without is None)
    assert (
        "| told: it is the server's own | +300.0 to +300.0, of 1 processes that lived long enough | PASS |"
        in text
    )
    assert "| 960 trained, 0 dropped and told, 0 lost, 0 trained twice, 0 not whole | PASS |" in text
    assert (tmp_path / "soak.png").stat().st_size > 10_000
