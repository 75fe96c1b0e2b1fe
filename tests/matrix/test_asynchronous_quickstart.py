"""The whole quickstart with and without lag, as `make quickstart ASYNC=1` runs it: both
learn the task alike.
"""

import pytest

from megatron_rl_corr.observability.metrics_file import read_metrics
from tests.examples.test_quickstart import (
    LEARNS_FASTER,
    STEPS,
    Quickstart,
    assert_ahead,
    assert_learned,
    assert_sampled_and_drawn,
)
from tests.matrix.releases import OVERLAID, chosen

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; test_quickstart.py has the one without lag"
)


def test_quickstart_with_and_without_lag_then_the_reward_is_learned_alike(tmp_path):
    with Quickstart(tmp_path / "run", "--steps", str(STEPS), "--asynchronous", *LEARNS_FASTER) as quickstart:
        assert quickstart.finish() == 0, quickstart.text
    runs = [quickstart.out, quickstart.out / "asynchronous"]
    without, ahead = (read_metrics(run / "metrics.jsonl") for run in runs)
    assert_learned(without)
    assert_ahead(ahead, steps_wanted=STEPS)
    assert any(step["rollout/mixed_version_fraction"] > 0 for step in ahead)
    last = [sum(step["reward/mean"] for step in steps[-5:]) / 5 for steps in (without, ahead)]
    assert last[1] >= 0.8 and last[1] == pytest.approx(last[0], abs=0.1)
    assert_sampled_and_drawn(quickstart, runs)
