"""The trainer's end of a process that scores samples: starts it, sends it samples, ends it with
its own children.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Collection, Sequence
from typing import Any

import orjson

from megatron_rl_corr.config.reward_specs import RewardSpec
from megatron_rl_corr.data.reward_value import is_reward
from megatron_rl_corr.data.reward_worker import FLAG, LENGTH_BYTES, first_message, frame
from megatron_rl_corr.data.worker_pool import WorkerGone

START_LIMIT_S = 300.0
"""Seconds for importing the users' files and for their setup()."""
ANSWER_BYTES = 64 << 20
"""Longest answer of a worker."""
NOT_ITS_OWN = "something else than its answer came from its process, as of code that it was given to run"
BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from megatron_rl_corr.data.reward_worker import serve; "
    "serve(int(sys.argv.pop(1)), int(sys.argv.pop(1)))"
)
NOT_INHERITED = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MEGATRON_RL_CORR",
}
"""Variables that make the trainer a rank of its job, beside TORCHELASTIC_*: libraries that find them would
wait for the other ranks. By their whole names: LOCAL_MODEL_DIR is the user's.
"""


class RewardProcess:
    """One process with a new interpreter: it is no fork of the trainer, and does not run the
    trainer's script.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ):
        self._process, self._reader, self._writer = process, reader, writer
        self._names: list[str] = []
        self.forms: list[tuple[str, bool]] = []
        """(form, whether it is async) of each function."""

    @classmethod
    async def start(
        cls, specs: Sequence[RewardSpec], texts: Sequence[str | None], hidden: Collection[str] = ()
    ) -> RewardProcess:
        """Start a process and load the reward functions in it.

        Args:
            specs: of the functions.
            texts: the text of each one's file, the same for all workers of a run; None for a module.
            hidden: variables of the environment that it does not get.

        Raises:
            ValueError: a user's file or its setup() failed (with the traceback), ended the process, or
                took more than START_LIMIT_S.
        """
        named = " ".join(spec.source for spec in specs)
        mine, its = socket.socketpair()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in {*NOT_INHERITED, *hidden} and not name.startswith("TORCHELASTIC_")
        }
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])  # Python looks at no other
        with its:
            reader, writer = await asyncio.open_connection(sock=mine)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                BOOTSTRAP,
                path,
                str(its.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=environment,
                process_group=0,
            )
        worker = cls(process, reader, writer)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                answer = await worker.ask(first_message(specs, texts))
            if "error" in answer:
                error = answer["error"]
                raise ValueError(
                    error if error.startswith(FLAG) else f"{FLAG} {named} could not be loaded:\n{error}"
                )
        except BaseException as error:
            await worker.end()
            if isinstance(error, (WorkerGone, TimeoutError)):
                why = (
                    error
                    if isinstance(error, WorkerGone)
                    else f"its file and setup() took over {START_LIMIT_S:g} s"
                )
                raise ValueError(f"{FLAG} {named} could not be loaded in a worker: {why}") from None
            raise
        worker.forms, worker._names = answer["value"], [spec.name for spec in specs]
        return worker

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    async def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer: {"value": ...} or {"error": a traceback}.

        Args:
            job: a message of `serve`.

        Raises:
            WorkerGone: the process ended, or what came is no answer.
        """
        try:
            self._writer.write(frame(job))
            await self._writer.drain()
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            answer = orjson.loads(await self._reader.readexactly(length)) if length <= ANSWER_BYTES else None
            if isinstance(answer, dict) and ("error" in answer or self._is_value(job, answer.get("value"))):
                return answer
            raise WorkerGone(NOT_ITS_OWN)
        except orjson.JSONDecodeError:
            raise WorkerGone(NOT_ITS_OWN) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # it may have closed the connection alone
                    await self._process.wait()
            raise WorkerGone(f"its process ended {_how(self._process.returncode)}") from None

    def _is_value(self, job: dict[str, Any], value: Any) -> bool:
        """True for a list, and of samples for the named numbers of each, as `checked_group` gives them."""
        if not isinstance(value, list) or "samples" not in job:
            return isinstance(value, list)
        name = self._names[job["function"]]
        return len(value) == len(job["samples"]) and all(
            isinstance(parts, dict) and name in parts and all(map(is_reward, parts.values()))
            for parts in value
        )

    async def end(self) -> None:
        """Kill the process and those that it started, except those in a process group of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._writer.close()


def _how(status: int | None) -> str:
    if status is None:
        return "its connection"
    return f"with exit status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
