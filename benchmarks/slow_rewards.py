"""What slow, failing and hanging rewards cost: steps with them against steps without, sampled
from a real server.

slow_rewards.py [--steps 12] [--step-s 5] [--lag 2] [--limit-s 5] [--workers 4]

The server, the client, the stream of groups and the reward workers are the package's; a trainer that takes
--step-s for each step stands for Megatron. The reward function sleeps 2 s in one sample of 16, raises in
one of 50 and hangs in one of 200. The run fails where a step is lost, counts by cause are not those
planted, or workers are left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.quiet import only_tables  # noqa: E402
from megatron_rl_corr.data.prompt import Prompt  # noqa: E402
from megatron_rl_corr.data.prompts import PromptDataset  # noqa: E402
from megatron_rl_corr.data.rewards import Rewards  # noqa: E402
from megatron_rl_corr.engines.trajectory import SamplingParams  # noqa: E402
from megatron_rl_corr.rollout.client import RolloutClient  # noqa: E402
from megatron_rl_corr.rollout.cursor import Cursor, GroupNumbers  # noqa: E402
from megatron_rl_corr.rollout.failures import FailedPrompts, Failures  # noqa: E402
from megatron_rl_corr.rollout.group_sampler import GroupSampler  # noqa: E402
from megatron_rl_corr.rollout.queue import GroupStream  # noqa: E402
from tools.cpu import environment, sglang_arguments  # noqa: E402
from tools.local_server import LocalServer  # noqa: E402
from tools.process_group import descendants  # noqa: E402

GROUP_SIZE, GROUPS, NEW_TOKENS, SLEEP_S = 8, 8, 16, 2.0


async def run(url: str, name: str, lag: int, options: argparse.Namespace) -> tuple[list[float], Failures]:
    """Seconds of each step, collected and trained, and what failed."""
    rewards = Rewards(
        f"{ROOT}/benchmarks/planted_reward.py:{name}", workers=options.workers, limit_s=options.limit_s
    )
    failures, failed_prompts = Failures(1.0), FailedPrompts(4096)
    prompts = PromptDataset([Prompt(i, [1 + i % 90, 2 + i % 7, 3]) for i in range(4096)])
    await rewards.start()
    workers = len(descendants(os.getpid()))
    async with RolloutClient([url], vocab_size=100) as client:
        sampler = GroupSampler(
            client,
            prompts,
            GroupNumbers(Cursor(0), 0, 1),
            SamplingParams(NEW_TOKENS, ignore_eos=True),
            group_size=GROUP_SIZE,
            rewards=rewards,
            failures=failures,
            failed_prompts=failed_prompts,
            on_failed=None,
            episodes=None,
        )
        stream = GroupStream(
            sampler.sample, sampler.draw, groups_per_step=GROUPS, first=0, last=options.steps, max_lag=lag
        )
        seconds = []
        for step in range(options.steps):
            started = time.monotonic()
            taken = await stream.take(step)
            assert len(taken.groups) == GROUPS and all(len(g.rewards) == GROUP_SIZE for g in taken.groups)
            await asyncio.sleep(options.step_s)
            seconds.append(time.monotonic() - started)
        await stream.close()
    await asyncio.sleep(options.limit_s + 2)  # calls whose group was dropped end by themselves
    left = len(descendants(os.getpid()))
    if left != workers:
        raise SystemExit(f"{left} processes after the run, {workers} before")
    await rewards.close()
    return seconds, failures


def measure(url: str, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SLEEP_S"] = str(SLEEP_S)
        print(
            "| run | steps | seconds | slowest step | ratio | raised | hung |\n|---|---|---|---|---|---|---|"
        )
        for lag in (0, options.lag):
            without = 0.0
            for name in ("quick", "reward"):
                calls = Path(folder) / f"{name}-{lag}"
                calls.touch()
                os.environ["PLANTED"] = str(calls)
                seconds, failures = asyncio.run(run(url, name, lag, options))
                planted = Counter(calls.read_text())
                found = failures.by_cause["reward_error"], failures.by_cause["reward_timeout"]
                if found != (planted["r"], planted["h"]):
                    raise SystemExit(f"{found} failed, planted were {planted}")
                without = without or sum(seconds)
                print(
                    f"| lag {lag}, {name} | {len(seconds)} | {sum(seconds):.1f} | {max(seconds):.1f} | "
                    f"{sum(seconds) / without:.2f} | {found[0]} | {found[1]} |",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, kind, default in (
        ("steps", int, 12),
        ("lag", int, 2),
        ("workers", int, 4),
        ("step-s", float, 5.0),
        ("limit-s", float, 5.0),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run(
            [sys.executable, ROOT / "examples/quickstart/make_model.py", model, "--seed", "0"],
            check=True,
            stdout=subprocess.DEVNULL,
            env=environment("sglang"),
        )
        server = LocalServer(
            model,
            dtype="float32",
            log_path=Path(folder) / "server.log",
            environment=environment("sglang"),
            extra_arguments=[*sglang_arguments(), "--random-seed", "0"],
        )
        with server:
            measure(server.url, options)
    return 0


if __name__ == "__main__":
    with only_tables():
        sys.exit(main())
