"""What only an examination asks a vLLM server for: its version, model, tokenizer, ways to update weights, checksums."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.inspection import ServedModel, UpdateSupport, VersionSupport
from megatron_rl_corr.engines.types import Request
from megatron_rl_corr.engines.vllm.updates import EXTENSION_CLASS, WEIGHT_TRANSPORTS

OLDEST, NEWEST = "0.32.0", "0.32.0"
"""The versions that were tested."""
_INITIAL_VERSION = "default"
"""What the weights are called that a server was started with."""
_NEEDS = {"/collective_rpc", "/update_weight_version", "/pause", "/resume"}


def version_key(version: str) -> tuple[int, ...]:
    """Sorts vLLM's versions: 0.25.1 < 0.32.0. Release candidates and builds count as the release; () is none."""
    release = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?!.*dev)", version)
    return tuple(int(part or 0) for part in release.groups()) if release else ()


def server_version(server_info: Mapping[str, Any]) -> str:
    """The version in an answer to /server_info."""
    return str((server_info.get("system_env") or {}).get("vllm_version"))


def config_of(server_info: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """A section of `vllm_config` in an answer to /server_info, for instance "model_config"; {} where there is none."""
    return (server_info.get("vllm_config") or {}).get(section) or {}


def version_support(server_info: Mapping[str, Any]) -> VersionSupport:
    """Whether weights can be updated in flight, and whether each token has its weight version.

    Args:
        server_info: its answer to /server_info.
    """
    version = server_version(server_info)
    key, lacks, note = version_key(version), "", ""
    if not key:
        note = f"vLLM {version!r} is no release; {NEWEST} is the newest tested"
    elif key < version_key(OLDEST):
        lacks = "weight versions by token"
    elif key > version_key(NEWEST):
        note = f"vLLM {version} is newer than {NEWEST}, the newest tested"
    return VersionSupport(version, OLDEST if OLDEST == NEWEST else f"{OLDEST} to {NEWEST}", lacks, note)


def served_model(model_info: Mapping[str, Any], server_info: Mapping[str, Any]) -> ServedModel:
    """The model in an answer to /server_info, and what /weight_info calls its weights."""
    config, version = config_of(server_info, "model_config"), model_info.get("weight_version")
    name = config.get("served_model_name")
    served = name[0] if isinstance(name, list) and name else name
    return ServedModel(config.get("model"), served, None, version, version == _INITIAL_VERSION)


def has_tokenizer(server_info: Mapping[str, Any]) -> bool:
    """Whether it runs without --skip-tokenizer-init."""
    return not config_of(server_info, "model_config").get("skip_tokenizer_init")


def has_float32_head(server_info: Mapping[str, Any]) -> bool:
    """Whether it runs with --hf-overrides '{"head_dtype": "float32"}'."""
    overrides = config_of(server_info, "model_config").get("hf_overrides")
    return isinstance(overrides, Mapping) and overrides.get("head_dtype") == "float32"


def cache_block(server_info: Mapping[str, Any]) -> int:
    """Tokens of one block, of which the prefix cache holds whole ones: 16 on most GPUs, 128 on a CPU (0.32)."""
    return int(config_of(server_info, "cache_config").get("block_size") or 16)


def tokenize(text: str) -> Request:
    """POST /tokenize."""
    return Request("POST", "/tokenize", {"prompt": text})


def tokenized(answer: Mapping[str, Any]) -> list[int] | None:
    """`tokens` of the answer to `tokenize`."""
    return answer.get("tokens")


def abort_request(request_id: str) -> Request:
    """POST /abort_requests: the request returns its tokens so far. vLLM puts a prefix before the name it was given."""
    return Request("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]})


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
        return int(answer["data"][0]["max_model_len"])
    except (KeyError, IndexError, TypeError) as error:
        raise RolloutProtocolError(url, "/v1/models", f"no max_model_len ({error!r})") from None


def list_endpoints() -> Request:
    """GET /openapi.json."""
    return Request("GET", "/openapi.json")


def update_support(url: str, answer: Mapping[str, Any], server_info: Mapping[str, Any]) -> UpdateSupport:
    """Which ways to update weights the server's endpoints and flags allow.

    Args:
        url: names the server in the error.
        answer: to `list_endpoints`.
        server_info: its answer to /server_info.

    Raises:
        RolloutProtocolError: it lists no paths.
    """
    if "paths" not in answer:
        raise RolloutProtocolError(url, "/openapi.json", "no paths in /openapi.json")
    extension = str(config_of(server_info, "parallel_config").get("worker_extension_cls") or "")
    ours = extension == EXTENSION_CLASS
    transports = WEIGHT_TRANSPORTS if ours and set(answer["paths"]) >= _NEEDS else ()
    return UpdateSupport(transports, True, "" if ours else f"worker extension {extension or 'none'}")
