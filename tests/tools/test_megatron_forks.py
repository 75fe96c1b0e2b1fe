"""A fork that has Megatron behaves as an interpreter that was started for the script, or for the rank."""

import subprocess
import sys

import pytest

from tests.forked_torchrun import forking
from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded
from tools.cpu import gpu_available
from tools.local_server import free_port

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

SCRIPT = """
import os, sys, time
assert __name__ == "__main__" and "megatron.training" in sys.modules and os.path.dirname(__file__) == sys.path[0]
kind, *rest = sys.argv[1:]
print(kind, rest, os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), flush=True)
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
    assert sorted(left.stdout.splitlines()) == ["leaves ['4'] 0 2", "leaves ['4'] 1 2"] and left.returncode == 4


def test_script_when_it_hangs_then_it_is_killed_and_the_next_one_runs(script):
    with pytest.raises(subprocess.TimeoutExpired) as error:
        run_megatron(script, "hangs", ranks=2, timeout=1)
    assert "hangs [] 0 2" in error.value.stdout
    assert run_megatron(script, "ends").returncode == 0


def torchrun(script, *words):
    """torchrun of two ranks, which are forks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master-addr", "127.0.0.1",
               "--master-port", str(free_port()), script, *words]  # fmt: skip
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
