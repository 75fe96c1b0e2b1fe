"""The plain-library example: short, and the same training on one process and on TP 2 x DP 2."""

import sys
from pathlib import Path

import pytest

from tests.forked_torchrun import TORCHRUN, forking
from tests.megatron_forks import run_megatron
from tests.preloaded import run_preloaded
from tools.local_server import free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/library_loop/train.py"


def steps(processes, tensor_parallel):
    """[k3_kl, mean weight] of each step."""
    if processes == 1:
        done = run_megatron(EXAMPLE, tensor_parallel, ranks=1)
    else:
        command = [
            sys.executable,
            *TORCHRUN,
            "--nproc_per_node",
            str(processes),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free_port()),
            str(EXAMPLE),
            str(tensor_parallel),
        ]
        done = run_preloaded(forking(command)[1:], timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [int(line[1]) for line in lines] == [0, 1, 2, 3, 4]
    return [[float(line[3]), float(line[6])] for line in lines]


def test_library_loop_when_run_on_four_processes_then_every_step_is_that_of_one():
    assert len(EXAMPLE.read_text().splitlines()) < 100
    alone = steps(1, 1)
    for found, expected in zip(steps(4, 2), alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    # The policy leaves the uniform one that sampled.
    assert alone[-1][0] > 3 * alone[0][0] > 0
