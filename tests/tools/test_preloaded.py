"""A fork that has its engine behaves as an interpreter that was started for the script, or for the rank."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.forked_torchrun import forking
from tests.megatron_forks import run_megatron
from tests.preloaded import PreloadedPopen, run_preloaded
from tools.cpu import environment, gpu_available
from tools.local_server import free_port

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

SCRIPT = """
import os, sys, time

assert (
    __name__ == "__main__" and "megatron.training" in sys.modules and os.path.dirname(__file__) == sys.path[0]
)
kind, *rest = sys.argv[1:]
# one write: another rank's words would come between
os.write(1, f"{kind} {rest} {os.environ.get('RANK')} {os.environ.get('WORLD_SIZE')}\\n".encode())
if kind == "raises":
    raise KeyError("a")
if kind == "leaves":
    sys.exit(int(rest[0]) if os.environ.get("RANK", "1") == "1" else 0)
if kind == "hangs" or kind == "fails" and os.environ["RANK"] == "0":
    time.sleep(60)
if kind == "fails":
    sys.exit("rank 1 is broken")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_script_when_it_ends_raises_or_leaves_then_its_status_and_what_it_wrote(script):
    ended = run_megatron(script, "ends", 1, None)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends ['1', 'None'] None None\n", "")
    raised = run_megatron(script, "raises")
    assert raised.returncode == 1 and raised.stderr.endswith("KeyError: 'a'\n")
    assert run_megatron(script, "leaves", 3).returncode == 3


def test_script_when_on_ranks_then_each_has_torchruns_variables_and_one_status_is_of_all(script):
    left = run_megatron(script, "leaves", 4, ranks=2)
    assert (
        sorted(left.stdout.splitlines()) == ["leaves ['4'] 0 2", "leaves ['4'] 1 2"] and left.returncode == 4
    )


def test_script_when_it_hangs_then_it_is_killed_and_the_next_one_runs(script):
    with pytest.raises(subprocess.TimeoutExpired) as error:
        run_megatron(script, "hangs", ranks=2, timeout=1)
    assert "hangs [] 0 2" in error.value.stdout
    assert run_megatron(script, "ends").returncode == 0


def torchrun(script, *words):
    """torchrun of two ranks, which are forks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        script,
        *words,
    ]
    return run_preloaded(forking(command)[1:], timeout=50)


@pytest.mark.parametrize("words", [["ends"], ["leaves", "0"]])
def test_forked_torchrun_when_both_ranks_succeed_then_status_0(script, words):
    done = torchrun(script, *words)
    rest = words[1:]
    assert sorted(done.stdout.splitlines()) == [f"{words[0]} {rest} {rank} 2" for rank in (0, 1)], done.stderr
    assert done.returncode == 0


def test_forked_torchrun_when_one_rank_fails_then_it_says_why_and_the_other_is_ended(script):
    done = torchrun(script, "fails")
    assert done.returncode == 1 and "rank 1 is broken" in done.stderr


OWNER = """
import subprocess, sys, time
from tests.preloaded import PreloadedPopen
from tools.cpu import environment

child = (
    "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
)
open(sys.argv[1], "w").write(child)
process = PreloadedPopen(
    [sys.executable, sys.argv[1]], env=environment("megatron"), stdout=subprocess.PIPE, text=True
)
print(process.pid, process.stdout.readline(), flush=True)
time.sleep(60)
"""


def test_fork_when_its_owner_is_killed_then_nothing_below_it_is_left(tmp_path, script):
    run_megatron(script, "ends")  # the process that forks is this test's own, and lives on
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path / "child.py"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


def test_popen_when_no_engine_is_named_then_the_interpreter_is_a_new_one():
    code = "import os, sys; print(os.getppid(), 'torch' in sys.modules)"
    with PreloadedPopen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=30)[0] == f"{os.getpid()} False\n"
    assert process.returncode == 0


def test_popen_when_killed_then_its_return_code_is_the_signals(script):
    process = PreloadedPopen(
        [sys.executable, script, "hangs"], env=environment("megatron"), stdout=subprocess.PIPE
    )
    assert process.stdout.readline().startswith(b"hangs") and process.poll() is None
    process.kill()
    assert process.wait(10) == process.returncode == -9
    process.stdout.close()
