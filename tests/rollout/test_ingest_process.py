"""A process beside the trainer asks for samples and parses their answers: the same samples and errors,
and what becomes of it when it, or somebody who waits for it, ends.
"""

import asyncio
import gc
import os
import socket
import time

import psutil
import pytest
import torch
from aiohttp import web

from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.rollout import RolloutClient, SamplingParams
from megatron_rl_corr.rollout.ingest import messages
from tests.stand_in_server import answer, one_token

SHAPE = ExpertShape(num_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)


@pytest.fixture
def link():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_message_when_received_then_equal_and_its_tensors_can_be_written(link):
    ours, theirs = link
    value = {
        "a": torch.arange(5),
        "b": torch.rand(7, 3),
        "none": None,
        "empty": torch.empty(0, 2),
        "text": "x",
    }
    inbox = messages.Inbox(theirs)
    for number in range(3):
        messages.send(ours, "ask", number, value | {"number": number})
        kind, which, found = inbox.receive()
        assert (kind, which, found["number"]) == ("ask", number, number)
        assert all(torch.equal(found[name], value[name]) for name in ("a", "b", "empty"))
        assert found["none"] is None and found["text"] == "x"
        found["a"][0] = 9
    assert value["a"][0] == 0


def test_message_when_its_tensors_are_gone_then_so_is_its_memory(link):
    ours, theirs = link

    def mapped():
        return sum("rollout-ingest" in line for line in open("/proc/self/maps"))

    descriptors = len(os.listdir("/proc/self/fd"))
    kept = messages.send(ours, "answer", 0, torch.zeros(1 << 20))
    _, _, found = messages.Inbox(theirs).receive()
    del kept
    assert mapped() == 1 and len(os.listdir("/proc/self/fd")) == descriptors
    view = found[5:]
    del found
    gc.collect()
    assert mapped() == 1 and view[0] == 0
    del view
    gc.collect()
    assert mapped() == 0


def test_message_when_the_other_side_is_gone_then_eof(link):
    ours, theirs = link
    ours.close()
    with pytest.raises(EOFError):
        messages.Inbox(theirs).receive()
    with pytest.raises(OSError):
        messages.send(theirs, "ask", 0, None)


def children():
    return [one for one in psutil.Process().children() if "ingest.worker" in " ".join(one.cmdline())]


def ingesting(faulty, scenario, *handlers, **options):
    """The scenario's result; no process is left behind."""
    try:
        return faulty.run(scenario, *handlers, ingest_process=True, **options)
    finally:
        assert children() == []


def test_samples_when_parsed_elsewhere_then_those_of_this_process(faulty):
    async def good(request):
        body = await request.json()
        ids = body["input_ids"]
        return answer(len(ids), [5, 6, 7], {"type": "length", "length": 3})

    async def scenario(client):
        return await client.generate([[1], [1, 2], [1, 2, 3]], SamplingParams(3), samples_per_prompt=2)

    found, expected = ingesting(faulty, scenario, good), faulty.run(scenario, good)
    assert len(found) == 6
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.prompt_ids, other.prompt_ids) and torch.equal(one.output_ids, other.output_ids)
        assert torch.equal(one.rollout_logprobs, other.rollout_logprobs)
        assert (one.finish_reason, one.weight_versions, one.engine) == (
            other.finish_reason,
            other.weight_versions,
            other.engine,
        )


def test_error_when_a_server_refuses_then_as_in_this_process(faulty):
    async def refuses(request):
        return web.Response(status=400, text="no such thing")

    async def scenario(client):
        with pytest.raises(Exception) as error:
            await client.generate([[1]], SamplingParams(1))
        return f"{type(error.value).__name__}: {error.value}", error.value.__notes__

    def without_port(told):
        return str(told).replace(told[0].split("127.0.0.1:")[1].split(" ")[0], "PORT")

    assert without_port(ingesting(faulty, scenario, refuses)) == without_port(faulty.run(scenario, refuses))


def test_process_when_it_is_killed_then_the_samples_are_asked_again_by_another(faulty):
    asked = []

    async def slow_once(request):
        if request.path != "/generate":
            return web.Response(status=404)
        body = await request.json()
        asked.append(body["input_ids"])
        if len(asked) == 1:
            [process] = children()
            process.kill()
            await asyncio.sleep(1)
        return one_token(len(body["input_ids"]))

    async def scenario(client):
        return await client.generate([[1, 2]], SamplingParams(1))

    [sample] = ingesting(faulty, scenario, slow_once)
    assert sample.output_ids.tolist() == [5] and asked == [[1, 2], [1, 2]]


def test_process_when_a_sample_is_cancelled_then_its_request_ends_and_others_go_on(faulty):
    ended = []

    async def handle(request):
        if request.path == "/abort_request":
            return web.Response()
        body = await request.json()
        if body["input_ids"] == [9]:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
        return one_token(len(body["input_ids"]))

    async def scenario(client):
        hangs = asyncio.create_task(client.generate([[9]], SamplingParams(1)))
        await client.generate([[1]], SamplingParams(1))
        await asyncio.sleep(0.1)
        hangs.cancel()
        await asyncio.wait([hangs])
        assert hangs.cancelled()
        return await client.generate([[1]], SamplingParams(1))

    assert len(ingesting(faulty, scenario, handle)) == 1


def test_process_when_this_one_dies_then_it_ends(tmp_path):
    program = tmp_path / "trainer.py"
    program.write_text(
        "import asyncio, os\n"
        "from megatron_rl_corr.rollout import RolloutClient, SamplingParams\n"
        "async def main():\n"
        "    client = RolloutClient(['http://127.0.0.1:9'], vocab_size=8, ingest_process=True)\n"
        "    client._ingest._open()\n"
        "    print(client._ingest._current.process.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    import subprocess
    import sys

    run = subprocess.run([sys.executable, program], capture_output=True, text=True, env=os.environ)
    pid, end = int(run.stdout), time.monotonic() + 20
    while psutil.pid_exists(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_routes_when_of_a_real_server_then_those_that_this_process_reads(keeping_server):
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]

    async def sampled(ingest_process):
        client = RolloutClient(
            [keeping_server.url],
            vocab_size=83,
            experts=SHAPE,
            ingest_process=ingest_process,
            max_concurrency=8,
        )
        async with client:
            return await client.generate([prompt], SamplingParams(6, ignore_eos=True), samples_per_prompt=8)

    there, here = asyncio.run(sampled(True)), asyncio.run(sampled(False))
    assert children() == []
    for one in there:
        assert one.routed_experts.shape == (len(prompt) + 5, 4, 2) and one.routed_experts.dtype == torch.uint8
        assert len(one.output_ids) == 6 and one.rollout_logprobs.isfinite().all()
        # What a prompt's tokens are sent to depends on no sample.
        assert torch.equal(one.routed_experts[:7], here[0].routed_experts[:7])
    assert all(one.prompt_ids is there[0].prompt_ids for one in there)
