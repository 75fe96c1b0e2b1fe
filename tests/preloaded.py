"""Interpreters that have imported an engine already: forks of one process a session, which took
the seconds once.

As a program it is that process: it imports the engine, takes command lines over a Unix socket,
and forks for each.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy
import psutil
from setproctitle import setproctitle

from tools.cpu import environment
from tools.cpu.process_environment import VARIABLE
from tools.local_server import LocalServer
from tools.process_group import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "megatron": (
        "megatron.training",
        "megatron.core.tokenizers.text",
        "tests.megatron_flags",
        "megatron_rl_corr.mcore.hooks",
    ),
    "sglang": ("sglang.srt.entrypoints.http_server", "sglang.srt.models.registry"),
    "vllm": ("vllm.entrypoints.openai.api_server",),
    "vllm_v2": ("vllm.entrypoints.openai.api_server",),
}
"""What a process of each engine spends its first seconds on."""
MOCK_DOCUMENTS = 1000
"""Of Megatron's mock data, of which a run reads a few."""
LARGEST = 200_000
"""Bytes of a message: a command line with its environment."""


_NewInterpreter = subprocess.Popen  # a program may put the class below in its place


class PreloadedPopen(subprocess.Popen):
    """subprocess.Popen, but `[sys.executable, ...]` runs in a fork where its environment names an
    engine of tools.cpu.

    A fork is what a new interpreter would be, with these differences: the engine is in sys.modules, and
    its mock data are MOCK_DOCUMENTS; its PYTHONPATH's sitecustomize is not read; it always has a session
    of its own, and it ends with all below it, whatever `preexec_fn` is, when this object's process ends;
    it ends without Python's finalisation; /proc shows the environment of before.
    """

    _status: socket.socket | None = None

    def _execute_child(
        self,
        args,
        executable,
        preexec_fn,
        close_fds,
        pass_fds,
        cwd,
        env,
        startupinfo,
        creationflags,
        shell,
        p2cread,
        p2cwrite,
        c2pread,
        c2pwrite,
        errread,
        errwrite,
        *rest,
    ):
        variables = dict(os.environ if env is None else env)
        engine, words = (
            variables.get(VARIABLE),
            [args] if isinstance(args, str) else list(map(os.fspath, args)),
        )
        if engine is None or shell or words[0] != sys.executable or "-c" in words[1:2]:
            super()._execute_child(
                args,
                executable,
                preexec_fn,
                close_fds,
                pass_fds,
                cwd,
                env,
                startupinfo,
                creationflags,
                shell,
                p2cread,
                p2cwrite,
                c2pread,
                c2pwrite,
                errread,
                errwrite,
                *rest,
            )
            return
        job = {"words": words[1:], "cwd": os.fspath(cwd or os.getcwd()), "variables": variables}
        files = [usual if given == -1 else given for usual, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._status = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status.connect(address(engine))
        socket.send_fds(self._status, [json.dumps(job).encode()], files)
        if not (answer := self._status.recv(LARGEST)):
            log = Path(address(engine)).with_name("log").read_text()
            raise ChildProcessError(f"the process that was to import {engine} has ended:\n{log[-3000:]}")
        self.pid = int(answer)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags):
        if self._status is None:
            return super()._try_wait(wait_flags)
        try:
            answer = self._status.recv(LARGEST, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._status.close()
        # none: the process that forks was killed, and all with it
        return self.pid, int(answer or signal.SIGKILL)

    def _internal_poll(self, *args, **kwargs):
        if self._status is None:
            return super()._internal_poll(*args, **kwargs)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run_preloaded(
    words: Sequence[object], *, engine: str = "megatron", timeout: float = 300.0, **options
) -> subprocess.CompletedProcess:
    """What `python WORDS` ends with and has written, in a fork that has the engine.

    Args:
        words: the command line, written as str.
        engine: "megatron" or "sglang"; its environment is the process's, unless options name one.
        timeout: seconds, after which it and its group are killed.
        options: subprocess.Popen's.

    Raises:
        subprocess.TimeoutExpired: with what it has written.
    """
    command = [sys.executable, *map(str, words)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = PreloadedPopen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            **{"env": environment(engine), **options},
        )
        try:
            process.wait(timeout)
        except BaseException as error:
            hangs = isinstance(error, subprocess.TimeoutExpired)
            with contextlib.suppress(ProcessLookupError):
                if hangs:  # where? Of what has registered faulthandler
                    os.killpg(process.pid, signal.SIGUSR1)
                    time.sleep(1.0)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
            if hangs:
                error.stdout, error.stderr = _read(out), _read(err)
                error.add_note(error.stdout[-2000:] + error.stderr[-8000:])
            raise
        return subprocess.CompletedProcess(command, process.returncode, _read(out), _read(err))


def _read(file) -> str:
    file.seek(0)
    return file.read()


class PreloadedServer(LocalServer):
    """A LocalServer that is there in two seconds."""

    popen = PreloadedPopen


def address(engine: str) -> str:
    """The socket of the process that has imported the engine; started now, or by a process above this one."""
    variable = f"TESTS_PRELOADED_{engine.upper()}"
    if variable not in os.environ:
        folder = tempfile.mkdtemp(prefix="preloaded-")
        with open(f"{folder}/log", "w") as log:
            process = _NewInterpreter(
                [sys.executable, "-W", "ignore", "-m", "tests.preloaded", engine, folder],
                env=environment(engine),
                stdout=subprocess.PIPE,
                stderr=log,
                preexec_fn=die_with_parent(),
                cwd=ROOT,
            )
        process.stdout.read()  # it listens; what is asked now waits for the imports
        atexit.register(_end, process, folder)
        os.environ[variable] = f"{folder}/socket"
    return os.environ[variable]


def preload_all() -> None:
    """Start what every process below this one shares, and a program that starts processes of
    both engines needs.
    """
    for engine in ("megatron", "sglang", "vllm"):
        address(engine)


def _end(process, folder: str) -> None:
    process.terminate()
    process.wait(30)
    process.stdout.close()
    shutil.rmtree(folder)


def main(engine: str, folder: str) -> None:
    """Import the engine, then fork for every command line that comes, until killed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{folder}/socket")
    listener.listen(64)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # ends what the starter reads
    setproctitle(f"{__spec__.name} {engine}")  # later it would not find where: forks change their variables
    for module in MODULES[engine]:
        importlib.import_module(module)
    if engine == "megatron":
        # Each rank shuffles what is in all of Megatron's 100,000 mock documents, and takes a few
        # from the samples.
        importlib.import_module(
            "megatron.core.datasets.gpt_dataset"
        ).MockGPTLowLevelDataset.size = MOCK_DOCUMENTS
    gc.freeze()  # or each fork would walk all that was imported, again and again
    while True:
        asker, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):  # keepers that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        arm = die_with_parent()
        if not os.fork():
            arm()
            listener.close()
            _keep(asker)
        asker.close()


def _keep(asker: socket.socket) -> None:
    """In a fork: the process between a job and who asked for it, until either ends."""
    try:
        message, files, *_ = socket.recv_fds(asker, LARGEST, 3)
        arm = die_with_parent()
        pid = os.fork()
        if not pid:
            arm()
            asker.close()
            _run(json.loads(message), files)
        for file in files:
            os.close(file)
        asker.send(b"%d" % pid)
        ended, _, _ = select.select([asker, os.pidfd_open(pid)], [], [])
        if asker in ended:  # it is gone, and what it started shall not outlive it
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(OSError):
            asker.send(b"%d" % status)
    finally:
        os._exit(0)


def _run(job: dict, files: list[int]) -> None:
    """In the fork: what the interpreter does with the command line, then the end of the process."""
    status = 1
    try:
        os.setsid()
        for usual, given in enumerate(files):
            os.dup2(given, usual)
            os.close(given)
        setproctitle(" ".join([sys.executable, *job["words"]]))
        os.environ.clear()
        os.environ.update(job["variables"])
        os.chdir(job["cwd"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tempfile.tempdir = None  # TMPDIR may be another one
        numpy.random.seed()  # torch's and random's are reset by a fork, or the same in every interpreter
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[1:1] = [path for path in paths if path not in sys.path]
        status = interpret(job["words"])
        atexit._run_exitfuncs()  # as multiprocessing ends its forks
    finally:  # whatever was raised, this fork must not go on with the loop
        os._exit(status)


def interpret(words: Sequence[str]) -> int:
    """The exit status of `python WORDS`: [-u] [-W action], then -m and a module or a script,
    and its arguments.
    """
    while words[0] in ("-u", "-W"):
        words = words[1 + (words[0] == "-W") :]
    status = 1
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = list(words[1:]), os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = list(words), os.path.dirname(words[0])
            runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status & 0xFF


if __name__ == "__main__":
    main(*sys.argv[1:])
