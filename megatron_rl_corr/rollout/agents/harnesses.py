"""The trainer's end of the process that starts harnesses: asks it for an episode's, and starts it anew."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

import megatron_rl_corr
from megatron_rl_corr.data import json_text
from megatron_rl_corr.data.reward_process import NOT_INHERITED, START_LIMIT_S
from megatron_rl_corr.data.reward_worker import LENGTH_BYTES, frame
from megatron_rl_corr.data.worker_pool import RESTARTS
from megatron_rl_corr.engines.errors import SampleFailure
from megatron_rl_corr.engines.secrets import HIDDEN, without_secret_words
from megatron_rl_corr.events import EVENTS
from megatron_rl_corr.rollout.agents.outcome import REWARD, checked_outcome, is_outcome
from megatron_rl_corr.rollout.agents.starter import (
    GRACE_S,
    HarnessKind,
    end_processes,
    mark_of,
)

BOOTSTRAP = (
    "import sys, json; path, own = json.loads(sys.argv.pop(1)); "
    "sys.path[:] = path if own else [*path, *sys.path]; "
    "from megatron_rl_corr.rollout.agents.starter import serve; "
    "serve(int(sys.argv.pop(1)), int(sys.argv.pop(1)))"
)
ROOT = Path(megatron_rl_corr.__file__).resolve().parents[1]
PATHS = ("PYTHONPATH", "PYTHONHOME")
"""Variables that are for the trainer's interpreter."""
CAUSE, TIMEOUT = "agent", "agent_timeout"
"""Causes of a `SampleFailure`."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _AskedHarness:
    """An episode's harness that was asked for."""

    key: str
    ended: asyncio.Future[dict[str, Any]]
    pid: int | None = None
    """Once it has begun."""


@dataclass(eq=False)
class _StarterProcess:
    """The process that starts them."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    mark: str
    asked: dict[int, _AskedHarness] = field(default_factory=dict)
    reading: asyncio.Task | None = None


class Harnesses:
    """Runs the user's function or command, a process an episode, forked from one that has imported the file.

    A harness that fails, hangs or is killed is an error of its episode alone. Where the process that starts
    them ends, its episodes have failed, and the next one starts another. For one event loop.

    Args:
        kind: what is run, and within which limits.
        hidden: variables of the environment that it does not get, such as those with servers' keys.
        python: the interpreter that imports a function; None: this one, with its paths.

    Raises:
        ValueError: there is no such program.
    """

    def __init__(self, kind: HarnessKind, hidden: Collection[str] = (), *, python: str | None = None):
        if python is not None and shutil.which(python) is None:
            raise ValueError(f"`agent_python` {python} is not a program; give the path of an interpreter")
        self.kind, self._hidden = kind, {*hidden, *NOT_INHERITED, *(PATHS if python else ())}
        self._python = python
        self._starter: _StarterProcess | None = None
        self._starting: asyncio.Lock = asyncio.Lock()
        self._count, self._closed = 0, False

    async def start(self) -> None:
        """Import the user's file.

        Raises:
            ValueError: it failed (with the traceback), ended the process, or took more than START_LIMIT_S.
        """
        self._starter = await self._started()

    @property
    def pid(self) -> int | None:
        """Number of the process that starts harnesses."""
        return None if self._starter is None else self._starter.process.pid

    async def run(
        self, task: dict[str, Any], base_url: str, root_url: str, key: str
    ) -> dict[str, float] | None:
        """An episode's result, as `checked_outcome` has it. Cancelled, it ends the harness.

        Args:
            task: what it is given, which JSON must have a form for.
            base_url, root_url: of the gateway, with and without the version that OpenAI's clients want.
            key: of the episode.

        Raises:
            SampleFailure: `agent`, it failed; `agent_timeout`, it took too long.
            ValueError: the process that starts harnesses is gone and can't be replaced.
        """
        try:
            text = json_text.dumps(task).decode()
        except orjson.JSONEncodeError as error:
            raise SampleFailure(
                CAUSE,
                f"{self.name}: the row holds what no harness can be given ({error}); leave it out of it",
            ) from None
        starter = await self._living()
        number = self._count = self._count + 1
        asked = _AskedHarness(key, asyncio.get_running_loop().create_future())
        starter.asked[number] = asked
        urls = {"base_url": base_url, "root_url": root_url}
        try:
            starter.writer.write(frame({"run": number, "task": text, **urls, "api_key": key}))
            ended = await asked.ended
        except asyncio.CancelledError:
            if number in starter.asked:
                starter.writer.write(frame({"end": number}))
            raise
        return self._result(ended, key)

    async def close(self) -> None:
        """End all harnesses, and whom they have started."""
        self._closed = True
        async with self._starting:
            starter, self._starter = self._starter, None
        if starter is not None:
            await self._end(starter)

    @property
    def name(self) -> str:
        """The option and what it names, for messages."""
        what = self.kind.function or " ".join(without_secret_words(self.kind.command or (), os.environ))
        return f"{self.kind.flag} {what}"

    async def _living(self) -> _StarterProcess:
        """The process; another one in the place of one that has ended.

        Raises:
            ValueError: it can't be started.
        """
        async with self._starting:
            if self._closed:
                raise SampleFailure(CAUSE, f"{self.name}: the run ends")
            for attempt in range(RESTARTS + 1):
                if self._starter is not None and not self._starter.reading.done():
                    return self._starter
                try:
                    await self.start()
                except (ValueError, OSError) as error:
                    if attempt == RESTARTS:
                        raise
                    logger.warning("harnesses can't be started (attempt %d): %s", attempt + 1, error)
                    await asyncio.sleep(2**attempt)
            return self._starter

    async def _started(self) -> _StarterProcess:
        mine, its = socket.socketpair()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in self._hidden and not name.startswith("TORCHELASTIC_")
        }
        own = self._python is None
        path = [entry for entry in sys.path if isinstance(entry, str)] if own else [str(ROOT)]
        with its:
            reader, writer = await asyncio.open_connection(sock=mine)
            process = await asyncio.create_subprocess_exec(
                sys.executable if own else self._python,
                "-c",
                BOOTSTRAP,
                json.dumps([path, own]),
                str(its.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=environment,
                process_group=0,
            )
        starter = _StarterProcess(process, reader, writer, secrets.token_hex(8))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                writer.write(frame({"kind": asdict(self.kind), "mark": starter.mark}))
                answer = await _received(reader)
            if "error" in answer:
                error = answer["error"]
                raise ValueError(
                    error
                    if error.startswith(self.kind.flag)
                    else f"{self.name} could not be loaded:\n{error}"
                )
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            await self._end(starter)
            late = isinstance(error, TimeoutError)
            why = f"it took over {START_LIMIT_S:g} s" if late else "it ended its process"
            raise ValueError(f"{self.name} could not be loaded: {why}") from None
        except BaseException:
            await self._end(starter)
            raise
        starter.reading = asyncio.create_task(self._read(starter))
        return starter

    async def _read(self, starter: _StarterProcess) -> None:
        """Take what the process tells, until it ends; what it then has not told has failed."""
        try:
            while True:
                told = await _received(starter.reader)
                if "began" in told:
                    starter.asked[told["began"]].pid = told["pid"]
                else:
                    asked = starter.asked.pop(told["ended"])
                    if not asked.ended.done():
                        asked.ended.set_result(told)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            starter.writer.close()
            left, starter.asked = starter.asked, {}
            for asked in left.values():
                if not asked.ended.done():
                    asked.ended.set_exception(
                        SampleFailure(CAUSE, f"{self.name}: the process that started its harness ended")
                    )
            if not self._closed:
                EVENTS.tell(
                    "worker_replaced", f"the process that starts harnesses ended with {len(left)} of them"
                )
            # They end with it; those whom they had started are looked for.
            _end_marked(starter.mark, [asked.pid for asked in left.values() if asked.pid is not None])

    async def _end(self, starter: _StarterProcess) -> None:
        starter.writer.close()  # on which it ends its harnesses, and itself
        try:
            async with asyncio.timeout(GRACE_S + 2.0):
                await starter.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starter.process.pid, signal.SIGKILL)
            await starter.process.wait()
        if starter.reading is not None:
            await asyncio.wait([starter.reading])

    def _result(self, ended: dict[str, Any], key: str) -> dict[str, float] | None:
        """What a harness that has ended gives, or its failure."""

        def shown(what: str) -> str:
            return with_output(f"{self.name} {what}", ended["output"], key)

        if ended["why"] == "timeout":
            raise SampleFailure(TIMEOUT, shown(f"took longer than {self.kind.timeout_s:g} s"))
        if ended["status"] is None:
            raise SampleFailure(CAUSE, shown("could not be started"))
        if self.kind.command is not None:
            if ended["status"] != 0:
                raise SampleFailure(CAUSE, shown(f"ended {_how(ended['status'])}"))
            answer = {"value": _last_line(ended["stdout"])}
        else:
            try:
                answer = orjson.loads(ended["result"])
            except orjson.JSONDecodeError:  # nothing, or half
                raise SampleFailure(
                    CAUSE, shown(f"ended {_how(ended['status'])} before it returned")
                ) from None
        own = isinstance(answer, dict) and answer.keys() & {"value", "error"}
        if not own or (self.kind.command is None and not is_outcome(answer.get("value"))):
            raise SampleFailure(CAUSE, shown("wrote into the descriptor of its result"))
        if "error" in answer:
            raise SampleFailure(CAUSE, shown(f"failed: {answer['error']}"))
        if self.kind.command is None:
            return answer["value"]
        try:
            return checked_outcome(answer["value"], self.name)
        except ValueError as error:
            raise SampleFailure(CAUSE, shown(f"failed: {error}")) from None


def with_output(what: str, output: str, key: str) -> str:
    """A message with the end of what a harness has written, without the episode's key."""
    text = output.strip().replace(key, HIDDEN)
    return f"{what.replace(key, HIDDEN)}\nthe end of its output:\n{text}" if text else what


async def _received(reader: asyncio.StreamReader) -> dict[str, Any]:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return orjson.loads(await reader.readexactly(length))


def _last_line(text: str) -> Any:
    """The number, or the JSON object, on the last line of a command's output; None: there is none."""
    lines = text.strip().splitlines()
    if not lines:
        return None
    try:
        return float(lines[-1])
    except ValueError:
        pass
    try:
        value = json.loads(lines[-1])  # takes NaN, which is then refused as what it is
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and REWARD in value else None


def _end_marked(mark: str, sessions: Collection[int]) -> None:
    """SIGKILL all processes of the episodes of a process that has ended."""
    end_processes(sessions, lambda process: (mark_of(process.pid) or "").startswith(f"{mark}-"))


def _how(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    return (
        f"by {signal.Signals(-status).name}" if -status in signal.valid_signals() else f"by signal {-status}"
    )
