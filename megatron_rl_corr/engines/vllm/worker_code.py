"""Which code of this package runs inside a vLLM server: trainer and server tell each other, before
any weight is sent.

The server's worker imports this module too: standard library only.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from megatron_rl_corr import __version__

_ENGINES = Path(__file__).resolve().parents[1]
_FILES = (
    "checksums.py",
    "stacked_parameters.py",
    "vllm/checks.py",
    "vllm/memory_checksums.py",
    "vllm/tensors.py",
    "vllm/worker/*.py",
    "weight_changes.py",
)
"""What decides how a server checks, decodes, loads and hashes weights."""


@cache
def worker_code() -> str:
    """The package's version and 8 digits of a SHA-256 over the files that run in workers. Example:
    "0.1.0-3f5a09c2".
    """
    digest = hashlib.sha256()
    for pattern in _FILES:
        for path in sorted(_ENGINES.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{__version__}-{digest.hexdigest()[:8]}"


def check_code(here: str, theirs: str | None) -> None:
    """Trainer and server have the same code of this package.

    Args:
        here: `worker_code` in the server, as its process began.
        theirs: what the trainer says of itself; None: it is too old to say it.

    Raises:
        ValueError: they have not.
    """
    if theirs != here:
        raise ValueError(
            f"this server's worker extension is of megatron-rl-corr {here}, and the trainer's is "
            f"{theirs or 'older'}; install the trainer's version of the package in the server's environment, "
            "and start the server again"
        )
