"""A reward that takes longer than the ranks' collectives may wait: the ranks that have none of
it wait with it.
"""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl_corr.reduce.failure import MEETING_INTERVAL_S, meeting_interval_s
from tests.faults.drills import drill, long
from tests.mcore.launched import launch

SCRIPT = Path(__file__).with_name("short_timeout_pretrain.py")
SLOW_S = 24
"""Three times the timeout that the script gives its collectives."""
REWARD = f"""
import asyncio

first = True

async def reward(prompt, output_ids, finish_reason):
    global first
    if first:
        first = False
        await asyncio.sleep({SLOW_S})
    return sum(int(i) % 2 for i in output_ids) / 8
"""


@pytest.mark.parametrize(("timeout_s", "interval_s"), [(9, 3), (60, 20), (600, MEETING_INTERVAL_S)])
def test_interval_of_meetings_then_a_third_of_what_a_collective_may_wait_and_never_more_than_a_minute(
    timeout_s, interval_s, tmp_path
):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    try:
        assert meeting_interval_s() == interval_s
    finally:
        dist.destroy_process_group()


@long
@drill(
    "a reward that takes three times as long as a collective may wait",
    promised="the run waits for it, and goes on",
)
def test_run_when_a_reward_takes_longer_than_a_collective_may_wait_then_it_goes_on(
    trained_server, tiny_moe_dir, tmp_path, seen
):
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [3, 1, 4]}\n')
    begin = time.monotonic()
    done = launch(
        tmp_path,
        "run",
        tiny_moe_dir,
        trained_server.url,
        SCRIPT,
        "--train-iters",
        1,
        "--save-interval",
        1,
        "--distributed-timeout-minutes",
        1,
        processes=2,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert time.monotonic() - begin > SLOW_S
    seen(f"a reward of {SLOW_S} s, collectives that wait for 8 s: status 0")
