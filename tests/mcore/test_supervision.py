"""The events file and the endpoint of a run: what they say, when they answer, how they end. No
Megatron is needed.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_rl_corr.config.flags import parse
from megatron_rl_corr.config.supervision import SupervisionConfig
from megatron_rl_corr.events import EVENTS, KINDS, Events, read_events
from megatron_rl_corr.mcore import endpoint as endpoint_module
from megatron_rl_corr.mcore import supervision as supervision_module
from megatron_rl_corr.mcore.endpoint import MOST_CONNECTIONS, Endpoint
from megatron_rl_corr.mcore.supervision import Supervision
from tests.faults.drills import drill
from tools.local_server import free_port

ROOT = Path(__file__).resolve().parents[2]


def get(port, path="/metrics"):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def session(urls=("a", "b"), left_out=("b",), running=3, ready=1, dropped=()):
    fleet = types.SimpleNamespace(dropped=dropped)
    client = types.SimpleNamespace(
        base_urls=urls, left_out=list(left_out), fleet=fleet, servers_wanted=4, idle_s=2.5
    )
    collector = types.SimpleNamespace(waiting=lambda: {"running": running, "ready": ready})
    parts = types.SimpleNamespace(source=types.SimpleNamespace(client=client), collector=collector)
    return types.SimpleNamespace(parts=parts)


@pytest.fixture
def fresh(monkeypatch):
    """EVENTS as of a new process."""
    for name, value in vars(type(EVENTS)()).items():
        monkeypatch.setattr(EVENTS, name, value)
    for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    yield EVENTS
    EVENTS.close()


def values(text):
    """(name, labels) -> value, as Prometheus reads them."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_text_when_read_by_prometheus_then_step_age_servers_groups_and_every_kind_of_event(fresh):
    shown = Supervision(SupervisionConfig())
    shown.open()
    before = values(shown.text())
    assert before["megatron_rl_corr_step",] == 0 and ("megatron_rl_corr_servers", "in") not in before
    shown.started(session(), 4)
    shown.end_step(5, 1.5)
    shown.end_step(6, 0.25)
    time.sleep(0.05)
    fresh.tell("server_left_out", "connection refused")
    found = values(shown.text())
    assert found["megatron_rl_corr_step",] == 6
    assert 0.05 <= found["megatron_rl_corr_last_step_age_seconds",] < 20
    assert found["megatron_rl_corr_servers", "in"] == found["megatron_rl_corr_servers", "left_out"] == 1
    assert found["megatron_rl_corr_servers_wanted",] == 4
    assert found["megatron_rl_corr_training_waits_seconds_total",] == 1.75
    assert found["megatron_rl_corr_sampling_waits_seconds_total",] == 2.5
    assert found["megatron_rl_corr_groups", "running"] == 3 and found["megatron_rl_corr_groups", "ready"] == 1
    counted = {kind: found["megatron_rl_corr_events_total", kind] for kind in KINDS}
    assert {kind for kind, count in counted.items() if count} == {"run_started", "server_left_out"}
    kinds = {family.name: family.type for family in text_string_to_metric_families(shown.text())}
    assert kinds["megatron_rl_corr_events"] == "counter" and kinds["megatron_rl_corr_step"] == "gauge"


def test_text_when_a_server_did_not_answer_at_a_restart_then_it_is_among_those_left_out(fresh):
    shown = Supervision(SupervisionConfig())
    shown.started(session(left_out=(), dropped=("c",)), 4)
    found = values(shown.text())
    assert (found["megatron_rl_corr_servers", "in"], found["megatron_rl_corr_servers", "left_out"]) == (2, 1)


@pytest.mark.parametrize("jump_s", [-86400, 86400])
def test_text_when_the_host_s_clock_jumps_then_the_age_of_the_last_step_is_the_time_that_has_passed(
    fresh, monkeypatch, jump_s
):
    shown = Supervision(SupervisionConfig())
    shown.started(session(), 0)
    shown.end_step(1, 0.0)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    assert 0 <= values(shown.text())["megatron_rl_corr_last_step_age_seconds",] < 20


def test_run_when_started_anew_then_its_events_are_appended_and_say_how(fresh, tmp_path, monkeypatch):
    path = tmp_path / "run" / "events.jsonl"
    first = Supervision(SupervisionConfig(events=str(path)))
    first.open()
    first.started(session(), 0)
    first.end_step(1, 0.0)
    fresh.tell("group_dropped", "a sample failed", group=7)
    fresh.close()  # killed
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    second = Supervision(SupervisionConfig(events=str(path)))
    second.open()
    second.started(session(), 1)
    second.restart()  # Megatron's, within the process
    second.open()
    second.started(session(), 1)
    assert second.begun
    second.close()
    assert not second.begun  # a start that follows is another run, no restart
    told = read_events(path)
    assert [(event["kind"], event["step"]) for event in told] == [
        ("run_started", 1),
        ("group_dropped", 2),
        ("run_restarted", 2),
        ("run_restarted", 2),
        ("run_ended", 2),
    ]
    assert (
        told[2]["reason"] == "at step 2, from a checkpoint: restart 2 of torchrun"
        and told[2]["restarts"] == 2
    )
    assert told[3]["reason"] == "at step 2, from a checkpoint: restart 1 within the process"
    assert values(second.text())["megatron_rl_corr_restarts",] == 3


@drill("the main thread hangs in a collective", promised="the metrics port answers")
def test_endpoint_when_the_main_thread_waits_in_native_code_then_it_answers_and_other_paths_are_not_found(
    fresh,
):
    with contextlib.closing(Endpoint("127.0.0.1", 0, lambda: "x 1\n")) as endpoint:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                time.sleep(0.3)
                content_type, text = get(endpoint.port)
                with contextlib.suppress(urllib.error.HTTPError):
                    get(endpoint.port, "/")
                    text = "another path was found"
                os._exit(0 if text == "x 1\n" and content_type.startswith("text/plain; version=0.0.4") else 1)
            os._exit(2)
        waitpid = ctypes.CDLL(None).waitpid  # as a collective does: no Python, and no lock of the interpreter
        status = ctypes.c_int()
        assert waitpid(pid, ctypes.byref(status), 0) == pid
        assert status.value == 0


def test_endpoint_when_clients_send_nothing_then_others_are_answered_and_closing_waits_for_none(
    fresh, monkeypatch
):
    monkeypatch.setattr(endpoint_module, "CONNECTION_TIMEOUT_S", 600.0)
    endpoint = Endpoint("127.0.0.1", 0, lambda: "x 1\n")
    idle = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(MOST_CONNECTIONS - 1)]
    assert get(endpoint.port)[1] == "x 1\n"
    begin = time.monotonic()
    endpoint.close()
    assert time.monotonic() - begin < 60
    for one in idle:
        one.close()


@drill(
    "clients of the metrics port that send a byte now and then, in all its places",
    promised="they are hung up on after 5 s, and others are answered",
)
@pytest.mark.parametrize("reads", [False, True], ids=["slow to ask", "slow to read"])
def test_endpoint_when_clients_are_slow_in_all_places_then_they_are_hung_up_on_at_one_deadline(
    fresh, monkeypatch, reads
):
    # A byte each 0.1 s. A limit of each read, 0.5 s, would never be reached; the deadline of 0.5 s
    # is, after 5 bytes.
    monkeypatch.setattr(endpoint_module, "CONNECTION_TIMEOUT_S", 0.5)
    text = "x" * 50_000_000 if reads else "x 1\n"  # more than the sockets' buffers hold
    with contextlib.closing(Endpoint("127.0.0.1", 0, lambda: text)) as endpoint:
        slow = [socket.create_connection(("127.0.0.1", endpoint.port)) for _ in range(MOST_CONNECTIONS)]
        if reads:
            for one in slow:
                one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        for byte in b"GET /metrics HT":
            for one in slow:
                with contextlib.suppress(OSError):
                    one.recv(1) if reads else one.send(bytes([byte]))
            time.sleep(0.1)
        monkeypatch.setattr(endpoint, "text", lambda: "x 1\n")
        assert get(endpoint.port)[1] == "x 1\n"
        for one in slow:
            one.close()


SERVE = """
import multiprocessing, sys, time
from megatron_rl_corr.mcore.endpoint import Endpoint
Endpoint("127.0.0.1", int(sys.argv[1]), lambda: "x 1\\n")
multiprocessing.get_context("fork").Process(target=time.sleep, args=[60]).start()  # a writer of checkpoints
print("ready", flush=True)
time.sleep(60)
"""


@drill(
    "SIGKILL of rank 0 with an open connection to its metrics port",
    promised="the next attempt has the port at once",
)
def test_endpoint_when_its_process_is_killed_in_a_connection_then_the_next_process_has_the_port_at_once(
    fresh,
):
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(port)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as first:
        try:
            assert first.stdout.readline() == b"ready\n"
            with socket.create_connection(("127.0.0.1", port)) as open_connection:
                open_connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                assert b"x 1" in open_connection.recv(4096) + open_connection.recv(4096)
                first.kill()
                first.wait()  # its fork still lives
                Endpoint("127.0.0.1", port, lambda: "x 2\n").close()
        finally:
            os.killpg(first.pid, signal.SIGKILL)


def test_port_when_busy_then_one_line_with_the_flag_and_a_restart_waits_for_what_is_left(fresh, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        options = SupervisionConfig(metrics_port=other.getsockname()[1])
        with pytest.raises(
            ValueError, match=r"`metrics_port` \d+ can't be opened at `metrics_address` 127.*: Addr"
        ):
            Supervision(options).open()
        monkeypatch.setenv("RANK", "1")
        Supervision(options).open()  # only rank 0 opens it
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        monkeypatch.setattr(supervision_module, "PATIENCE_S", 0.5)
        begin = time.monotonic()
        with pytest.raises(ValueError):
            Supervision(options).open()
        assert time.monotonic() - begin >= 0.5


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("elsewhere")])
def test_events_file_when_it_can_not_be_written_then_the_flag_and_the_remedy(make, tmp_path, fresh):
    make(tmp_path / "events")
    with pytest.raises(
        ValueError, match=r"`events` .*/events can't be written: .*; name a file, no link, in a folder"
    ):
        Supervision(SupervisionConfig(events=str(tmp_path / "events"))).open()
    assert not (tmp_path / "elsewhere").exists()


def test_flags_when_given_then_off_by_default_loopback_by_default_and_an_address_needs_a_port():
    required = [
        "--rollout-url",
        "http://a:1",
        "--rollout-hf-checkpoint",
        "m",
        "--rollout-prompts",
        "p",
        "--rollout-reward-function",
        "r.py:r",
    ]
    assert parse(required)[1].metrics_port is None
    assert parse([*required, "--rollout-metrics-port", "9100"])[1].metrics_address == "127.0.0.1"
    with pytest.raises(ValueError, match="--rollout-metrics-address.*--rollout-metrics-port"):
        parse([*required, "--rollout-metrics-address", "0.0.0.0"])
    for blank in ("", " "):  # of a variable that a launch script has not set
        with pytest.raises(
            ValueError, match="--rollout-metrics-address must name .*, got '.*; drop it .*0.0.0.0"
        ):
            parse([*required, "--rollout-metrics-port", "9100", "--rollout-metrics-address", blank])


def test_event_when_another_rank_is_amid_a_line_then_it_waits_for_the_rest(tmp_path, monkeypatch):
    path, events, order = tmp_path / "events", Events(), []
    events.open(path)
    with path.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"rank": 1, ')

        def rest(seconds):
            order.append(seconds)
            if len(order) == 20:  # far beyond WRITE_S
                other.write(b'"n": 0}\n')
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr("megatron_rl_corr.events.time.sleep", rest)
        events.tell("request_retried", "x")
        assert len(order) == 20
        fcntl.flock(other, fcntl.LOCK_EX)  # of a rank that was stopped: nobody waits for ever
        monkeypatch.setattr("megatron_rl_corr.events.LOCK_S", 0.0)
        events.tell("request_retried", "y")
    events.close()
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event.get("reason") for event in told] == [None, "x", "y"]


@drill("two ranks tell events at once", promised="each line of the file is whole")
def test_events_when_told_by_two_processes_then_every_line_is_whole(tmp_path):
    code = (
        "import sys; from megatron_rl_corr.events import Events; e = Events(); e.open(sys.argv[1])\n"
        "for n in range(2000): e.tell('request_retried', 'x' * 900, n=n)"
    )
    path = tmp_path / "events"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, path], env=os.environ | {"PYTHONPATH": str(ROOT), "RANK": rank}
        )
        for rank in "01"
    ]
    assert [one.wait() for one in running] == [0, 0]
    told = [json.loads(line) for line in path.read_text().splitlines()]
    for rank in (0, 1):
        assert [event["n"] for event in told if event["rank"] == rank] == list(range(2000))
