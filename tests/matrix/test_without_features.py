"""A whole run on real ranks and a real server without each feature: it starts, trains and pushes."""

import json
from pathlib import Path

import pytest

from megatron_rl_corr.config.features import FEATURES
from tests.features_removed import package_without
from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import launch, replayed

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID,
    reason="make test-matrix runs it; tests/conventions/test_features.py reads flags without each",
)
SCRIPT = Path(__file__).resolve().parent / "pretrain_any.py"
RUN = ["--global-batch-size", 16, "--save-interval", 100, "--train-iters", 2]


@pytest.mark.parametrize("names", [*((name,) for name in FEATURES), FEATURES], ids="+".join)
def test_run_without_features_then_it_starts_trains_and_pushes(
    names, sglang_server_fp32, tiny_moe_dir, tmp_path
):
    with replayed(sglang_server_fp32, tiny_moe_dir, tmp_path) as door:
        done = launch(
            tmp_path,
            "run",
            tiny_moe_dir,
            door.url,
            SCRIPT,
            *RUN,
            processes=2,
            package=package_without(tmp_path / "copy", *names),
        )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run/log/metrics.jsonl").read_text().splitlines()]
    assert [row["weight_version"] for row in rows] == [1, 2] and all(row["grad_norm"] > 0 for row in rows)
    assert ("rollout/probe_bits" in rows[0]) == ("push_probe" not in names)
