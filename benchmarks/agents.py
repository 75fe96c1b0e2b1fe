"""What agents cost: of the gateway's process for each request, of long conversations, and of processes.

python benchmarks/agents.py [--only requests long processes throughput] [--episodes 256] [--turns 20]
[--template qwen3] [--repeats 5]

requests: a process sends a request of each of --episodes episodes at once, and waits for all answers; a
rollout server in another process answers at once. The processor's time of the gateway's process, less that of
a bare client there which asks the server for the same ids; the least of --repeats rounds, in turns.
long: conversations of 40 turns and 32k tokens: the memory of an episode; and how late the event loop is for
others while prompts of 32k tokens come.
processes: 1,000 episodes at once, each in a process of its own (benchmarks/agent_harness.py).
throughput: a real tiny SGLang on this machine: the same episodes by an Environment, by one light process
that asks the gateway, and by a process an episode.
"""

import argparse
import asyncio
import datetime
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.agent_clients import FORK, WIRES, Callers, Conversation, Wire  # noqa: E402
from benchmarks.agent_processes import processes_table  # noqa: E402
from benchmarks.agent_rig import (  # noqa: E402
    SAMPLING,
    VOCAB_SIZE,
    answer_of,
    conversation,
    make_tokenizer,
    rules_of,
    server,
    text_of_docs,
)
from benchmarks.agent_throughput import throughput_table  # noqa: E402
from benchmarks.client import watched_loop  # noqa: E402
from benchmarks.correction import machine_name  # noqa: E402
from benchmarks.quiet import only_tables  # noqa: E402
from megatron_rl_corr.data.tokenizer import Tokenizer  # noqa: E402
from megatron_rl_corr.rollout.client import RolloutClient  # noqa: E402
from megatron_rl_corr.rollout.gateway.episode import Episode  # noqa: E402
from megatron_rl_corr.rollout.gateway.server import Gateway  # noqa: E402
from megatron_rl_corr.rollout.gateway.templates import Templates  # noqa: E402
from megatron_rl_corr.rollout.seeds import Draw  # noqa: E402

PARTS = ("requests", "long", "processes", "throughput")
SHOWN = (1, 5, 10)
"""Turns that are measured, beside the last."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    for name, default in {"episodes": 256, "turns": 20, "tokens": 128, "new": 200, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--template", default="qwen3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = text_of_docs()
    tokenizer = make_tokenizer(text, options.template)
    print(f"{datetime.date.today()}, Python {sys.version.split()[0]}, {machine_name('cpu')}")
    if "requests" in options.only:
        requests_table(tokenizer, text, options)
    if "long" in options.only:
        memory_table(tokenizer, text)
        loop_table(tokenizer, text)
    if "processes" in options.only:
        processes_table(tokenizer, text, options.processes)
    if "throughput" in options.only:
        throughput_table()


@dataclass(frozen=True)
class Cost:
    """Of a request in one turn."""

    gateway: float
    """Seconds of the processor in the gateway's process."""
    bare: float
    """The same of a client that asks the server for these ids."""
    tokens: int
    """Of the prompt."""


def requests_table(tokenizer: Tokenizer, text: str, options: argparse.Namespace) -> None:
    """Milliseconds beyond the bare client, by protocol and turn."""
    shown = [turn for turn in SHOWN if turn < options.turns] + [options.turns]
    head = ["request", *(f"turn {turn}" for turn in shown), *(f"bare, turn {turn}" for turn in shown)]
    print(f"\n| {' | '.join(head)} |\n|" + "---|" * len(head))
    for wire in WIRES:
        told = conversation(
            tokenizer, text, turns=options.turns, new=options.new, tokens=options.tokens, calls=wire.calls
        )
        costs = asyncio.run(measured(wire, told, tokenizer, options.episodes, shown, options.repeats))
        cells = [1e3 * (one.gateway - one.bare) for one in costs] + [1e3 * one.bare for one in costs]
        print(f"| {wire.name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)
    print(f"\nPrompts have {', '.join(str(one.tokens) for one in costs)} tokens.")


@asynccontextmanager
async def gateway_before(told: Conversation, tokenizer: Tokenizer, episodes: int):
    """(gateway, a function that opens so many episodes, the client, what sends requests)."""
    with server(answer_of(tokenizer, told)) as url:
        rules, templates = rules_of(tokenizer), Templates(tokenizer)
        client = RolloutClient([url], vocab_size=VOCAB_SIZE, engine="sglang", max_concurrency=episodes)
        async with client, Gateway(SAMPLING) as gateway:
            callers = Callers(gateway.base_url, episodes)

            def opened() -> dict[str, Episode]:
                made = [Episode(client, templates, rules, Draw(0, number, 0)) for number in range(episodes)]
                return {gateway.open_episode(one): one for one in made}

            try:
                yield gateway, opened, client, callers
            finally:
                callers.close()


async def measured(
    wire: Wire, told: Conversation, tokenizer: Tokenizer, count: int, shown: Sequence[int], repeats: int
) -> list[Cost]:
    """Of the turns that are shown, of `count` episodes at once: the least of so many rounds, of the gateway
    and of the bare client in turns, as other work on the machine makes all of them slower.
    """
    costs = []
    async with gateway_before(told, tokenizer, count) as (gateway, opened, client, callers):
        episodes = opened()
        for turn in range(1, shown[-1] + 1):
            body, ours, bare = wire.body(told, turn - 1), [], []
            for _ in range(repeats + 1 if turn in shown else 1):
                with counted(ours, count):
                    await callers.ask(wire.path, body, list(episodes))
                ids = max(
                    next(iter(episodes.values())).tree.turns(), key=lambda one: one.number
                ).asked.line.ids
                if turn in shown:
                    with counted(bare, count):
                        await asyncio.gather(
                            *(client.turn(ids, SAMPLING, Draw(0, number, 0)) for number in range(count))
                        )
            if turn in shown:
                costs.append(Cost(min(ours[1:]), min(bare[1:]), ids.numel()))
        for key, episode in episodes.items():
            gateway.close_episode(key)
            forks = episode.tree.forks
            if episode.counts.turns != shown[-1] + repeats * len(shown) or forks["template"] + forks["tools"]:
                raise SystemExit(f"{wire.name}: an episode is {episode.counts}")
    return costs


class counted:
    """Adds this process's seconds for each of so many requests to a list."""

    def __init__(self, found: list[float], count: int):
        self._found, self._count = found, count

    def __enter__(self) -> None:
        self._before = time.process_time()

    def __exit__(self, *_) -> None:
        self._found.append((time.process_time() - self._before) / self._count)


def close(gateway: Gateway, episodes: dict[str, Episode], turns: int) -> None:
    """SystemExit unless each is one sequence of these turns."""
    for key, episode in episodes.items():
        gateway.close_episode(key)
        if (episode.counts.turns, episode.counts.branches) != (turns, 1):
            raise SystemExit(f"an episode of {turns} turns is {episode.counts}")


def memory_table(tokenizer: Tokenizer, text: str, count: int = 16, turns: int = 40) -> None:
    """MB that an episode of 32k tokens holds until it ends, by protocol, and what its end takes."""
    print("\n| 40 turns, 32k tokens | tokens | MB an episode | its end, ms |\n|---|---|---|---|")
    told = conversation(tokenizer, text, turns=turns, new=670, tokens=128)
    for wire in [one for one in WIRES if one.name in ("chat completions", "responses", "messages")]:
        queue = FORK.SimpleQueue()  # a process each: what one has freed would be there for the next

        def of_wire(wire: Wire = wire, queue: Any = queue) -> None:
            queue.put(asyncio.run(memory(wire, told, tokenizer, count)))

        process = FORK.Process(target=of_wire)
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{wire.name} failed")
        tokens, held, end = queue.get()
        print(f"| {wire.name} | {tokens} | {held / 1e6:.2f} | {1e3 * end:.1f} |", flush=True)


async def memory(
    wire: Wire, told: Conversation, tokenizer: Tokenizer, count: int
) -> tuple[int, float, float]:
    """(tokens, bytes an episode, seconds of the processor at the end of one)."""
    async with gateway_before(told, tokenizer, count) as (gateway, opened, _, callers):
        rounds, times = [], []
        for _ in range(2):  # what the first has needed meanwhile is there for the second
            before, episodes = resident(), opened()
            for turn in range(len(told.news)):
                await callers.ask(wire.path, wire.body(told, turn), list(episodes))
            rounds.append(episodes)
        held = (resident() - before) / count
        for episodes in rounds:
            for episode in episodes.values():
                with counted(times, 1):
                    (branch,) = await episode.finish()
            close(gateway, episodes, len(told.news))
        return branch.prompt_ids.numel() + branch.output_ids.numel(), held, statistics.median(times)


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def loop_table(tokenizer: Tokenizer, text: str, count: int = 64, longs: int = 16) -> None:
    """How late the loop is while prompts of 32k tokens come, one each 0.3 s."""
    print("\n| prompts of 32k tokens | loop late, ms: p50 | p99 | most |\n|---|---|---|---|")
    short = conversation(tokenizer, text, turns=1, new=200, tokens=128)
    parts = [conversation(tokenizer, text[at:], turns=1, new=32_000, tokens=128) for at in range(longs)]
    for kind, bodies in (("none", []), ("one each 0.3 s", [WIRES[0].body(one, 0) for one in parts])):
        late = 1e3 * asyncio.run(lateness(short, bodies, tokenizer, count))
        cells = [np.quantile(late, 0.5), np.quantile(late, 0.99), late.max()]
        print(f"| {kind} | {' | '.join(f'{cell:.1f}' for cell in cells)} |", flush=True)


async def lateness(
    short: Conversation, bodies: Sequence[dict], tokenizer: Tokenizer, count: int
) -> np.ndarray:
    """Seconds of the processor by which the loop was late, each 20 ms."""
    async with gateway_before(short, tokenizer, count) as (gateway, opened, _, callers):
        more = Callers(gateway.base_url, 1)
        watching = asyncio.create_task(watched_loop())
        try:
            for body in bodies or [None] * 16:
                episodes = opened()
                keys = list(episodes)
                calls = [callers.ask(WIRES[0].path, WIRES[0].body(short, 0), keys[1:9]), asyncio.sleep(0.3)]
                if body is not None:
                    calls.append(more.ask(WIRES[0].path, body, keys[:1]))
                await asyncio.gather(*calls)
                for key in keys:
                    gateway.close_episode(key)
        finally:
            more.close()
        watching.cancel()
        return np.array(await watching)[:, 1]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with only_tables():
        main()
