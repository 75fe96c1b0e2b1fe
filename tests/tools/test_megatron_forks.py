"""A fork that has Megatron behaves as an interpreter that was started for the script."""

import subprocess

import pytest

from tests.megatron_forks import run_megatron
from tools.cpu import gpu_available

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
if kind == "hangs":
    time.sleep(60)
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
