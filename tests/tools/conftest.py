"""Copies of this checkout, as `git clone` would make them of what stands in the working tree."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def copy_checkout():
    """copy_checkout(folder): the files that git tracks or would add, copied into a new folder."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    answer = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in answer.stdout.split("\0") if name and (ROOT / name).is_file()]

    def copy(folder: Path) -> Path:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        return folder

    return copy
