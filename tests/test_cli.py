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


def test_presets_when_listed_then_a_table_of_all_within_110_columns():
    header, *lines = run("presets").stdout.splitlines()
    assert header.split() == ["preset", "weights", "keeps", "loss"]
    assert max(map(len, lines)) <= 110
    starts = [header.index(word) for word in ("preset", "weights", "keeps", "loss")]
    cells = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]
    table = {row[0]: row[1:] for row in cells if row[0]}
    assert list(table) == list(PRESETS)
    assert table["disabled"] == ["1", "all", "ppo_clip"]
    assert table["decoupled_token_icepop"] == ["token, 0 outside [0.5, 5]", "all", "ppo_clip"]
    assert table["decoupled_k3_rs"] == ["1", "seq_mean_k3 <= 0.01", "ppo_clip"]
    assert table["bypass_pg_is"] == ["sequence, at most 2", "all", "reinforce, bypass"]
    assert table["ms_swift_sequence_mask"] == ["geometric, 0 above 2", "all", "ppo_clip"]
    assert table["slime_mis"] == ["token, at most 2, mean 1", "token_ratio in [0.5, 2]", "ppo_clip"]
    assert ["", "", "seq_max_ratio >= 0.0001", ""] in cells
    assert table["nemo_rl_seq_mask_tis"] == ["token, no bound", "seq_mean_ratio in [0.999, 1.002]", "ppo_clip"]
    assert table["m2po"] == ["1", "m2 <= 0.04", "ppo_clip"]


@pytest.mark.parametrize("arguments", [(), ("reprot",)])
def test_command_when_missing_or_unknown_then_status_2_and_usage(arguments):
    result = run(*arguments)
    assert result.returncode == 2 and "usage: megatron-rl-corr" in result.stderr
