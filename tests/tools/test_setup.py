"""`make setup` in fresh checkouts: a .venv of their own over the shared packages, which stay as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import long, matrix

pytestmark = matrix

SHARED = Path(sys.prefix) / "shared"
WHICH = "import megatron_rl_corr, sys; print(megatron_rl_corr.__file__, sys.prefix)"


def run(*command, cwd="/"):
    """The output of a command that finds nothing by PYTHONPATH or the working folder."""
    left_out = ("VLLM", "MAKEFLAGS")  # of a `make test VLLM=...`
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTHON") and name not in left_out
    }
    if SHARED.exists():
        variables["MEGATRON_RL_CORR_ENVS"] = str(SHARED.resolve().parent)
    variables["PYTHON_FOR_SETUP"] = sys._base_executable
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def set_up(checkout):
    status, output = run("make", "setup", cwd=checkout)
    assert status == 0, output
    return output


def assert_works(checkout):
    """The command, Python and a program of the shared packages use this checkout's files and .venv."""
    venv = checkout / ".venv"
    found = f"{checkout / 'megatron_rl_corr/__init__.py'} {venv}"
    assert run(venv / "bin/megatron-rl-corr", "presets")[1].startswith("preset ")
    assert run(venv / "bin/python", "-c", WHICH) == (0, found + "\n")
    which = checkout.parents[1] / "test_which.py"
    status, output = run(venv / "bin/pytest", "-q", "-s", "-p", "no:cacheprovider", which)
    assert status == 0 and found in output, output
    assert run(venv / "bin/ruff", "--version")[1].startswith("ruff ")
    # For tests and examples, by path: not for whoever has installed the package.
    assert "No module named 'tools'" in run(venv / "bin/python", "-c", "import tools")[1]


def state_of(environment):
    """Every entry of the folders that an installation writes to, with the time of its last change."""
    [packages] = (environment / "lib").glob("python3*/site-packages")
    entries = [path for folder in (environment / "bin", packages) for path in folder.iterdir()]
    return {path: path.lstat().st_mtime_ns for path in entries if path.name != "__pycache__"}


@pytest.fixture
def folder(tmp_path):
    if not (SHARED / ".complete").exists():
        pytest.skip("this Python is not of a .venv that make setup has made")
    (tmp_path / "test_which.py").write_text(f"def test_which():\n    {WHICH}\n")
    # A blank, because a shebang cannot hold one.
    (tmp_path / "my code").mkdir()
    return tmp_path / "my code"


@long
def test_setup_when_two_checkouts_share_packages_and_one_moves_then_each_runs_its_own_files(
    folder, copy_checkout
):
    before = state_of(SHARED.resolve())
    first, second = copy_checkout(folder / "first"), copy_checkout(folder / "second")
    # As older versions of make setup made it: a link to the shared environment itself.
    (first / ".venv").symlink_to(SHARED.resolve())
    assert "found a finished environment" in set_up(first)
    set_up(second)
    moved = first.rename(folder / "moved")
    assert run(moved / ".venv/bin/megatron-rl-corr", "presets")[0] != 0
    set_up(moved)
    assert_works(moved)
    assert_works(second)
    assert state_of(SHARED.resolve()) == before
    assert not list(moved.glob("*.egg-info")) and not (moved / "build").exists()
    # Done once, it only checks.
    made = (moved / ".venv/.made").stat().st_mtime_ns
    assert "environment:" not in set_up(moved)
    assert (moved / ".venv/.made").stat().st_mtime_ns == made


def test_setup_when_venv_is_a_users_folder_then_it_is_refused_and_kept(folder, copy_checkout):
    checkout = copy_checkout(folder / "mine")
    (checkout / ".venv").mkdir()
    (checkout / ".venv/notes").write_text("mine")
    status, output = run("make", "setup", cwd=checkout)
    assert status != 0 and "move it away" in output
    assert [path.name for path in (checkout / ".venv").iterdir()] == ["notes"]


def test_setup_vllm_when_a_version_is_chosen_then_it_is_linked_or_refused_by_name(folder, copy_checkout):
    shared = Path(sys.prefix, "vllm").resolve()
    if not (shared / ".complete").exists():
        pytest.skip("make setup-vllm has not been run")
    checkout = copy_checkout(folder / "checkout")
    set_up(checkout)
    locked = shared.with_name(shared.name.split("-python-")[0])
    status, output = run("make", "setup-vllm", "VLLM=0.31.0", cwd=checkout)
    assert status != 0 and "VLLM is 0.31.0" in output and "give 0.32.0 or 0.33.0" in output
    assert not (checkout / ".venv/vllm").exists()
    for version, packages in (
        ("0.32.0", locked),
        ("0.33.0", Path(f"{locked}-python-0.33.0")),
        (None, locked),
    ):
        if not (packages / ".complete").exists():
            continue  # what is not there yet would be fetched
        status, output = run("make", "setup-vllm", *[f"VLLM={version}"] * (version is not None), cwd=checkout)
        assert status == 0 and f".venv/vllm is ready (vLLM {version or '0.32.0'})" in output
        assert (checkout / ".venv/vllm").resolve() == packages
