"""Models and endpoints that a server with OpenAI's API lists."""

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.engines.answer_types import at_least_1
from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.types import Request


def list_models() -> Request:
    """GET /v1/models."""
    return Request("GET", "/v1/models")


def context_length(url: str, answer: Mapping[str, Any]) -> int:
    """`max_model_len` of the first model that /v1/models lists.

    Args:
        url: names the server in the error.
        answer: to `list_models`.

    Raises:
        RolloutProtocolError: there is none.
    """
    try:
        return at_least_1(answer["data"][0]["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RolloutProtocolError(url, "/v1/models", f"no max_model_len ({error!r})") from None


def list_endpoints() -> Request:
    """GET /openapi.json."""
    return Request("GET", "/openapi.json")
