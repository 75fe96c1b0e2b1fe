"""vLLM behind the seam: every request, answer, limit and remedy of its servers (0.32)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.http import HTTPTransport, certificates, checked_key, checked_urls
from megatron_rl_corr.engines.types import EngineLimits

GENERATE = "/inference/v1/generate"


class VLLM(Engine):
    """vLLM servers over HTTP."""

    name = "vLLM"
    generate_endpoint = GENERATE
    limits = EngineLimits()

    checked_urls = staticmethod(checked_urls)

    def open_transport(
        self, urls: Sequence[str], *, timeout_s: float, connect_timeout_s: float, api_key: str | None = None,
        ca_file: str | Path | None = None,
    ) -> HTTPTransport:  # fmt: skip
        return HTTPTransport(
            timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, api_key=checked_key(api_key),
            tls=certificates(ca_file, urls),
        )  # fmt: skip
