"""Pushes of changes alone to servers that are killed in between: do all end with the same weights?

python benchmarks/killed_pushes.py [--pushes 300] [--servers sglang sglang vllm vllm] [--seed 0] [--out DIR]

Four Megatron ranks (pipeline 2, expert 2) train a tiny Qwen3 with experts in bfloat16 and push what changed,
everything with every tenth push. Now and then a random server is killed in whatever it does, and started
again. Every push is verified by checksums of all weights, and behind a push of changes that is due
everything is sent once more and must change no checksum. At the end the servers are asked once more, and
those of one engine compared with each other.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from local_run import environment, local_server, megatron_flags, torchrun  # noqa: E402

from benchmarks.pushes import run_flags, write_inputs  # noqa: E402
from benchmarks.quiet import only_tables  # noqa: E402
from megatron_rl_corr.engines.sglang.changes_loader import LOADER  # noqa: E402
from megatron_rl_corr.rollout.client import RolloutClient  # noqa: E402

EXTRA = {"sglang": ["--custom-weight-loader", LOADER], "vllm": []}
FULL_EVERY = 10
PAUSE_S, AWAY_S = (20.0, 60.0), (0.0, 8.0)
"""Seconds from a server's return to the next kill, and from a kill to the new start."""
COLUMNS = (
    "servers",
    "status",
    "pushes",
    "of changes",
    "share of values",
    "push s: changes",
    "everything",
    "kills",
    "sent again",
    "changes given up",
    "checksums at the end",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pushes", type=int, default=300)
    add("--servers", nargs="+", choices=EXTRA, default=["sglang", "sglang", "vllm", "vllm"])
    add("--seed", type=int, default=0, help="of whom is killed when")
    add("--out", type=Path, help="new folder that keeps the run (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        row = drilled(options.out or Path(temporary) / "run", options.servers, options.pushes, options.seed)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    print("| " + " | ".join(map(str, row)) + " |")


def drilled(folder: Path, engines: list[str], pushes: int, seed: int) -> tuple:
    """The row of the table."""
    folder.mkdir(parents=True)
    model = write_inputs(folder, "moe")
    servers = [
        local_server(
            model,
            engine=engine,
            dtype="bfloat16",
            log_path=folder / f"server{number}.log",
            seed=number,
            slots=32,
            extra_arguments=EXTRA[engine],
        )
        for number, engine in enumerate(engines)
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        status, kills = trained(folder, model, servers, pushes, random.Random(seed))
        rows = [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]
        version = f"-{rows[-1]['weight_version']}"  # behind the name of the run
        equal = asyncio.run(compared([server.url for server in servers], version))
    finally:
        for server in servers:
            server.stop()
    changes = [row for row in rows if row["rollout/push_changed"] < 1]
    whole = [row for row in rows if row["rollout/push_changed"] == 1]
    told = Counter(json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines())
    return (
        ", ".join(engines),
        status,
        len(rows),
        len(changes),
        f"{statistics.median(row['rollout/push_changed'] for row in changes):.2%}",
        *(f"{statistics.median(row['time/push_s'] for row in each):.2f}" for each in (changes, whole)),
        kills,
        told["push_repeated"],
        told["changes_given_up"],
        equal,
    )


def trained(folder: Path, model: Path, servers: list, pushes: int, chance: random.Random) -> tuple[int, int]:
    """(exit status of the run, kills)."""
    command = torchrun(
        [
            *megatron_flags(model, folder / "tensorboard"),
            *run_flags(folder, folder / "log", [server.url for server in servers]),
            "--pipeline-model-parallel-size",
            2,
            "--expert-model-parallel-size",
            2,
            "--bf16",
            "--micro-batch-size",
            4,
            "--train-iters",
            pushes,
            "--lr",
            1e-5,
            "--rollout-events",
            folder / "events.jsonl",
            "--rollout-push",
            "delta",
            "--rollout-push-full-every",
            FULL_EVERY,
        ],
        processes=4,
    )
    kills = 0
    with open(folder / "train.log", "w") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=environment("megatron"), stdout=log, stderr=log)
        try:
            while not ended_within(run, chance.uniform(*PAUSE_S)):
                server = chance.choice(servers)
                os.killpg(server.pid, signal.SIGKILL)
                kills += 1
                server.stop()
                time.sleep(chance.uniform(*AWAY_S))
                server.start().wait_ready()
        finally:
            run.terminate()
            run.wait()
    return run.returncode, kills


def ended_within(run: subprocess.Popen, seconds: float) -> bool:
    """Whether the run has ended by then."""
    try:
        run.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


async def compared(urls: list[str], version: str) -> str:
    """What the checksums of every parameter say of the servers that have the last version.

    Servers of one engine must have the same; one that was killed last may have missed the last push.
    """
    client = RolloutClient(urls, vocab_size=2**20, engine="auto")
    try:
        await client.find_servers(60)
        everyone = client.control(urls)
        await everyone.wait_healthy(60)
        versions = await everyone.reported_versions()
        current = [url for url, own in zip(urls, versions, strict=True) if own and own.endswith(version)]
        for servers in client.control(current).by_engine().values():
            answers = await servers.weights_checker()
            of_each = [
                servers.engine_of(url).all_checksums(url, answer)
                for url, answer in zip(servers.base_urls, answers, strict=True)
            ]
            if any(one != of_each[0] for one in of_each):
                return "DIFFER"
    finally:
        await client.close()
    return f"{len(current)} of {len(urls)} current, equal"


if __name__ == "__main__":
    with only_tables():
        main()
