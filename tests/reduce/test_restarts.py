"""What a process knows of restarts, and whose keys its process group finds."""

import pytest
from torch.distributed import HashStore, rendezvous

from megatron_rl_corr.reduce import restarts


@pytest.fixture
def started(monkeypatch):
    """started(count, agent): as torchrun starts a process; the handlers of rendezvous are put back."""
    handlers = rendezvous.__globals__["_rendezvous_handlers"]
    store = HashStore()
    monkeypatch.setitem(handlers, "env", lambda url: iter([(store, 1, 2)]))
    monkeypatch.setattr(restarts, "_within", [])

    def start(count: int, agent: str | None = "True"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        if agent is not None:
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
        restarts.part_attempts()
        [(found, rank, size)] = handlers["env"]("env://")
        assert (rank, size) == (1, 2)
        return store, found

    return start


def test_restart_when_torchrun_or_megatron_starts_again_then_known(started, monkeypatch):
    started(0)
    assert not restarts.is_restart()
    restarts.begin_again()
    assert restarts.is_restart()
    monkeypatch.setattr(restarts, "_within", [])
    started(1)
    assert restarts.is_restart() and restarts.attempts_before() == 1


def test_group_when_an_attempt_follows_another_then_keys_of_its_own(started):
    store, found = started(2)
    found.set("key", "value")
    assert store.get("megatron_rl_corr/groups_of_attempt_2/key") == b"value"


@pytest.mark.parametrize(("count", "agent"), [(0, "True"), (1, None), (1, "False")])
def test_group_when_first_or_rank_0_keeps_the_store_then_as_it_is(started, count, agent):
    store, found = started(count, agent)
    assert found is store
