"""The command of `make gpu-check`: what becomes of a part that ends in any way, its table, and
its exit status.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tiers import long, matrix
from tools.gpu_check import __main__ as command
from tools.gpu_check import runner
from tools.gpu_check.outcome import Finding, Outcome
from tools.gpu_check.parts import ONLY_ON_A_GPU, PARTS, Part
from tools.gpu_check.runner import FAILED, HOLDS, NOT_RUN, Result
from tools.gpu_check.table import markdown

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]
PART = Part("made-up", "nowhere.check", "a made-up part", 30)


@pytest.mark.parametrize(
    ("program", "state", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", FAILED, "ended by SIGSEGV"),
        ("print('first')\nraise ValueError('made up')", FAILED, "ValueError: made up"),
        ("raise SystemExit(3)", FAILED, "it printed nothing"),
        ("pass", FAILED, "it printed nothing"),
        ("import time; time.sleep(60)", FAILED, "no end within 2 s"),
        (
            "from tools.gpu_check.outcome import Outcome\nfrom pathlib import Path\nimport sys\n"
            "Outcome(not_run='made up').save(Path(sys.argv[1]))",
            NOT_RUN,
            "made up",
        ),
        (
            "from tools.gpu_check.outcome import Outcome\nfrom pathlib import Path\nimport sys\n"
            "Outcome(tables='|').save(Path(sys.argv[1]))",
            HOLDS,
            "",
        ),
    ],
)
def test_part_when_its_process_ends_or_not_then_its_state_and_reason(program, state, reason, tmp_path):
    limit = 2 if "sleep" in program else 60
    result = runner.run_process(
        PART, [sys.executable, "-c", program], runner.variables(PART, "cpu", tmp_path), tmp_path, limit
    )
    assert result.state == state and reason in result.reason
    assert (state == FAILED) == (str(tmp_path / "made-up.log") in result.reason)


def test_part_when_it_hangs_then_its_children_end_with_it(tmp_path):
    program = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, "
        "flush=True)\ntime.sleep(60)"
    )
    runner.run_process(PART, [sys.executable, "-c", program], dict(os.environ), tmp_path, 10)
    child, deadline = int((tmp_path / "made-up.log").read_text()), time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_parts_when_they_lack_a_package_or_time_then_not_run_by_name(tmp_path, monkeypatch):
    lines = []
    lacking = Part(
        "lacking", "nowhere.check", "x", 30, ("no_such_package", "no_such.part"), ("no_such_gpu_package",)
    )
    results = runner.run_all([lacking], "cpu", tmp_path, lines.append)
    assert (
        results[0].state == NOT_RUN and results[0].reason == "no_such_package and no_such.part not installed"
    )
    assert lines == [
        "lacking: x",
        "lacking: not run after 0 s: no_such_package and no_such.part not installed",
    ]
    assert (
        runner.needed(lacking, "cuda")[-1] == "no_such_gpu_package"
        and len(runner.needed(lacking, "cpu")) == 3
    )
    monkeypatch.setattr(runner, "TOTAL_S", 0)
    assert "were over" in runner.run_all([PART], "cuda", tmp_path, lines.append)[0].reason
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_part_when_the_time_of_all_is_over_while_it_runs_then_not_run_and_when_its_own_is_then_failed(
    tmp_path, monkeypatch
):
    begin = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: begin(["sleep", "60"], **more))
    monkeypatch.setattr(runner, "TOTAL_S", 1)
    [cut] = runner.run_all([PART], "cuda", tmp_path, lambda _: None)
    assert cut.state == NOT_RUN and "the 1 s of all parts were over; it was cut off after" in cut.reason
    monkeypatch.setattr(runner, "TOTAL_S", 60)
    short = Part("short", "nowhere.check", "x", 1)
    [late] = runner.run_all([short], "cuda", tmp_path, lambda _: None)
    assert late.state == FAILED and late.reason.startswith("no end within 1 s")


def outcome(*findings, tables=""):
    return Outcome(list(findings), tables=tables, machine="NVIDIA Made-Up, torch 2.14.1")


WELL = Result(PART, HOLDS, "", outcome(Finding("a | b", "1e-06", "1e-05"), Finding("c", "3")), 4.0)
BENCHMARK = Result(PARTS[-1], HOLDS, "", outcome(tables="| t |\n|---|\n| 1 |"), 5.0)
[TE] = [part for part in PARTS if part.name == "transformer-engine"]
ABSENT = Result(TE, NOT_RUN, "transformer_engine not installed")
BROKEN = Result(PARTS[0], FAILED, "DoesNotHold: x is 2; see /a.log")


@pytest.mark.parametrize(
    ("results", "device", "status", "words"),
    [
        ([WELL, BENCHMARK], "cuda", 0, "all parts ran and hold"),
        ([WELL, BENCHMARK], "cpu", 3, "not run: benchmark-router-replay: GPU timings (there is no GPU)"),
        ([WELL, ABSENT], "cuda", 3, "not run: transformer-engine (transformer_engine not installed)"),
        ([ABSENT, BROKEN, WELL], "cuda", 1, "FAILED: triton (DoesNotHold: x is 2; see /a.log)"),
    ],
)
def test_command_when_parts_have_ended_then_its_status_and_the_names(
    results, device, status, words, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(command, "gpu_available", lambda: device == "cuda")
    monkeypatch.setattr(command, "run_all", lambda parts, on, logs, say: results if on == device else [])
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--table", str(tmp_path / "table.md")])
    assert command.main() == status
    printed = capsys.readouterr().out
    assert words in printed and (tmp_path / "table.md").read_text() in printed


def test_table_when_parts_have_ended_then_machine_date_findings_and_what_was_not_run():
    text = markdown([WELL, BENCHMARK, ABSENT, BROKEN], "cuda")
    assert text.startswith("## GPU check: NVIDIA Made-Up, torch 2.14.1, 20")
    assert "| made-up | a \\| b | 1e-06 | 1e-05 |" in text and "| made-up | c | 3 |  |" in text
    assert "| triton | FAILED: DoesNotHold: x is 2; see /a.log | | |" in text
    assert "Not run: transformer-engine (transformer_engine not installed)." in text
    assert "A rehearsal" not in text and "A rehearsal" in markdown([WELL], "cpu")
    assert text.endswith("### benchmark-router-replay\n\n| t |\n|---|\n| 1 |\n")


BARE = '''
import sys
ALLOWED = {allowed!r}

class Bare:
    """Finds no installed package but these, as where only torch and Triton are."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first in sys.stdlib_module_names or first in ALLOWED or first.startswith("_"):
            return self.finder.find_spec(name, path, target)
        return None

sys.meta_path[:] = map(Bare, sys.meta_path)
'''
ALLOWED = {
    "torch",
    "triton",
    "numpy",
    "tools",
    "benchmarks",
    "megatron_rl_corr",
    "nvidia",
    "cuda",
    "torchgen",
    "functorch",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "filelock",
    "typing_extensions",
    "setuptools",
    "packaging",
}
"""Torch, what it needs, and this checkout."""


@long
def test_command_when_only_torch_and_triton_are_installed_then_what_needs_more_is_named_and_the_rest_holds(
    tmp_path,
):
    (tmp_path / "sitecustomize.py").write_text(BARE.format(allowed=ALLOWED))
    chosen = ["host-sync", "fp8-rounding", "transformer-engine", "push-tensor", "benchmark-correction"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.gpu_check", "--only", *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        timeout=1200,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    left_out = [line for line in done.stdout.splitlines() if line.startswith("[gpu-check] not run: ")]
    assert [line.split(": ", 1)[1] for line in left_out] == [
        "host-sync: sync-debug mode (there is no GPU)",
        "transformer-engine (megatron.core not installed)",
        "push-tensor (sglang and transformers and safetensors and aiohttp and psutil not installed)",
        "benchmark-correction: GPU timings (there is no GPU)",
    ]
    assert "fp8-rounding: holds after" in done.stdout and "benchmark-correction: holds after" in done.stdout


def test_parts_when_they_leave_something_out_without_a_gpu_then_of_the_fixed_list():
    assert {part.only_on_a_gpu for part in PARTS if part.only_on_a_gpu} == set(ONLY_ON_A_GPU)
