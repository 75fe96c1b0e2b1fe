"""Pushes to two vLLM servers of which one has other weights or is killed: the tests of
tests/weight_sync on them.
"""

import pytest

from tests.conftest import running_victim
from tests.matrix.patched import unchanged
from tests.tiers import long
from tests.weight_sync.test_changes_real_server import Trainer
from tests.weight_sync.test_push_real_servers import (  # noqa: F401
    pushing,
    test_push_when_a_server_is_killed_in_the_middle_then_the_others_have_all_weights_and_sample,
    test_push_when_only_one_of_two_servers_misses_a_tensor_then_it_is_named,
    weights,
)

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    long,
]


@pytest.fixture(scope="module")
def any_victim(tiny_moe_dir, tmp_path_factory):
    yield from running_victim("vllm", tiny_moe_dir, tmp_path_factory.mktemp("victim"))


@pytest.fixture(scope="module")
def companion(vllm_server_fp32, tiny_moe_dir):
    with unchanged(vllm_server_fp32, tiny_moe_dir):
        yield vllm_server_fp32


def test_push_of_changes_when_a_server_was_started_again_then_all_get_everything(
    companion, victim, tiny_moe_dir
):
    trainer = Trainer(companion, tiny_moe_dir, victim.server)
    shares = []
    try:
        for version in range(6):
            if version == 3:
                victim.kill()
                victim.start_again()
            trainer.train(seed=version)
            trainer.push_changes(str(version))
            shares.append(trainer.deltas.share)
        numbers = set(trainer.servers.loaded.values())
        trainer.checksums_of_everything("whole")
        assert len(numbers) == 1 and numbers == set(trainer.servers.loaded.values())
    finally:
        trainer.close()
    # Everything, what proves the changes, changes; and everything again, at once.
    assert shares[:2] == [1, 1] and shares[3] == 1
    assert all(0.01 < share < 0.03 for share in (shares[2], *shares[4:]))
