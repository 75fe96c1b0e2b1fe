"""Reward functions: how they are found, what they are given, where they run, and how a call may fail."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch

from megatron_rl_corr.data import worker_pool
from megatron_rl_corr.data.loading import load
from megatron_rl_corr.data.reward_value import checked_reward
from megatron_rl_corr.rollout import (
    Prompt,
    Rewards,
    SampleFailure,
    Trajectory,
    VersionSpan,
    blocking,
    load_function,
)
from tests.faults.drills import drill


def trajectory(output_ids, finish_reason="stop", environment_reward=None):
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=torch.tensor([1, 2]),
        output_ids=torch.tensor(output_ids, dtype=torch.int64),
        rollout_logprobs=torch.zeros(len(output_ids)),
        finish_reason=finish_reason,
        weight_versions=(VersionSpan("v", 0, len(output_ids)),),
        cached_tokens=0,
        server="http://a:1",
        environment_reward=environment_reward,
    )


PROMPT = Prompt(11, [1, 2], {"answer": 7, "text": "\u00e4\n", "nested": {"a": [1.5, None]}})
FASTER = "make it faster, or raise `reward_timeout_s`"
FILE = """
import asyncio, os, sys, time
ready, calls, running = None, 0, 0

class Foreign(BaseException): pass

def setup():
    global ready
    ready = os.getpid()
    print("set up in", ready)

def fate(first):
    if first == 91: os._exit(3)
    if first == 92: sys.exit("enough")
    if first == 93: return float("nan")
    if first == 94: return {}[first]
    if first == 95: time.sleep(600)
    if first == 97: raise Foreign("no Exception")

def reward(prompt, output_ids, finish_reason):
    global calls
    calls += 1
    assert ready == os.getpid() and not {"numpy", "torch", "megatron.core"} & sys.modules.keys()
    assert prompt.metadata["nested"] == {"a": [1.5, None]} and prompt.metadata["text"] == "\\u00e4\\n"
    assert "RANK" not in os.environ and os.path.isdir(os.environ["KEPT"])
    if output_ids[0] > 90:
        return fate(output_ids[0])
    if output_ids[0] == 80:
        return calls
    if output_ids[0] == 81:  # returns once another such call runs too: 0 and 1 wait for each other, and so on
        folder, number = os.environ["KEPT"], output_ids[1]
        open(f"{folder}/{number}", "w").close()
        while not os.path.exists(f"{folder}/{number ^ 1}"):
            time.sleep(0.01)
    return sum(output_ids) + 100 * (finish_reason == "length") + 1000 * prompt.index + prompt.input_ids[1] / 2

def in_a_thread(prompt, output_ids, finish_reason):
    assert ready == os.getpid()
    return fate(output_ids[0]) if output_ids[0] > 90 else sum(output_ids)

async def waits(prompt, output_ids, finish_reason):
    global running
    assert ready == os.getpid()
    if output_ids[0] == 82:  # returns once twenty such calls run
        running += 1
        while running < 20:
            await asyncio.sleep(0.01)
        return 0
    await asyncio.sleep(600 if output_ids[0] == 95 else 0.2)
    if output_ids[0] == 96: await asyncio.wait_for(asyncio.sleep(9), 0.01)
    return fate(output_ids[0]) if output_ids[0] > 90 else sum(output_ids)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(FILE)
    return path


def run(scenario, spec, **options):
    """await scenario(rewards) with what is started and ended around it; nothing of it is left."""

    async def inner():
        rewards = Rewards(spec, **({"limit_s": 10.0} | options))
        try:
            await rewards.start()
            return await asyncio.wait_for(scenario(rewards), 60)
        finally:
            await rewards.close()

    # A session's servers are children of this process too, and may start and end processes of their own.
    others = set(psutil.Process().children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "others", others)
        try:
            return asyncio.run(inner())
        finally:
            assert Workers.alive() == set()


class Workers:
    """The processes that a scenario's rewards have started."""

    others = set()

    @classmethod
    def alive(cls):
        ours = [child for child in psutil.Process().children() if child not in cls.others]
        return {p.pid for child in ours for p in (child, *children_of(child)) if is_alive(p)}


def children_of(process):
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def failure_of(rewards, ids):
    async def inner():
        with pytest.raises(SampleFailure) as error:
            await rewards.score(PROMPT, trajectory(ids))
        return error.value.cause, str(error.value)

    return inner()


def memory_of(pids):
    """Resident bytes."""
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


@drill("a reward function that hangs", promised="its worker is replaced, its sample has failed")
def test_reward_when_plain_then_scored_in_processes_of_their_own_that_are_replaced_after_a_hang(
    file, monkeypatch, capfd, told, tmp_path
):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("KEPT", str(tmp_path))
    printed = ""

    async def until_set_up(workers):
        nonlocal printed
        async with asyncio.timeout(30):
            while (printed := printed + capfd.readouterr().out).count("set up in") < workers:
                await asyncio.sleep(0.05)

    async def scenario(rewards):
        workers = Workers.alive()
        assert len(workers) == 2
        # 1 + 2 + 100 + 11000 + 2 / 2
        assert await rewards.score(PROMPT, trajectory([1, 2], "length")) == 11104.0
        many = [rewards.score(PROMPT, trajectory([81, n])) for n in range(6)]
        assert await asyncio.gather(*many) == [11082.0 + n for n in range(6)]  # two at a time
        assert await failure_of(rewards, [93]) == (
            "reward_error",
            f"`reward_function` {file}:reward must return a number that is finite in float32, got nan",
        )
        cause, text = await failure_of(rewards, [94])
        assert (
            cause == "reward_error" and "KeyError: 94" in text and "if first == 94: return {}[first]" in text
        )
        cause, text = await failure_of(rewards, [92])
        assert cause == "reward_error" and "SystemExit: enough" in text
        cause, text = await failure_of(rewards, [97])
        assert cause == "reward_error" and "Foreign: no Exception" in text
        assert Workers.alive() == workers  # exceptions end no worker
        memory, descriptors = memory_of(workers), len(os.listdir("/proc/self/fd"))
        for _ in range(5):  # ten hangs
            hangs = await asyncio.gather(failure_of(rewards, [95]), failure_of(rewards, [95]))
            text = f"`reward_function` {file}:reward: it took longer than 1 s; {FASTER}"
            assert hangs == [("reward_timeout", text)] * 2
        assert await failure_of(rewards, [91]) == (
            "reward_error",
            f"`reward_function` {file}:reward: its process ended with exit status 3; a reward function "
            "must return or raise",
        )
        assert await rewards.score(PROMPT, trajectory([80])) == 1  # the first call of a new one
        await until_set_up(2 + 10 + 1)
        left = Workers.alive()
        assert len(left) == 2 and not left & workers
        # Fewer descriptors are open where the loop had not closed all when they were counted.
        assert memory_of(left) < 1.1 * memory and len(os.listdir("/proc/self/fd")) <= descriptors

    run(scenario, f"{file}:reward", workers=2, limit_s=1.0)
    assert (printed + capfd.readouterr().out).count("set up in") == 2 + 10 + 1
    replaced = Counter(facts["reason"] for kind, facts in told if kind == "worker_replaced")
    assert replaced == {"it took longer than 1 s": 10, "its process ended with exit status 3": 1}


CHANGES = """
def reward(prompt, output_ids, finish_reason):
    prompt.input_ids.extend(output_ids)
    prompt.metadata["tests"].append(0)
    return prompt.metadata.pop("answer", 0) + len(prompt.metadata["tests"]) + len(prompt.input_ids)

async def waits(prompt, output_ids, finish_reason):
    return reward(prompt, output_ids, finish_reason)
"""


@pytest.mark.parametrize("name, workers", [("reward", 1), ("reward", 0), ("waits", None)])
def test_reward_when_the_function_changes_its_prompt_then_the_next_call_has_the_data_sets(
    tmp_path, name, workers
):
    (tmp_path / "changes.py").write_text(CHANGES)
    prompt = Prompt(3, [1, 2], {"answer": 50, "tests": [7]})

    async def scenario(rewards):
        # 50 + 2 + 5
        assert [await rewards.score(prompt, trajectory([4, 5, 6])) for _ in range(3)] == [57.0] * 3
        assert prompt == Prompt(3, [1, 2], {"answer": 50, "tests": [7]})

    run(scenario, f"{tmp_path}/changes.py:{name}", workers=workers)


@pytest.mark.parametrize("later", ["def reward(sample): return -1", None])
def test_reward_when_its_file_is_edited_during_the_run_then_a_new_worker_scores_as_the_others(
    tmp_path, later
):
    spec = tmp_path / "edited.py"
    spec.write_text(
        "import time\ndef reward(prompt, ids, reason): return time.sleep(60) if ids == [9] else 1\n"
    )

    async def scenario(rewards):
        spec.unlink() if later is None else spec.write_text(later)
        assert (await failure_of(rewards, [9]))[0] == "reward_timeout"
        assert [await rewards.score(PROMPT, trajectory([n])) for n in range(4)] == [1] * 4

    run(scenario, f"{spec}:reward", workers=1, limit_s=0.5)


FORKS = """
import os, sys, time
def reward(prompt, output_ids, finish_reason):
    if output_ids[0] == 7 and os.fork() == 0:
        time.sleep(0.2)
        sys.exit()
    return output_ids[0]
"""


def test_reward_when_the_function_forks_and_the_child_comes_out_of_it_then_no_answer_is_taken_for_another(
    tmp_path,
):
    (tmp_path / "forks.py").write_text(FORKS)

    async def scenario(rewards):
        assert await rewards.score(PROMPT, trajectory([7])) == 7
        await asyncio.sleep(0.5)  # the child has ended; it would have answered the next call
        assert [await rewards.score(PROMPT, trajectory([n])) for n in (3, 4, 5)] == [3, 4, 5]

    run(scenario, f"{tmp_path}/forks.py:reward", workers=1)


def test_worker_when_the_users_variables_are_called_like_torchruns_then_it_has_them_and_not_torchruns(
    tmp_path, monkeypatch
):
    names = [
        "LOCAL_MODEL_DIR",
        "RANKER_URL",
        "GROUP_ID",
        "ROLE_PROMPT",
        "MASTER_KEY",
        "LOCAL_RANK",
        "TORCHELASTIC_A",
    ]
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path there is one that Python never looks at
    (tmp_path / "reads.py").write_text(
        f"import os\ndef reward(sample):\n    return sum(2**n for n, one in enumerate({names}) if one in "
        "os.environ)\n"
    )

    async def scenario(rewards):
        assert await rewards.score(PROMPT, trajectory([1])) == 0b0011111

    run(scenario, f"{tmp_path}/reads.py:reward", workers=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_setup_when_it_is_async_then_awaited_before_the_first_call(tmp_path, workers):
    (tmp_path / "late.py").write_text(
        "import asyncio\nready = 0\nasync def setup():\n    global ready\n    await asyncio.sleep(0.01)\n"
        "    ready = 1\ndef reward(sample):\n    return ready\n"
    )

    async def scenario(rewards):
        assert await rewards.score(PROMPT, trajectory([1])) == 1

    run(scenario, f"{tmp_path}/late.py:reward", workers=workers)


RETRIES = """
import asyncio
async def reward(prompt, output_ids, finish_reason):
    while output_ids[0] == 95:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:  # and it goes on
            await asyncio.sleep(0.01)
    return output_ids[0]
"""


def test_reward_when_an_async_function_goes_on_though_it_is_cancelled_then_left_behind_and_no_endless_wait(
    tmp_path, monkeypatch
):
    (tmp_path / "retries.py").write_text(RETRIES)
    monkeypatch.setattr(worker_pool, "GRACE_S", 0.2)
    monkeypatch.setattr(blocking, "EXIT_TIMEOUT_S", 0.2)
    with blocking.LoopThread() as loop:
        rewards = Rewards(f"{tmp_path}/retries.py:reward", limit_s=0.5)
        loop.call(rewards.start())
        with pytest.raises(SampleFailure, match="it took longer than 0.5 s") as error:
            loop.call(rewards.score(PROMPT, trajectory([95])), timeout=20)
        assert error.value.cause == "reward_timeout"
        assert loop.call(rewards.score(PROMPT, trajectory([5]))) == 5

        async def given_up():
            call = asyncio.create_task(rewards.score(PROMPT, trajectory([95])))
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.wait([call], timeout=10)
            return call.cancelled()

        assert loop.call(given_up(), timeout=20)


@drill("a reward file that calls exit()", promised="refused by name")
def test_start_when_the_users_file_calls_exit_then_refused_and_the_loop_thread_goes_on(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('no licence')\n")
    with blocking.LoopThread() as loop:
        rewards = Rewards(f"{tmp_path}/leaves.py:reward", workers=0, limit_s=1.0)
        with pytest.raises(
            ValueError, match=r"leaves.py:reward called exit\('no licence'\) while it was loaded"
        ):
            loop.call(rewards.start(), timeout=20)


def test_reward_when_an_environment_leaves_an_object_in_the_metadata_then_that_sample_fails(file):
    prompt = Prompt(0, [1, 2], {"tool": object()})

    async def scenario(rewards):
        with pytest.raises(SampleFailure, match="metadata holds what no worker can be given") as error:
            await rewards.score(prompt, trajectory([1]))
        assert error.value.cause == "reward_error"
        assert await rewards.score(PROMPT, trajectory([3])) == 3

    run(scenario, f"{file}:in_a_thread", workers=1)


def test_reward_when_its_group_is_given_up_then_a_running_call_ends_and_is_told_and_one_in_line_is_not_begun(
    file,
):
    told = []

    async def scenario(rewards):
        calls = [asyncio.create_task(rewards.score(PROMPT, trajectory([n]))) for n in (95, 94)]
        await asyncio.sleep(0.3)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls) and told == []
        assert await rewards.score(PROMPT, trajectory([3, 4])) == 7
        assert [failure and failure.cause for failure in told] == ["reward_timeout"]

    run(scenario, f"{file}:in_a_thread", workers=0, limit_s=0.8, late=told.append)


@pytest.mark.parametrize("name, workers", [("in_a_thread", 0), ("waits", None)])
def test_reward_when_in_the_trainers_process_then_as_in_workers_and_the_loop_goes_on(file, name, workers):
    async def scenario(rewards):
        assert await rewards.score(PROMPT, trajectory([3, 4])) == 7
        hang = asyncio.create_task(failure_of(rewards, [95]))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not hang.done()  # the loop went round ten times meanwhile
        assert await hang == (
            "reward_timeout",
            f"`reward_function` {file}:{name}: it took longer than 1 s; {FASTER}",
        )
        assert await rewards.score(PROMPT, trajectory([5])) == 5
        causes = [await failure_of(rewards, [n]) for n in (92, 93, 94, 97)]
        assert {cause for cause, _ in causes} == {"reward_error"}
        assert (
            "SystemExit: enough" in causes[0][1] and "finite" in causes[1][1] and "KeyError" in causes[2][1]
        )
        assert "Foreign: no Exception" in causes[3][1]
        if name == "waits":
            cause, text = await failure_of(rewards, [96])  # its own TimeoutError is an exception like another
            assert cause == "reward_error" and "TimeoutError" in text
            twenty = [rewards.score(PROMPT, trajectory([82])) for _ in range(20)]
            assert await asyncio.gather(*twenty) == [0] * 20  # all at once: they wait for each other

    run(scenario, f"{file}:{name}", workers=workers, limit_s=1.0)


@pytest.mark.parametrize("maker", [None, "an environment"])
def test_reward_when_a_teacher_trains_then_none_is_needed_but_of_episodes_that_score_themselves(maker):
    options = SimpleNamespace(
        rewards=(),
        reward_workers=1,
        reward_timeout_s=10.0,
        teacher_urls=("http://teacher",),
        maker=maker,
        names_of_keys=set(),
        reward_url_arguments=dict,
    )

    async def score():
        rewards = Rewards.of(options, None)
        try:
            if maker is None:
                return await rewards.score(PROMPT, trajectory([1]))
            return await failure_of(rewards, [1])
        finally:
            await rewards.close()

    found = asyncio.run(score())
    assert found == 0 if maker is None else found[0] == "reward_error"


def test_reward_when_the_environment_scores_then_its_own_and_exactly_one_of_the_two(file):
    async def alone(rewards):
        assert await rewards.score(PROMPT, trajectory([1], environment_reward=0.25)) == 0.25
        cause, text = await failure_of(rewards, [1])
        assert cause == "reward_error"
        assert text.endswith("gave no reward, and `reward_function` is not given; give one of them")

    async def beside(rewards):
        with pytest.raises(
            SampleFailure, match="gave the reward 0.25, and `reward_function` is given; drop one of them"
        ):
            await rewards.score(PROMPT, trajectory([1], environment_reward=0.25))

    run(alone, None)
    run(beside, f"{file}:in_a_thread", workers=0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "spec, named",
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("math:nosuch", "math has no 'nosuch'; it has .*sqrt"),
        ("{folder}/main_only.py:reward", "main_only.py has no 'reward'"),
    ],
)
def test_start_when_a_worker_cannot_import_the_function_then_refused_by_name(tmp_path, spec, named, workers):
    (tmp_path / "main_only.py").write_text("if __name__ == '__main__':\n    reward = lambda sample: 0.0\n")
    with pytest.raises(ValueError, match="^`reward_function`: .*" + named):
        run(None, spec.format(folder=tmp_path), workers=workers)


@pytest.mark.parametrize("field", ["`reward_function`", "`environment`"])
def test_load_of_a_file_then_its_module_has_a_name_that_python_can_import(tmp_path, field):
    (tmp_path / "mine_alone.py").write_text("def f():\n    pass\n")
    assert load(f"{tmp_path}/mine_alone.py:f", field).__module__ == f"rollout_{field.strip('`')}_mine_alone"


def test_start_when_setup_fails_or_workers_are_given_for_an_async_function_then_refused(tmp_path, file):
    (tmp_path / "broken.py").write_text(
        "def setup():\n    open('/no/such')\ndef reward(sample):\n    return 0\n"
    )
    with pytest.raises(ValueError, match=r"broken.py:reward could not be loaded:\n(.*\n)*FileNotFoundError"):
        run(None, f"{tmp_path}/broken.py:reward", workers=2)
    (tmp_path / "ends.py").write_text("import os\nos._exit(5)\n")
    with pytest.raises(
        ValueError, match="could not be loaded in a worker: its process ended with exit status 5"
    ):
        run(None, f"{tmp_path}/ends.py:reward", workers=1)
    with pytest.raises(ValueError, match="`reward_workers` 3 has no effect on .*:waits, an async function"):
        run(None, f"{file}:waits", workers=3)


@drill("SIGKILL of a trainer with reward workers", promised="its workers end too")
def test_workers_when_the_trainer_is_killed_then_they_end_too(file):
    script = f"""
import asyncio, os
from megatron_rl_corr.rollout import Rewards
from tools.process_group import descendants
async def main():
    rewards = Rewards({str(file) + ":in_a_thread"!r}, workers=2, limit_s=9.0)
    await rewards.start()
    print("WORKERS", *descendants(os.getpid()), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in trainer.stdout if line.startswith("WORKERS"))
        workers = [int(pid) for pid in line.split()[1:]]
        assert len(workers) == 2
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize("value, expected", [(True, 1.0), (2, 2.0), (0.1, 0.10000000149011612)])
def test_reward_value_when_any_real_number_then_as_float32_has_it(value, expected):
    assert checked_reward(value, "f") == expected


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 1e39, 3.4028236e38, [1.0]])
def test_reward_value_when_not_a_finite_number_then_error_names_source_and_value(value):
    with pytest.raises(ValueError, match="^f must return a number.*, got ") as error:
        checked_reward(value, "f")
    assert repr(value) in str(error.value)


def test_load_function_when_given_a_file_or_a_module_then_found(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def by_length(p, ids, why):\n    return len(ids)\n")
    assert load_function(f"{tmp_path}/my_rewards.py:by_length")(None, [1, 2], "stop") == 2
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_function("my_rewards:by_length")(None, [1], "stop") == 1


@pytest.mark.parametrize(
    "spec, named",
    [
        ("by_length", "give path/to/file.py:name or package.module:name, got 'by_length'"),
        ("r.py:", "give path"),
        (":f", "give path"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("no_such_package.rewards:f", "there is no module 'no_such_package'"),
        ("megatron_rl_corr.no_such_module:f", "there is no module 'megatron_rl_corr.no_such_module'"),
        ("math:nosuch", "math has no 'nosuch'; it has .*sqrt"),
        ("math:pi", "'pi' in math is a float, not a function"),
    ],
)
def test_load_function_when_not_found_then_error_names_the_flag_and_the_remedy(spec, named):
    with pytest.raises(ValueError, match="`reward_function`: .*" + named):
        load_function(spec)


def test_load_function_when_the_users_module_fails_then_its_own_error(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_function(f"{path}:f")


FORGES = """
import os

def reward(sample):
    text = sample.metadata.get("forged")
    if text is None:
        return 1.0
    head = len(text).to_bytes(8, "big") if text != "huge" else b"\\xff" * 8
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, head + text.encode())
        except OSError:
            continue
    os._exit(0)
"""


@pytest.mark.parametrize(
    "forged",
    [
        "{",
        "[]",
        "5",
        "huge",
        '{"value": 5}',
        '{"value": [1.0]}',
        '{"value": [{"reward": "x"}]}',
        '{"value": [{}]}',
    ],
)
def test_answer_when_forged_in_the_worker_then_its_sample_alone_fails(tmp_path, forged):
    """As code may that a policy wrote and a reward function runs."""
    (tmp_path / "forges.py").write_text(FORGES)

    async def scenario(rewards):
        bad = dataclasses.replace(PROMPT, metadata={"forged": forged})
        with pytest.raises(SampleFailure) as failure:
            await rewards.score(bad, trajectory([1]))
        assert failure.value.cause == "reward_error" and "something else than its answer" in str(
            failure.value
        )
        return await rewards.score(PROMPT, trajectory([1]))

    assert run(scenario, f"{tmp_path}/forges.py:reward", workers=1, limit_s=60.0) == 1.0
