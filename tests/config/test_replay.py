"""Where a replay ends."""

import pytest

from megatron_rl_corr.config.replay import last_replayed


@pytest.mark.parametrize(
    ("iteration", "exit_interval", "last"),
    [(3, None, 100), (3, 0, 100), (3, 4, 4), (4, 4, 8), (0, 4, 4), (98, 40, 100), (98, 99, 99)],
)
def test_replay_when_it_ends_early_then_behind_the_next_multiple(iteration, exit_interval, last):
    assert last_replayed(iteration, 100, exit_interval) == last
