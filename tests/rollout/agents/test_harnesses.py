"""Harnesses in real processes: what they return, how they fail, and that nothing of them is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.rollout.agents import starter
from megatron_rl_corr.rollout.agents.harnesses import Harnesses
from megatron_rl_corr.rollout.agents.outcome import checked_outcome, is_outcome
from megatron_rl_corr.rollout.agents.starter import HarnessKind

FILE = Path(__file__).resolve().parent / "harness_file.py"
KEY = "0123456789abcdef0123456789abcdef"
URLS = ("http://127.0.0.1:9/v1", "http://127.0.0.1:9")


@asynccontextmanager
async def harnesses(name="run", *, timeout_s=60.0, memory_gib=1.0, command=None, hidden=()):
    function = None if command else f"{FILE}:{name}"
    made = Harnesses(HarnessKind(function, command, timeout_s, memory_gib, "`agent`"), hidden)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def outcome(made, **task):
    """The result, or the failure."""
    try:
        return await made.run(task, *URLS, KEY)
    except SampleFailure as failure:
        return failure


def run(*tasks, **how):
    """Outcomes of these tasks, all at once."""

    async def all_of_them():
        async with harnesses(**how) as made:
            return await asyncio.gather(*(outcome(made, **task) for task in tasks))

    return asyncio.run(all_of_them())


def notes(path):
    found = {}
    for line in path.read_text().splitlines():
        found |= json.loads(line)
    return found


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_so, seconds=20.0):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def test_results_when_returned_then_numbers_parts_or_none():
    found = run({"do": "number"}, {"do": "none"}, {"do": "dict"})
    assert found == [{"agent": 1.5}, None, {"agent": 1.0, "agent/steps": 3.0}]


def test_plain_function_when_given_then_it_is_called():
    assert run({"do": ""}, name="plain") == [{"agent": 0.25}]


@pytest.mark.parametrize(
    ("do", "says"),
    [
        ("raises", "KeyError: 'nothing of ***'\nthe end of its output:\nworking with ***"),
        ("exit", "SystemExit: 3"),
        ("end", "exit status 4 before it returned"),
        ("crash", "SIGSEGV before it returned"),
        ("text", "must return a number"),
        ("no reward", 'with "reward"'),
        ("nan", "finite"),
        ("huge", "bytes of JSON; at most 65536"),
        ("much_memory", "MemoryError"),
        ("unknown", "KeyError: 'unknown'"),
    ],
)
def test_harness_when_it_fails_then_its_episode_alone(do, says):
    failed, good = run({"do": do}, {"do": "number"}, memory_gib=0.5)
    assert failed.cause == "agent" and says in str(failed) and KEY not in str(failed)
    assert good == {"agent": 1.5}


def test_function_when_it_takes_other_arguments_then_the_failure_says_so():
    [failed] = run({"do": ""}, name="wants_two")
    assert failed.cause == "agent" and "wants_two() takes 2 positional arguments" in str(failed)


def test_output_when_there_is_much_then_its_end_is_kept():
    [flooded, good] = run({"do": "flood"}, {"do": "number"})
    assert flooded == {"agent": 1.0} and good == {"agent": 1.5}


def test_row_when_json_has_no_form_for_it_then_its_episode_fails():
    failed, good = run({"do": "number", "what": object()}, {"do": "number"})
    assert failed.cause == "agent" and "can be given" in str(failed) and good == {"agent": 1.5}


def test_fork_when_both_return_then_one_result():
    assert run({"do": "fork_returns"}) == [{"agent": 1.0}]


def test_harness_when_it_hangs_then_it_is_ended_and_may_clean_up(tmp_path):
    [failed] = run({"do": "", "notes": str(tmp_path / "notes")}, name="hang", timeout_s=1.0)
    assert failed.cause == "agent_timeout" and "longer than 1 s" in str(failed)
    assert notes(tmp_path / "notes") == {"cleaned": True}


def test_harness_when_it_ignores_sigterm_then_it_is_killed(tmp_path):
    path = tmp_path / "notes"
    failed, good = run({"do": "stubborn", "notes": str(path)}, {"do": "number"}, timeout_s=2.0)
    assert failed.cause == "agent_timeout" and good == {"agent": 1.5}
    assert not is_alive(notes(path)["began"])


def test_children_when_the_harness_has_returned_then_they_end_too(tmp_path):
    async def measured():
        async with harnesses() as made:
            assert await outcome(made, do="children", notes=str(tmp_path / "notes")) == {"agent": 1.0}
            left = notes(tmp_path / "notes")["left"]
            await asyncio.to_thread(wait_until, lambda: not any(map(is_alive, left)))
            assert await outcome(made, do="number") == {"agent": 1.5}

    asyncio.run(measured())


def test_episode_when_cancelled_then_its_harness_and_children_end(tmp_path):
    path = tmp_path / "notes"

    async def cancelled():
        async with harnesses() as made:
            call = asyncio.create_task(outcome(made, do="children", notes=str(path), wait=1))
            await asyncio.to_thread(wait_until, path.is_file)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.to_thread(wait_until, lambda: not any(map(is_alive, notes(path)["left"])))
            assert await outcome(made, do="number") == {"agent": 1.5}

    asyncio.run(cancelled())


def test_starter_when_killed_then_its_episodes_fail_and_another_one_starts(tmp_path):
    paths = [tmp_path / f"notes{at}" for at in range(3)]

    async def killed():
        async with harnesses() as made:
            calls = [outcome(made, do="children", notes=str(path), wait=1) for path in paths]
            calls = [asyncio.create_task(call) for call in calls]
            await asyncio.to_thread(wait_until, lambda: all(path.is_file() for path in paths))
            first = made.pid
            os.kill(first, signal.SIGKILL)
            failed = await asyncio.gather(*calls)
            assert [one.cause for one in failed] == ["agent"] * 3
            left = [pid for path in paths for pid in notes(path)["left"]]
            await asyncio.to_thread(wait_until, lambda: not any(map(is_alive, left)))
            assert await outcome(made, do="number") == {"agent": 1.5}
            assert made.pid != first

    asyncio.run(killed())


TRAINER = """
import asyncio, sys
from tests.rollout.agents.test_harnesses import harnesses, outcome
async def main():
    async with harnesses() as made:
        print(made.pid, flush=True)
        await asyncio.gather(*(outcome(made, do=do, notes=sys.argv[1] + do, wait=1) for do in sys.argv[2:]))
asyncio.run(main())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_trainer_when_it_ends_then_all_ends(tmp_path, sent):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path / "notes-"), "children", "stubborn"],
        stdout=subprocess.PIPE,
        text=True,
    )
    starts = int(trainer.stdout.readline())
    paths = [tmp_path / f"notes-{do}" for do in ("children", "stubborn")]
    wait_until(lambda: all(path.is_file() for path in paths))
    trainer.send_signal(sent)
    trainer.wait()
    left = [starts, *notes(paths[0])["left"], notes(paths[1])["began"]]
    wait_until(lambda: not any(map(is_alive, left)))


def test_environment_when_run_then_keys_of_the_gateway_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVERS_KEY", "secret")
    monkeypatch.setenv("RANK", "0")
    assert run(
        {"do": "variables", "notes": str(tmp_path / "notes"), "x": [1 << 70]}, hidden=["SERVERS_KEY"]
    ) == [None]
    found = notes(tmp_path / "notes")
    assert found["OPENAI_BASE_URL"] == URLS[0] and found["ANTHROPIC_BASE_URL"] == URLS[1]
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"] == KEY
    assert found["SERVERS_KEY"] is None and found["RANK"] is None
    assert found["loaded_by"] not in (found["pid"], os.getpid())  # imported once, and forked from there
    assert found["task"] == {"do": "variables", "x": [1 << 70]}


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("echo no number", None),
        ("true", None),
        ("echo 3; echo 0.5", {"agent": 0.5}),
        ("""echo '{"reward": 1, "steps": 2}'""", {"agent": 1.0, "agent/steps": 2.0}),
        ("cat $ROLLOUT_TASK | grep -c 12345", {"agent": 1.0}),
        ("test $OPENAI_API_KEY = " + KEY + " && echo 2", {"agent": 2.0}),
        ("echo nan", "finite"),
        ("echo why >&2; exit 7", "exit status 7\nthe end of its output:\nwhy"),
        ("kill -9 $$", "SIGKILL"),
    ],
)
def test_command_when_run_then_its_last_line_is_the_reward(command, found):
    [ended] = run({"number": 12345}, command=("sh", "-c", command))
    if isinstance(found, str):
        assert ended.cause == "agent" and found in str(ended)
    else:
        assert ended == found


def test_command_when_there_is_no_such_program_then_its_episodes_fail():
    [failed] = run({}, command=("no-such-program",))
    assert failed.cause == "agent" and "No such file" in str(failed)


def test_command_when_it_hangs_then_it_is_ended():
    [failed] = run({}, command=("sleep", "600"), timeout_s=0.5)
    assert failed.cause == "agent_timeout"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise OSError('broken')", "OSError: broken"),
        ("import os; os._exit(1)", "ended its process"),
        ("x = 1", "has no 'run'"),
    ],
)
def test_file_when_it_cannot_be_loaded_then_the_start_fails(tmp_path, text, says):
    path = tmp_path / "agent.py"
    path.write_text(text)
    with pytest.raises(ValueError, match="`agent`") as raised:
        asyncio.run(Harnesses(HarnessKind(f"{path}:run", None, 1.0, None, "`agent`")).start())
    assert says in str(raised.value)


def test_episodes_when_many_at_once_then_each_has_its_result():
    found = run(*({"do": do} for do in ("number", "crash", "dict") * 40))
    assert [one if isinstance(one, dict) else one.cause for one in found] == [
        {"agent": 1.5},
        "agent",
        {"agent": 1.0, "agent/steps": 3.0},
    ] * 40


def test_running_when_a_pipe_gives_much_then_a_bound_is_kept():
    one = starter.RunningHarness(0, 1, 0.0, {})
    for _ in range(10):
        one.take("output", b"x" * 3000)
        one.take("result", b"y" * 30_000)
    assert len(one.output) == starter.OUTPUT_BYTES and len(one.result) == starter.RESULT_BYTES + 1


@pytest.mark.parametrize(
    "value",
    [
        "1",
        [1.0],
        {"reward": "1"},
        {"reward": 1, "score": 1},
        {1: 2},
        float("inf"),
        {"rewards": {"chatcmpl-0": 1.0}},
        {"reward": 1, "rewards": [1.0]},
        {"reward": 1, "rewards": {0: 1.0}},
        {"reward": 1, "rewards": {"chatcmpl-0": float("nan")}},
    ],
)
def test_outcome_when_it_is_something_else_then_it_is_refused(value):
    with pytest.raises(ValueError, match="`agent` f"):
        checked_outcome(value, "`agent` f")


def test_harness_when_no_process_can_be_had_then_it_fails_and_no_descriptor_is_lost(tmp_path):
    file = tmp_path / "no_fork.py"
    file.write_text(
        "import os\n\ndef fork():\n    raise OSError(11, 'no process')\n\nos.fork = fork\n\n"
        "def run(*_):\n    return 1.0\n"
    )

    async def asked():
        made = Harnesses(HarnessKind(f"{file}:run", None, 60.0, 1.0, "`agent`"))
        await made.start()
        try:
            counts = []
            for _ in range(3):
                failure = await outcome(made)
                assert "could not be started" in str(failure) and "no process" in str(failure)
                counts.append(len(os.listdir(f"/proc/{made.pid}/fd")))
            return counts
        finally:
            await made.close()

    assert len(set(asyncio.run(asked()))) == 1


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_command_when_its_reward_is_no_finite_number_then_it_fails_and_is_not_without_one(value):
    """No reward would be for the reward function to give."""
    [failure] = run({}, command=("echo", f'{{"reward": {value}}}'))
    assert isinstance(failure, SampleFailure) and "finite" in str(failure)


FORGED = (
    *('{"value": {}}', '{"value": 5}', '{"value": {"agent": "x"}}', '{"value": {"agent": null}}'),
    *('{"value": {"agent": 1.0, "rewards": 5}}', '{"value": {"agent": true}}', '{"value": [1.0]}'),
    *("[]", '{"other": 1}', '{"value": {"agent": 1.0, "rewards": {"chatcmpl-0": "1"}}}'),
)


def test_result_when_forged_in_the_harness_then_its_episode_alone_fails():
    """Whatever comes out of its process, the run must go on."""
    *failures, good = run(*({"do": "forges", "forged": one} for one in FORGED), {"do": "number"})
    assert good == {"agent": 1.5}
    assert [(type(one), one.cause) for one in failures] == [(SampleFailure, "agent")] * len(FORGED)
    assert all("wrote into the descriptor of its result" in str(one) for one in failures)
    assert is_outcome(None) and is_outcome({"agent": 1, "agent/x": 0.5, "rewards": {"a": 1.0}})
