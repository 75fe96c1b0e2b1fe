"""Scripts that need Megatron, each in a fork of one process that has imported it: seconds of
imports once a session.

As a program, `megatron_forks.py N SCRIPT ...` is what torchrun does for N ranks on one machine, by
forks of itself.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.preloaded import interpret, run_preloaded
from tools.local_server import free_port


def run_megatron(
    script: Path, *arguments: object, ranks: int | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess:
    """Run a script as `python SCRIPT ARGUMENTS` would, in the environment of tools.cpu's Megatron.

    Args:
        script: it must not count on a fresh interpreter: Megatron is imported already,
            nothing is initialised.
        arguments: its command line, written as str.
        ranks: start it so many times at once, with torchrun's variables; the status is the worst one's.
        timeout: seconds, after which it and its children are killed.

    Raises:
        subprocess.TimeoutExpired: with what it has written.
    """
    return run_preloaded([*([] if ranks is None else [__file__, ranks]), script, *arguments], timeout=timeout)


def main(ranks: int, words: list[str]) -> int:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
            os._exit(interpret(words))
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
