"""How long an answer may be: it follows from what was asked, with room for what a server adds
of its own accord.
"""

from __future__ import annotations

from megatron_rl_corr.engines.routes import ExpertShape
from megatron_rl_corr.engines.trajectory import SamplingParams

ANSWER = 1 << 20
"""Bytes of an answer without its tokens."""
TOKEN = 1 << 10
"""Bytes of a sampled token: its id, its log-prob and its text."""
LIKELY = 256
"""Bytes of one of the likeliest ids beside it: the same, in words."""
KEPT = 16
"""Bytes of an id that a token was drawn from, as ,151935."""
ROUTE = 8
"""Bytes of an expert's id: int32 in base64 is 5.4."""
UNASKED_ROUTES = 2 << 10
"""Bytes of any token, where a server returns routes or something else that no request asks for: 90 layers
of 8 experts have 960 in one byte each.
"""


def of_sample(prompt_tokens: int, sampling: SamplingParams) -> int:
    """Bytes of the answer to a request for one sample, without the routes that it asks for."""
    sampled = sampling.max_new_tokens
    return (
        ANSWER
        + sampled * (TOKEN + KEPT * max(sampling.top_k, 0) + LIKELY * sampling.top_logprobs)
        + (prompt_tokens + sampled) * UNASKED_ROUTES
        + of_routes(prompt_tokens + sampled, sampling.keys)
    )


def of_likeliest(tokens: int, likeliest: int) -> int:
    """Bytes of an answer that tells the likeliest ids at so many tokens, prompt included."""
    return ANSWER + tokens * (TOKEN + UNASKED_ROUTES + (likeliest + 2) * LIKELY)


def of_routes(tokens: int, experts: ExpertShape | None) -> int:
    """Bytes of the experts of so many tokens in all layers."""
    return 0 if experts is None else tokens * experts.num_layers * experts.top_k * ROUTE


def of_checksums() -> int:
    """Bytes of the checksums of a model's parameters on all ranks of a server: 600 000 of 100 bytes each."""
    return 64 << 20
