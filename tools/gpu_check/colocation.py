"""A real SGLang server gives its memory to a trainer, gets it back with a push, and then samples right."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from tools.gpu_check.outcome import Finding, Outcome, at_most
from tools.gpu_check.pushes import DTYPES, changed, make_model, prove, server

CACHED_TOKENS = 1 << 21
"""Of the server on a GPU: what it keeps of them is 2 GiB, beside which a tiny model's weights are nothing."""
MOST = 0.1
"""Share of that memory that may stay, or be missing afterwards: other allocations of both processes."""


def check(device: str) -> Outcome:
    free: list[int] = []

    def release(servers) -> None:
        from megatron_rl_corr.reduce.failure import all_reduce_failure
        from megatron_rl_corr.weight_sync.update import release_servers

        all_reduce_failure(None)  # NCCL takes memory at the first collective
        free.append(free_bytes(device))
        release_servers(SimpleNamespace(leads=True), servers)
        free.append(free_bytes(device))

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        model = make_model(Path(folder) / "model")
        flags = [
            "--enable-memory-saver",
            *(["--max-total-tokens", CACHED_TOKENS] if device == "cuda" else []),
        ]
        with server(model, DTYPES[device], device, *map(str, flags)) as running:
            outcome = prove(
                running.url, "tensor", model, changed(model, DTYPES[device]), device, before=release
            )
            free.append(free_bytes(device))
        if device == "cuda":  # a server's memory on a CPU is the host's
            outcome.findings += judge(free, cache_bytes(model))
    return outcome


def cache_bytes(model: Path) -> float:
    """What the server's keys and values take."""
    from megatron_rl_corr.commands.planner.serving import cache_bytes_per_token
    from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint

    return CACHED_TOKENS * cache_bytes_per_token(HFCheckpoint(model).config, 1)


def judge(free: Sequence[int], cache: float) -> list[Finding]:
    """Whether the device's free memory grew by that of the cache, and shrank again.

    Args:
        free: bytes before the release, after it, and after the push.
        cache: bytes of keys and values.

    Raises:
        DoesNotHold: it did not.
    """
    before, released, after = free
    return [
        at_most("share of the cache's memory that a release left", 1 - (released - before) / cache, MOST),
        at_most("share of it that the push did not give back", 1 - (released - after) / cache, MOST),
    ]


def free_bytes(device: str) -> int:
    """Of the whole device, as every process sees it."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0
