"""A client whose servers join and leave: who is asked, and what becomes of samples in flight."""

import asyncio

import pytest

from megatron_rl_corr.engines.errors import RolloutOutage
from megatron_rl_corr.rollout import RolloutClient, SamplingParams
from tests.stand_in_server import good, one_token, run, serving

ONE = SamplingParams(1)


def client_of(urls, **options):
    defaults = {"vocab_size": 10, "outage_timeout_s": 30.0, "ingest_process": False, "changes": True}
    return RolloutClient(urls, **(defaults | options))


def test_client_when_it_has_no_server_then_it_waits_for_one():
    async def scenario():
        async with serving(good) as url, client_of([]) as client:
            sampling = asyncio.create_task(client.generate([[1], [2]], ONE))
            await asyncio.sleep(0.05)
            assert not sampling.done() and client.base_urls == ()
            await client.admit({url: "sglang"})
            found = await sampling
            assert [sample.server for sample in found] == [url, url] and client.base_urls == (url,)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_client_when_no_server_joins_then_the_outage_says_so():
    async def scenario():
        async with client_of([], outage_timeout_s=0.1) as client:
            with pytest.raises(RolloutOutage, match="no rollout server to sample from for too long"):
                await client.generate([[1]], ONE)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def held():
    """A handler that answers /generate once it may, and what it has been asked."""
    may, asked = asyncio.Event(), []

    async def handle(request):
        body = await request.json()
        asked.append(body.get("input_ids"))
        await may.wait()
        return one_token(len(body["input_ids"]))

    return handle, may, asked


async def until(holds):
    while not holds():
        await asyncio.sleep(0.005)


def test_server_when_it_leaves_then_its_samples_end_and_new_ones_go_elsewhere():
    async def scenario():
        handle, may, asked = held()
        async with (
            serving(handle) as leaving,
            serving(good) as staying,
            client_of([leaving, staying]) as client,
        ):
            sampling = asyncio.create_task(client.generate([[1], [2]], ONE))
            await until(lambda: asked)
            await client.retire([leaving], 60.0, "it leaves")
            later = await client.generate([[3], [4], [5]], ONE)
            assert {sample.server for sample in later} == {staying} and len(asked) == 1
            may.set()
            found = await sampling
            assert sorted(sample.server for sample in found) == sorted([leaving, staying])
            counts = client.counts()
            assert counts["retries"] == counts["left_out"] == 0 and counts["samples"] == 5

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_server_when_it_does_not_end_its_samples_in_time_then_others_are_asked_once():
    async def scenario():
        handle, may, asked = held()
        async with serving(handle) as leaving, serving(good) as staying:
            # not one retry is allowed: a sample that is handed back has not failed
            async with client_of([leaving, staying], max_retries=0, read_timeout_s=3600.0) as client:
                sampling = asyncio.create_task(client.generate([[1], [2]], ONE))
                await until(lambda: asked)
                await client.retire([leaving], 0.05, "it leaves")
                found = await sampling
                counts = client.counts()
            may.set()
            assert [sample.server for sample in found] == [staying, staying]
            assert [sample.prompt_ids.tolist() for sample in found] == [[1], [2]]
            assert (counts["samples"], counts["retries"], counts["left_out"]) == (2, 1, 0)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_server_when_it_leaves_and_dies_then_others_are_asked_and_nobody_asks_after_it():
    async def scenario():
        may, asked = asyncio.Event(), []

        async def dies(request):
            asked.append(request.path)
            await may.wait()
            request.transport.abort()
            await asyncio.sleep(1.0)

        async with (
            serving(dies) as leaving,
            serving(good) as staying,
            client_of([leaving, staying]) as client,
        ):
            sampling = asyncio.create_task(client.generate([[1], [2]], ONE))
            await until(lambda: asked)
            await client.retire([leaving], 60.0, "it leaves")
            may.set()
            found = await sampling
            assert {sample.server for sample in found} == {staying} and client.left_out == []
            await asyncio.sleep(0.7)  # a server that is left out is probed after half a second
            assert asked == ["/generate"]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_server_when_it_joins_while_others_sample_then_a_silent_one_is_still_noticed():
    async def scenario():
        handle, _, asked = held()
        async with serving(good) as first, serving(handle) as silent, client_of([first]) as client:
            client._health._read_timeout_s = 0.5
            async with client._health.watching():
                await asyncio.sleep(0.01)  # those of before are watched by now
                await client.admit({silent: "sglang"})
                found = await client.generate([[n] for n in range(1, 5)], ONE)
            assert asked and {sample.server for sample in found} == {first}
            assert client.counts()["left_out"] == 1

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_server_when_it_comes_back_at_its_address_then_it_is_a_new_one():
    async def scenario(client):
        (url,) = client.base_urls
        await client.generate([[1]], ONE)
        await client.retire([url], 0.0, "it leaves")
        assert client.base_urls == ()
        await client.admit({url: "sglang"})
        (sample,) = await client.generate([[1]], ONE)
        assert sample.server == url and client.counts()["samples"] == 2

    run(scenario, good, changes=True)
