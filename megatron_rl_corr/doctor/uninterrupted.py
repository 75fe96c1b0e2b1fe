"""Awaits what must not be cut off in the middle: putting a server back into its state."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end. A cancellation of the caller meanwhile is raised afterwards, a failure of it at once."""
    task, cancellation = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
    task.result()
    if cancellation is not None:
        raise cancellation
