"""How large each folder may be, in lines of code, and that the source is as its formatter writes it."""

import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BUDGETS = {
    "config": 2_910,
    "models": 2_616,
    "engines": 6_039,
    "reduce": 673,
    "core": 2_630,
    "logprobs": 1_060,
    "data": 4_551,
    "rollout": 8_400,
    "weight_sync": 2_490,
    "doctor": 900,
    "moe": 965,
    "mcore": 9_435,
    "features": 4_865,
    "observability": 880,
    "integrations": 680,
    "commands": 5_640,
    "modules": 996,
}
"""Lines of code that each folder may have; modules: the files beside them.

A budget is lowered when its folder shrinks, and raised only by lowering another one: what is added is paid
for by what is merged or deleted.
"""
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Lines with a token that is neither a comment nor of a docstring."""
    lines, begins = set(), True
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        if token.type in LAYOUT:
            begins = begins or token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            continue
        if not (begins and token.type == tokenize.STRING and after.type == tokenize.NEWLINE):
            lines.update(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(lines)


def test_package_when_counted_then_each_folder_is_within_its_budget():
    counted = Counter()
    for path in (ROOT / "megatron_rl_corr").rglob("*.py"):
        folder = path.relative_to(ROOT / "megatron_rl_corr").parts[0]
        counted["modules" if folder.endswith(".py") else folder] += code_lines(path.read_text("utf-8"))
    assert set(counted) == set(BUDGETS)
    over = {
        folder: f"{n} lines, {BUDGETS[folder]} allowed"
        for folder, n in counted.items()
        if n > BUDGETS[folder]
    }
    assert over == {}
    slack = {
        folder: f"{n} lines, lower {BUDGETS[folder]}"
        for folder, n in counted.items()
        if n < 0.9 * BUDGETS[folder]
    }
    assert slack == {}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""A module\n\nof prose."""\n\nx = 1  # one\n', 1),
        ('class A:\n    """Prose."""\n\n    # why\n    x: int = 1\n    """Prose."""\n', 2),
        ('x = f(\n    1,\n    "a\\n"\n    "b",\n)\n', 5),
        ('x = """\ntext\n"""\n', 3),
        ("\n\n", 0),
    ],
)
def test_lines_when_counted_then_prose_and_blanks_are_none(text, lines):
    assert code_lines(text) == lines


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=["format", "check"])
def test_source_when_formatted_then_it_stays(command):
    run = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--quiet", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_source_when_read_then_no_line_is_kept_from_the_formatter():
    mark = "fmt: " + "skip"
    files = [
        path
        for top in ("megatron_rl_corr", "tests", "tools", "examples")
        for path in (ROOT / top).rglob("*.py")
    ]
    assert len(files) > 500
    assert [path for path in files if mark in path.read_text("utf-8")] == []
