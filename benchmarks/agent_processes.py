"""Many episodes at once, each with a process of its own: memory, descriptors, time, and none lost."""

import asyncio
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agent_rig import ROOT, SAMPLING, VOCAB_SIZE, answer_of, conversation, rules_of, server
from megatron_rl_corr.data.prompt import Prompt
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import Trajectory
from megatron_rl_corr.rollout.agents.agents import Agents
from megatron_rl_corr.rollout.agents.harnesses import Harnesses
from megatron_rl_corr.rollout.agents.starter import HarnessKind
from megatron_rl_corr.rollout.client import RolloutClient
from megatron_rl_corr.rollout.gateway.server import Gateway
from megatron_rl_corr.rollout.gateway.templates import Templates

GROUP, TURNS = 8, 3
DELAY = (4.0, 8.0)
"""Seconds until a server answers: all processes begin before the first ends."""
LOOK_S = 1.0


@dataclass
class Peaks:
    """The most that was seen at one moment."""

    processes: int = 0
    memory: int = 0
    """Bytes of all harnesses and of what starts them, each shared page once."""
    own: int = 0
    """Bytes of this process, which has the gateway and the client."""
    files: int = 0
    """Descriptors of this process."""
    starter_files: int = 0
    looks: list[float] = field(default_factory=list)

    def look(self, starter: int) -> None:
        """Take the numbers of now."""
        below = psutil.Process(starter).children(recursive=True)
        self.processes = max(self.processes, len(below))
        self.memory = max(self.memory, sum(map(proportional, [starter, *(one.pid for one in below)])))
        self.own = max(self.own, psutil.Process().memory_info().rss)
        self.files = max(self.files, psutil.Process().num_fds())
        self.starter_files = max(self.starter_files, psutil.Process(starter).num_fds())


def processes_table(tokenizer: Tokenizer, text: str, count: int) -> None:
    """So many episodes of TURNS turns; SystemExit where one is lost."""
    head = [
        "episodes",
        "at once",
        "seconds",
        "GB of harnesses",
        "MB each",
        "GB of this process",
        "its descriptors",
    ]
    head += ["those of the starter", "CPU s of this process", "of the starter", "lost"]
    print(f"\n| {' | '.join(head)} |\n|" + "---|" * len(head), flush=True)
    for number in sorted({count // 4, count}):
        cells = asyncio.run(cells_of(tokenizer, text, number))
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


async def cells_of(tokenizer: Tokenizer, text: str, count: int) -> list[Any]:
    told = conversation(tokenizer, text, turns=TURNS, new=200, tokens=128)
    task = {"messages": [{"role": "user", "content": told.news[0]}], "reply": told.news[1], "turns": TURNS}
    kind = HarnessKind(f"{ROOT}/benchmarks/agent_harness.py:run", None, 600.0, 4.0, "`agent`")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))  # as most systems have it
    with server(answer_of(tokenizer, told), DELAY) as url:
        client = RolloutClient([url], vocab_size=VOCAB_SIZE, engine="sglang", max_concurrency=count)
        agents = Agents(
            Harnesses(kind), Gateway(SAMPLING), Templates(tokenizer), rules_of(tokenizer), "episode"
        )
        async with client:
            await agents.start()
            try:
                starter, peaks, ended = agents._harnesses.pid, Peaks(), asyncio.Event()
                looking = asyncio.create_task(asyncio.to_thread(keep_looking, peaks, starter, ended))
                begun, cpu = time.monotonic(), time.process_time()
                groups = await asyncio.gather(
                    *(
                        agents.generate(
                            client, [Prompt(row, [1], task, "text")], SAMPLING, samples_per_prompt=GROUP
                        )
                        for row in range(count // GROUP)
                    )
                )
                seconds, cpu = time.monotonic() - begun, time.process_time() - cpu - sum(peaks.looks)
                starter_cpu = sum(psutil.Process(starter).cpu_times()[:2])
            finally:
                ended.set()
                await looking
                await agents.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    whole = sum(is_whole(one) for group in groups for one in group)
    lost = count // GROUP * GROUP - whole
    if lost:
        raise SystemExit(f"{lost} of {count} episodes are lost")
    each = peaks.memory / max(1, peaks.processes)
    cells = [whole, peaks.processes, f"{seconds:.0f}", f"{peaks.memory / 1e9:.2f}", f"{each / 1e6:.1f}"]
    cells += [f"{peaks.own / 1e9:.2f}", peaks.files, peaks.starter_files, f"{cpu:.1f}", f"{starter_cpu:.1f}"]
    return [*cells, lost]


def is_whole(one: Trajectory) -> bool:
    return one.environment_reward == 1.0 and int(one.turn_ids.max()) == TURNS - 1


def keep_looking(peaks: Peaks, starter: int, ended: asyncio.Event) -> None:
    while not ended.is_set():
        before = time.thread_time()
        try:
            peaks.look(starter)
        except psutil.NoSuchProcess:  # one has ended meanwhile
            pass
        peaks.looks.append(time.thread_time() - before)
        time.sleep(LOOK_S)


def proportional(pid: int) -> int:
    """Bytes of a process, of pages that n processes share one n-th; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
