"""One rank of a scale.py user, in a process of its own: prints as JSON what its push asks for.

python benchmarks/scale_worker.py '{"model": "KIMI_K2", "rank": 0, "parallel": {"world": 2048, ...}, ...}'
"""

import asyncio
import json
import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import SimpleNamespace

warnings.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # behind the package that is measured, which PYTHONPATH names

import psutil  # noqa: E402
import torch  # noqa: E402
from aiohttp import web  # noqa: E402

from benchmarks.fake_rank import Counts, HeldBytes, Parallel, counted, meta_model, start  # noqa: E402
from megatron_rl_corr.engines import load_engine  # noqa: E402
from megatron_rl_corr.engines.types import Request, Transport  # noqa: E402
from megatron_rl_corr.mcore import compat  # noqa: E402
from megatron_rl_corr.models.names import NameTable  # noqa: E402
from megatron_rl_corr.models.shards import local_parameters  # noqa: E402
from megatron_rl_corr.reduce import failure  # noqa: E402
from megatron_rl_corr.rollout.blocking import LoopThread  # noqa: E402
from megatron_rl_corr.rollout.client import RolloutClient  # noqa: E402
from megatron_rl_corr.weight_sync import export  # noqa: E402
from megatron_rl_corr.weight_sync.servers import WeightServers  # noqa: E402
from megatron_rl_corr.weight_sync.transports import broadcast  # noqa: E402
from megatron_rl_corr.weight_sync.update import push_weights  # noqa: E402
from megatron_rl_corr.weight_sync.verify import PushVerifier  # noqa: E402
from tests.commands.planner import published  # noqa: E402

try:
    from megatron_rl_corr.weight_sync.transports import announcers
except ImportError:  # a version before them
    announcers = None

TENSORS, ROUNDS = 80, 12
"""Tensors that a bucket announces, and buckets, where the time of a request is taken."""
BUCKET = {
    "names": [f"model.layers.7.mlp.experts.{i}.gate_proj.weight" for i in range(TENSORS)],
    "dtypes": ["bfloat16"] * TENSORS,
    "shapes": [[1536, 4096]] * TENSORS,
    "group_name": "g",
}
"""What a bucket is announced with."""
CHANGES = {
    "names": ["n" * 100_000, "values"],
    "dtypes": ["int32", "bfloat16"],
    "shapes": [[2**28], [2**28]],
    "group_name": "g",
}
"""The same of changes: a name tells of some thousand tensors."""
INFO = {
    "version": "0.5.23",
    "tp_size": 8,
    "pp_size": 1,
    "ep_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "dtype": "auto",
    "device": "cuda",
    "quantization": None,
}


class Answering(Transport):
    """Servers that answer at once, in the place of HTTP; counts what is asked of them."""

    def __init__(self, ranks: int):
        self.asked, self.bytes, self.versions, self._ranks = Counter(), Counter(), {}, ranks

    async def send(self, url: str, request: Request, *, timeout_s: float | None = None) -> tuple[int, bytes]:
        self.asked[request.endpoint] += 1
        if request.json is not None and self.asked[request.endpoint] < 2:
            self.bytes[request.endpoint] = len(json.dumps(request.json))
        if request.endpoint == "/update_weight_version":
            self.versions[url] = request.json["new_version"]
        answer = {
            "/model_info": {"weight_version": self.versions.get(url, "default"), "model_path": "m"},
            "/server_info": INFO | {"tp_size": self._ranks},
            "/weights_checker": {
                "success": True,
                "ranks": [{"parallelism_info": {"tp_rank": 0}, "checksums": {}}],
            },
        }.get(request.endpoint, {"success": True, "status": "ok", "message": ""})
        return 200, b"Cache flushed" if request.endpoint == "/flush_cache" else json.dumps(answer).encode()

    async def close(self) -> None:
        """Nothing is open."""


class CountedGroup:
    """A process group of a sender and all servers, in which nothing travels."""

    def __init__(self, counts: Counts):
        self._counts = counts

    def broadcast(self, tensor: torch.Tensor, root: int) -> SimpleNamespace:
        """Counted, and done."""
        self._counts.note("broadcast", "servers", sent=tensor.nbytes)
        return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)


def main() -> None:
    asked = json.loads(sys.argv[1])
    logging.disable()
    parallel, hf = Parallel(**asked["parallel"]), getattr(published, asked["model"])
    start(parallel, asked["rank"])
    model, layout = meta_model(hf, parallel), compat.layout()
    experts = (hf.get("num_experts") or hf["n_routed_experts"]) // parallel.expert
    parameters = local_parameters(
        [model], NameTable(hf, padded_vocab_size=hf["vocab_size"]), experts_per_rank=experts
    )
    names = {
        layout.tp_group: "tensor",
        layout.stage_groups.expert: "expert",
        layout.stage_groups.senders: "senders",
    }
    objects = {
        # (expert-parallel rank, tensor-parallel rank) of each member
        layout.tp_group: [(0, i) for i in range(parallel.tensor)],
        layout.stage_groups.expert: [(i, 0) for i in range(parallel.expert)],
        layout.stage_groups.senders: [{"sglang": []}],  # the servers' checksums
    }
    with counted(names, objects) as counts, LoopThread() as loop:
        exporter = export.StageExporter(
            parameters,
            layout.shard,
            layout.stage_groups,
            stage=layout.pp_rank,
            num_stages=layout.pp_size,
        )
        planned = exporter.planned()
        found = push(asked, exporter, planned, counts, loop)
    found["own_bytes"] = sum(parameter.tensor.nbytes for parameter in parameters)
    if exporter.leads:
        found |= costs(asked["servers"], BUCKET) | {"changes": costs(asked["servers"], CHANGES)}
    print(json.dumps(found))


def push(
    asked: dict, exporter: export.StageExporter, planned: dict, counts: Counts, loop: LoopThread
) -> dict:
    """What a push of this rank asks of its groups and of the servers, and what it holds."""
    urls = [f"http://10.{i // 200}.{i % 200}.1:1" for i in range(asked["servers"])]
    client = RolloutClient(urls, vocab_size=2**20, engine="sglang")
    transport = Answering(asked["gpus"])
    client.fleet._transports = dict.fromkeys(client.fleet._transports, transport)
    broadcast._join = lambda *_, **__: CountedGroup(counts)
    broadcast.listening_store = lambda address, timeout_s: (None, 1)
    broadcast.address_towards = lambda url: "127.0.0.1"
    failure.meeting_interval_s = lambda: 1.0  # the fake backend has no time limit that this is a part of
    elements = asked["elements"]
    servers = WeightServers(
        client,
        loop,
        broadcast.DistributedTransport(client.control, loop, backend="nccl"),
        verifiers={"sglang": PushVerifier(load_engine("sglang"), elements)},
    )
    if exporter.num_stages > 1:
        servers.planned = planned  # as gathered from all stages, once a run
    before = time.thread_time()
    with HeldBytes() as held:
        push_weights(exporter, servers, version="1", bucket_bytes=int(bucket_mib(asked["servers"]) * 2**20))
    sent = counts.sent["broadcast", "servers"]
    return {
        "sends": exporter.sends,
        "tensors": len(planned),
        "planned_bytes": len(json.dumps(planned)),
        "sent_to_servers": sent,
        "requests": transport.asked,
        "request_bytes": transport.bytes,
        "held": held.most,
        "interpreter_s": time.thread_time() - before - held.spent_s,
        "overlaps": hasattr(broadcast.DistributedTransport, "finish"),
        "groups": counts.table(),
    }


def bucket_mib(servers: int) -> float:
    """The package's default."""
    chosen = getattr(export, "default_bucket_mib", None)
    return 256.0 if chosen is None else chosen(servers)


def costs(servers: int, bucket: dict) -> dict:
    """What it takes to announce a bucket to so many servers, from this process and from others."""
    return {"request_s": seconds_per_request(servers, bucket), "announced": announced(servers, bucket)}


def seconds_per_request(servers: int, bucket: dict) -> float:
    """Processor time of this package's client for one request of a bucket, to so many servers at once."""

    async def ask(urls: list[str]) -> float:
        client = RolloutClient(urls, vocab_size=8, engine="sglang")
        spent = []
        for _ in range(ROUNDS):
            before = time.thread_time()
            await client.update_weights_from_distributed(**bucket)
            spent.append((time.thread_time() - before) / servers)
        await client.close()
        return statistics.median(spent)

    with listening(servers) as urls:
        return asyncio.run(ask(urls))


def announced(servers: int, bucket: dict) -> dict[str, float] | None:
    """Processor time where processes announce: this one's of a bucket, theirs of a request; or None."""
    if announcers is None or not (count := announcers.announcing_processes(servers)):
        return None
    with listening(servers) as urls, LoopThread() as loop:
        others = set(psutil.Process().children())
        client = RolloutClient(urls, vocab_size=8, engine="sglang")
        made = announcers.Announcers(loop, [client.asking_process() for _ in range(count)])
        for _ in range(3):  # they start, and connect
            made.announce(client, bucket).result()
        workers = [one for one in psutil.Process().children() if one not in others]
        before = time.process_time(), processor_s(workers)
        for _ in range(ROUNDS):
            made.announce(client, bucket).result()
        own, theirs = time.process_time() - before[0], processor_s(workers) - before[1]
        made.close()
        loop.call(client.close())
    return {"processes": count, "bucket_s": own / ROUNDS, "request_s": theirs / ROUNDS / servers}


def processor_s(processes: list[psutil.Process]) -> float:
    """What they have taken so far."""
    return sum(sum(one.cpu_times()[:2]) for one in processes)


@contextmanager
def listening(servers: int) -> Iterator[list[str]]:
    """The addresses of so many servers that answer any request well, in a process of their own."""
    ports: SimpleQueue = get_context("fork").SimpleQueue()
    process = get_context("fork").Process(target=_listen, args=(ports, servers), daemon=True)
    process.start()
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports.get()]
    finally:
        process.kill()
        process.join()


def _listen(ports: SimpleQueue, servers: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"success": True, "message": ""})

    async def listen() -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        for _ in range(servers):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.put([address[1] for address in runner.addresses])
        await asyncio.Event().wait()

    asyncio.run(listen())


if __name__ == "__main__":
    main()
