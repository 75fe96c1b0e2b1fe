"""Whole runs on two servers that share the trainer's GPUs in turn, one of which ends: the other
does all the rest.
"""

import asyncio
import json
from pathlib import Path

import pytest

from megatron_rl_corr.rollout import RolloutClient
from tests.faults.drills import drill, long
from tests.mcore.launched import launch, write_data
from tests.preloaded import PreloadedServer, address
from tools.cpu import environment, sglang_arguments

SCRIPT = Path(__file__).with_name("server_killed_pretrain.py")
RUN = [
    "--global-batch-size",
    16,
    "--train-iters",
    3,
    "--save-interval",
    10,
    "--moe-grouped-gemm",
    "--moe-permute-fusion",
    "--rollout-weight-transport",
    "tensor",
    "--rollout-colocate",
]
MOMENTS = {
    "pause": "2:/pause_generation",
    "release": "2:/release_memory_occupation weights,kv_cache,cuda_graph",
    "weights": "2:/resume_memory_occupation weights",
    "begin": "2:/begin_weight_update",
    "bucket": "3:/update_weights_from_tensor",
    "end": "2:/end_weight_update",
    "cache": "2:/resume_memory_occupation kv_cache,cuda_graph",
    "continue": "2:/continue_generation",
}
"""In the first batch, behind those of the start. Deaths while sampling:
tests/rollout/test_failover_real_servers.py.
"""


@pytest.fixture(scope="module")
def serving(tiny_moe_dir, tmp_path_factory):
    """serving(): a new server with a memory saver; all end with the module."""
    address("megatron")  # what forks runs must not end with a thread that waits for a server
    started = []

    def serve():
        log = tmp_path_factory.mktemp("colocated") / "server.log"
        server = PreloadedServer(
            tiny_moe_dir,
            dtype="float32",
            log_path=log,
            environment=environment("sglang"),
            extra_arguments=[*sglang_arguments(), "--enable-memory-saver"],
        )
        started.append(server)
        server.start().wait_ready()
        return server

    yield serve
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def survivor(serving):
    return serving()


async def version_of(url):
    async with RolloutClient([url], vocab_size=83, timeout_s=60) as client:
        return (await client.reported_versions())[0]


@drill(
    "a server dies while it and the trainer share GPUs in turn",
    promised="left out, the run ends with the other",
)
@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=[long] * (name != "release")) for name in MOMENTS]
)
def test_run_when_one_of_two_colocated_servers_dies_then_the_other_does_the_rest(
    moment, serving, survivor, tiny_moe_dir, tmp_path, seen
):
    victim = serving()
    write_data(tmp_path)
    done = launch(
        tmp_path,
        "run",
        tiny_moe_dir,
        [survivor.url, victim.url],
        SCRIPT,
        *RUN,
        "--rollout-events",
        tmp_path / "events.jsonl",
        processes=2,
        KILL_SERVER=f"{victim.pid} {victim.url} {MOMENTS[moment]}",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("[killed]") == 1, "the server was not killed"
    steps = [json.loads(line) for line in (tmp_path / "run/log/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3] and not any(
        step["rollout/failed_fraction"] for step in steps
    )
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    left_out = [event for event in told if event["kind"] == "server_left_out"]
    assert left_out and {event["server"] for event in left_out} == {victim.url}
    assert asyncio.run(version_of(survivor.url)).endswith("-3")
    seen(f"left out at step {left_out[0]['step']}, steps 1 to 3")
