"""Which version of vLLM answers, what a run can do with it, and whether it is vLLM at all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.engines.errors import RolloutServerError
from megatron_rl_corr.engines.inspection import VersionSupport
from megatron_rl_corr.engines.types import Request, Transport

OLDEST, NEWEST = "0.32.0", "0.33.0"
"""The versions that were tested."""


def version() -> Request:
    """GET /version: every vLLM server has it, without a key and without development mode;
    SGLang's have not.
    """
    return Request("GET", "/version")


async def recognizes(url: str, transport: Transport, timeout_s: float) -> bool:
    """True if a vLLM server answers at an address."""
    try:
        await transport.send(url, version(), timeout_s=timeout_s)
    except RolloutServerError as error:
        if error.status != 404:
            raise
        return False
    return True


def version_key(version: str) -> tuple[int, ...]:
    """Sorts vLLM's versions: 0.25.1 < 0.32.0. Release candidates and builds count as the
    release; () is none.
    """
    release = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?!.*dev)", version)
    return tuple(int(part or 0) for part in release.groups()) if release else ()


def version_support(server_info: Mapping[str, Any]) -> VersionSupport:
    """Whether weights can be updated in flight, and whether each token has its weight version.

    Args:
        server_info: its answer to /server_info.
    """
    version = str((server_info.get("system_env") or {}).get("vllm_version"))
    key, lacks, note = version_key(version), "", ""
    if not key:
        note = f"vLLM {version!r} is no release; {NEWEST} is the newest tested"
    elif key < version_key(OLDEST):
        lacks = "weight versions by token"
    elif key > version_key(NEWEST):
        note = f"vLLM {version} is newer than {NEWEST}, the newest tested"
    return VersionSupport(version, OLDEST if OLDEST == NEWEST else f"{OLDEST} to {NEWEST}", lacks, note)
