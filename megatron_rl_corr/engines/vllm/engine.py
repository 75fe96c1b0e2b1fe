"""vLLM behind the seam: every request, answer, limit and remedy of its servers (0.32)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl_corr.engines.base import Engine
from megatron_rl_corr.engines.http import HTTPTransport, certificates, checked_key, checked_urls
from megatron_rl_corr.engines.types import EngineLimits
from megatron_rl_corr.engines.vllm import detailed_samples, server_facts, server_version


class VLLM(Engine):
    """vLLM servers over HTTP."""

    name = "vLLM"
    generate_endpoint = detailed_samples.GENERATE
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

    recognizes = staticmethod(server_version.recognizes)
    detailed_sample = staticmethod(detailed_samples.detailed_sample)
    parse_detailed_sample = staticmethod(detailed_samples.parse_detailed_sample)
    score = staticmethod(detailed_samples.score)
    parse_scores = staticmethod(detailed_samples.parse_scores)
    abort_request = staticmethod(server_facts.abort_request)
    tokenize = staticmethod(server_facts.tokenize)
    tokenized = staticmethod(server_facts.tokenized)
    has_tokenizer = staticmethod(server_facts.has_tokenizer)
    version_support = staticmethod(server_facts.version_support)
    has_float32_head = staticmethod(server_facts.has_float32_head)
    cache_block = staticmethod(server_facts.cache_block)
    served_model = staticmethod(server_facts.served_model)
    list_endpoints = staticmethod(server_facts.list_endpoints)
    update_support = staticmethod(server_facts.update_support)
    list_models = staticmethod(server_facts.list_models)
    context_length = staticmethod(server_facts.context_length)
    all_checksums = staticmethod(server_facts.all_checksums)
