"""Real servers that release their memory behind a proxy which fails when it changes: what they
are called then.

A server whose answer is lost is left out, and the run goes on with another one; only a restart mends it.
"""

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl_corr.engines.control import ServerControl
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError
from tests.faults.door import Door
from tests.tiers import in_matrix, matrix
from tests.weight_sync.test_memory_real_server import Colocated, Restartable
from tests.weight_sync.test_push_real_servers import noisy

pytestmark = matrix

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def weights(tiny_moe_dir):
    return load_file(tiny_moe_dir / "model.safetensors")


@pytest.fixture(scope="module")
def pair(tiny_moe_dir, tmp_path_factory):
    """Two servers that can release their memory; the first is the one that fails."""
    made = [
        Restartable(tiny_moe_dir, tmp_path_factory.mktemp(name), "--enable-memory-saver")
        for name in ("lost", "well")
    ]
    yield made
    for one in made:
        if one.server is not None:
            one.server.stop()


@pytest.fixture
def door(pair):
    door = Door(pair[0].running().url)
    yield door
    door.close()


@pytest.fixture
def alone(door, tiny_moe_dir):
    trainer = Colocated([door.url], tiny_moe_dir)
    yield trainer
    trainer.close()


@pytest.fixture
def both(door, pair, tiny_moe_dir):
    trainer = Colocated([door.url, pair[1].running().url], tiny_moe_dir)
    yield trainer
    trainer.close()


@pytest.mark.parametrize("status", [400, 404, 409, 499])
def test_release_when_refused_then_the_server_keeps_its_name_and_samples_on(alone, door, weights, status):
    alone.push(weights, "first")
    door.failing = {RELEASE: (status, False)}
    with pytest.raises(RolloutServerError, match=f"answered POST {RELEASE} with HTTP {status}"):
        alone.release()
    assert alone.version() == "first" and not alone.servers.memory.lacking | alone.servers.memory.unknown
    assert alone.another().finish_reason == "length"


@pytest.mark.parametrize("status", [None, 408, 500, 502, 503, 504])
def test_release_when_a_gateway_fails_or_the_answer_is_cut_then_nobody_knows_what_the_only_server_has(
    alone, door, weights, status
):
    alone.push(weights, "first")
    door.failing = {RELEASE: (status, False)}
    with pytest.raises(RolloutServerError, match="did not answer" if status is None else f"HTTP {status}"):
        alone.release()
    assert alone.version() == "changing memory first"
    for call in (alone.release, lambda: alone.push(weights, "second")):
        with pytest.raises(
            RolloutProtocolError, match="its answer was lost .*nobody knows which it has; restart"
        ):
            call()
    alone.ask("update_weight_version", "first")  # it has all of it: the request was kept from it


MOMENTS = {
    "release, HTTP 504": (RELEASE, 1, 504),
    "release, cut": (RELEASE, 1, None),
    "weights resumed, HTTP 502": (RESUME, 1, 502),
    "cache resumed, cut": (RESUME, 2, None),
    "killed at its weights": (RESUME, 1, "killed"),
    "killed at its cache": (RESUME, 2, "killed"),
}
"""What fails -> the request, which one of it in the turn, and how. The server has done what it was asked."""


@pytest.mark.parametrize(
    "moment",
    [
        "killed at its weights",
        *in_matrix(
            "release, HTTP 504",
            "cache resumed, cut",
            "release, cut",
            "weights resumed, HTTP 502",
            "killed at its cache",
        ),
    ],
)
def test_turn_when_one_of_two_servers_is_lost_in_it_then_the_run_goes_on_with_the_other(
    both, pair, door, weights, told, monkeypatch, moment
):
    path, number, how = MOMENTS[moment]
    lost, well = both.client.base_urls
    both.push(weights, "first")
    with monkeypatch.context() as patch:
        strike(
            patch,
            lost,
            path,
            number,
            lambda: pair[0].kill() if how == "killed" else door.failing.update({path: (how, True)}),
        )
        both.release()
        both.push(noisy(weights, 1), "second")
    for version in ("third", "fourth"):
        both.release()
        both.push(noisy(weights, 2), version)
        assert both.servers.urls == (well,) and both.client.left_out == [lost]
        assert [span.version for span in both.sample().weight_versions] == [version]
    missed = [facts["server"] for kind, facts in told if kind == "server_missed_update"]
    assert missed == [lost] * 3
    assert [facts["server"] for kind, facts in told if kind == "memory_not_released"] == [lost] * (
        path == RELEASE
    )
    if how != "killed":
        assert both.version().startswith("changing memory ")
        pair[0].kill()
    assert not pair[0].runs_after(15)
    pair[0].running()
    both.push(weights, "fifth")  # a restarted one has all of its memory, and takes part again
    both.release()
    both.push(weights, "sixth")
    assert both.servers.urls == (lost, well) and both.version() == "sixth"
    assert not both.servers.memory.lacking | both.servers.memory.unknown


def strike(monkeypatch, url, path, number, blow):
    """Right before the number-th such request to that server, `blow` is called."""
    ask, calls = ServerControl.ask, 0

    async def struck(self, asked, request, **options):
        nonlocal calls
        if asked == url and request is not None and request.endpoint == path:
            calls += 1
            if calls == number:
                blow()
        return await ask(self, asked, request, **options)

    monkeypatch.setattr(ServerControl, "ask", struck)


def test_start_when_one_of_two_servers_was_left_unknown_then_it_is_refused_by_name(
    both, weights, tiny_moe_dir
):
    both.push(weights, "first")
    both.ask("update_weight_version", "changing memory first")
    next_one = Colocated(both.client.base_urls, tiny_moe_dir)
    try:
        with pytest.raises(
            RolloutError, match=f"{next_one.client.base_urls[0]} .*nobody knows which it has; restart"
        ):
            next_one.release()
    finally:
        next_one.close()
    both.ask("update_weight_version", "first")
    both.push(weights, "second")
