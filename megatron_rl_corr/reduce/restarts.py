"""Lets the process groups of a job that torchrun has started again meet, without the addresses of
the attempt before.

torchrun's agent keeps one store for all attempts (torch 2.14). Gloo and NCCL leave addresses in it, under
names that are the same in each attempt, so that a later one connects to processes that are gone:
"Connection refused".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.distributed import PrefixStore, Store, rendezvous

_SCHEME = "env"
"""How init_process_group meets where neither a store nor an address is given, as in Megatron."""
_within: list[bool] = []
"""One entry for each restart within this process."""


def attempts_before() -> int:
    """How often torchrun has started this job again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def begin_again() -> None:
    """From now on this process is a restart: Megatron's in-process restart sets the job up anew."""
    _within.append(True)


def is_restart() -> bool:
    """True if torchrun has started this job again, or Megatron within this process."""
    return attempts_before() > 0 or bool(_within)


def part_attempts() -> None:
    """From now on the default process group of this process finds only keys of its own attempt.

    Does nothing in a first attempt, nor where rank 0 keeps the store, which ends with it.
    """
    if not attempts_before() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    handlers = rendezvous.__globals__["_rendezvous_handlers"]
    original = handlers[_SCHEME]

    def parted(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        for store, rank, size in original(url, *args, **kwargs):
            yield PrefixStore(f"megatron_rl_corr/groups_of_attempt_{attempts_before()}", store), rank, size

    handlers[_SCHEME] = parted
