"""What SGLang can do since which version, as its own code tells."""

import re

PAUSES_SINCE = "0.5.6.post2"
SPANS_SINCE = "0.5.19"
"""Each token's weight version."""
FLUSHES_PAUSED_SINCE = "0.5.21"
"""Drops cached prefixes while requests wait that a pause has retracted; older ones refuse with HTTP 400."""
NEWEST = "0.5.23"
"""The newest that was tested."""


def version_key(version: str) -> tuple[int, ...]:
    """Sorts SGLang's versions: 0.5.6 < 0.5.6.post2 < 0.5.19. Release candidates count as the release; () is none."""
    release = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.post(\d+))?", version)
    if release is None:
        return ()
    return tuple(int(part or 0) for part in release.groups())
