"""Groups of samples, rewards that fail and rows that are left out, on a vLLM server: the tests
of tests/rollout.
"""

import pytest

from tests.rollout.test_failed_samples_real_server import (  # noqa: F401
    test_step_when_the_reward_fails_for_every_sample_then_the_run_ends_with_its_traceback,
    test_steps_when_rewards_sleep_raise_and_hang_then_none_is_lost_and_counts_are_those_planted,
)
from tests.rollout.test_groups_real_server import (  # noqa: F401
    test_steps_when_groups_need_a_spread_then_every_other_is_replaced_and_no_number_is_lost,
    test_steps_when_the_users_filter_fails_for_some_rows_then_their_groups_are_lost_and_counted,
    test_take_when_surplus_runs_at_the_server_then_it_is_idle_when_the_step_has_its_groups,
)
from tests.tiers import long

pytestmark = long


@pytest.fixture(scope="module")
def companion(vllm_server_fp32):
    return vllm_server_fp32
