"""A float32 trainer pushes to servers that compute in bfloat16, as most runs do: both have what it sent."""

import pytest

from tests.matrix.engine_pair import check_samples, pair, run, steps_of
from tests.tiers import long

pytestmark = long
STEPS = 4
ROUNDING = 0.1  # nats of one token


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_run_when_servers_compute_in_bfloat16_then_every_log_prob_is_near_that_of_the_pushed_weights(
    tiny_moe_dir, tmp_path, transport
):
    with pair(tiny_moe_dir, tmp_path, dtype="bfloat16") as servers:
        done = run(tmp_path, servers, tiny_moe_dir, "--rollout-weight-transport", transport, steps=STEPS)
        assert done.returncode == 0, done.stderr[-6000:]
        rows = check_samples(tmp_path, servers, tiny_moe_dir, STEPS, exact=ROUNDING)
    assert {row["engine"] for row in rows} == set(servers)
    for step in steps_of(tmp_path):
        assert 1e-3 < step["rollout_corr/log_ratio_abs_max"] < ROUNDING
        assert step["rollout/probe_k3"] < 1e-3
