"""`make gpu-check` as a whole without a GPU: a rehearsal that leaves out a fixed list, and in
which nothing fails.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.matrix.releases import OVERLAID, chosen
from tools.cpu import gpu_available
from tools.gpu_check.parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = [
    "host-sync: sync-debug mode (there is no GPU)",
    "host-sync-tokens: sync-debug mode (there is no GPU)",
    "push-tensor: CUDA IPC (there is no GPU)",
    "push-distributed: NCCL (there is no GPU)",
    "colocation: CUDA IPC (there is no GPU)",
    "fp8-server: FP8 server (there is no GPU)",
    *(
        f"benchmark-{name}: GPU timings (there is no GPU)"
        for name in ("correction", "logprob", "packing", "router-replay")
    ),
]

pytestmark = [
    pytest.mark.skipif(chosen() != OVERLAID, reason="starts five servers; make test-matrix runs it"),
    pytest.mark.skipif(gpu_available(), reason="there is a GPU: make gpu-check itself"),
]


def test_rehearsal_when_there_is_no_gpu_then_nothing_fails_and_only_the_fixed_list_is_not_run(tmp_path):
    done = subprocess.run(
        ["make", "gpu-check", f"TABLE={tmp_path / 'table.md'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert re.search(r"Error 3$", done.stderr, re.MULTILINE), done.stdout + done.stderr
    lines = [
        line.removeprefix("[gpu-check] ")
        for line in done.stdout.splitlines()
        if line.startswith("[gpu-check] ")
    ]
    assert [line.removeprefix("not run: ") for line in lines if line.startswith("not run: ")] == NOT_RUN
    assert not [line for line in lines if "FAILED" in line]
    table = (tmp_path / "table.md").read_text()
    for part in PARTS:
        assert f"| {part.name} | " in table
        assert [line for line in lines if line.startswith(f"{part.name}: holds after ")]
