"""The same episodes by an `Environment` and through the gateway, on a real server: tokens a second."""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agent_clients import Callers
from benchmarks.agent_rig import ROOT
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import SamplingParams, Trajectory
from megatron_rl_corr.rollout import Environment
from megatron_rl_corr.rollout.agents.agents import Agents
from megatron_rl_corr.rollout.agents.harnesses import Harnesses
from megatron_rl_corr.rollout.agents.starter import HarnessKind
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.environment import DONE
from megatron_rl_corr.rollout.episodes import generate_episodes
from megatron_rl_corr.rollout.gateway.episode import Episode, EpisodeRules
from megatron_rl_corr.rollout.gateway.server import Gateway
from megatron_rl_corr.rollout.gateway.templates import Templates
from megatron_rl_corr.rollout.seeds import Draw
from tools.cpu import environment, sglang_arguments
from tools.local_server import LocalServer

EPISODES, TURNS, IN_FLIGHT = 64, 3, 64
SAMPLING = SamplingParams(4096, temperature=4.0)
"""Answers end long before: any of 83 tokens is about as likely, and one of them ends an answer."""
CONTEXT = 8192
TEMPLATE = (
    "{% for message in messages %}<pad>{{ message.role }}:{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<pad>assistant:{% endif %}"
)
REPLY = "and now? say it in other words."
WAYS = ("environment", "gateway, one process asks for all", "gateway, a process an episode")


@dataclass(frozen=True)
class Ran:
    """One way's episodes."""

    sampled: dict[tuple[int, int], list[int]]
    """prompt, turn -> ids."""
    seconds: float
    own: float
    """Seconds of the processor in this process."""
    harness: float
    """The same of what asks the gateway."""
    server: float = 0.0
    """The same of the server."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sampled.values()))


def throughput_table(repeats: int = 9) -> None:
    """The ways in turns, on one server."""
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        subprocess.run(
            [sys.executable, ROOT / "examples/quickstart/make_model.py", model, "--seed", "0"],
            check=True,
            env=environment("sglang"),
        )
        for name, what in (
            ("tokenizer_config.json", {"chat_template": TEMPLATE}),
            ("config.json", {"max_position_embeddings": CONTEXT}),
        ):
            path = model / name
            path.write_text(json.dumps(json.loads(path.read_text()) | what))
        served = LocalServer(
            model,
            dtype="float32",
            log_path=Path(scratch) / "server.log",
            environment=environment("sglang"),
            extra_arguments=[
                *sglang_arguments(),
                "--enable-deterministic-inference",
                "--max-running-requests",
                str(IN_FLIGHT),
            ],
        )
        with served:
            runs = asyncio.run(all_ways(served.url, served.pid, model, repeats))
    head = ["way", "tokens/s", "of the environment's", "the same ids"]
    head += [
        "CPU ms a request: server",
        "here",
        "what asks",
        "all, of the environment's",
        "without what asks",
    ]
    print(f"\n| {' | '.join(head)} |\n|" + "---|" * len(head))
    for number, way in enumerate(WAYS):
        pairs = [(run[number], run[0]) for run in runs]
        same = [own.sampled.get(turn) == ids for own, base in pairs for turn, ids in base.sampled.items()]
        rates = [own.tokens / own.seconds for own, _ in pairs]
        shares = [rate / (base.tokens / base.seconds) for rate, (_, base) in zip(rates, pairs, strict=True)]
        cells = [f"{statistics.median(rates):.0f}", f"{statistics.median(shares):.3f}"]
        cells[1] += f" ({min(shares):.2f} to {max(shares):.2f})"
        cells.append(f"{100 * sum(same) / len(same):.0f} %")
        for of in ("server", "own", "harness"):
            each = statistics.median(getattr(own, of) / len(own.sampled) for own, _ in pairs)
            cells.append(f"{1e3 * each:.2f}")
        for harness in (1, 0):
            shares = [
                (own.server + own.own + harness * own.harness) / (base.server + base.own)
                for own, base in pairs
            ]
            cells.append(f"{statistics.median(shares):.3f}")
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


def cpu_of(pid: int) -> float:
    """Seconds of the processor of a process and those below it."""
    above = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in [above, *above.children(recursive=True)])


async def all_ways(url: str, server: int, model: Path, repeats: int) -> list[list[Ran]]:
    tokenizer = Tokenizer.from_folder(model)
    tasks = [
        {"messages": [{"role": "user", "content": f"what is {number}?"}], "reply": REPLY, "turns": TURNS}
        for number in range(EPISODES)
    ]
    ways, runs = (by_environment, by_one_process, by_processes), []
    for repeat in range(repeats + 1):
        ran: list[Any] = [None] * len(ways)
        for step in range(len(ways)):
            number = (step + repeat) % len(ways)  # each is the first in some repeats
            client = RolloutClient(
                [url],
                vocab_size=len(tokenizer._tokenizer),
                engine="sglang",
                max_concurrency=IN_FLIGHT,
                seed=repeat,
            )
            async with client:
                await client.flush_cache()
                before = cpu_of(server)
                made = await ways[number](client, tokenizer, tasks)
                ran[number] = replace(made, server=cpu_of(server) - before)
        runs.append(ran)
    return runs[1:]


class Replies(Environment):
    """Says the same after each turn, as the template writes it."""

    def __init__(self, prompt: Prompt):
        self._left, self._reply = TURNS, prompt.metadata["reply_ids"]

    def step(self, response: list[int], finish_reason: str) -> Any:
        self._left -= 1
        return self._reply if self._left else DONE

    def reward(self) -> float:
        return 1.0


async def by_environment(client: RolloutClient, tokenizer: Tokenizer, tasks: list[dict[str, Any]]) -> Ran:
    reply = tokenizer.encode(f"<pad>user:{REPLY}<eos><pad>assistant:", special_tokens=False)
    prompts = [
        Prompt(
            number,
            tokenizer.encode(tokenizer.render(task["messages"]), special_tokens=False),
            {"reply_ids": reply},
            "text",
        )
        for number, task in enumerate(tasks)
    ]
    begun, cpu = time.monotonic(), time.process_time()
    found = await generate_episodes(
        client,
        prompts,
        SAMPLING,
        environment=Replies,
        max_turns=TURNS,
        group_numbers=range(EPISODES),
    )
    return Ran(sampled_of(found), time.monotonic() - begun, time.process_time() - cpu, 0.0)


async def by_one_process(client: RolloutClient, tokenizer: Tokenizer, tasks: list[dict[str, Any]]) -> Ran:
    templates, rules = Templates(tokenizer), EpisodeRules(SAMPLING, CONTEXT - 64, TURNS)
    async with Gateway(SAMPLING) as gateway:
        callers = Callers(gateway.base_url, EPISODES)
        episodes = [Episode(client, templates, rules, Draw(client.seed, one, 0)) for one in range(EPISODES)]
        keys = [gateway.open_episode(one) for one in episodes]
        before, begun, cpu = callers.seconds, time.monotonic(), time.process_time()
        await callers.converse(dict(zip(keys, tasks, strict=True)))
        for key in keys:
            gateway.close_episode(key)
        found = [
            replace(branch, prompt_index=number)
            for number, one in enumerate(episodes)
            for branch in await one.finish()
        ]
        ran = Ran(
            sampled_of(found), time.monotonic() - begun, time.process_time() - cpu, callers.seconds - before
        )
        callers.close()
    return ran


async def by_processes(client: RolloutClient, tokenizer: Tokenizer, tasks: list[dict[str, Any]]) -> Ran:
    kind = HarnessKind(f"{ROOT}/benchmarks/agent_harness.py:run", None, 600.0, 4.0, "`agent`")
    rules = EpisodeRules(SAMPLING, CONTEXT - 64, TURNS)
    agents = Agents(Harnesses(kind), Gateway(SAMPLING), Templates(tokenizer), rules, "episode")
    await agents.start()
    try:
        starter = psutil.Process(agents._harnesses.pid)
        before, begun, cpu = sum(starter.cpu_times()[:4]), time.monotonic(), time.process_time()
        prompts = [Prompt(number, [1], task, "text") for number, task in enumerate(tasks)]
        found = await agents.generate(client, prompts, SAMPLING, group_numbers=range(EPISODES))
        seconds, own = time.monotonic() - begun, time.process_time() - cpu
        return Ran(sampled_of(found), seconds, own, sum(starter.cpu_times()[:4]) - before)
    finally:
        await agents.close()


def sampled_of(found: list[Trajectory]) -> dict[tuple[int, int], list[int]]:
    """The ids of each turn."""
    made = {}
    for one in found:
        for turn in range(int(one.turn_ids.max()) + 1):
            made[one.prompt_index, turn] = one.output_ids[one.turn_ids == turn].tolist()
    return made
