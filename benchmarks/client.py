"""What the client costs the trainer's process for each sample, with and without an ingest process.

python benchmarks/client.py [--models none 30B-A3B 235B-A22B] [--lengths 1024 8192 32768] [--samples 24]
[--in-flight 8]

A process of its own answers every request with one answer of SGLang's form, over the loopback. Of each
case: the processor's time of this process for a sample, that of the ingest process, and how late the
event loop of this process ran at worst and in the 99th of 100 cases; a GPU's training waits for neither
but for the interpreter of this process. A bare client, aiohttp with orjson, that checks nothing, stands
beside.
"""

import argparse
import asyncio
import base64
import datetime
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import psutil
import torch
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.correction import machine_name
from benchmarks.ingest import MODELS, PROMPT, VOCAB_SIZE, answer, routed_answer
from benchmarks.quiet import only_tables
from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.rollout import RolloutClient, SamplingParams

WAYS = ("bare aiohttp and orjson", "in this process", "ingest process")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["none", "30B-A3B", "235B-A22B"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--in-flight", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}, Python {sys.version.split()[0]}, {machine_name('cpu')}\n")
    columns = ["routes of", "response", "MB", "way", "this process, ms a sample", "ingest process, ms"]
    print("| " + " | ".join([*columns, "loop late, ms: p99", "most"]) + " |\n|" + "---|" * 8)
    for model in options.models:
        shape = MODELS.get(model)
        for length in options.lengths:
            body = answer(length, False) if shape is None else routed_answer(length, shape)[0]
            for way in WAYS:
                own, others, late = measured(way, body, shape, length, options.samples, options.in_flight)
                late.sort()
                cells = [model, f"{length} tokens", f"{len(body) / 1e6:.1f}", way]
                cells += [f"{1e3 * own:.1f}", f"{1e3 * others:.1f}" if others else ""]
                cells += [f"{1e3 * late[int(0.99 * len(late))]:.1f}", f"{1e3 * late[-1]:.1f}"]
                print("| " + " | ".join(cells) + " |", flush=True)


def measured(
    way: str, body: bytes, shape: ExpertShape | None, length: int, samples: int, in_flight: int
) -> tuple[float, float, list[float]]:
    """(processor seconds of this process a sample, of its ingest process, how late the loop was)."""
    ports = get_context("fork").SimpleQueue()
    server = get_context("fork").Process(target=serve, args=(body, ports), daemon=True)
    server.start()
    try:
        return asyncio.run(asked(way, f"http://127.0.0.1:{ports.get()}", shape, length, samples, in_flight))
    finally:
        server.kill()
        server.join()


async def asked(
    way: str, url: str, shape: ExpertShape | None, length: int, samples: int, in_flight: int
) -> tuple[float, float, list[float]]:
    sampling, late = SamplingParams(length, ignore_eos=True), []
    client = RolloutClient(
        [url],
        vocab_size=VOCAB_SIZE,
        engine="sglang",
        experts=shape,
        max_concurrency=in_flight,
        ingest_process=way == "ingest process",
    )
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight), read_bufsize=1 << 20)

    async def work(count: int) -> None:
        if way != WAYS[0]:
            await client.generate([PROMPT.tolist()], sampling, samples_per_prompt=count)
            return

        async def one() -> None:
            async with session.post(url + "/generate", json={"input_ids": PROMPT.tolist()}) as response:
                found = orjson.loads(await response.read())["meta_info"]
            np.array([row[0] for row in found["output_token_logprobs"]], dtype=np.float32)
            if shape is not None:
                np.frombuffer(base64.b64decode(found["routed_experts"]), "<i4")

        await asyncio.gather(*(one() for _ in range(count)))

    async def watch() -> None:
        while True:
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            late.append(time.monotonic() - due)

    await work(in_flight)  # connections, and the start of the process
    helpers = [one for one in psutil.Process().children() if "ingest.worker" in " ".join(one.cmdline())]
    watching = asyncio.create_task(watch())
    before, before_others = time.process_time(), sum(sum(one.cpu_times()[:2]) for one in helpers)
    await work(samples)
    own = (time.process_time() - before) / samples
    others = (sum(sum(one.cpu_times()[:2]) for one in helpers) - before_others) / samples
    watching.cancel()
    await session.close()
    await client.close()
    return own, others, late


def serve(body: bytes, ports) -> None:
    async def answer_all(request: web.Request) -> web.Response:
        await request.read()
        if request.path != "/generate":
            return web.Response(status=404)
        return web.Response(body=body, content_type="application/json")

    async def listen() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", answer_all)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(listen())


if __name__ == "__main__":
    with only_tables():
        main()
