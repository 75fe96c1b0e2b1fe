"""The environment of the gateway's clients has what its lock names, and nothing that is missing."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-agents/bin/python"
LOCK = ROOT / "requirements/agents.txt"


@pytest.fixture(scope="module", autouse=True)
def made():
    if not PYTHON.exists():
        pytest.skip("make setup-agents has not been run")


def pip(*words):
    return subprocess.run([PYTHON, "-I", "-m", "pip", *words], capture_output=True, text=True, timeout=60)


def test_lock_when_installed_then_it_is_complete_and_all():
    locked = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert sorted(pip("freeze").stdout.split()) == sorted(locked)
    # TRL's wheel is there for its files of chat templates; nothing imports it, so its requirements are not.
    missing = [line for line in pip("check").stdout.splitlines() if not line.startswith("trl ")]
    assert missing in ([], ["No broken requirements found."])


def test_set_up_when_run_again_then_ready_at_once():
    done = subprocess.run([ROOT / "scripts/setup-agents"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and ".venv-agents is ready" in done.stdout
    assert len(done.stdout.splitlines()) == 1
