"""A process beside the trainer asks for samples and parses their answers: the same samples and errors,
and what becomes of it when it, or somebody who waits for it, ends.
"""

import asyncio
import base64
import errno
import gc
import itertools
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
import torch
from aiohttp import web
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.local_faults import LocalFault
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.rollout import (
    Environment,
    Prompt,
    RolloutClient,
    SamplingParams,
    generate_episodes,
    retries,
)
from megatron_rl_corr.rollout.ingest import messages, worker
from megatron_rl_corr.rollout.ingest.process import _Process
from tests.asking_processes import asking_processes
from tests.stand_in_server import answer, one_token
from tests.tiers import in_matrix, matrix

pytestmark = matrix

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


def ingesting(faulty, scenario, *handlers, **options):
    """The scenario's result; no process is left behind."""
    try:
        return faulty.run(scenario, *handlers, **(options | {"ingest_process": True}))
    finally:
        assert asking_processes() == []


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


async def refuses(request):
    return web.Response(status=400, text="no such thing")


async def quotes_the_key(request):
    return web.Response(status=400, text=request.headers["Authorization"])


async def answers_too_much(request):
    return web.Response(body=bytes(4 << 20))


async def breaks_off(request):
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"x")
    request.transport.close()
    return response


async def answers_other_ids(request):
    return answer(7, [5], {"type": "length", "length": 1})


@pytest.mark.parametrize(
    "handler", [refuses, answers_other_ids, *in_matrix(quotes_the_key, answers_too_much, breaks_off)]
)
def test_error_when_a_server_fails_then_as_in_this_process(faulty, handler):
    command_lines = []

    async def scenario(client):
        with pytest.raises(Exception) as error:
            await client.generate([[1]], SamplingParams(1))
        command_lines.extend(str(one.cmdline()) for one in asking_processes())
        return f"{type(error.value).__name__}: {error.value}", error.value.__notes__

    def without_port(told):
        return str(told).replace(told[0].split("127.0.0.1:")[1].split(" ")[0], "PORT")

    options = {"api_key": "s3cret-k3y", "max_retries": 0}
    there = without_port(ingesting(faulty, scenario, handler, **options))
    assert there == without_port(faulty.run(scenario, handler, **options))
    assert "s3cret" not in there and len(command_lines) == 1 and "s3cret" not in command_lines[0]


def test_fault_of_this_host_when_it_lasts_and_all_wait_for_it_then_raised(faulty):
    """The process tells how many wait there: to this one all of them look as if in flight."""

    class Unreachable:
        waiting_here = 2

        async def ready(self):
            pass

        async def answer(self, url, asked):
            raise LocalFault(url, "/generate", "no descriptor", "raise it", sent=True)

    async def scenario(client):
        client._retries._ingest = Unreachable()
        with pytest.raises(LocalFault, match="no descriptor"):
            await client.generate([[1], [2], [3]], SamplingParams(1))

    faulty.run(scenario, refuses)


def test_process_when_it_tells_of_a_fault_then_how_many_wait_there_is_kept(faulty):
    async def scenario(client):
        ingest, loop = client._ingest, asyncio.get_running_loop()
        current = _Process(None, None, loop)
        future = loop.create_future()
        current.waiting[3] = "ask", "u", future
        ingest._hand_on(current, "error", 3, (LocalFault("u", "/", "no descriptor", ""), 7))
        with pytest.raises(LocalFault):
            await future
        assert ingest.waiting_here == 7

    ingesting(faulty, scenario, refuses)


def test_process_when_it_can_not_start_then_an_error_that_names_the_option(faulty, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")

    why = "ended 3 times before it could take.*or set `ingest_process` off"

    async def scenario(client):
        with pytest.raises(RuntimeError, match=why):
            await client.generate([[1]] * 20, SamplingParams(1))

    ingesting(faulty, scenario, refuses, outage_timeout_s=10)


@contextmanager
def descriptors_left(count):
    free = os.dup(0)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_message_when_this_process_has_no_descriptor_left_then_an_error(link):
    ours, theirs = link
    kept = messages.send(ours, "answer", 0, torch.zeros(1 << 20))
    with descriptors_left(0), pytest.raises(OSError) as error:
        messages.Inbox(theirs).receive()
    assert error.value.errno == errno.EMFILE and kept is not None


def test_message_when_its_memory_can_not_be_mapped_then_an_error_of_this_host(link):
    """One descriptor is left, for the memory, and none to open it: torch raises RuntimeError for that."""
    ours, theirs = link
    kept = messages.send(ours, "answer", 0, torch.zeros(1 << 20))
    with descriptors_left(1):
        with pytest.raises(OSError, match="can't be mapped") as sending:
            messages.send(ours, "answer", 1, torch.zeros(1 << 20))
        with pytest.raises(OSError, match="can't be mapped") as receiving:
            messages.Inbox(theirs).receive()
    assert sending.value.errno == receiving.value.errno == errno.ENOMEM and kept is not None


def test_process_when_it_starts_slowly_then_no_server_is_taken_for_silent(faulty):
    """It takes seconds, in which an idle server has no request though this client waits for its answer."""
    readings = itertools.count()

    async def idle(request):
        if request.path == "/generate":
            return one_token(1)
        load = {"dp_rank": 0, "num_used_tokens": 0, "num_running_reqs": 0, "num_waiting_reqs": 0}
        return web.json_response({"loads": [load | {"timestamp": float(next(readings))}]})

    idle.shows_loads = True

    async def scenario(client):
        await client.generate([[1]], SamplingParams(1))
        return client.counts()["left_out"]

    # A reading every 0.8 s, once something is asked there: that takes a moment, and the start seconds.
    assert ingesting(faulty, scenario, idle, read_timeout_s=4.0) == 0 and next(readings) == 0


def test_message_when_it_is_small_then_without_shared_memory_and_else_its_end_is_told(link):
    ours, theirs = link
    freed = []
    inbox = messages.Inbox(theirs, freed.append)
    assert messages.send(ours, "answer", 1, torch.zeros(1000)) is None
    assert messages.send(ours, "answer", 2, torch.ones(1 << 20)) is not None
    small, large = inbox.receive()[2], inbox.receive()[2]
    view = large[7:9]
    del small, large
    gc.collect()
    assert freed == [] and view.tolist() == [1, 1]
    del view
    gc.collect()
    assert freed == [2]


def test_process_when_it_is_killed_then_the_samples_are_asked_again_by_another(faulty):
    asked = []

    async def slow_once(request):
        if request.path != "/generate":
            return web.Response(status=404)
        body = await request.json()
        asked.append(body["input_ids"])
        if len(asked) == 1:
            [process] = asking_processes()
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


def test_process_when_a_signal_ends_the_group_then_it_goes_on_until_the_trainer_ends(faulty):
    """The trainer may finish its step and save before it leaves, as with --exit-signal-handler."""
    asked = []

    async def slow(request):
        if request.path != "/generate":
            return web.Response(status=404)
        asked.append(1)
        [process] = asking_processes()
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        await asyncio.sleep(0.5)
        return one_token(1)

    async def scenario(client):
        return await client.generate([[1]], SamplingParams(1))

    assert len(ingesting(faulty, scenario, slow)) == 1 and len(asked) == 1


def test_answers_when_this_host_loses_each_then_an_error_and_not_for_ever_anew(faulty):
    """As where every request ends the process. Of several samples each sees the others in flight: none
    would find that nothing works.
    """
    asked = []

    class Losing:
        waiting_here = 0

        async def ready(self):
            pass

        async def answer(self, url, one):
            asked.append(one.prompt_ids.tolist())
            raise LocalFault(url, "/generate", "it is gone", "see why", sent=True)

    async def scenario(client):
        client._retries._ingest = Losing()
        with pytest.raises(LocalFault, match="it is gone") as error:
            await client.generate([[1], [2], [3]], SamplingParams(1))
        assert f"lost {retries.MOST_LOST} times" in str(error.value.__notes__)

    faulty.run(scenario, refuses, outage_timeout_s=0)
    assert asked.count([1]) == retries.MOST_LOST


def test_request_when_it_can_not_be_sent_there_then_an_error_and_no_endless_wait(faulty, monkeypatch):
    send = messages.send

    def sends(link, kind, number, value):
        if kind == "ask":
            raise TypeError("cannot pickle this")
        return send(link, kind, number, value)

    monkeypatch.setattr(messages, "send", sends)

    async def scenario(client):
        with pytest.raises(TypeError, match="cannot pickle this"):
            await client.generate([[1]], SamplingParams(1))

    ingesting(faulty, scenario, refuses)


def test_error_when_it_can_not_be_pickled_then_it_goes_by_its_words():
    """Nobody would tell who waits for the answer."""
    made = worker._portable(RuntimeError("with a socket", threading.Lock()), "http://s:1")
    assert isinstance(made, RolloutProtocolError) and "with a socket" in str(made)
    assert type(worker._portable(ValueError("simple"), "http://s:1")) is ValueError


@pytest.mark.parametrize("forked", [False, *in_matrix(True)])
def test_process_when_this_one_dies_then_it_ends(tmp_path, forked):
    """Also where a process that was forked off, as a data loader's, keeps the connection open."""
    program = tmp_path / "trainer.py"
    program.write_text(
        "import asyncio, os, time\n"
        "from megatron_rl_corr.rollout import RolloutClient, SamplingParams\n"
        "async def main():\n"
        "    client = RolloutClient(['http://127.0.0.1:9'], vocab_size=8, ingest_process=True)\n"
        "    client._ingest._open()\n"
        f"    child = os.fork() if {forked} else -1\n"
        "    if child == 0:\n"
        "        os.close(1); os.close(2); time.sleep(60); os._exit(0)\n"
        "    print(client._ingest._current.process.pid, child, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, env=os.environ)
    pid, child = map(int, run.stdout.split())
    end = time.monotonic() + 30
    try:
        while psutil.pid_exists(pid) and time.monotonic() < end:
            time.sleep(0.05)
        assert not psutil.pid_exists(pid) and (child < 0 or psutil.pid_exists(child))
    finally:
        if child > 0:
            os.kill(child, 9)


TURNS, LAYERS, TOP_K, SPOKEN = 20, 48, 8, 100
"""Turns of an episode, and tokens of each."""
WIDE = ExpertShape(LAYERS, tuple(range(LAYERS)), TOP_K, 128)


class Talker(Environment):
    def __init__(self, prompt):
        pass

    def step(self, output_ids, finish_reason):
        return [7]


async def routing(request):
    """Turns of SPOKEN tokens, whose routes follow from where they are; the third one is cut
    in the middle by a pause.
    """
    if request.path != "/generate":
        return web.Response(status=404)
    body = await request.json()
    prompt, first = len(body["input_ids"]), body["routed_experts_start_len"]
    at, reason = prompt % (SPOKEN + 1), "stop"
    tokens = SPOKEN - (at - 1)
    if prompt == 1 + 2 * (SPOKEN + 1):
        tokens, reason = 40, "abort"
    rows = np.arange(first, prompt + tokens - 1)[:, None, None]
    ids = (rows + np.arange(LAYERS)[:, None] + np.arange(TOP_K)) % 128
    made = {
        "output_ids": [5] * tokens,
        "meta_info": {
            "finish_reason": {"type": reason},
            "prompt_tokens": prompt,
            "weight_version": "v1",
            "num_retractions": 0,
            "output_token_logprobs": [[-1.0, 5, None]] * tokens,
            "routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode(),
        },
    }
    return web.json_response(made)


class Copies(TorchDispatchMode):
    """Counts the bytes of what torch's operations return in this thread."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            if found.untyped_storage().data_ptr() not in {one.untyped_storage().data_ptr() for one in given}:
                self.bytes += found.nbytes
        return found


@pytest.mark.parametrize("there", [False, True])
def test_episode_of_20_turns_when_it_has_routes_then_it_copies_its_bytes_and_not_those_of_each_turn(
    faulty, monkeypatch, there
):
    moved, loads, send = [], pickle.loads, messages.send

    def received(data, buffers=()):
        buffers = list(buffers)
        moved.extend(len(one) for one in buffers)
        return loads(data, buffers=buffers)

    def sent(link, kind, number, value):
        if kind == "ask":
            moved.append(value[2].prompt_ids.nbytes)
        return send(link, kind, number, value)

    async def scenario(client):
        with Copies() as copies:
            [whole] = await generate_episodes(
                client, [Prompt(0, [1])], SamplingParams(4000), environment=Talker, max_turns=TURNS
            )
        return whole, copies.bytes

    monkeypatch.setattr(messages.pickle, "loads", received)
    monkeypatch.setattr(messages, "send", sent)
    if there:
        whole, copied = ingesting(faulty, scenario, routing, experts=WIDE)
    else:
        whole, copied = faulty.run(scenario, routing, experts=WIDE)
    tokens = 1 + TURNS * (SPOKEN + 1) - 1
    assert whole.routed_experts.shape == (tokens - 1, LAYERS, TOP_K) and whole.routes_from == 0
    expected = (torch.arange(tokens - 1)[:, None, None] + torch.arange(LAYERS)[:, None]) + torch.arange(TOP_K)
    assert torch.equal(whole.routed_experts.long(), expected % 128)
    assert whole.turn_ids.max() == TURNS - 1 and whole.output_ids.numel() == tokens - 1
    size = whole.routed_experts.nbytes
    # Once as parts and once joined; to join at each turn takes 10 times its bytes, and to send
    # what is known again too. A prompt's ids go with each turn: 8 bytes of 384 a token.
    assert copied + sum(moved) < 2.6 * size
    if there:
        assert sum(moved) < 1.4 * size


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
    assert asking_processes() == []
    for one in there:
        assert one.routed_experts.shape == (len(prompt) + 5, 4, 2) and one.routed_experts.dtype == torch.uint8
        assert len(one.output_ids) == 6 and one.rollout_logprobs.isfinite().all()
        # What a prompt's tokens are sent to depends on no sample.
        assert torch.equal(one.routed_experts[:7], here[0].routed_experts[:7])
    assert all(one.prompt_ids is there[0].prompt_ids for one in there)
