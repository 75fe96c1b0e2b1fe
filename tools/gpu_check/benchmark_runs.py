"""Benchmarks beside their alternatives: at full size on a GPU, tiny without one, where only the code
is shown to run.

Each ends by itself where its results are wrong.
"""

import os
import subprocess
import sys
from pathlib import Path

from tools.gpu_check.outcome import Outcome, require

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "correction": ["--sequences", "4", "--length", "64", "--repeats", "1"],
    "logprob": ["--tokens", "70", "--vocab", "50", "--hidden", "8", "--repeats", "1", "--no-compile"],
    "packing": [
        "--samples",
        "16",
        "--length",
        "64",
        "--hidden",
        "32",
        "--layers",
        "1",
        "--repeats",
        "1",
        "--ranks",
        "2",
    ],
    "router_replay": [
        "--hidden",
        "32",
        "--layers",
        "1",
        "--experts",
        "4",
        "--top-k",
        "2",
        "--samples",
        "4",
        "--length",
        "32",
        "--repeats",
        "2",
    ],
}
FULL: dict[str, list[str]] = {
    "correction": ["--repeats", "7"],
    "logprob": [],
    "packing": ["--samples", "64", "--length", "4096", "--hidden", "2048", "--layers", "4"],
    "router_replay": [
        "--hidden",
        "1024",
        "--layers",
        "4",
        "--experts",
        "32",
        "--top-k",
        "4",
        "--samples",
        "8",
        "--length",
        "2048",
    ],
}


def check_correction(device: str) -> Outcome:
    return run("correction", device)


def check_logprob(device: str) -> Outcome:
    return run("logprob", device)


def check_packing(device: str) -> Outcome:
    return run("packing", device)


def check_router_replay(device: str) -> Outcome:
    return run("router_replay", device)


def run(name: str, device: str) -> Outcome:
    """Run benchmarks/NAME.py; its errors go to this part's log.

    Raises:
        DoesNotHold: it ended with another status than 0, or printed no table.
    """
    options = (FULL if device == "cuda" else TINY)[name]
    return run_file(ROOT / f"benchmarks/{name}.py", *options)


def run_file(path: Path, *options: str) -> Outcome:
    """As `run`, of any file."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path, *options],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout)
    require(done.returncode == 0, f"{path.name} ended with status {done.returncode}")
    require("\n|---" in done.stdout or "|---|" in done.stdout, f"{path.name} printed no table")
    command = " ".join(["python", f"benchmarks/{path.name}", *options])
    return Outcome(tables=f"`{command}`\n\n{done.stdout.strip()}")
