"""benchmarks/logprob.py runs, and ends where a path is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.logprob import Work, check
from tests.tiers import long, matrix

pytestmark = matrix

ROOT = Path(__file__).resolve().parents[2]


@long
def test_command_when_tiny_then_a_row_for_each_path():
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "benchmarks/logprob.py",
            "--tokens",
            "70",
            "--vocab",
            "50",
            "--hidden",
            "8",
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--repeats",
            "1",
            "--no-compile",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [
        line.split(" | ")[0].removeprefix("| ") for line in run.stdout.splitlines() if line.startswith("| ")
    ]
    assert rows == [
        "path",
        "ours",
        "ours, in place",
        "ours with entropy",
        "Megatron",
        "log_softmax and gather",
        "sampled",
        "100%",
        "50%",
        "25%",
        "path",
        "logits, then log-probs in place",
        "linear_logprobs",
        "linear_logprobs, fp32 head",
        "linear_logprobs, half of the tokens sampled",
        "columns",
        *["151936"] * 3,
        *["18992"] * 3,
    ]


@pytest.mark.parametrize("scale, detach, words", [(1.001, False, "log-probs"), (1.0, True, "the gradient")])
def test_check_when_a_path_is_wrong_then_the_benchmark_ends(scale, detach, words):
    logits, labels, upstream = torch.randn(3, 5), torch.tensor([0, 1, 2]), [torch.ones(3), torch.ones(3)]

    def path(logits):
        log_p = logits - logits.logsumexp(1, keepdim=True).detach() if detach else logits.log_softmax(1)
        return [log_p.gather(1, labels[:, None])[:, 0] * scale]

    work = Work(path, (logits,), (torch.empty_like(logits),), upstream)
    work.prepare()
    work.both()
    with pytest.raises(SystemExit, match=words):
        check("x", work, logits, labels, upstream)
