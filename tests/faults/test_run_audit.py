"""A run whose every process is watched: what it writes, where it listens, what it shows of secrets and of
texts that want to act. The command samples without a trainer; tests/matrix/test_audited_training.py trains.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.faults.drills import drill
from tests.rollout.agents.model_folder import folder_with_template, write_rows

ROOT = Path(__file__).resolve().parents[2]
HARNESS = Path(__file__).with_name("hostile_harness.py")
SERVER_KEY = "canary-of-the-servers-5d41"
CANARIES = {
    "ROLLOUT_KEY": SERVER_KEY,
    "HF_TOKEN": "hf_canaryOfTheHub91f2",
    "WANDB_API_KEY": "canary-of-wandb-77b0",
    "JUDGE_PASSWORD": "canary-of-a-judge-20ce",
}
"""Variables of the run that hold secrets; no message, no file and no command line may have one."""
KEY = re.compile(r"\b[0-9a-f]{32}\b")
"""What an episode's key looks like."""


def watched(environment, folder):
    """The environment of a process that tests/faults/audit watches, with secrets, and folders of its own for
    all that libraries write.
    """
    places = {name: folder / name.lower() for name in ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME")}
    for place in places.values():
        place.mkdir()
    # what its harness tells of its environment must not have ids of the tests' own that look like keys
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    paths = os.pathsep.join([str(HARNESS.parent / "audit"), str(ROOT), environment.get("PYTHONPATH", "")])
    return (
        environment
        | CANARIES
        | {name: str(place) for name, place in places.items()}
        | {
            "AUDIT_FILE": str(folder / "audit.jsonl"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "tmpdir/torchinductor_own"),
            "PYTHONPATH": paths,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
    )


def noted(folder):
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def check_places(notes, named):
    """Nothing was written outside the folders that flags name, but in the processes' own temporary folder and
    into devices.
    """
    allowed = [*map(str, named), "/dev/", "/proc/self/"]
    written = {
        path
        for one in notes
        if one["what"] == "open" or one["what"].startswith("os.")
        for path in ([one["of"]] if isinstance(one["of"], str) else one["of"])
        if path.startswith("/")
    }
    assert written
    assert [path for path in written if not any(path.startswith(place) for place in allowed)] == []


def check_addresses(notes):
    """What Python's sockets were bound to: addresses of the loopback, and those without a name."""
    bound = [one["of"] for one in notes if one["what"] == "socket.bind"]
    assert bound
    assert [one for one in bound if not one.startswith(("('127.0.0.1', ", "('::1', "))] == []


def check_texts(*texts):
    """No secret, no episode's key, nothing that a terminal obeys, and no line that looks like another's."""
    for text in texts:
        for secret in CANARIES.values():
            assert secret not in text, text[max(text.index(secret) - 300, 0) :][:400]
        assert not KEY.search(text), KEY.search(text)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028]", text)
        assert not re.search("^(\\[rollout\\] all is well|megatron_rl_corr: step 7)", text, re.MULTILINE)


def check_files(folder):
    """No secret in the bytes of any file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        for secret in CANARIES.values():
            assert secret.encode() not in content, path


@drill(
    "an agent and a reward that tell their environment, the episode's key and terminal escapes",
    promised="none reaches a message, a file or a command line; nothing is written or opened elsewhere",
)
def test_command_when_watched_then_it_keeps_to_its_folders_and_shows_no_secret(
    sglang_server_fp32, tiny_moe_dir, short_path, seen
):
    model = folder_with_template(tiny_moe_dir, short_path / "model")
    (short_path / "data").mkdir()
    rows = write_rows(
        short_path / "data/prompts.jsonl",
        *({"do": "tells" if n == 2 else "asks", "number": n} for n in range(4)),
    )
    words = [
        *("rollout", "--url", sglang_server_fp32.url, "--hf-checkpoint", model, "--prompts", rows),
        *("--agent", f"{HARNESS}:run", "--reward-function", f"{HARNESS}:reward", "--input-key", "messages"),
        *("--reward-workers", "1", "--group-size", "1", "--max-new-tokens", "4", "--out", short_path / "out"),
        *("--api-key-env", "ROLLOUT_KEY", "--max-failed-fraction", "1", "--agent-max-turns", "1"),
    ]
    environment = watched(dict(os.environ), short_path)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl_corr.cli", *map(str, words)],
        env=environment,
        cwd=short_path / "data",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "failed: reward_error 1, agent 1" in done.stdout.replace(
        "agent 1, reward_error 1", "reward_error 1, agent 1"
    )
    assert "HF_TOKEN" in done.stderr and "taken" in done.stderr  # they did tell
    check_texts(done.stdout, done.stderr)
    check_files(short_path / "out")
    notes = noted(short_path)
    check_places(notes, [short_path / "out", short_path / "tmpdir"])
    assert sorted(path.name for path in short_path.iterdir()) == sorted(
        ["audit.jsonl", "data", "model", "out", "home", "tmpdir", "hf_home", "xdg_cache_home"]
    )
    left = [path.name for name in ("tmpdir", "home") for path in (short_path / name).iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch's own
    check_addresses(notes)
    started = [one["of"] for one in notes if one["what"] in ("begins", "subprocess.Popen", "os.exec")]
    assert len({one["pid"] for one in notes}) >= 3 and len(started) >= 2
    check_texts(*started)
    seen(f"{len(notes)} notes of {len({one['pid'] for one in notes})} processes")
