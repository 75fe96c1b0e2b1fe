"""Which caches of an SGLang server may give keys and values of old weights to requests for new ones.

A push drops cached prefixes by /flush_cache. That resets the tree of prefixes, and clears the pools of the
GPU and of the host's memory behind it (--enable-hierarchical-cache); what lies further out stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.engines.sglang.server_version import FLUSHES_PAUSED_SINCE, version_key

_IN_PLACE_NEEDS = ("disable_overlap_schedule", "disable_radix_cache")
"""Launch options, as /server_info names them. With the overlap scheduler a token is labelled with the
version after the one that sampled it; with the prefix cache later prompts meet keys and values of old
weights, and SGLang refuses to drop them while a response is running. A client of `keyed_cache` meets none,
so its servers may have that cache.
"""
_HOST_CACHE = "enable_hierarchical_cache"
"""A cache behind the prefix cache; in older SGLang it knows a prefix by its tokens alone,
whatever its key.
"""
_OUTER_STORES = (
    "hicache_storage_backend",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "radix_cache_backend",
)
"""Launch options of stores outside the server's process. By its code (0.5.23) /flush_cache ends what is on
its way to and from each of them, and removes nothing from it; /clear_hicache_storage_backend would, and
only HiCache and LMCache know that one. A --radix-cache-backend is FlexKV, or code of the user's.
"""


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
    problem = outer_store_problem(server_info)
    if problem is not None:
        return problem
    if mode == "in_place":
        needs = _IN_PLACE_NEEDS[:1] if keyed_cache and not server_info.get(_HOST_CACHE) else _IN_PLACE_NEEDS
        missing = [_flag(name) for name in needs if not server_info.get(name)]
        if missing:
            return (
                f"`pause_mode` in_place needs a server started with {' '.join(missing)}; start it so, or use "
                "`pause_mode` retract"
            )
    if mode == "retract" and samples_ahead:
        version = str(server_info.get("version"))
        if () < version_key(version) < version_key(FLUSHES_PAUSED_SINCE):
            return (
                f"SGLang {version} can't drop cached prefixes while the requests wait that a push has "
                f"retracted, and `max_lag` is above 0; serve with SGLang {FLUSHES_PAUSED_SINCE} or newer, or "
                "use `max_lag` 0"
            )
    return None


def outer_store_problem(server_info: Mapping[str, Any]) -> str | None:
    """Why what the server keeps outside may outlive the weights it was computed with, with the
    remedy; None: nothing.

    Args:
        server_info: its answer to /server_info.
    """
    flags = [
        _flag(name) if server_info[name] is True else f"{_flag(name)} {server_info[name]}"
        for name in _OUTER_STORES
        if server_info.get(name)
    ]
    if not flags:
        return None
    return (
        f"it keeps keys and values outside its own memory ({', '.join(flags)}), where a weight update does "
        "not drop them: requests for new weights would be given those of old ones; start it without"
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
