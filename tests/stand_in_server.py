"""A server in this process that misbehaves as a test tells it to."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from megatron_rl_corr.rollout import RolloutClient, RolloutError, RolloutOutage, SampleFailure, SamplingParams


def answer(prompt_tokens, tokens, reason, version="v1"):
    """A well-formed /generate body; reason: its finish_reason. The log-prob of id i is -i."""
    return web.json_response(
        {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": reason,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(tokens),
                "weight_version": version,
                "output_token_logprobs": [[-float(token), token, None] for token in tokens],
            },
        }
    )


def one_token(prompt_tokens, token=5, version="v1"):
    """A well-formed /generate body of one token."""
    return answer(prompt_tokens, [token], {"type": "length", "length": 1}, version)


async def _no_loads(request):
    return web.Response(status=404)


@asynccontextmanager
async def serving(handle, ssl_context=None):
    """The address of a server that gives every request to `async handle(request)`.

    A client's watch looks at /v1/loads at a random moment; a handler sees that only if it has `shows_loads`.
    """
    app = web.Application()
    if not getattr(handle, "shows_loads", False):
        app.router.add_route("GET", "/v1/loads", _no_loads)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl_context)
    await site.start()
    try:
        yield f"http{'s' if ssl_context else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def run(scenario, *handlers, **options):
    """`await scenario(client)` with one server for each handler."""

    async def inner():
        async with serving(handlers[0]) as first, serving(handlers[-1]) as last:
            urls = [first, last][: len(handlers)]
            # A process of its own takes seconds to start.
            defaults = {"vocab_size": 10, "outage_timeout_s": 0.1, "ingest_process": False}
            async with RolloutClient(urls, **(defaults | options)) as client:
                return await asyncio.wait_for(scenario(client), timeout=90)  # a machine may be busy

    return asyncio.run(inner())


async def good(request):
    """A handler that answers /generate well."""
    body = await request.json()
    return one_token(len(body["input_ids"]))


def failure(handle, **options):
    """Why a server is left out, or what `generate` raises at once, when every request is
    given to `handle`.
    """

    async def scenario(client):
        with pytest.raises(RolloutError) as error:
            await client.generate([[1]], SamplingParams(1))
        if isinstance(error.value, RolloutOutage):
            ((cause, _),) = error.value.causes
            assert str(cause) in str(error.value)
            assert error.value.__notes__ == ["it was sample 0 of prompt 0 (1 tokens)"]
            return cause
        if isinstance(error.value, SampleFailure):
            return error.value.__cause__
        return error.value

    return run(scenario, handle, **options)
