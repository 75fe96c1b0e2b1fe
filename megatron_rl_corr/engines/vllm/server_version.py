"""Which version of vLLM answers, and whether it is vLLM at all."""

from __future__ import annotations

from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.types import Request, Transport


def version() -> Request:
    """GET /version: every vLLM server has it, without a key and without development mode; SGLang's have not."""
    return Request("GET", "/version")


async def recognizes(url: str, transport: Transport, timeout_s: float) -> bool:
    """Whether a vLLM server answers at an address."""
    try:
        await transport.send(url, version(), timeout_s=timeout_s)
    except RolloutServerError as error:
        if error.status != 404:
            raise
        return False
    return True
