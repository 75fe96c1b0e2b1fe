"""What an SGLang server tells of itself: its ranks, how it may be updated, its model and its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl_corr.engines.answer_types import at_least_1, checked_checksums, rank_number
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.inspection import ServedModel, UpdateSupport
from megatron_rl_corr.engines.sglang.changes_loader import LOADER
from megatron_rl_corr.engines.sglang.indexer_keys import POSITIONS
from megatron_rl_corr.engines.stacked_parameters import single_experts
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import NamedTensor, ServerChecksums, ServerRanks
from megatron_rl_corr.models.block_fp8 import dequantise_blockwise
from megatron_rl_corr.models.quantization import SCALE

_LAYOUT = (
    "tp_size",
    "pp_size",
    "ep_size",
    "dtype",
    "device",
    "quantization",
    "moe_runner_backend",
    "moe_a2a_backend",
    "enable_dp_attention",
    "enable_dp_lm_head",
    "moe_dense_tp_size",
    "enable_eplb",
    "ep_num_redundant_experts",
    "init_expert_location",
    "enable_fp32_lm_head",
    "disable_shared_experts_fusion",
)
"""Names in /server_info that decide what a rank holds, and how; every version has the first six."""
_QUANTISES_UPDATES = "flash_rl"
"""The --load-format of a server that quantises what it is sent (0.5.23: Qwen2 and Qwen3). By its code
any other puts numbers into quantised weights as they are, beside the scales that it holds, or has no
loader left for them.
"""
QUANTISES_UPDATES_WITH = f"Qwen2 and Qwen3 with --load-format {_QUANTISES_UPDATES}"
_FULL_PRECISION_CACHES = ("auto", "bf16", "bfloat16", "float16", "float32")
_TRANSPORTS = {
    "distributed": "/update_weights_from_distributed",
    "tensor": "/update_weights_from_tensor",
    "disk": "/update_weights_from_disk",
}
_INITIAL_VERSION = "default"
"""What the weights are called that a server was started with."""


def remedy(endpoint: str, status: int, detail: str) -> str:
    """What to do about an answer with this HTTP status; "" where that is not known.

    Args:
        endpoint: what was requested, for instance "/health".
        status: of HTTP, not 2xx.
        detail: the start of the answer's body.
    """
    if status in (401, 403):
        return "give the client the server's --admin-api-key, or its --api-key where it has no other"
    if status == 404:
        return "is this the address of an SGLang server, and is its version supported?"
    if status == 400 and endpoint == "/update_weights_from_disk":
        return "does the server's host see `weight_dir` under the same path, and may the server read it?"
    if status == 503 and endpoint == "/health":
        return "it is starting, paused or stuck; see its log"
    return ""


def changes_problem(server_info: Mapping[str, Any]) -> str | None:
    """Why it can't take pushes of changes alone, with the remedy; None: it can."""
    if quantization(server_info) is not None or server_info.get("load_format") == _QUANTISES_UPDATES:
        return "it quantises what it is sent, all of a tensor at once; use `push` full"
    if LOADER in (server_info.get("custom_weight_loader") or ()):
        return None
    return (
        f"it was started without --custom-weight-loader {LOADER}, by which it takes pushes of changes; add "
        "that, with this package in the server's environment, or use `push` full"
    )


def update_is_open(error: RolloutError) -> bool:
    """True if /begin_weight_update was refused because a killed trainer has left its session open."""
    return isinstance(error, RolloutServerError) and error.status == 400 and "already open" in error.detail


def ranks(url: str, server_info: Mapping[str, Any]) -> ServerRanks:
    """The server's tensor- and pipeline-parallel sizes.

    Args:
        url: names the server in the error.
        server_info: its answer to /server_info.

    Raises:
        RolloutProtocolError: it hides several replicas behind one address, or does not tell.
    """
    names = ("dp_size", "enable_dp_attention", "tp_size", "pp_size")
    missing = [name for name in names if server_info.get(name) is None]
    if missing:
        raise RolloutProtocolError(url, "/server_info", f"no {', '.join(missing)} in it")
    if server_info["dp_size"] > 1 and not server_info["enable_dp_attention"]:
        raise RolloutProtocolError(
            url,
            "/server_info",
            f"it runs --dp-size {server_info['dp_size']} replicas; start as many servers and name each in "
            "`urls`",
        )
    return ServerRanks(server_info["tp_size"], server_info["pp_size"])


def sampling_problem(server_info: Mapping[str, Any], sampling: SamplingParams) -> str | None:
    """Why the server can't sample so, with the remedy; None: it can.

    Args:
        server_info: its answer to /server_info.
        sampling: the run's.
    """
    if sampling.min_p > 0 and server_info.get("enable_deterministic_inference"):
        return (
            f"`min_p` {sampling.min_p}: SGLang 0.5.23 with --enable-deterministic-inference (or "
            "--rl-on-policy-target) ends at its first request with one; start it without, or drop `min_p`"
        )
    if sampling.top_logprobs and server_info.get("speculative_algorithm"):
        return (
            f"`score_centering` {sampling.top_logprobs} with --speculative-algorithm "
            f"{server_info['speculative_algorithm']}: whether the likeliest ids are then those of the policy "
            "was not tried; start it without, or drop `score_centering`"
        )
    if sampling.keys is not None and not server_info.get("enable_return_indexer_topk"):
        return (
            "`indexer_replay`: it does not return the keys of its sparse attention; start it with "
            f"--enable-return-indexer-topk, and {POSITIONS}"
        )
    if sampling.keys is not None and server_info.get("speculative_algorithm"):
        return (
            f"`indexer_replay` with --speculative-algorithm {server_info['speculative_algorithm']}: whose "
            "keys are returned then was not tried; start it without, or drop `indexer_replay`"
        )
    if sampling.stop and server_info.get("skip_tokenizer_init"):
        return (
            f"`stop` {list(sampling.stop)}: a server with --skip-tokenizer-init has no texts to compare; "
            "start it without, or use `stop_token_ids`"
        )
    return None


def batch_invariance_problem(server_info: Mapping[str, Any]) -> str | None:
    """Why a token's log-prob may depend on what else the server computes, with the remedy; None: it does
    not.

    Args:
        server_info: its answer to /server_info.
    """
    if server_info.get("enable_deterministic_inference"):
        return None
    if server_info.get("device") == "cpu":
        return (
            "`batch_invariant`: SGLang has batch-invariant kernels on GPUs alone, and this server runs with "
            "--device cpu; serve from a GPU with --enable-deterministic-inference"
        )
    return (
        f"`batch_invariant`: it runs {server_info.get('version')} with --attention-backend "
        f"{server_info.get('attention_backend')} and without --enable-deterministic-inference; start it with "
        "that flag and --attention-backend fa3, fa4, flashinfer or triton"
    )


def logprob_type(server_info: Mapping[str, Any]) -> str:
    """bfloat16 with --rl-on-policy-target, which makes log-probs of logits in 16 bits; else float32."""
    return "bfloat16" if server_info.get("rl_on_policy_target") else "float32"


def is_quantized(server_info: Mapping[str, Any]) -> bool:
    """True if the server computes with weights, or keeps keys and values, of fewer than 16 bits."""
    cache = server_info.get("kv_cache_dtype") or "auto"
    return bool(server_info.get("quantization")) or cache not in _FULL_PRECISION_CACHES


def quantization(server_info: Mapping[str, Any]) -> str | None:
    """Its --quantization."""
    return server_info.get("quantization")


def quantises_updates(server_info: Mapping[str, Any]) -> bool:
    """True if it runs with --load-format flash_rl."""
    return server_info.get("load_format") == _QUANTISES_UPDATES


def checksums(url: str, server_info: Mapping[str, Any], answer: Mapping[str, Any]) -> ServerChecksums:
    """The server's checksums, from its answers to /server_info and /weights_checker.

    Raises:
        RolloutProtocolError: there is no checksum for each rank.
    """
    try:
        found = [_rank_checksums(rank) for rank in answer["ranks"]]
        of_ranks, drafts = tuple(own for own, _ in found), tuple(drafts for _, drafts in found)
        layout = (*(server_info[key] for key in _LAYOUT[:6]), *(server_info.get(key) for key in _LAYOUT[6:]))
        quantization = server_info["quantization"] or _quantization_of_folder(server_info.get("model_path"))
        device = server_info["device"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RolloutProtocolError(
            url, "/weights_checker", f"no checksum by rank ({error!r} is missing)"
        ) from None
    return ServerChecksums(
        url=url,
        device=device,
        tp_size=server_info["tp_size"],
        layout=(*layout, len(of_ranks)),
        quantization=quantization,
        ranks=of_ranks,
        # of several pipeline stages SGLang shows the first one's (0.5.23)
        shows_all=server_info["pp_size"] == 1,
        # In 16 bits a CPU with AMX holds its matrices packed, and /server_info does not tell; float32
        # is never packed.
        layout_is_known=device == "cpu" and layout[:4] == (1, 1, 1, "float32") and quantization is None,
        quantises_updates=quantises_updates(server_info),
        drafts=drafts,
    )


def hashed(bucket: Sequence[NamedTensor]) -> list[NamedTensor]:
    """What the checksums of a bucket's tensors are of: of quantised weights what values and scales stand for.

    Both are hashed as one, in bfloat16, so that a server may keep them in another form (0.5.23,
    weight_checker.py).
    """
    scales = {name.removesuffix(SCALE): tensor for name, tensor in bucket if name.endswith(SCALE)}
    return [
        (part, dequantise_blockwise(one, scales[name], torch.bfloat16) if name in scales else one)
        for name, tensor in bucket
        if not name.endswith(SCALE)
        for part, one in single_experts(name, tensor)
    ]


def _quantization_of_folder(model_path: str | None) -> str | None:
    """SGLang finds it in the checkpoint itself, and does not always tell."""
    if model_path is None or not (config := Path(model_path) / "config.json").is_file():
        return None
    quantised = json.loads(config.read_text()).get("quantization_config")
    return quantised.get("quant_method", "by its config.json") if quantised else None


def _rank_checksums(rank: Mapping[str, Any]) -> tuple[tuple[int, dict[str, str]], dict[str, str]]:
    """((tensor-parallel rank, the model's checksums), those of what a draft model has of its own)."""
    infos = rank["parallelism_info"]
    all_sums = checked_checksums(rank["checksums"])
    if isinstance(infos, dict):  # SGLang <= 0.5.20
        return (rank_number(infos["tp_rank"]), all_sums), {}
    roles = tuple(f"{info['role']}." for info in infos if info["role"] != "target")
    sums = {name: checksum for name, checksum in all_sums.items() if not name.startswith(roles)}
    shared = {*sums.values()}  # the embedding and the output layer, which draft models take from the model
    drafts = {name: one for name, one in all_sums.items() if name not in sums and one not in shared}
    return (rank_number(infos[0]["tp_rank"]), sums), drafts


def tokenized(answer: Mapping[str, Any]) -> list[int] | None:
    """`tokens` of the answer to `tokenize`."""
    return answer.get("tokens")


def has_tokenizer(server_info: Mapping[str, Any]) -> bool:
    """True if it runs without --skip-tokenizer-init."""
    return not server_info.get("skip_tokenizer_init")


def has_float32_head(server_info: Mapping[str, Any]) -> bool:
    """True if it runs with --enable-fp32-lm-head."""
    return bool(server_info.get("enable_fp32_lm_head"))


def drafts_itself(server_info: Mapping[str, Any]) -> bool:
    """True if it runs with --speculative-algorithm NEXTN, or EAGLE without a draft model
    of another folder.
    """
    draft = server_info.get("speculative_draft_model_path")
    return bool(server_info.get("speculative_algorithm")) and draft in (None, server_info.get("model_path"))


def served_model(model_info: Mapping[str, Any], server_info: Mapping[str, Any]) -> ServedModel:
    """The model in an answer to /model_info, which tells all of it."""
    version = model_info.get("weight_version")
    return ServedModel(
        model_info.get("model_path"),
        model_info.get("served_model_name"),
        model_info.get("model_type"),
        version,
        version == _INITIAL_VERSION,
    )


def update_support(url: str, answer: Mapping[str, Any], server_info: Mapping[str, Any]) -> UpdateSupport:
    """Which endpoints for weights /openapi.json lists.

    Args:
        url: names the server in the error.
        answer: to `list_endpoints`.
        server_info: tells nothing of them.

    Raises:
        RolloutProtocolError: it lists no paths.
    """
    if "paths" not in answer:
        raise RolloutProtocolError(url, "/openapi.json", "no paths in /openapi.json")
    paths = answer["paths"]
    session = "/begin_weight_update" in paths
    transports = tuple(name for name, path in _TRANSPORTS.items() if path in paths)
    return UpdateSupport(transports, session, "" if session else "SGLang <= 0.5.20")


def longest_sequence(url: str, answer: Mapping[str, Any]) -> int:
    """As `Engine.longest_sequence`, from the answer to /server_info.

    A server takes prompts of fewer than max_req_input_len tokens, which is 6 less than the context, or than
    its cache of keys and values if that is smaller. It cuts what is sampled two tokens before the end of
    the context, and two pages before that of the cache.

    Raises:
        RolloutProtocolError: it does not tell.
    """
    try:
        longest, cache = (at_least_1(answer[name]) for name in ("max_req_input_len", "max_total_num_tokens"))
        return max(1, min(longest, cache - 2 * at_least_1(answer["page_size"])))
    except (KeyError, ValueError) as error:
        raise RolloutProtocolError(url, "/server_info", f"no limits of a request ({error!r})") from None


def all_checksums(url: str, answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """`checksums` of every rank in an answer to /weights_checker.

    Args:
        url: names the server in the error.
        answer: to `weights_checker`.

    Raises:
        RolloutProtocolError: there are none.
    """
    try:
        return [checked_checksums(rank["checksums"]) for rank in answer["ranks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutProtocolError(url, "/weights_checker", f"no checksums ({error!r})") from None
