"""A real SGLang router in front of two real servers: samples come from both, control reaches both."""

import json

import pytest

from megatron_rl_corr.rollout import LoopThread, RolloutClient, SamplingParams
from megatron_rl_corr.rollout.server_sources import ServerList, Unread, behind_router
from tests.router_process import RouterProcess


def test_client_when_given_a_router_then_it_samples_from_and_steers_every_server_behind_it(
    sglang_server_fp32, victim, tiny_moe_dir, tmp_path
):
    vocab_size = json.loads((tiny_moe_dir / "config.json").read_text())["vocab_size"]
    servers = [sglang_server_fp32.url, victim.server.url]
    with RouterProcess(tmp_path / "router.log") as router, LoopThread() as loop:
        for server in servers:
            router.add(server)
        client = RolloutClient([router.url], vocab_size=vocab_size, timeout_s=120)
        try:
            assert sorted(loop.call(client.find_servers(60))) == sorted(servers)
            loop.call(client.wait_healthy(60))
            sampling = SamplingParams(8, ignore_eos=True)
            trajectories = loop.call(
                client.generate([[3, 1, 4]], sampling, samples_per_prompt=8), timeout=120
            )
            assert {t.server for t in trajectories} == set(servers)
            assert len(loop.call(client.pause_generation("retract"))) == 2
            waiting = loop.submit(client.generate([[1], [2]], SamplingParams(1)))
            assert len(loop.call(client.continue_generation())) == 2
            assert {t.server for t in waiting.result(60)} == set(servers)
        finally:
            loop.call(client.close())


def test_router_when_its_workers_change_then_the_list_of_servers_follows(
    sglang_server_fp32, victim, tmp_path
):
    servers = [sglang_server_fp32.url, victim.server.url]
    with RouterProcess(tmp_path / "router.log") as router, LoopThread() as loop:
        client = RolloutClient([], vocab_size=96, changes=True, engine="auto")

        def ask(url):
            return behind_router(client, loop, url)

        try:
            with pytest.raises(Unread, match="no list of servers: .* no worker"):
                ask(router.url)
            with pytest.raises(Unread, match="this is a server and no router"):
                ask(servers[0])
            for server in servers:
                router.add(server)
            found = ServerList([router.url], [], ask)
            assert found.look() == () and sorted(found.look()) == sorted(servers)
            router.remove(servers[1])
            assert sorted(found.look()) == sorted(servers) and found.look() == (servers[0],)
            router.remove(servers[0])  # a router without a worker says nothing
            assert [found.look() for _ in range(2)] == [(servers[0],)] * 2
        finally:
            loop.call(client.close())
