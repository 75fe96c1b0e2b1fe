"""Starts of the launcher, each with its own command line, in forks of one process that has imported Megatron.

As a program it takes a JSON file, name -> {"words": the command line behind the launcher, "ranks": how
many, "limit": the largest file in bytes or null}, and prints name -> what each rank ended with and wrote.
Two starts run at a time.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.preloaded import interpret, run_preloaded
from tools.local_server import free_port

AT_ONCE = 2
LONGEST_S = 120


@dataclass(frozen=True)
class Ended:
    """A rank that has ended."""

    status: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """What the plugin has said on stderr of its end, less its name."""
        names = ("megatron_rl_corr.launch: ", "megatron_rl_corr: ")
        return [line.partition(": ")[2] for line in self.err.splitlines() if line.startswith(names)]


def run_starts(rows: Mapping[str, dict], folder: Path, **variables: str) -> dict[str, list[Ended]]:
    """Name -> its ranks, ended."""
    path = folder / "starts.json"
    path.write_text(json.dumps(rows, default=str))
    from tests.matrix.releases import OVERLAID, release_environment

    env = release_environment(OVERLAID[-1]) | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    done = run_preloaded([__file__, path], env=env, timeout=590)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [Ended(**rank) for rank in ranks] for name, ranks in found.items()}


def main(path: str) -> None:
    rows, running, found = json.loads(Path(path).read_text()), {}, {}
    while rows or running:
        while rows and len(running) < AT_ONCE:
            name = next(iter(rows))
            running |= dict.fromkeys([_begin(name, rows.pop(name), found)], name)
        pid, _ = os.wait()
        running.pop(pid, None)
    read = {name: json.loads(Path(result).read_text()) for name, result in found.items()}
    print(json.dumps(read))


def _begin(name: str, row: dict, found: dict[str, str]) -> int:
    """Fork one start; found gets the file with what it ends with."""
    descriptor, found[name] = tempfile.mkstemp()
    os.close(descriptor)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        Path(found[name]).write_text(json.dumps(_start(row)))
        os._exit(0)
    return pid


def _start(row: dict) -> list[dict]:
    ranks, begun = row.get("ranks", 1), time.monotonic()
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    pids, files = [], []
    for rank in range(ranks):
        files.append([tempfile.TemporaryFile("w+") for _ in range(2)])  # noqa: SIM115  read when the rank has ended
        pids.append(os.fork())
        if not pids[-1]:
            for number, file in enumerate(files[-1], start=1):
                os.dup2(file.fileno(), number)
            os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
            if row.get("limit"):
                resource.setrlimit(resource.RLIMIT_FSIZE, (row["limit"], row["limit"]))
            signal.alarm(LONGEST_S)
            os._exit(interpret(["-m", "megatron_rl_corr.launch", *map(str, row["words"])]))
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < ranks:
        pid, status = os.wait()
        if pid in pids:
            ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic() - begun
    for pair in files:
        for file in pair:
            file.seek(0)
    return [
        {"status": ended[pid][0], "out": out.read(), "err": err.read(), "seconds": ended[pid][1]}
        for pid, (out, err) in zip(pids, files, strict=True)
    ]


if __name__ == "__main__":
    main(sys.argv[1])
