"""What a benchmark prints: its tables; and why, where it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import os, subprocess, sys, warnings
from benchmarks.quiet import only_tables
with only_tables():
    print("| a |")
    warnings.warn("from Python")
    os.write(1, b"from C++ to 1\\n")
    os.write(2, b"from C++ to 2\\n")
    subprocess.run(["echo", "from a child"])
    {end}
    print("| b |")
print("after")
os.write(2, b"shown\\n")
"""
NOISE = ("from Python", "from C++ to 1", "from C++ to 2", "from a child")


def run(end: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", CODE.format(end=end)], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.parametrize("end", ["pass", "sys.stdout.flush()"])
def test_output_when_it_succeeds_then_only_what_is_printed(end):
    result = run(end)
    assert result.stdout == "| a |\n| b |\nafter\n" and result.stderr == "shown\n"


@pytest.mark.parametrize("end, code", [("raise ValueError('broken')", 1), ("sys.exit(3)", 3)])
def test_output_when_it_fails_then_what_was_hidden_is_shown(end, code):
    result = run(end)
    assert result.returncode == code and result.stdout == "| a |\n"
    assert all(text in result.stderr for text in NOISE)
    assert ("ValueError: broken" in result.stderr) == (code == 1)


def test_output_when_it_ends_early_without_an_error_then_nothing_more():
    result = run("sys.exit(0)")
    assert (result.returncode, result.stdout, result.stderr) == (0, "| a |\n", "")


def unquiet(files: dict[str, str]) -> list[str]:
    """Scripts that run main() outside of only_tables; a benchmark reads the output of its own workers."""
    scripts = {
        name: text for name, text in files.items() if "__main__" in text and not name.endswith("_worker.py")
    }
    return [
        name for name, text in scripts.items() if "with only_tables():\n" not in text.partition("__main__")[2]
    ]


def test_benchmarks_when_they_are_scripts_then_each_runs_within_only_tables():
    files = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    assert unquiet(files) == []
    loud = 'from benchmarks.quiet import only_tables\nif __name__ == "__main__":\n    main()\n'
    assert unquiet({"loud.py": loud, "a_worker.py": loud, "part.py": "x = 1"}) == ["loud.py"]
