"""Runs several requests at once, and decides what the failure of one means for the others."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


def raise_first(answers: Sequence[Any]) -> None:
    """Raise the first failure among the answers, with the others as notes."""
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    if failures:
        for other in failures[1:]:
            failures[0].add_note(f"also: {other}")
        raise failures[0]


async def all_or_first_failure(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results in the order of the calls; the first failure cancels the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
