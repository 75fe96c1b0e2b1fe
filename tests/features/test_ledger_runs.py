"""Ledgers of real runs: the terms of each token add up to its D, and a planted fault is blamed by its name."""

import json
import math
from pathlib import Path

import pytest

from tests.mcore.launched import launch, replayed

SCRIPT = Path(__file__).resolve().parent / "ledger_pretrain.py"
RUN = [
    *["--global-batch-size", 16, "--train-iters", 3, "--save-interval", 100],
    *["--rollout-ledger-interval", 1, "--rollout-ledger-share", 1],
    *["--moe-grouped-gemm", "--moe-permute-fusion", "--rollout-probe-push", "off"],
]
WAYS = {"clean": []}


def steps_of(folder):
    return [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(keeping_server, tiny_moe_dir, tmp_path_factory):
    """run(name, *flags, processes): (its output, its steps, of each rank the tokens of each batch)."""
    folder = tmp_path_factory.mktemp("ledgers")
    with replayed(keeping_server, tiny_moe_dir, folder) as door:

        def run(name, *flags, processes, url=None):
            out = folder / name
            out.mkdir()
            done = launch(
                folder, name, tiny_moe_dir, url or door.url, SCRIPT, *RUN, *flags, processes=processes, LEDGER=str(out)
            )
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            ranks = [json.loads(path.read_text()) for path in sorted(out.glob("?.json"))]
            return done.stdout, steps_of(out), ranks

        yield run


def test_clean(runs):
    out, steps, ranks = runs("clean", processes=2)
    print(out[-6000:])
    for step in steps:
        print({k: v for k, v in step.items() if "ledger" in k or k.startswith("time") or "k3_kl"==k})
    assert 0
