"""The four gloo ranks that all distributed tests of this folder share: one start for every
case of a worker.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent


def run_ranks(worker: str, folder: Path) -> list[dict]:
    """What a worker saved, by rank."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, HERE / worker, folder], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # The files are this test's own, and hold a configuration beside tensors.
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks("worker.py", tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="session")
def vocab_ranks(tmp_path_factory) -> list[dict]:
    return run_ranks("vocab_worker.py", tmp_path_factory.mktemp("vocab_ranks"))
