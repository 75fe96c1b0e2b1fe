"""Scripts that need Megatron, each in a fork of one process that has imported it: seconds of imports once a session.

As a program it is that process: it reads a script's command line from a line of JSON, runs it, and prints its status.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path

from tools.cpu import environment
from tools.local_server import free_port
from tools.process_group import die_with_parent


def run_megatron(
    script: Path, *arguments: object, ranks: int | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess:
    """Run a script as `python SCRIPT ARGUMENTS` would, in the environment of tools.cpu's Megatron.

    Args:
        script: it must not count on a fresh interpreter: Megatron is imported already, nothing is initialised.
        arguments: its command line, written as str.
        ranks: start it so many times at once, with torchrun's variables; the status is the worst one's.
        timeout: seconds, after which it and its children are killed.

    Raises:
        subprocess.TimeoutExpired: with what it has written.
    """
    return _parent().run([str(script), *map(str, arguments)], ranks, timeout)


@cache
def _parent() -> "_Parent":
    parent = _Parent()
    atexit.register(parent.close)
    return parent


class _Parent:
    """The process that is forked, from outside."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.megatron_forks"], env=environment("megatron"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, preexec_fn=die_with_parent(),
        )  # fmt: skip

    def run(self, argv: list[str], ranks: int | None, timeout: float) -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            job = {"argv": argv, "ranks": ranks, "out": str(out), "err": str(err)}
            self._process.stdin.write(json.dumps(job) + "\n")
            pid = int(self._process.stdout.readline())
            ended, _, _ = select.select([self._process.stdout], [], [], timeout)
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            status = int(self._process.stdout.readline())
            if not ended:
                raise subprocess.TimeoutExpired(argv, timeout, out.read_text(), err.read_text())
            return subprocess.CompletedProcess(argv, status, out.read_text(), err.read_text())

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def main():
    import megatron.training  # noqa: F401

    import megatron_rl_corr.mcore.hooks  # noqa: F401

    gc.freeze()  # or each fork would walk all that was imported, again and again
    for line in sys.stdin:
        job = json.loads(line)
        arm, status = die_with_parent(), 1
        pid = os.fork()
        if not pid:
            arm()
            try:
                status = _run(job)
            finally:  # whatever was raised, this fork must not go on with the loop
                os._exit(status)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(job: dict) -> int:
    """In the fork: the script's exit status."""
    os.setsid()
    for path, number in ((os.devnull, 0), (job["out"], 1), (job["err"], 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    if job["ranks"] is None:
        return _run_script(job["argv"])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job["ranks"])}
    pids = []
    for rank in range(job["ranks"]):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job["ranks"]))
            return _run_script(job["argv"])
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


def _run_script(argv: list[str]) -> int:
    """The exit status that its interpreter would have."""
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    status = 1
    try:
        runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    return status


if __name__ == "__main__":
    main()
