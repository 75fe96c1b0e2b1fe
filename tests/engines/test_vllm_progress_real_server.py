"""What a real vLLM server's watch says while it samples, is paused, has an engine that is
stopped, and is idle.
"""

import asyncio
import os
import signal

import psutil
import pytest

from megatron_rl_corr.engines import load_engine
from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.trajectory import SamplingParams

ENGINE = load_engine("vllm")


def engine_core_of(server):
    """The process that samples; the HTTP process is another."""
    below = psutil.Process(server.pid).children(recursive=True)
    (core,) = [process.pid for process in below if "EngineCore" in "".join(process.cmdline())]
    return core


def test_silence_when_sampling_paused_stopped_or_idle(vllm_server_fp32):
    url, core = vllm_server_fp32.url, engine_core_of(vllm_server_fp32)

    async def scenario():
        transport = ENGINE.open_transport([url], timeout_s=60, connect_timeout_s=5)
        watch = ENGINE.progress(transport, url)
        request = ENGINE.generate([1, 2, 3], SamplingParams(480, ignore_eos=True), seed=1)
        sampling = asyncio.ensure_future(transport.send(url, request))
        assert await watch.silence(5) is None  # the first look
        await asyncio.sleep(0.3)
        assert await watch.silence(5) is None
        await transport.send(url, ENGINE.pause_generation("retract"))
        assert not sampling.done()
        for _ in range(3):
            assert await watch.silence(5) is None  # it has to wait
        await transport.send(url, ENGINE.continue_generation())
        os.kill(core, signal.SIGSTOP)
        try:
            await transport.send(url, ENGINE.health())  # the HTTP process is well
            with pytest.raises(
                RolloutServerError, match="did not answer GET /is_paused: timed out after 1 s"
            ):
                for _ in range(3):  # the first may still see what was told before the stop
                    await watch.silence(1)
        finally:
            os.kill(core, signal.SIGCONT)
        await sampling
        await watch.silence(5)
        idle = await watch.silence(5)
        assert "it has no request, though this client waits" in str(idle)
        await transport.close()

    asyncio.run(scenario())
