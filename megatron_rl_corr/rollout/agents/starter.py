"""The process that starts harnesses for `Harnesses`: it imports the user's file once, and forks for every
episode.

It imports neither numpy nor torch nor Megatron, so a fork is small. Messages are JSON behind their length,
over a socket that it inherits; nothing that a harness sends is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import inspect
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl_corr.data import json_text
from megatron_rl_corr.data.loading import load_with_module
from megatron_rl_corr.data.reward_worker import LENGTH_BYTES, PR_SET_PDEATHSIG, attempt, frame
from megatron_rl_corr.rollout.agents.outcome import checked_outcome

MARK = "ROLLOUT_EPISODE"
"""Variable that all processes of an episode have, however they were started."""
GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
SWEEP_S = 0.25
"""Seconds between two looks for processes that ended harnesses have left behind."""
OUTPUT_BYTES = 4000
"""The last bytes of a harness's output that are kept."""
RESULT_BYTES = 65_536
"""Longest result of a harness, as JSON."""
READS_AT_END = 64
"""Most reads, of 64 KiB, of a pipe whose harness has ended."""
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


@dataclass(frozen=True)
class HarnessKind:
    """What an episode runs, and within which limits.

    Example: HarnessKind("my_agent.py:run", None, 600.0, 4.0, "`agent`").
    """

    function: str | None
    """FILE.py:NAME or package.module:NAME; None with a command."""
    command: tuple[str, ...] | None
    timeout_s: float
    memory_gib: float | None
    """Data (RLIMIT_DATA) that each of its processes may allocate; None: no limit."""
    flag: str
    """The option that names it, for errors."""


@dataclass(eq=False)
class RunningHarness:
    """A harness that runs, or whose end was not told yet."""

    number: int
    pid: int
    deadline: float
    pipes: dict[int, str]
    """Descriptor that is read -> result, output or stdout."""
    task_file: str | None = None
    why: str | None = None
    """timeout or cancelled, once it was told to end."""
    killed: bool = False
    result: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    stdout: bytearray = field(default_factory=bytearray)

    def take(self, kind: str, data: bytes) -> None:
        """Keep what one of its pipes gave: the beginning of a result, the end of all else."""
        kept: bytearray = getattr(self, kind)
        kept += data
        if kind == "result":
            del kept[RESULT_BYTES + 1 :]
        else:
            del kept[: -RESULT_BYTES if kind == "stdout" else -OUTPUT_BYTES]


def serve(descriptor: int, parent: int) -> None:
    """Load the function, then start and end harnesses until the trainer hangs up or ends.

    The first message received is {"kind": a HarnessKind, "mark": TEXT}, answered by {"value": null} or
    {"error": a traceback}. Then {"run": N, "task": JSON text, "base_url", "root_url", "api_key"} is answered
    by {"began": N, "pid": P}, and at its end by {"ended": N, "status": as os.waitstatus_to_exitcode has it,
    "why": null, timeout or cancelled, "result": JSON text, "output": TEXT, "stdout": TEXT}. {"end": N} ends
    it before.

    Args:
        descriptor: number of the inherited socket to the trainer.
        parent: process number of the trainer.
    """
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as channel:
        begun = _first(channel)
        if begun is None:
            return
        kind = HarnessKind(**begun["kind"])
        found: list[Callable] = []
        if kind.function is not None:
            loaded = attempt(lambda: found.append(load_with_module(kind.function, kind.flag)[1]))
            if "error" in loaded:
                channel.sendall(frame(loaded))
                return
        with tempfile.TemporaryDirectory(prefix="rollout-agents-") as folder:
            starter = Starter(channel, kind, found[0] if found else None, begun["mark"], Path(folder), parent)
            channel.sendall(frame({"value": None}))
            starter.run()


def _first(channel: socket.socket) -> dict[str, Any] | None:
    with channel.makefile("rb", buffering=0) as received:
        head = received.read(LENGTH_BYTES)
        if not head:
            return None
        left, parts = int.from_bytes(head, "big"), []
        while left and (part := received.read(left)):
            parts.append(part)
            left -= len(part)
    return json_text.loads(b"".join(parts))


class Starter:
    """Forks harnesses, reads their pipes, ends those that are past their time, and tells the trainer."""

    def __init__(
        self,
        channel: socket.socket,
        kind: HarnessKind,
        function: Callable | None,
        mark: str,
        folder: Path,
        parent: int,
    ):
        self._channel, self._kind, self._function = channel, kind, function
        self._pid = os.getpid()
        self._mark, self._folder = mark, folder
        self._running: dict[int, RunningHarness] = {}
        """By process number."""
        self._left: dict[int, str] = {}
        """Process number of a harness that has ended -> its mark; looked for at the next sweep."""
        self._swept, self._received = 0.0, bytearray()
        self._selector = selectors.DefaultSelector()
        self._wake, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._own = [channel.fileno(), self._wake, wakes]
        self._closing = False
        # What was the user's file's own to handle is ours from here on.
        signal.signal(signal.SIGCHLD, _noted)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which then hangs up
        signal.signal(signal.SIGTERM, self._close)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # whom a harness leaves behind becomes a child of this process
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        self._closing = os.getppid() != parent
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._selector.register(channel, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._own.append(self._selector.fileno())
        gc.collect()
        gc.freeze()  # a collection in a fork would copy the pages of everything that it looks at

    def run(self) -> None:
        """Serve until the trainer hangs up or ends; then end all harnesses, and whom they have started."""
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._channel:
                        self._receive()
                    elif key.fd == self._wake:
                        os.read(self._wake, 4096)
                    elif key.data.pid in self._running:
                        self._read(key.data, key.fd)
                self._reap()
                self._end_late()
                self._sweep()
        except (BrokenPipeError, ConnectionError):
            pass  # the trainer is gone
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._end_all()

    def _close(self, *_: Any) -> None:
        self._closing = True

    def _end_all(self) -> None:
        """SIGTERM to all harnesses, then SIGKILL to everything below this process."""
        for one in self._running.values():
            signal_group(one.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while self._running and time.monotonic() < end:
            self._forget_ended()
            time.sleep(0.02)
        sessions = {one.pid for one in self._running.values()} | self._left.keys()
        while end_processes(sessions, lambda process: process.parent == self._pid):
            self._forget_ended()
            time.sleep(0.02)

    def _forget_ended(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if self._running.pop(pid, None) is not None:
                    self._left[pid] = ""

    def _patience(self) -> float | None:
        """Seconds until something is due without being told."""
        due = [one.deadline for one in self._running.values() if not one.killed]
        due += [self._swept + SWEEP_S] * bool(self._left)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _receive(self) -> None:
        data = self._channel.recv(1 << 20)
        if not data:
            self._closing = True
            return
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "big")
            if len(self._received) < end:
                return
            message = json_text.loads(bytes(self._received[LENGTH_BYTES:end]), unique_keys=False)
            del self._received[:end]
            if "run" in message:
                self._begin(message)
                continue
            for one in self._running.values():
                if one.number == message["end"]:
                    self._stop(one, "cancelled")

    def _begin(self, message: dict[str, Any]) -> None:
        number, kinds = message["run"], ("result", "output")
        if self._kind.command is not None:
            kinds = ("stdout", "output")
        pairs: list[tuple[int, int]] = []
        try:
            for _ in kinds:
                pairs.append(os.pipe2(os.O_CLOEXEC))
            task_file = None if self._kind.command is None else self._written(number, message["task"])
            pid = os.fork()
        except OSError as error:  # no descriptor, process or disk left
            for end in (end for pair in pairs for end in pair):
                os.close(end)
            told = {"ended": number, "status": None, "why": None, "result": "", "output": str(error)}
            self._send(told | {"stdout": ""})
            return
        if pid == 0:
            self._be_harness(message, [ends[1] for ends in pairs], [ends[0] for ends in pairs], task_file)
        for _, end in pairs:
            os.close(end)
        pipes = {begin: kind for (begin, _), kind in zip(pairs, kinds, strict=True)}
        one = RunningHarness(number, pid, time.monotonic() + self._kind.timeout_s, pipes, task_file)
        self._running[pid] = one
        for begin in pipes:
            fcntl.fcntl(begin, fcntl.F_SETFL, os.O_NONBLOCK)
            self._selector.register(begin, selectors.EVENT_READ, one)
        self._send({"began": number, "pid": pid})

    def _written(self, number: int, task: str) -> str:
        path = self._folder / f"task_{number}.json"
        path.write_text(task, encoding="utf-8")
        return str(path)

    def _be_harness(
        self, message: dict[str, Any], writes: list[int], reads: list[int], task_file: str | None
    ) -> NoReturn:
        """The fork: it never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)
            os.setsid()
            for own in (*self._own, *reads, *(fd for one in self._running.values() for fd in one.pipes)):
                with contextlib.suppress(OSError):
                    os.close(own)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            # A command's result is in its standard output, a function's comes over a pipe of its own.
            os.dup2(writes[0] if self._kind.command is not None else writes[1], 1)
            os.dup2(writes[1], 2)
            os.environ[MARK] = f"{self._mark}-{message['run']}"
            os.environ |= {
                "OPENAI_BASE_URL": message["base_url"],
                "OPENAI_API_KEY": message["api_key"],
                "ANTHROPIC_BASE_URL": message["root_url"],
                "ANTHROPIC_API_KEY": message["api_key"],
            }
            resource.setrlimit(resource.RLIMIT_NOFILE, self._files)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if self._kind.memory_gib is not None:
                most = int(self._kind.memory_gib * 2**30)
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            if self._kind.command is not None:
                os.environ["ROLLOUT_TASK"] = task_file
                self._exec()
            status = _call(self._function, message, writes[0], f"{self._kind.flag} {self._kind.function}")
        except BaseException:  # noqa: BLE001  its standard error is shown with its failure
            with contextlib.suppress(BaseException):
                traceback.print_exc()
                sys.stderr.flush()
        finally:
            os._exit(status)

    def _exec(self) -> NoReturn:
        try:
            os.execvp(self._kind.command[0], self._kind.command)
        except OSError as error:
            os.write(2, f"{self._kind.command[0]}: {error.strerror}\n".encode())
            os._exit(127)

    def _read(self, one: RunningHarness, descriptor: int) -> bool:
        """Take what a pipe has, and close one at its end; False: it has nothing now."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            one.take(one.pipes[descriptor], data)
        else:
            self._shut(one, descriptor)
        return bool(data)

    def _shut(self, one: RunningHarness, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        del one.pipes[descriptor]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:  # others are orphans of a harness
                self._ended(self._running.pop(pid), os.waitstatus_to_exitcode(status))

    def _ended(self, one: RunningHarness, status: int) -> None:
        signal_group(one.pid, signal.SIGKILL)
        for descriptor in list(one.pipes):
            # An orphan may hold the other end, and write on, so that there may never be an end.
            for _ in range(READS_AT_END):
                if descriptor not in one.pipes or not self._read(one, descriptor):
                    break
            if descriptor in one.pipes:
                self._shut(one, descriptor)
        if one.task_file is not None:
            with contextlib.suppress(OSError):
                os.unlink(one.task_file)
        self._left[one.pid] = f"{self._mark}-{one.number}"
        texts = {
            name: getattr(one, name).decode("utf-8", "replace") for name in ("result", "output", "stdout")
        }
        self._send({"ended": one.number, "status": status, "why": one.why, **texts})

    def _stop(self, one: RunningHarness, why: str) -> None:
        if one.why is None:
            one.why, one.deadline = why, time.monotonic() + GRACE_S
            signal_group(one.pid, signal.SIGTERM)

    def _end_late(self) -> None:
        now = time.monotonic()
        for one in self._running.values():
            if one.deadline > now or one.killed:
                continue
            if one.why is None:
                self._stop(one, "timeout")
            else:
                one.killed = True
                signal_group(one.pid, signal.SIGKILL)

    def _sweep(self) -> None:
        """End what ended harnesses have left behind, in whatever groups and sessions."""
        if not self._left or time.monotonic() - self._swept < SWEEP_S:
            return
        left, self._left = self._left, {}
        marks = set(left.values())

        def is_left(process: Process) -> bool:
            adopted = process.parent == self._pid and process.pid not in self._running
            return adopted and mark_of(process.pid) in marks

        end_processes(left.keys(), is_left)
        self._swept = time.monotonic()

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.sendall(frame(message))


def _noted(*_: Any) -> None:
    """Only so that the wake-up descriptor is written to."""


def _call(function: Callable, message: dict[str, Any], descriptor: int, source: str) -> int:
    """Run the user's function and send what it returns, or its traceback."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # its `finally` is run
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # random reseeds itself in a fork
        numpy.random.seed()
    answer = attempt(lambda: _returned(function, message))
    if "value" in answer:
        try:
            answer = {"value": checked_outcome(answer["value"], source)}
        except ValueError as error:
            answer = {"error": str(error)}
    text = json.dumps(answer).encode()
    if len(text) > RESULT_BYTES:
        text = json.dumps(
            {"error": f"its result is {len(text)} bytes of JSON; at most {RESULT_BYTES} are read"}
        ).encode()
    while text:
        text = text[os.write(descriptor, text) :]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return 0


def _returned(function: Callable, message: dict[str, Any]) -> Any:
    async def awaited(answer: Any) -> Any:
        return await answer

    task = json_text.loads(message["task"], unique_keys=False)
    value = function(task, message["base_url"], message["api_key"])
    return asyncio.run(awaited(value)) if inspect.isawaitable(value) else value


@dataclass(frozen=True)
class Process:
    """A living process, from /proc/PID/stat."""

    pid: int
    parent: int
    session: int


def processes() -> Iterator[Process]:
    """All that this user can see; zombies are left out."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                stat = Path(entry.path, "stat").read_bytes()
                state, parent, _, session = stat[stat.rindex(b")") + 2 :].split(None, 4)[:4]
                if state not in (b"Z", b"X"):
                    yield Process(int(entry.name), int(parent), int(session))


def mark_of(pid: int) -> str | None:
    """The episode that a process is of, by the environment that it was started with."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    head = f"{MARK}=".encode()
    return next((one[len(head) :].decode() for one in variables if one.startswith(head)), None)


def end_processes(sessions: Container[int], is_meant: Callable[[Process], bool]) -> int:
    """SIGKILL the processes of these sessions, those that are meant, and all below them.

    Returns:
        How many.
    """
    every = list(processes())
    below: dict[int, list[int]] = {}
    for process in every:
        below.setdefault(process.parent, []).append(process.pid)
    waiting = [one.pid for one in every if one.session in sessions or is_meant(one)]
    ended: set[int] = set()
    while waiting:
        pid = waiting.pop()
        if pid not in ended:
            ended.add(pid)
            waiting += below.get(pid, [])
    for pid in ended:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(ended)


def signal_group(leader: int, sent: signal.Signals) -> None:
    """To the process group of a harness; to the harness alone while it has none yet."""
    try:
        os.killpg(leader, sent)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, sent)
