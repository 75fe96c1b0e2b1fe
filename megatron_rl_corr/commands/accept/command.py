"""The command: runs the trials one after the other, judges them, writes a page and its numbers."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_rl_corr.commands.accept.judgement import BARS, TrialNumber, explanation, judge, measured
from megatron_rl_corr.commands.accept.servers import served_before, server_rows, where
from megatron_rl_corr.commands.accept.trial import EXPLAINED, read_rows, run_trial, trial_command, trials
from megatron_rl_corr.engines.secrets import without_secret_words
from megatron_rl_corr.files import write_atomically
from megatron_rl_corr.tables import one_message, text_table, visible

PAGE, NUMBERS = "accept.md", "accept.json"
PACKAGES = ("megatron-rl-corr", "megatron-core", "transformer-engine", "torch")
"""Whose releases the page has, beside the servers'."""


def run(arguments: argparse.Namespace) -> int:
    """Status 0 if the model is accepted, 1 if it is not, 130 if interrupted.

    Raises:
        ValueError: the command names no servers or no checkpoint, or `--out` is there already.
    """
    words, out = arguments.run_command, Path(arguments.out)
    if arguments.steps < 4:
        raise ValueError(f"--steps {arguments.steps} must be 4 at least: a ledger is made in each quarter")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out} is there and not empty: name a new folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the trial ends, too
    names, kind = (
        trials(words),
        arguments.bar or ("bfloat16" if {"--bf16", "--fp16"} & {*words} else "float32"),
    )
    out.mkdir(parents=True, exist_ok=True)
    before = served_before(words)
    rows: list[TrialNumber] = []
    notes: list[str] = []
    numbers: dict[str, dict[str, float]] = {}
    for number, name in enumerate((*names, EXPLAINED), start=1):
        if name == EXPLAINED and all(row.passed for row in rows):
            continue
        folder = out / name
        command = trial_command(words, name, folder, steps=arguments.steps, has_experts=len(names) > 1)
        count = "one more" if name == EXPLAINED else f"{number} of {len(names)}"
        print(f"trial {count}, {name}: {_shown(command)}", flush=True)
        try:
            status, last = run_trial(command, out / f"{name}.log")
        except KeyboardInterrupt:
            print(f"interrupted; the trial has ended, and its log is {out / f'{name}.log'}")
            return 128 + signal.SIGINT
        steps = read_rows(folder)
        if name != EXPLAINED:
            rows += judge(name, steps, arguments.steps, BARS[kind], has_experts=len(names) > 1)
            rows.append(TrialNumber(name, "exit status", str(status), "0", status == 0))
            numbers[name] = measured(steps)
        if status != 0 and name != EXPLAINED:
            notes += [f"{name} ended with status {status}; its last lines, of {out / f'{name}.log'}:", *last]
        verdict = explanation(steps)
        if verdict:
            notes.append(f"{name}: {verdict}")
    rows += server_rows(words, before)
    notes += where(rows)
    accepted = all(row.passed for row in rows)
    table = _table(rows)
    print(visible("\n".join([*table, *notes, _outcome(accepted, kind)])))
    versions = versions_here() | (
        {} if isinstance(before, str) else {one.engine: one.release for one in before.values()}
    )
    _write(out, rows, notes, accepted, kind, _shown(words), {"numbers": numbers, "versions": versions})
    return 0 if accepted else 1


def versions_here() -> dict[str, str]:
    """Releases of what computes, by package, as far as they are installed beside this command."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _shown(words: Sequence[str]) -> str:
    """The command as a line, with *** in the place of what is secret."""
    return shlex.join(without_secret_words(words, os.environ))


def _table(rows: list[TrialNumber]) -> list[str]:
    cells = [(row.trial, row.what, row.found, row.bar, "ok" if row.passed else "FAILED") for row in rows]
    return text_table([("trial", "what", "found", "must be", ""), *cells])


def _outcome(accepted: bool, kind: str) -> str:
    words = "accepted" if accepted else "not accepted"
    return f"{words} in {kind}"


def _line(row: TrialNumber) -> str:
    cells = row.trial, row.what, row.found, row.bar, "ok" if row.passed else "**failed**"
    return f"| {' | '.join(_inert(cell) for cell in cells)} |"


def _inert(text: str) -> str:
    """A text of a server's as Markdown shows it: neither markup nor a cell or line of its own."""
    return re.sub(r"([|<`\[])", r"\\\1", visible(text).replace("\n", " "))


def _write(
    out: Path,
    rows: list[TrialNumber],
    notes: list[str],
    accepted: bool,
    kind: str,
    command: str,
    further: dict,
) -> None:
    date = time.strftime("%Y-%m-%d")
    versions = ", ".join(f"{name} {_inert(release)}" for name, release in further["versions"].items())
    lines = [
        f"# {_outcome(accepted, kind)}",
        "",
        f"`{command}`",
        "",
        f"{date}, {versions}.",
        "",
        "| trial | what | found | must be | |",
        "|---|---|---|---|---|",
        *map(_line, rows),
        "",
        *(f"    {one_message(note)}" for note in notes),
    ]
    write_atomically(out / PAGE, ("\n".join(lines) + "\n").encode())
    found = {
        "accepted": accepted,
        "date": date,
        **further,
        "bar": {"of": kind, **BARS[kind]._asdict()},
        "rows": [vars(row) for row in rows],
        "notes": notes,
    }
    write_atomically(out / NUMBERS, (json.dumps(found, indent=1) + "\n").encode())
