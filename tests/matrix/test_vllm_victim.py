"""What is tested of SGLang servers that are stopped, slowed, killed and updated while they sample,
on vLLM servers.

The tests and their fixtures are those of tests/rollout, on other servers.
"""

import pytest

from tests.conftest import running_victim
from tests.matrix.patched import unchanged
from tests.rollout.test_failover_real_servers import (  # noqa: F401
    client,
    model,
    push,
    test_collect_when_one_server_is_killed_then_none_is_lost_and_it_returns_with_the_right_weights,
    test_collect_when_one_server_pauses_then_what_it_cut_is_continued_on_the_other,
)
from tests.rollout.test_in_flight_real_servers import (  # noqa: F401
    engine,
    loop,
    models,
    test_in_place_when_prompts_of_before_come_again_then_their_keys_are_not_met_where_caches_are_keyed,
    test_weights_when_changed_while_sampling_then_every_token_carries_the_version_that_sampled_it,
    weights,
)
from tests.rollout.test_silence_real_servers import (  # noqa: F401
    test_generate_when_a_request_is_lost_on_its_way_then_given_up_though_the_scheduler_is_well,
    test_generate_when_a_server_is_paused_for_longer_than_the_bound_then_it_is_not_silent,
    test_generate_when_answers_take_many_times_the_bound_and_wait_in_the_queue_then_they_arrive,
    test_generate_when_the_scheduler_alone_is_stopped_then_left_out_within_the_bound_and_back_when_it_goes_on,
)
from tests.tiers import long

pytestmark = long


@pytest.fixture(scope="module")
def any_victim(tiny_moe_dir, tmp_path_factory):
    yield from running_victim("vllm", tiny_moe_dir, tmp_path_factory.mktemp("victim"))


@pytest.fixture(scope="module")
def companion(vllm_server_fp32, tiny_moe_dir):
    with unchanged(vllm_server_fp32, tiny_moe_dir):
        yield vllm_server_fp32


@pytest.fixture(scope="module")
def urls(victim, companion):
    return [victim.server.url, companion.url]


@pytest.fixture
def keeping(companion):
    return "vllm", companion.url
