"""The soak: the quickstart for a thousand steps, with a random fault every 20, against the same
run without faults.

soak.py OUT [--steps 1000] [--every 20] [--seed 0] [--without-compared]

Two servers, each behind a door of tests/faults/door.py, and four ranks under `torchrun --max-restarts`. It
writes soak.md, the table, and soak.png, the rewards, into OUT, with all that the runs leave: some 3 GB for
a thousand steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "examples/quickstart")]

import run as quickstart  # noqa: E402
from local_run import environment, local_server, make_model  # noqa: E402

from megatron_rl_corr.observability.metrics_file import read_metrics  # noqa: E402
from tests.faults.door import Door  # noqa: E402
from tests.faults.soak_faults import Faults  # noqa: E402
from tests.faults.soak_report import Seen, write_report  # noqa: E402
from tools.local_server import LocalServerError  # noqa: E402
from tools.process_group import adopt_orphans, end_group  # noqa: E402

SAVE_EVERY, WATCH_S = 10, 2.0
STUCK_S = 600.0
"""A run without a new step for so long is taken to hang."""


class SoakServer:
    """A server behind its door, which keeps its address while the server is killed and started again."""

    def __init__(self, number: int, model: Path, folder: Path, seed: int):
        self.number, self._model, self._folder, self._seed = number, model, folder, seed
        self.starts = 0
        self.start()
        self.door = Door(self.server.url)

    def start(self) -> None:
        """Start it with the weights that the run began with: what a supervisor of servers does."""
        self.starts += 1
        self.server = local_server(
            self._model,
            dtype="bfloat16",
            log_path=self._folder / f"server{self.number}.{self.starts}.log",
            seed=self._seed + self.number,
            slots=64,
        )
        self.server.start()

    def start_again(self) -> None:
        """The same after a kill, at the same door."""
        self.server.stop()
        self.start()
        self.door.target = self.server.url

    def signal(self, number: int) -> None:
        """To the server and all its processes."""
        with contextlib.suppress(ProcessLookupError, LocalServerError):
            os.killpg(self.server.pid, number)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.server.stop()
        self.door.close()


class Training:
    """torchrun with its ranks; started again, with --load, where it ends in spite of --max-restarts."""

    def __init__(self, folder: Path, command: list[str], last: int):
        self.folder, self._command, self._last = folder, command, last
        self.starts = 0
        self.begun = time.time()
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self._log = (self.folder / f"train.{self.starts}.log").open("w")
        self.process = subprocess.Popen(
            self._command,
            env=environment("megatron"),
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def steps(self) -> list[dict]:
        """What is written of each step so far."""
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.is_file() else []

    def ranks(self) -> list[psutil.Process]:
        """The ranks that run, by their number."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if "RANK" in (variables := process.environ()):
                        found[int(variables["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def goes_on(self, step: int) -> bool:
        """Whether it runs; what has ended before its last step is started again."""
        if self.process.poll() is None:
            return True
        self._log.close()
        if step >= self._last or self.starts > 20:
            return False
        self._start()
        return True

    def end(self) -> None:
        end_group(self.process.pid, grace_s=5.0, reap=self.process.poll)
        for child in psutil.Process().children(recursive=True):  # ranks have sessions of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                if "megatron_rl_corr.launch" in " ".join(child.cmdline()):
                    child.kill()


def training_command(out: Path, folder: Path, model: Path, servers: list[SoakServer], options) -> list[str]:
    """The quickstart's, which saves and loads, and is started again by torchrun."""
    options = argparse.Namespace(
        steps=options.steps, seed=options.seed, engine="sglang", router_replay="off", launcher_flags=[]
    )
    more = [
        "--rollout-url",
        *(server.door.url for server in servers),
        "--rollout-save-trajectories",
        folder / "samples",
        "--rollout-events",
        folder / "events.jsonl",
        "--rollout-read-timeout-s",
        10,
        "--rollout-outage-timeout-s",
        180,
        "--save",
        folder / "checkpoints",
        "--load",
        folder / "checkpoints",
        "--save-interval",
        SAVE_EVERY,
    ]
    command = quickstart.training_command(out, folder, model, servers[0].door.url, options, *more)
    place = command.index("--master-addr")
    command[place : place + 4] = ["--standalone", "--max-restarts", "1000"]
    return command


def prune(folder: Path) -> None:
    """Keep the last two checkpoints: a thousand steps would write a hundred."""
    import shutil

    for old in sorted((folder / "checkpoints").glob("iter_*"))[:-2]:
        shutil.rmtree(old, ignore_errors=True)


def watch(training: Training, servers: list[SoakServer], faults: Faults | None, last: int) -> Seen:
    """Until the run's last step: memory of all processes, and a fault whenever one is due."""
    seen, step, moved = Seen(), 0, time.monotonic()
    while training.goes_on(step):
        time.sleep(WATCH_S)
        rows = training.steps()
        now = rows[-1]["step"] if rows else 0
        if rows and now != step:  # a restart before the first checkpoint empties the file
            moved = time.monotonic()
            reward = rows[-1]["reward/mean"]
            print(f"[soak] {training.folder.name}: step {now} of {last}, reward {reward:.3f}", flush=True)
        step = now
        if time.monotonic() - moved > STUCK_S:
            print(f"[soak] no step for {STUCK_S:.0f} s, the run is ended", flush=True)
            seen.stuck = True
            break
        seen.remember(step, training.ranks(), servers)
        prune(training.folder)
        if faults is not None:
            faults.at_step(step)
    if faults is not None:
        faults.close()
    training.end()
    seen.steps, seen.starts, seen.seconds = training.steps(), training.starts, time.time() - training.begun
    seen.status = training.process.returncode
    return seen


def soak(out: Path, name: str, model: Path, options, *, with_faults: bool) -> tuple[Seen, Faults | None]:
    """One run with its own servers."""
    folder = out / name
    folder.mkdir()
    servers: list[SoakServer] = []
    try:
        servers += [SoakServer(number, model, folder, options.seed) for number in (0, 1)]
        for server in servers:
            server.server.wait_ready()
        training = Training(folder, training_command(out, folder, model, servers, options), options.steps)
        faults = None
        if with_faults:
            faults = Faults(servers, training, every=options.every, last=options.steps - 5, seed=options.seed)
        try:
            return watch(training, servers, faults, options.steps), faults
        finally:
            training.end()
    finally:
        for server in servers:
            server.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="steps from one fault to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the faults, the model and the sampling")
    parser.add_argument("--without-compared", action="store_true", help="leave the run without faults out")
    options = parser.parse_args()
    out = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    model = out / "model"
    make_model(ROOT / "examples/quickstart/make_model.py", model, "--seed", options.seed)
    quickstart.write_prompts(out / "prompts.jsonl")
    seen, faults = soak(out, "faults", model, options, with_faults=True)
    compared = None
    if not options.without_compared:
        compared, _ = soak(out, "compared", model, options, with_faults=False)
    good = write_report(out, options, seen, faults.done, compared)
    print((out / "soak.md").read_text())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
