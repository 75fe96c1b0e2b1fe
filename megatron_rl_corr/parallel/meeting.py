"""Waiting for what only some ranks asked for, and may be long in coming, without a rank that waits too long."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future

from megatron_rl_corr.parallel.failure import all_reduce_done

ROUND_S = 60.0
"""Ranks meet at least so often. NCCL ends a run whose ranks wait longer for each other than
--distributed-timeout-minutes, 10 by default."""


def has_come(asked: Future) -> bool:
    """Within ROUND_S."""
    return bool(concurrent.futures.wait([asked], ROUND_S).done)


def all_reduce_answer[Answer, Used](
    asked: Future[Answer] | None, use: Callable[[Answer], Used], wait: Callable[[Future[Answer]], bool] = has_come
) -> Used | None:
    """use(the answer) on the ranks that asked (None on others), back when every rank has its own.

    Every rank calls it. wait(asked) waits for at most ROUND_S and tells whether the answer has come. What goes wrong
    on one rank, in the answer or in its use, ends the wait of all as `all_reduce_done` says, and what others asked for
    is cancelled.
    """
    used, error, waiting, done = None, None, asked is not None, False
    try:
        while not done:
            if waiting and wait(asked):
                waiting = False
                try:
                    used = use(asked.result())
                except Exception as failure:  # noqa: BLE001  raised below, on this rank, once the others know
                    error = failure
            done = all_reduce_done(not waiting, error)
    finally:
        if waiting:  # another rank failed, or Ctrl-C
            asked.cancel()
    return used
