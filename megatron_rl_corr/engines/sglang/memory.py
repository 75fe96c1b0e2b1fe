"""How an SGLang server started with --enable-memory-saver releases its GPU memory, and takes it
again (0.5.19 on).

Its scheduler asserts that it is idle when it releases, and that what it takes again was released: where
that is not so, the server ends instead of answering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl_corr.engines.memory import MemoryPart
from megatron_rl_corr.engines.sglang.prefix_caches import outer_store_problem
from megatron_rl_corr.engines.sglang.servers import quantization
from megatron_rl_corr.engines.types import Request

_TAGS = {"weights": ("weights",), "cache": ("kv_cache", "cuda_graph")}
"""SGLang's names of memory. That of CUDA graphs is released only with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1."""


_IN_USE = {"weight_gb": "weights", "kv_cache_gb": "keys and values", "graph_gb": "graphs"}
"""SGLang divides by 2^30."""


def memory_problem(server_info: Mapping[str, Any]) -> str | None:
    """Why the server can't release its memory and get new weights, with the remedy; None: it can.

    Args:
        server_info: its answer to /server_info.
    """
    if not server_info.get("enable_memory_saver"):
        return (
            "`colocate` needs a server started with --enable-memory-saver, without which it keeps its "
            "memory and says that it has released it; start it so, or drop `colocate`"
        )
    if server_info.get("weight_cache_mode") not in (None, "off"):
        return (
            f"`colocate` with --weight-cache-mode {server_info['weight_cache_mode']}: its weights are "
            "another process's, which it can't release; start it without"
        )
    if server_info.get("speculative_algorithm"):
        return (
            f"`colocate` with --speculative-algorithm {server_info['speculative_algorithm']}: the weights of "
            "its draft model are released too, and nobody sends them anew; start it without"
        )
    if (server_info.get("pp_size") or 1) > 1:
        return (
            f"`colocate` with --pp-size {server_info['pp_size']} is not proven: whether every pipeline stage "
            "releases its memory and takes it again in step with the others; start it with --tp-size alone"
        )
    if quantization(server_info) is not None:
        return (
            "`colocate` with quantised weights is not tested: whether every value and scale comes back with "
            "a push; serve the model in 16 bits"
        )
    return outer_store_problem(server_info)


def release_memory(parts: Sequence[MemoryPart]) -> Request:
    """POST /release_memory_occupation; the answer is null."""
    return Request("POST", "/release_memory_occupation", {"tags": _tags(parts)})


def resume_memory(parts: Sequence[MemoryPart]) -> Request:
    """POST /resume_memory_occupation; the answer is null."""
    return Request("POST", "/resume_memory_occupation", {"tags": _tags(parts)})


def memory_in_use(answer: Mapping[str, Any]) -> dict[str, float]:
    """What for -> GiB, in an answer to GET /v1/loads: of the data-parallel rank that has most of it.

    Example: {"weights": 15.1, "keys and values": 40.0}.
    """
    ranks = [one.get("memory") or {} for one in answer.get("loads") or ()]
    found = {
        name: [float(rank[key]) for rank in ranks if isinstance(rank.get(key), int | float)]
        for key, name in _IN_USE.items()
    }
    return {name: max(sizes) for name, sizes in found.items() if sizes and max(sizes) > 0}


def _tags(parts: Sequence[MemoryPart]) -> list[str]:
    return [tag for part in parts for tag in _TAGS[part]]
