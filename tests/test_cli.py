"""The command line as a user meets it, each time in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr import __version__
from megatron_rl_corr.config import PRESETS

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess:
    command = ["-c", code] if code else ["-m", "megatron_rl_corr.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=120
    )


def test_help_when_asked_then_lists_the_commands_without_importing_anything_heavy():
    code = """
import sys
from megatron_rl_corr import cli
try:
    cli.main(["--help"])
finally:
    print("loaded", [name for name in ("torch", "numpy", "matplotlib", "yaml") if name in sys.modules])
"""
    result = run(code=code)
    assert result.returncode == 0, result.stderr
    assert "report" in result.stdout and "presets" in result.stdout
    assert "loaded []" in result.stdout


def test_version_when_asked_then_name_and_version():
    assert run("--version").stdout == f"megatron-rl-corr {__version__}\n"


def test_report_when_the_folder_holds_a_run_then_one_line_says_where_the_page_is(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    result = run("report", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"report: {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").is_file() and (tmp_path / "overview.png").is_file()
    assert "metrics.jsonl:2: the last line is incomplete and was left out" in result.stderr


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "no metrics.jsonl in"),
        ("", "metrics.jsonl holds no steps; let the run finish at least one step"),
        ('{"step": 1}\nnonsense\n{"step": 3}\n', "metrics.jsonl:2: not a step's metrics"),
    ],
)
def test_report_when_the_metrics_are_unusable_then_status_2_and_one_line_of_reason(tmp_path, content, words):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    result = run("report", str(tmp_path))
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("megatron-rl-corr report: error: ") and words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


def test_report_when_the_folder_is_missing_then_status_2_and_its_name(tmp_path):
    result = run("report", str(tmp_path / "nowhere"))
    assert result.returncode == 2
    assert result.stderr == (
        f"megatron-rl-corr report: error: no such folder: {tmp_path / 'nowhere'}; "
        "give the folder that the run wrote into\n"
    )


def test_presets_when_listed_then_each_name_with_what_it_sets_and_no_line_too_long():
    lines = run("presets").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == list(PRESETS)
    assert max(map(len, lines)) <= 110
    text = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:] if not line.startswith(" ")}
    assert text["disabled"] == "nothing"
    assert text["decoupled_token_icepop"] == (
        "rollout_is=token, rollout_is_mode=mask, rollout_is_lower=0.5, rollout_is_upper=5"
    )
    assert text["decoupled_k3_rs"] == "rollout_rs=seq_mean_k3<=0.01"


@pytest.mark.parametrize("arguments", [(), ("reprot",)])
def test_command_when_missing_or_unknown_then_status_2_and_usage(arguments):
    result = run(*arguments)
    assert result.returncode == 2 and "usage: megatron-rl-corr" in result.stderr
