"""A process with few file descriptors that samples from servers of another process; prints what
came of it as JSON.

Arguments: descriptors beyond those that are open, the requests at once, the addresses.
"""

import asyncio
import json
import os
import resource
import sys

from megatron_rl_corr.rollout import SamplingParams
from megatron_rl_corr.rollout.client import RolloutClient


async def sample(spare: int, at_once: int, urls: list[str]) -> dict:
    async with RolloutClient(
        urls, vocab_size=8, engine="sglang", max_concurrency=at_once, outage_timeout_s=1.0
    ) as client:
        soft = len(os.listdir("/proc/self/fd")) + spare
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            samples = await client.generate([[1]] * 200, SamplingParams(1))
            found = {"samples": len(samples)}
        except Exception as error:  # noqa: BLE001  told to the test
            found = {"error": type(error).__name__, "text": str(error)}
        return found | client.counts() | {"soft": soft, "left": client.left_out}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(sample(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))))
