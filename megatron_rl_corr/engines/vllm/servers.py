"""What a vLLM server tells of itself: its ranks, type, model, tokenizer and updates; what to do
about its errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron_rl_corr.engines.errors import RolloutProtocolError
from megatron_rl_corr.engines.inspection import ServedModel, UpdateSupport
from megatron_rl_corr.engines.types import Request, ServerRanks
from megatron_rl_corr.engines.vllm.checks import config_problem
from megatron_rl_corr.engines.vllm.requests import GENERATE
from megatron_rl_corr.engines.vllm.routed_experts import WITHOUT_OMISSION
from megatron_rl_corr.engines.vllm.updates import EXTENSION, EXTENSION_CLASS, WEIGHT_TRANSPORTS

_FULL_PRECISION_CACHES = ("auto", "bfloat16", "float16", "float32")
_GUARDED = ("/v1", "/v2", "/inference")
"""The paths that --api-key guards."""
_INITIAL_VERSION = "default"
"""What the weights are called that a server was started with."""
_NEEDS = {"/collective_rpc", "/update_weight_version", "/pause", "/resume"}


def config_of(server_info: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """A section of `vllm_config` in an answer to /server_info, for instance "model_config"; {}
    where there is none.
    """
    return (server_info.get("vllm_config") or {}).get(section) or {}


def remedy(endpoint: str, status: int, detail: str) -> str:
    """What to do about an answer with this HTTP status; "" where that is not known.

    Args:
        endpoint: what was requested, for instance "/health".
        status: of HTTP, not 2xx.
        detail: the start of the answer's body.
    """
    if "rl_corr_" in detail and "not implemented" in detail or "Weight transfer not configured" in detail:
        return f"start the server with {EXTENSION}"
    if "rl_corr_" in detail and "unexpected keyword argument" in detail:
        return (
            "its worker extension is older: install the trainer's megatron-rl-corr there, and start it again"
        )
    if status == 400 and "x-session-id" in detail.lower():
        return WITHOUT_OMISSION
    if status == 401:
        return "give the client the server's --api-key"
    if status == 403 and endpoint == GENERATE:
        return "start the server with --enable-scale-out"
    if status == 404 and not endpoint.startswith((*_GUARDED, "/health", "/version")):
        return "start the server with VLLM_SERVER_DEV_MODE=1 in its environment, with vLLM 0.32 or newer"
    if status == 404:
        return "is this the address of a vLLM server, and is its version 0.32 or newer?"
    if status == 500 and "EngineCore" in detail or status == 503 and endpoint == "/health":
        return "its engine has died; see its log, and start it anew"
    if status == 503 and endpoint == GENERATE and "is paused" in detail:
        return "whoever paused it must POST /resume; a push that is under way does"
    # 0.32 hides the reason, "sampling distribution replay requires top_k"
    if status == 500 and endpoint == GENERATE:
        return (
            "see its log; a server with --return-sampling-mask samples with `top_k` at a `temperature` "
            "above 0 only: start it without, or sample so in evaluations too"
        )
    return ""


def ranks(url: str, server_info: Mapping[str, Any]) -> ServerRanks:
    """The server's tensor- and pipeline-parallel sizes.

    Args:
        url: names the server in the error.
        server_info: its answer to /server_info.

    Raises:
        RolloutProtocolError: it hides several replicas behind one address, has ranks of another kind,
            or does not tell.
    """
    parallel = config_of(server_info, "parallel_config")
    try:
        tensor, pipeline = parallel["tensor_parallel_size"], parallel["pipeline_parallel_size"]
        replicas, world = parallel["data_parallel_size"], parallel["world_size"]
    except KeyError as error:
        raise RolloutProtocolError(url, "/server_info", f"no {error} in its parallel_config") from None
    if replicas > 1:
        raise RolloutProtocolError(
            url,
            "/server_info",
            f"it runs --data-parallel-size {replicas} replicas; start as many servers and name each in "
            "`urls`",
        )
    if world != tensor * pipeline:
        raise RolloutProtocolError(
            url,
            "/server_info",
            f"its {world} ranks are not --tensor-parallel-size {tensor} x --pipeline-parallel-size "
            f"{pipeline}; start it with these alone",
        )
    return ServerRanks(tensor, pipeline)


def is_quantized(server_info: Mapping[str, Any]) -> bool:
    """True if the server computes with weights, or keeps keys and values, of fewer than 16 bits."""
    cache = config_of(server_info, "cache_config").get("cache_dtype") or "auto"
    return bool(quantization(server_info)) or cache not in _FULL_PRECISION_CACHES


def quantization(server_info: Mapping[str, Any]) -> str | None:
    """How its weights are quantised, by its --quantization or its checkpoint."""
    return config_of(server_info, "model_config").get("quantization")


def changes_problem(server_info: Mapping[str, Any]) -> str | None:
    """Why it can't take pushes of changes alone, with the remedy; None: it can."""
    if quantization(server_info) is not None:
        return "it quantises what it is sent, all of a tensor at once; use `push` full"
    return None


def most_likeliest(server_info: Mapping[str, Any]) -> int:
    """Its --max-logprobs, where -1 is no bound; 20, the default, if it does not tell."""
    most = config_of(server_info, "model_config").get("max_logprobs", 20)
    return 1 << 30 if most == -1 else int(most)


def dtype(server_info: Mapping[str, Any]) -> str:
    """What the server computes in, for instance "bfloat16"."""
    return str(config_of(server_info, "model_config").get("dtype")).removeprefix("torch.")


def served_model(model_info: Mapping[str, Any], server_info: Mapping[str, Any]) -> ServedModel:
    """The model in an answer to /server_info, and what /weight_info calls its weights."""
    config, version = config_of(server_info, "model_config"), model_info.get("weight_version")
    name = config.get("served_model_name")
    served = name[0] if isinstance(name, list) and name else name
    return ServedModel(config.get("model"), served, None, version, version == _INITIAL_VERSION)


def has_tokenizer(server_info: Mapping[str, Any]) -> bool:
    """True if it runs without --skip-tokenizer-init."""
    return not config_of(server_info, "model_config").get("skip_tokenizer_init")


def has_float32_head(server_info: Mapping[str, Any]) -> bool:
    """True if it runs with --hf-overrides '{"head_dtype": "float32"}'."""
    overrides = config_of(server_info, "model_config").get("hf_overrides")
    return isinstance(overrides, Mapping) and overrides.get("head_dtype") == "float32"


def cache_block(server_info: Mapping[str, Any]) -> int:
    """Tokens of one block, of which the prefix cache holds whole ones: 16 on most GPUs, 128
    on a CPU (0.32).
    """
    return int(config_of(server_info, "cache_config").get("block_size") or 16)


def tokenize(text: str) -> Request:
    """POST /tokenize."""
    return Request("POST", "/tokenize", {"prompt": text})


def tokenized(answer: Mapping[str, Any]) -> list[int] | None:
    """`tokens` of the answer to `tokenize`."""
    return answer.get("tokens")


def abort_request(request_id: str) -> Request:
    """POST /abort_requests: the request returns its tokens so far. vLLM puts a prefix before the
    name it was given.
    """
    return Request("POST", "/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]})


def update_support(url: str, answer: Mapping[str, Any], server_info: Mapping[str, Any]) -> UpdateSupport:
    """Which ways to update weights the server's endpoints and flags allow.

    Args:
        url: names the server in the error.
        answer: to `list_endpoints`.
        server_info: its answer to /server_info.

    Raises:
        RolloutProtocolError: it lists no paths, or its configuration lacks a field.
    """
    if "paths" not in answer:
        raise RolloutProtocolError(url, "/openapi.json", "no paths in /openapi.json")
    extension = str(config_of(server_info, "parallel_config").get("worker_extension_cls") or "")
    if extension != EXTENSION_CLASS:
        return UpdateSupport((), True, f"worker extension {extension or 'none'}")
    try:
        problem = config_problem(_fields(server_info.get("vllm_config")))
    except AttributeError as error:
        raise RolloutProtocolError(url, "/server_info", f"no {error.name} in its vllm_config") from None
    transports = WEIGHT_TRANSPORTS if problem is None and set(answer["paths"]) >= _NEEDS else ()
    return UpdateSupport(transports, True, problem or "")


def _fields(told: Any) -> Any:
    """What JSON tells of vLLM's configuration, with its fields as attributes."""
    return (
        SimpleNamespace(**{name: _fields(value) for name, value in told.items()})
        if isinstance(told, dict)
        else told
    )
