"""Builds the requests that are sent to an SGLang server: data in, `Request` out, nothing is sent here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_rl_corr.engines import answer_size
from megatron_rl_corr.engines.sglang.changes_loader import LOADER
from megatron_rl_corr.engines.sglang.tensors import serialized
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.engines.types import Request, ServerRanks
from megatron_rl_corr.engines.weight_changes import CODE

PAUSE_MODES = ("abort", "in_place", "retract")

# Sent in full, and top_p and top_k too where they are off, because a server's
# --preferred-sampling-params fill whatever a request leaves out, and the log-probs it returns would not
# show the truncation or the penalty.
NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


def generate_request(
    prompt_ids: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    request_id: str | None = None,
    *,
    seed: int,
    routed_experts: bool = False,
    routes_from: int = 0,
    cache_key: str | None = None,
) -> Request:
    """One sample of one prompt (ids already checked), with a log-prob for every sampled token, no text.

    seed: in [-2**63, 2**63); it decides what a server with deterministic inference draws, which would draw
    the same for all requests without one. With top_p, top_k or min_p the answer also tells, for every
    token, the ids that it was drawn from and its log-prob renormalised on them; with top_logprobs the
    likeliest ids. routed_experts: and the
    experts that every token but the last went to, without the first routes_from tokens. cache_key: keys
    and values are shared only with requests of the same one.
    """
    body = {
        "input_ids": prompt_ids,
        "sampling_params": {**sampling_fields(sampling), "sampling_seed": seed},
        "return_logprob": True,
        "return_text_in_logprobs": False,
        "stream": False,
    }
    if sampling.needs_mask:
        body["return_sampling_mask"] = True
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    if sampling.keys is not None:
        body["return_indexer_topk"] = True
    if routed_experts:
        body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
    if cache_key is not None:
        body["extra_key"] = cache_key
    if request_id is not None:
        body["rid"] = request_id
    return Request("POST", "/generate", body, max_bytes=answer_size.of_sample(len(prompt_ids), sampling))


def sampling_fields(sampling: SamplingParams) -> dict[str, object]:
    """`sampling_params` of a request, without a seed."""
    return {
        **NEUTRAL,
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }


def health() -> Request:
    """200 once the server can generate; 503 while it starts, and after 20 s of pause."""
    return Request("GET", "/health")


def server_info() -> Request:
    """Version, launch arguments and scheduler state: every scheduler answers, also while it is paused."""
    return Request("GET", "/server_info")


def loads() -> Request:
    """What the schedulers have written down last: requests that run and wait, tokens in the
    cache; none is asked.
    """
    return Request("GET", "/v1/loads?include=core")


def memory_report() -> Request:
    """Memory of weights, of keys and values, and of graphs, on each rank. SGLang 0.5.19 on."""
    return Request("GET", "/v1/loads?include=memory")


def ready() -> Request:
    """200 where new requests are handed on to the scheduler; 503 in a pause. SGLang 0.5.20 on."""
    return Request("GET", "/ready")


def model_info() -> Request:
    """Model path and current `weight_version`."""
    return Request("GET", "/model_info")


def pause_generation(mode: str) -> Request:
    """Stop sampling. New requests wait; running ones, by mode:

    abort: return at once with the tokens so far; in_place: go on later on the keys and values they have;
    retract: go on later with keys and values computed anew.
    """
    if mode not in PAUSE_MODES:
        raise ValueError(f"pause mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    return Request("POST", "/pause_generation", {"mode": mode})


def continue_generation() -> Request:
    """Go on after a pause; harmless without one."""
    return Request("POST", "/continue_generation", {})


def begin_weight_update(
    tensors: Mapping[str, Sequence[int]] | None = None,
    *,
    checksums: bool = True,
    changes_follow: bool = False,
) -> Request:
    """Opens the session in which SGLang >= 0.5.21 accepts weights from a process group.

    Args:
        tensors: without effect; SGLang checks each tensor as it comes, and refuses a wrong one without harm.
        checksums: without effect; SGLang hashes what it holds when it is asked.
        changes_follow: without effect; SGLang's weights lie in memory as they were loaded.
    """
    return Request("POST", "/begin_weight_update", {})


def end_weight_update() -> Request:
    """Closes that session."""
    return Request("POST", "/end_weight_update", {})


def init_weights_update_group(
    master_address: str, master_port: int, *, rank_offset: int, world_size: int, group_name: str, backend: str
) -> Request:
    """Join the process group in which the trainer is rank 0; the server's ranks start at rank_offset."""
    return Request(
        "POST",
        "/init_weights_update_group",
        {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        },
    )


def update_weights_from_distributed(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, group_name: str
) -> Request:
    """Receive one broadcast from rank 0 per name, in order. dtypes as "bfloat16"; the weights
    keep their name.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"{len(names)} names have {len(dtypes)} dtypes and {len(shapes)} shapes")
    body = {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "flush_cache": False,
    }
    return Request("POST", "/update_weights_from_distributed", body, keeps_connection=True)


def update_weights_from_tensor(serialized_named_tensors: Sequence[str]) -> Request:
    """Load the tensors of a pickled [(name, tensor)] in base64: one entry for each tensor-parallel rank."""
    body = {"serialized_named_tensors": list(serialized_named_tensors), "flush_cache": False}
    return Request("POST", "/update_weights_from_tensor", body)


def begin_changes(push: str, base: str, stages: int, *, ranks: ServerRanks) -> Request:
    """Have the server's --custom-weight-loader expect changes: `changes_loader.begin`."""
    header = json.dumps({"push": push, "base": base, "stages": stages, "code": CODE})
    entry = serialized([(header, torch.zeros(1))])
    request = update_weights_from_tensor([entry] * ranks.tensor)
    return replace(request, json=(request.json or {}) | {"load_format": LOADER})


def update_weights_from_disk(model_path: str) -> Request:
    """Load a Hugging Face folder by the path that the server knows it by; its weights keep
    their version's name.

    The load format is named because the server's own may be one that reads nothing, as `dummy`.
    """
    body = {"model_path": model_path, "load_format": "auto", "flush_cache": False}
    return Request("POST", "/update_weights_from_disk", body)


def destroy_weights_update_group(group_name: str) -> Request:
    """Leave the process group."""
    return Request("POST", "/destroy_weights_update_group", {"group_name": group_name})


def flush_cache() -> Request:
    """Forget cached prefixes; 400 while requests run."""
    return Request("POST", "/flush_cache")


def weights_checker() -> Request:
    """A digest of the weights the server holds, by rank."""
    return Request("POST", "/weights_checker", {"action": "checksum"}, max_bytes=answer_size.of_checksums())


def update_weight_version(new_version: str) -> Request:
    """Rename the current weights. Running requests go on (the server's default is to abort them)."""
    body = {"new_version": new_version, "abort_all_requests": False}
    return Request("POST", "/update_weight_version", body)


def abort_request(request_id: str) -> Request:
    """POST /abort_request: the request of this `rid` returns its tokens so far."""
    return Request("POST", "/abort_request", {"rid": request_id})


def tokenize(text: str) -> Request:
    """POST /v1/tokenize."""
    return Request("POST", "/v1/tokenize", {"prompt": text})
