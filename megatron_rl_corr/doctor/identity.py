"""Who a server is and what it offers: judges version, model, endpoints and routed experts."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rl_corr.doctor.findings import Row, found
from megatron_rl_corr.engines.sglang.server_version import (
    FLUSHES_PAUSED_SINCE,
    NEWEST,
    PAUSES_SINCE,
    SPANS_SINCE,
    version_key,
)

TRANSPORTS = {
    "distributed": "/update_weights_from_distributed",
    "tensor": "/update_weights_from_tensor",
    "disk": "/update_weights_from_disk",
}


def judge_version(version: str) -> Row:
    """Whether weights can be updated in flight, and every token's weights are told."""
    key, numbers = version_key(version), {"version": version}
    if not key:
        return Row("version", "note", f"SGLang {version!r} is no release; {NEWEST} is the newest tested", numbers)
    if key < version_key(SPANS_SINCE):
        lacks = "pauses" if key < version_key(PAUSES_SINCE) else "weight versions by token"
        return found("version", "version_unsupported", f"SGLang {version} has no {lacks}", **numbers)
    if key < version_key(FLUSHES_PAUSED_SINCE):
        said = (
            f"SGLang {version} can't drop cached prefixes while retracted requests wait: --rollout-max-lag above 0 "
            f"needs {FLUSHES_PAUSED_SINCE}, or --rollout-pause-mode abort"
        )
        return Row("version", "note", said, numbers)
    if key > version_key(NEWEST):
        return Row("version", "note", f"SGLang {version} is newer than {NEWEST}, the newest tested", numbers)
    return Row("version", "ok", f"SGLang {version}, in {SPANS_SINCE} to {NEWEST}", numbers)


def judge_model(info: Mapping[str, Any], vocab_size: int) -> Row:
    """What is served. Sampling defaults of the server are no mismatch: our requests name every parameter."""
    numbers = {
        "model_path": info.get("model_path"), "served_model_name": info.get("served_model_name"),
        "model_type": info.get("model_type"), "weight_version": info.get("weight_version"), "vocab_size": vocab_size,
    }  # fmt: skip
    said = f"{numbers['model_path']} ({numbers['model_type']}), vocabulary {vocab_size}"
    if numbers["served_model_name"] not in (None, numbers["model_path"]):
        said += f", served as {numbers['served_model_name']}"
    return Row("model", "ok", f"{said}, weights {numbers['weight_version']!r}", numbers)


def judge_endpoints(paths: Sequence[str] | str) -> Row:
    """The ways to update weights, from the server's own description of its endpoints (or why it has none)."""
    if isinstance(paths, str):
        return Row("weight updates", "note", f"the server does not list its endpoints: {paths}")
    transports = [name for name, path in TRANSPORTS.items() if path in paths]
    session = "in a session" if "/begin_weight_update" in paths else "without a session (SGLang <= 0.5.20)"
    numbers = {"transports": transports, "session": "/begin_weight_update" in paths}
    if "distributed" not in transports:
        said = f"no distributed update, which a push of ours needs; there is {', '.join(transports) or 'none'}"
        return found("weight updates", "version_unsupported", said, **numbers)
    return Row("weight updates", "ok", f"{', '.join(transports)}, {session}", numbers)


def judge_routes(encoded: str | None, tokens: int, shape: tuple[int, int, int] | None, expected: bool) -> Row:
    """The experts of a request with `tokens` tokens, prompt and response, as base64 of int32.

    shape: the model's (layers, experts of a token, experts), None where unknown. One row for each token but
    the last, which nothing was computed for.
    """
    if encoded is None:
        if expected:
            return found("routed experts", "routed_experts_missing", "asked for and not returned")
        return Row("routed experts", "note", "not returned; needed only to replay the routing")
    try:
        ids = np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.int32)
    except (binascii.Error, ValueError) as error:
        return found("routed experts", "routed_experts_wrong", f"not base64 of int32: {error}")
    rows = tokens - 1
    numbers: dict[str, Any] = {"ids": int(ids.size), "tokens": tokens, "shape": shape}
    if ids.size == 0 or ids.size % rows:
        return found("routed experts", "routed_experts_wrong", f"{ids.size} ids for {rows} tokens", **numbers)
    if shape is None:
        return Row("routed experts", "ok", f"{ids.size // rows} ids for each of {rows} tokens", numbers)
    layers, top_k, experts = shape
    said = f"{ids.size // rows} ids for each of {rows} tokens, the model has {layers} layers of {top_k} of {experts}"
    if ids.size != rows * layers * top_k or ids.min() < 0 or ids.max() >= experts:
        return found("routed experts", "routed_experts_wrong", f"{said}; ids {ids.min()} to {ids.max()}", **numbers)
    return Row("routed experts", "ok", said, numbers)


def experts_shape(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """(layers, experts of a token, experts) of a Hugging Face config.json; None for a dense model."""
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if not experts or not config.get("num_experts_per_tok"):
        return None
    return config["num_hidden_layers"], config["num_experts_per_tok"], experts
