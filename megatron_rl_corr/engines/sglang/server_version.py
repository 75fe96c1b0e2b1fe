"""What SGLang can do since which version, as its own code tells."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl_corr.engines.inspection import VersionSupport

PAUSES_SINCE = "0.5.6.post2"
SPANS_SINCE = "0.5.19"
"""Each token's weight version."""
FLUSHES_PAUSED_SINCE = "0.5.21"
"""Drops cached prefixes while requests wait that a pause has retracted; older ones refuse with HTTP 400."""
NEWEST = "0.5.23"
"""The newest that was tested."""


def version_key(version: str) -> tuple[int, ...]:
    """Sorts SGLang's versions: 0.5.6 < 0.5.6.post2 < 0.5.19. Release candidates count as the
    release; () is none.
    """
    release = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.post(\d+))?", version)
    if release is None:
        return ()
    return tuple(int(part or 0) for part in release.groups())


def version_support(server_info: Mapping[str, Any]) -> VersionSupport:
    """Whether weights can be updated in flight, and whether each token has its weight version.

    Args:
        server_info: its answer to /server_info.
    """
    version = str(server_info.get("version"))
    key, lacks, note = version_key(version), "", ""
    if not key:
        note = f"SGLang {version!r} is no release; {NEWEST} is the newest tested"
    elif key < version_key(PAUSES_SINCE):
        lacks = "pauses"
    elif key < version_key(SPANS_SINCE):
        lacks = "weight versions by token"
    elif key < version_key(FLUSHES_PAUSED_SINCE):
        note = (
            f"SGLang {version} can't drop cached prefixes while retracted requests wait: --rollout-max-lag "
            f"above 0 needs {FLUSHES_PAUSED_SINCE}"
        )
    elif key > version_key(NEWEST):
        note = f"SGLang {version} is newer than {NEWEST}, the newest tested"
    return VersionSupport(version, f"{SPANS_SINCE} to {NEWEST}", lacks, note)
