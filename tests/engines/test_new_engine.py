"""A made-up engine costs its own folder and one entry in config/run.py, and then collects samples."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_corr.engines import load_engine

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}


def install(package):
    """The whole change: a folder, and an entry."""
    shutil.copytree(
        FOLDER / "replay_recorded",
        package / "engines/replay_recorded",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    run = package / "config/run.py"
    before = run.read_text()
    entry = '"replay_recorded": "megatron_rl_corr.engines.replay_recorded", '
    run.write_text(before.replace("ENGINES = {", "ENGINES = {" + entry, 1))
    assert run.read_text() != before


def test_engine_when_added_then_one_folder_and_one_entry_and_samples_by_client_and_queue(tmp_path):
    package = tmp_path / "megatron_rl_corr"
    shutil.copytree(ROOT / "megatron_rl_corr", package, ignore=shutil.ignore_patterns("__pycache__"))
    install(package)
    before, after = files_of(ROOT / "megatron_rl_corr"), files_of(package)
    changed = sorted(name for name in after if before.get(name) != after[name])
    assert (
        changed == ["config/run.py", "engines/replay_recorded/__init__.py"] and before.keys() <= after.keys()
    )
    ran = subprocess.run(
        [sys.executable, FOLDER / "replay_collect.py", tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr


def test_engine_when_unknown_then_error_names_those_that_are_known():
    with pytest.raises(ValueError, match="engine must be one of sglang.*, got 'replay_recorded'"):
        load_engine("replay_recorded")
