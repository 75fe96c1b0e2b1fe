"""`pip install .` into an environment without any other package: the command answers;
tools/ stays outside.
"""

import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

PIP = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(copy_checkout, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_checkout(folder / "source")
    command = [
        *PIP,
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        folder,
        source,
    ]
    subprocess.run(command, check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_wheel_then_it_holds_the_package_with_its_templates_and_nothing_else(wheel, copy_checkout):
    source = wheel.parent / "source/megatron_rl_corr"
    wanted = {
        path.relative_to(source.parent).as_posix()
        for end in ("py", "j2")
        for path in source.rglob(f"*.{end}")
    }
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == wanted and "megatron_rl_corr/launch.py" in held


def test_wheel_when_installed_without_any_dependency_then_help_and_presets_answer(wheel, tmp_path):
    venv.create(tmp_path / "empty", symlinks=True)
    python = tmp_path / "empty/bin/python"
    subprocess.run(
        [*PIP, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True
    )
    # What the command imports for these is in the standard library: neither torch nor anything else is there.
    assert subprocess.run([python, "-I", "-c", "import torch"], capture_output=True).returncode != 0
    for arguments, expected in (
        (["--help"], "presets"),
        (["presets"], "decoupled_token_is"),
        (["--version"], "0."),
    ):
        command = [tmp_path / "empty/bin/megatron-rl-corr", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and expected in done.stdout, done.stderr
