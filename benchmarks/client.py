"""What the client costs the trainer's process for each sample, with and without an ingest process.

python benchmarks/client.py [--models none 30B-A3B 235B-A22B] [--lengths 1024 8192 32768] [--samples 24]
[--in-flight 8] [--servers 1] [--delay 0 0] [--spread 1] [--repeats 1]

Processes of their own answer every request with an answer of SGLang's form, over the loopback; with
--servers 256 --in-flight 1024 --delay 1 4 --spread 4 they are a fleet, whose answers come after 1 to 4 s and
have from a quarter to all of a length's tokens. Of each case: the processor's time of this process and of the
ingest process, and how late the event loop of this process and another thread of it ran; a GPU's training
waits for neither but for the interpreter of this process. Time that the machine gave to others is not
counted in the last two columns. A bare client, aiohttp with orjson, that checks nothing, stands beside.
"""

import argparse
import asyncio
import base64
import datetime
import multiprocessing
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.correction import machine_name
from benchmarks.ingest import MODELS, PROMPT, VOCAB_SIZE, answer, routed_answer
from benchmarks.quiet import only_tables
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.rollout import RolloutClient, SamplingParams

WAYS = ("bare aiohttp and orjson", "in this process", "ingest process")
PROCESSES = 4
"""At most so many share the servers of a fleet."""
TICK_S = 0.02
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Load:
    """Requests of one case."""

    shape: ExpertShape | None
    lengths: tuple[int, ...]
    """Tokens of the answers, which come in turns."""
    servers: int
    delay: tuple[float, float]
    """Seconds until an answer, evenly between."""
    samples: int
    in_flight: int


@dataclass(frozen=True)
class Cost:
    """Seconds of one case."""

    own: float
    """Of the processor in this process, for a token."""
    others: float
    """The same in the ingest process."""
    late: np.ndarray
    """By which the event loop was late."""
    busy: np.ndarray
    """Of the processor in this process meanwhile, at most `late`."""
    stalled: np.ndarray
    """As `busy`, of another thread."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["none", "30B-A3B", "235B-A22B"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--delay", type=float, nargs=2, default=(0.0, 0.0), metavar="S")
    parser.add_argument("--spread", type=int, default=1, help="so many lengths, up to each of --lengths")
    parser.add_argument("--repeats", type=int, default=1, help="the medians of so many runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, Python {sys.version.split()[0]}, {machine_name('cpu')}\n")
    columns = ["routes of", "response", "MB", "way", "us a token", "ms a sample", "ms in this process"]
    columns += ["loop late, ms: p50", "p99", "by itself: p99", "another thread: most"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for model in options.models:
        for length in options.lengths:
            lengths = tuple(length * (part + 1) // options.spread for part in range(options.spread))
            load = Load(
                MODELS.get(model),
                lengths,
                options.servers,
                tuple(options.delay),
                options.samples,
                options.in_flight,
            )
            bodies = [body_of(load.shape, tokens) for tokens in lengths]
            # In turns, so that other work on the machine slows all of them.
            runs = [[measured(way, bodies, load) for way in WAYS] for _ in range(options.repeats)]
            for way, costs in zip(WAYS, zip(*runs, strict=True), strict=True):
                cells = [
                    model,
                    f"{lengths[0]} to {length} tokens" if options.spread > 1 else f"{length} tokens",
                ]
                cells += [f"{sum(map(len, bodies)) / len(bodies) / 1e6:.1f}", way, *told(costs, load)]
                print("| " + " | ".join(cells) + " |", flush=True)


def told(costs: tuple[Cost, ...], load: Load) -> list[str]:
    """The medians over the runs, as cells."""
    tokens = sum(load.lengths) / len(load.lengths)

    def middle(values) -> float:
        return statistics.median(float(value) for value in values)

    both, own = middle(one.own + one.others for one in costs), middle(one.own for one in costs)
    lags = [
        middle(np.quantile(one.late, 0.5) for one in costs),
        middle(np.quantile(one.late, 0.99) for one in costs),
        middle(np.quantile(one.busy, 0.99) for one in costs),
        middle(one.stalled.max() for one in costs),
    ]
    cells = [f"{1e6 * both:.3f}", f"{1e3 * tokens * both:.2f}", f"{1e3 * tokens * own:.2f}"]
    return cells + [f"{1e3 * lag:.1f}" for lag in lags]


def body_of(shape: ExpertShape | None, tokens: int) -> bytes:
    """One answer, which ends by itself."""
    body = answer(tokens, False) if shape is None else routed_answer(tokens, shape)[0]
    return body.replace(b'"type":"length"', b'"type":"stop"')


def measured(way: str, bodies: list[bytes], load: Load) -> Cost:
    """Of one way, with servers that are started for it."""
    count, queues, servers = min(PROCESSES, load.servers), [], []
    for part in range(count):
        queues.append(FORK.SimpleQueue())
        ports = len(range(part, load.servers, count))
        arguments = (bodies, load.delay, ports, queues[-1])
        servers.append(FORK.Process(target=serve, args=arguments, daemon=True))
        servers[-1].start()
    try:
        urls = [f"http://127.0.0.1:{port}" for queue in queues for port in queue.get()]
        return asyncio.run(asked(way, urls, load))
    finally:
        for server in servers:
            server.kill()
            server.join()


async def asked(way: str, urls: list[str], load: Load) -> Cost:
    client = RolloutClient(
        urls,
        vocab_size=VOCAB_SIZE,
        engine="sglang",
        experts=load.shape,
        max_concurrency=load.in_flight,
        ingest_process=way == "ingest process",
    )
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=load.in_flight), read_bufsize=1 << 20
    )

    async def work(count: int) -> int:
        """The tokens that came."""
        if way == WAYS[0]:
            return sum(
                await asyncio.gather(*(bare(session, urls[i % len(urls)], load) for i in range(count)))
            )
        sampling = SamplingParams(load.lengths[-1])
        tokens = 0

        async def trained(sample) -> None:  # and then gone, as the samples of a batch
            nonlocal tokens
            tokens += sample.output_ids.numel()

        await client.generate([PROMPT.tolist()], sampling, samples_per_prompt=count, on_sample=trained)
        return tokens

    await work(load.in_flight)  # connections, and the start of the process
    helpers = [one for one in psutil.Process().children() if "ingest.worker" in " ".join(one.cmdline())]
    # To watch costs as much as a sample: it is done in a second round.
    before, before_others = time.process_time(), sum(sum(one.cpu_times()[:2]) for one in helpers)
    tokens = await work(load.samples)
    own = (time.process_time() - before) / tokens
    others = (sum(sum(one.cpu_times()[:2]) for one in helpers) - before_others) / tokens
    watching, ended = asyncio.create_task(watched_loop()), threading.Event()
    thread_found: list[tuple[float, float]] = []
    thread = threading.Thread(target=watched_thread, args=(ended, thread_found))
    thread.start()
    await work(load.samples)
    ended.set()
    thread.join()
    watching.cancel()
    late, busy = np.array(await watching).T
    stalled = np.array(thread_found).T[1]
    await session.close()
    await client.close()
    return Cost(own, others, late, busy, stalled)


async def bare(session: aiohttp.ClientSession, url: str, load: Load) -> int:
    """One request as a few lines would send it: ids, log-probs and routes as tensors, and no check."""
    request = {"input_ids": PROMPT.tolist(), "sampling_params": {"max_new_tokens": load.lengths[-1]}}
    async with session.post(url + "/generate", json=request) as response:
        found = orjson.loads(await response.read())["meta_info"]
    rows = found["output_token_logprobs"]
    ids = torch.tensor([row[1] for row in rows])
    torch.tensor([row[0] for row in rows])
    if load.shape is not None:
        routes = np.frombuffer(base64.b64decode(found["routed_experts"]), "<i4")
        torch.from_numpy(routes.reshape(-1, load.shape.num_layers, load.shape.top_k).copy())
    return ids.numel()


async def watched_loop() -> list[tuple[float, float]]:
    """(how late the loop was, processor's time of this process meanwhile) until it is cancelled."""
    found = []
    while True:
        due, before = time.monotonic() + TICK_S, time.process_time()
        try:
            await asyncio.sleep(TICK_S)
        except asyncio.CancelledError:
            return found
        late = time.monotonic() - due
        found.append((late, min(late, time.process_time() - before)))


def watched_thread(ended: threading.Event, found: list[tuple[float, float]]) -> None:
    """The same of a thread that only sleeps, as one that starts a GPU's kernels: what it waits
    for is the interpreter.
    """
    while not ended.is_set():
        due, before = time.monotonic() + TICK_S, time.process_time()
        time.sleep(TICK_S)
        late = time.monotonic() - due
        found.append((late, min(late, time.process_time() - before)))


class Server(asyncio.Protocol):
    """Answers each POST of a connection after a while, and tells its model; 404 to anything else."""

    def __init__(self, bodies: list[bytes], delay: tuple[float, float], draw: random.Random):
        self._bodies, self._delay, self._draw = bodies, delay, draw
        self._got = b""

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, blank, rest = self._got.partition(b"\r\n\r\n")
        if not blank:
            return
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        if len(rest) < length:
            return
        self._got = rest[length:]
        if head.startswith(b"POST /generate"):
            asyncio.get_running_loop().call_later(self._draw.uniform(*self._delay), self._answer)
        elif head.startswith(b"GET /v1/models"):
            self._send(b'{"data": [{"id": "policy", "max_model_len": 1048576}]}')
        else:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def _answer(self) -> None:
        self._send(self._draw.choice(self._bodies))

    def _send(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        self._transport.write(memoryview(body))


def serve(bodies: list[bytes], delay: tuple[float, float], ports: int, queue) -> None:
    """So many servers, until the process is killed."""

    async def listen() -> None:
        loop, draw = asyncio.get_running_loop(), random.Random(0)
        made = [
            await loop.create_server(lambda: Server(bodies, delay, draw), "127.0.0.1", 0, backlog=1024)
            for _ in range(ports)
        ]
        queue.put([one.sockets[0].getsockname()[1] for one in made])
        await asyncio.Event().wait()

    asyncio.run(listen())


if __name__ == "__main__":
    with only_tables():
        main()
