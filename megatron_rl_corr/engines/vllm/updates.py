"""Requests that pause a vLLM server and give it new weights, and what its answers to them mean.

Weights go to methods of our worker extension, through /collective_rpc; what it refuses is in its
answer as "error".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl_corr.engines import answer_size
from megatron_rl_corr.engines.answer_types import at_least_1, checked_checksums, rank_number
from megatron_rl_corr.engines.errors import RolloutError, RolloutProtocolError, RolloutServerError
from megatron_rl_corr.engines.types import Request, ServerChecksums, ServerRanks
from megatron_rl_corr.engines.vllm.requests import GENERATE
from megatron_rl_corr.engines.vllm.worker_code import worker_code

PAUSE_MODES = {"abort": "abort", "in_place": "keep&clear_cache=false", "retract": "keep"}
"""Ways to pause, and what /pause calls them. With `keep` running requests get new keys and values
after the pause.
"""
WEIGHT_TRANSPORTS = ("distributed", "tensor", "disk")
_RPC = "/collective_rpc"
EXTENSION_CLASS = "megatron_rl_corr.engines.vllm.worker.Extension"
EXTENSION = f'--worker-extension-cls {EXTENSION_CLASS} --weight-transfer-config \'{{"backend": "rl_corr"}}\''
"""Flags of a server that takes weights from this package."""


def pause_generation(mode: str) -> Request:
    """Stop sampling. New requests wait; running ones, by mode:

    abort: return at once with the tokens so far; in_place: go on later with the keys and values they have;
    retract: go on later with keys and values computed anew.
    """
    if mode not in PAUSE_MODES:
        raise ValueError(f"pause mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    return Request("POST", f"/pause?mode={PAUSE_MODES[mode]}")


def refuses_while_paused(error: RolloutServerError) -> bool:
    """True if a server does not let a new request wait for the end of a pause.

    0.33 refuses it with HTTP 503 where the pause ended or waits for the running ones (`abort`, `wait`);
    0.32 lets it wait, as both do where those go on later.
    """
    return error.endpoint == GENERATE and error.status == 503 and "Generation is paused" in error.detail


def continue_generation() -> Request:
    """Go on after a pause; harmless without one."""
    return Request("POST", "/resume")


def pause_problem(
    server_info: Mapping[str, Any], mode: str, *, keyed_cache: bool, samples_ahead: bool
) -> str | None:
    """Why the server can't be paused in this mode for a weight update, with the remedy; None: it can.

    Args:
        server_info: its answer to /server_info.
        mode: abort, in_place or retract.
        keyed_cache: requests name their weights as their cache key.
        samples_ahead: responses run while weights are updated.
    """
    cache = (server_info.get("vllm_config") or {}).get("cache_config") or {}
    if mode == "in_place" and not keyed_cache and cache.get("enable_prefix_caching") is not False:
        return (
            "`pause_mode` in_place keeps the prefix cache, from which later prompts would take keys and "
            "values of old weights; start the server with --no-enable-prefix-caching, or use `pause_mode` "
            "retract"
        )
    return None


def begin_weight_update(
    tensors: Mapping[str, Sequence[int]] | None = None,
    *,
    checksums: bool = True,
    changes_follow: bool = False,
) -> Request:
    """Begin an update; one that a killed trainer left open is broken off.

    Refused if it does not fit the model, or if the server runs other code of this package.

    Args:
        tensors: all that it will bring, Hugging Face name -> shape; None: checked bucket by bucket.
        checksums: hash the parameters while they are loaded.
        changes_follow: keep what `begin_changes` needs.
    """
    shapes = None if tensors is None else {name: list(shape) for name, shape in tensors.items()}
    return _call(
        "rl_corr_begin", tensors=shapes, checksums=checksums, keep=changes_follow, code=worker_code()
    )


def begin_changes(push: str, base: str, stages: int, *, ranks: ServerRanks) -> Request:
    """Expect in the open update what has changed alone; refused where the server does not have `base`."""
    return _call("rl_corr_begin_changes", push=push, base=base, stages=stages)


def end_weight_update() -> Request:
    """End it; refused if tensors are missing."""
    return _call("rl_corr_end")


def update_is_open(error: RolloutError) -> bool:
    """Never: `begin_weight_update` ends what an earlier trainer left open."""
    return False


def init_weights_update_group(
    master_address: str, master_port: int, *, rank_offset: int, world_size: int, group_name: str, backend: str
) -> Request:
    """Join the process group in which the trainer is rank 0; the server's ranks start at rank_offset."""
    return _call(
        "rl_corr_join",
        master_address=master_address,
        master_port=master_port,
        rank_offset=rank_offset,
        world_size=world_size,
        group_name=group_name,
        backend=backend,
    )


def destroy_weights_update_group(group_name: str) -> Request:
    """Leave the process group of this name."""
    return _call("rl_corr_leave", name=group_name)


def update_weights_from_distributed(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, group_name: str
) -> Request:
    """Receive one broadcast from rank 0 per name, in order.

    Args:
        names: Hugging Face names.
        dtypes: for instance "bfloat16".
        shapes: of the whole tensors.
        group_name: the group in which rank 0 broadcasts; each pipeline stage's sender has its own.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"{len(names)} names have {len(dtypes)} dtypes and {len(shapes)} shapes")
    info = {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
    }
    return replace(_call("rl_corr_bucket", buckets=[info]), keeps_connection=True)


def update_weights_from_tensor(entries: Sequence[str]) -> Request:
    """Load a bucket: for each tensor-parallel rank what `tensors.serialized` made."""
    same = all(entry is entries[0] or entry == entries[0] for entry in entries)
    return _call(
        "rl_corr_bucket", buckets=[{"serialized": entry} for entry in (entries[:1] if same else entries)]
    )


def update_weights_from_disk(model_path: str) -> Request:
    """Load a Hugging Face folder, by the path that the server knows it by; the weights keep
    their version's name.
    """
    return _call("rl_corr_load_folder", path=model_path, code=worker_code())


def update_weight_version(new_version: str) -> Request:
    """Rename the weights; running requests go on."""
    return Request("POST", "/update_weight_version", {"new_version": new_version})


def weights_checker() -> Request:
    """Checksums of each parameter: of its memory, or as an update loaded it where the server's
    kernels pack it.
    """
    return replace(_call("rl_corr_checksums"), max_bytes=answer_size.of_checksums())


def checksums(url: str, server_info: Mapping[str, Any], answer: Mapping[str, Any]) -> ServerChecksums:
    """The server's checksums, from its answer to `weights_checker`.

    Raises:
        RolloutProtocolError: there is no checksum for each rank.
    """
    try:
        ranks = answer["results"]
        first = ranks[0]
        layout = tuple(
            first[key] for key in ("device", "tp_size", "expert_parallel", "dtype", "quantization")
        )
        hash(layout)  # it is compared with those of other servers
        sums = tuple((rank_number(rank["tp_rank"]), _by_parameter(rank)) for rank in ranks)
        at_least_1(first["tp_size"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RolloutProtocolError(url, _RPC, f"no checksum by rank ({error!r} is missing)") from None
    return ServerChecksums(
        url=url,
        device=first["device"],
        tp_size=first["tp_size"],
        layout=(*layout, len(ranks)),
        quantization=first["quantization"],
        ranks=sums,
        # before any packing, in 16 bits too
        layout_is_known=first["device"] == "cpu" and first["tp_size"] == 1,
    )


def all_checksums(url: str, answer: Mapping[str, Any]) -> list[dict[str, str]]:
    """`checksums` of every rank in an answer to `weights_checker`.

    Raises:
        RolloutProtocolError: there are none.
    """
    try:
        return [_by_parameter(rank) for rank in answer["results"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutProtocolError(url, _RPC, f"no checksums ({error!r})") from None


def _by_parameter(rank: Mapping[str, Any]) -> dict[str, str]:
    """{parameter: checksum}, by the names of `server_parameter`, without what vLLM derives from
    other parameters.
    """
    return {
        _NAMES.sub(lambda match: _OUR_NAMES[match[0]], name): one
        for name, one in checked_checksums(rank["checksums"]).items()
        if not name.endswith(_DERIVED)
    }


_OUR_NAMES = {
    ".experts.routed_experts.": ".experts.",  # 0.32 has a layer's experts in a module of their own
    ".fused_qkv_a_proj.": ".fused_qkv_a_proj_with_mqa.",  # of latent attention
}
_NAMES = re.compile("|".join(map(re.escape, _OUR_NAMES)))
_DERIVED = (".W_UK_T", ".W_UV")
"""Latent attention's, from kv_b_proj, at the end of each update."""


def _call(method: str, **arguments: Any) -> Request:
    return Request("POST", _RPC, {"method": method, "kwargs": arguments})
