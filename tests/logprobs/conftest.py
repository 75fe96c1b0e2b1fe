"""Runs of every case of the Triton log-probs: by Triton's interpreter, and on a GPU if there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
GPU = pytest.param("gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


@pytest.fixture(scope="session", params=["interpreter", GPU])
def runs(request, tmp_path_factory) -> dict:
    """What worker.py saved."""
    pytest.importorskip("triton")
    file = tmp_path_factory.mktemp("kernels") / "results.pt"
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    environment["TRITON_INTERPRET"] = "1" if request.param == "interpreter" else "0"
    done = subprocess.run(
        [sys.executable, HERE / "worker.py", file],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(file)
