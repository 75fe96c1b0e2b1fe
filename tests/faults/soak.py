"""The soak: two runs of the same training at the same time, one with random faults and with servers that
join and leave, the other one left alone; and what each line of the promise has seen.

soak.py OUT [--steps 1000 | --hours 6] [--seed 0] [--every 16] [--changes-every 30] [--ranks 2]
soak.py OUT --report     the report again, of what is in OUT; of a soak that is under way, of its steps so far

Each run has servers behind doors of tests/faults/door.py, listed in a file that the run reads, and ranks
under `torchrun --max-restarts`. OUT gets soak.md, the table, and soak.png, the picture, with all that the
runs leave: some 0.3 GB for a thousand steps. The exit status is 0 if all is as promised, 1 if something is
not, and 3 if something could not be judged, as the memory of ranks in a short soak.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "examples/quickstart")]

import run as quickstart  # noqa: E402
from local_run import HIDDEN_GPU, environment, make_model, megatron_flags, torchrun  # noqa: E402

from tests.faults.door import Door  # noqa: E402
from tests.faults.soak_faults import DRAIN_S, RECOVERY_S, Changes, Faults, Fleet  # noqa: E402
from tests.faults.soak_report import NAMES, last_step, write_report  # noqa: E402
from tests.faults.soak_reward import TOKENS  # noqa: E402
from tests.preloaded import PreloadedServer, address  # noqa: E402
from tools.cpu import sglang_arguments  # noqa: E402
from tools.local_server import LocalServerError  # noqa: E402
from tools.process_group import adopt_orphans, die_with_parent, end_descendants, end_group  # noqa: E402

SAVE_EVERY, LOOK_S, MEMORY_EVERY_S = 10, 1.0, 5.0
GROUP_SIZE, GROUPS = 8, 8
LEAST_SERVERS, MOST_SERVERS = 2, 3
STUCK_S = 600.0
"""A run without a new step for so long is taken to hang."""
MOST_STARTS = 60
ENDLESS = 1_000_000
"""Steps of a run that the clock ends."""


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
        self.server = PreloadedServer(
            self._model,
            engine="sglang",
            dtype="bfloat16",
            log_path=self._folder / f"server{self.number}.{self.starts}.log",
            environment=environment("sglang"),
            extra_arguments=[*sglang_arguments(HIDDEN_GPU), "--random-seed", str(self._seed + self.number)],
        )
        self.server.start()

    def start_again(self) -> None:
        """The same after a kill, at the same door."""
        self.server.stop()
        self.start()
        self.door.target = self.server.url

    def wait_ready(self) -> None:
        """Return once it answers, or does not come, which the run will say."""
        with contextlib.suppress(LocalServerError):
            self.server.wait_ready(RECOVERY_S)

    def signal(self, number: int) -> None:
        """To the server and all its processes."""
        with contextlib.suppress(ProcessLookupError, LocalServerError):
            os.killpg(self.server.pid, number)

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess, LocalServerError):
            process = psutil.Process(self.server.pid)
            return [process, *process.children(recursive=True)]
        return []

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.server.stop()
        self.door.close()


class Training:
    """torchrun with its ranks; started again, with --load, where it ends before its last step."""

    def __init__(self, folder: Path, command: list[str], last: int):
        self.folder, self._command, self._last = folder, command, last
        self.starts = 0
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
            preexec_fn=die_with_parent(signal.SIGTERM),
        )

    def ranks(self) -> list[psutil.Process]:
        """The ranks that run, by their number."""
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if "RANK" in (variables := process.environ()):
                        found[int(variables["RANK"])] = process
        return [found[rank] for rank in sorted(found)]

    def kill(self) -> None:
        """All of it, at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            torchrun_process = psutil.Process(self.process.pid)
            for process in [torchrun_process, *torchrun_process.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def goes_on(self, step: int) -> bool:
        """True while it runs; what has ended before its last step is started again."""
        if self.process.poll() is None:
            return True
        self._log.close()
        if step >= self._last or self.starts >= MOST_STARTS:
            return False
        self._start()
        return True

    def end(self) -> None:
        ranks = self.ranks()
        end_group(self.process.pid, grace_s=5.0, reap=self.process.poll)
        for rank in ranks:  # they have sessions of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()


class Run:
    """One of the two: its folder, its servers, its training, and what is written down of them."""

    def __init__(self, out: Path, name: str, model: Path, options, *, with_faults: bool):
        self.name, self.folder, self._options = name, out / name, options
        self.folder.mkdir()
        self.step, self.ended, self.stuck = 0, False, False
        self._seen_at, self._noted, self._told = 0.0, [0, 0], -1
        self._moved = time.monotonic()
        self._watch = (self.folder / "watch.jsonl").open("a", buffering=1)
        self.training, self._changes, self._faults = None, None, None
        self._make = lambda number: SoakServer(number, model, self.folder, options.seed)
        first = [self._make(number) for number in (0, 1)]
        self.fleet = Fleet(first, self.folder / "servers.txt", self._make)
        self._first, self._with_faults, self._model = first, with_faults, model

    def begin(self) -> None:
        """Train; the servers answer."""
        options = self._options
        for server in self._first:
            server.server.wait_ready()
        command = training_command(self.folder, self._model, self.folder / "servers.txt", options)
        self.training = Training(self.folder, command, options.steps)
        if self._with_faults:
            self._faults = Faults(self.fleet, self.training, every=options.every, seed=options.seed)
            self._changes = Changes(
                self.fleet,
                self._faults,
                every=options.changes_every,
                least=LEAST_SERVERS,
                most=MOST_SERVERS,
                seed=options.seed,
            )

    def look(self, progress: float) -> None:
        """Once a second: the step, memory, a fault or a change that is due. progress: the share of the soak
        that is done, by the clock or by steps.
        """
        step = last_step(self.folder / "metrics.jsonl")
        if step != self.step:
            self.step, self._moved = step, time.monotonic()
        if not self.training.goes_on(step):
            self._end()
            return
        if time.monotonic() - self._moved > STUCK_S:
            print(f"[soak] {self.name}: no step for {STUCK_S:.0f} s, the run is ended", flush=True)
            self.stuck = True
            self._end()
            return
        if step // 10 != self._told:
            self._told = step // 10
            print(f"[soak] {self.name}: step {step}", flush=True)
            prune(self.folder)
        if time.monotonic() - self._seen_at >= MEMORY_EVERY_S:
            self._seen_at = time.monotonic()
            self._remember()
        if self._faults is not None:
            progress = step / self._options.steps if self._options.hours is None else progress
            self._faults.at_step(step, progress)
            self._changes.at_step(step, progress)
            self._note()

    def close(self) -> None:
        if self.training is not None:
            self.training.end()
        self.fleet.close()

    def stop(self) -> None:
        """The clock has ended it."""
        self.step = last_step(self.folder / "metrics.jsonl")
        self._end(of_clock=True)

    def _end(self, *, of_clock: bool = False) -> None:
        self.ended = True
        self._remember()
        self.training.end()
        status = 0 if of_clock else self.training.process.returncode
        end = {"starts": self.training.starts, "status": status, "stuck": self.stuck}
        (self.folder / "end.json").write_text(json.dumps(end))
        if self._faults is not None:
            self._faults.close()

    def _remember(self) -> None:
        """Write down the step, the servers, and the memory and the open files of every process."""
        own = {f"rank {number}": [rank] for number, rank in enumerate(self.training.ranks())}
        servers = [*self.fleet.listed, *self.fleet.away]
        own |= {f"server {server.number}": server.processes() for server in servers}
        memory = {}
        for who, processes in own.items():
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                resident = sum(process.memory_info().rss for process in processes)
                files = processes[0].num_fds() if who.startswith("rank") else 0
                memory[who] = [round(resident / 2**20, 2), processes[0].pid, files]
        victim = None if self._faults is None else self._faults.victim
        row = {
            "time": round(time.time(), 2),
            "step": self.step,
            "listed": len(self.fleet.listed),
            "well": sum(server is not victim for server in self.fleet.listed),
            "memory": memory,
        }
        self._watch.write(json.dumps(row) + "\n")

    def _note(self) -> None:
        """Write down faults and changes that are new."""
        for place, (name, source) in enumerate((("faults", self._faults), ("changes", self._changes))):
            with (self.folder / f"{name}.jsonl").open("a") as file:
                for one in source.done[self._noted[place] :]:
                    file.write(json.dumps(vars(one)) + "\n")
            self._noted[place] = len(source.done)


def training_command(folder: Path, model: Path, servers: Path, options) -> list[str]:
    """A replica and a part of the experts on each rank; it saves and loads, and torchrun starts it again."""
    flags = [
        *megatron_flags(model, folder / "tensorboard"),
        *("--expert-model-parallel-size", options.ranks),
        *("--micro-batch-size", GROUPS * GROUP_SIZE // options.ranks),
        *("--global-batch-size", GROUPS * GROUP_SIZE),
        *("--train-iters", options.steps),
        *("--lr", 2e-3),
        *("--lr-decay-style", "constant"),
        *("--seed", options.seed + 1),
        *("--eval-interval", ENDLESS),
        *("--rollout-servers-file", servers),
        *("--rollout-servers-poll-s", 1),
        *("--rollout-servers-drain-s", DRAIN_S),
        *("--rollout-servers-wait-s", 300),
        *("--rollout-weight-transport", "tensor"),
        *("--rollout-prompts", folder.parent / "prompts.jsonl"),
        *("--rollout-reward-function", f"{ROOT / 'tests/faults/soak_reward.py'}:reward"),
        *("--rollout-group-size", GROUP_SIZE),
        *("--rollout-max-new-tokens", TOKENS),
        *("--rollout-log-dir", folder),
        *("--rollout-correction-preset", "decoupled_geo_rs_token_tis"),
        *("--rollout-rs", "seq_mean_ratio"),
        *("--rollout-rs-threshold", "0.996_1.004"),
        *("--rollout-save-trajectories", folder / "samples"),
        *("--rollout-events", folder / "events.jsonl"),
        *("--rollout-read-timeout-s", 10),
        *("--save", folder / "checkpoints"),
        *("--load", folder / "checkpoints"),
        *("--save-interval", SAVE_EVERY),
    ]
    command = torchrun(flags, processes=options.ranks)
    place = command.index("--master-addr")
    command[place : place + 4] = ["--standalone", "--max-restarts", "1000"]
    return command


def prune(folder: Path) -> None:
    """Keep the last two checkpoints: a thousand steps would write a hundred."""
    for old in sorted((folder / "checkpoints").glob("iter_*"))[:-2]:
        shutil.rmtree(old, ignore_errors=True)


def soak(out: Path, options) -> None:
    """Both runs, until both have ended."""
    model = out / "model"
    make_model(ROOT / "tests/faults/soak_model.py", model, "--seed", options.seed)
    quickstart.write_prompts(out / "prompts.jsonl")
    address("sglang")
    runs: list[Run] = []
    try:
        runs += [Run(out, name, model, options, with_faults=name == "faults") for name in NAMES]
        for run in runs:
            run.begin()
        begun = time.monotonic()
        while not all(run.ended for run in runs):
            time.sleep(LOOK_S)
            progress = 0.0 if options.hours is None else (time.monotonic() - begun) / (3600.0 * options.hours)
            for run in runs:
                if not run.ended:
                    run.stop() if progress >= 1.0 else run.look(progress)
    finally:
        for run in runs:
            run.close()
        # a rank that is killed leaves the process behind that writes its checkpoints
        end_descendants(keep_group=os.getpgrp())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=1000, help="of each run")
    length.add_argument("--hours", type=float, help="end both runs after so many hours")
    parser.add_argument("--every", type=int, default=16, help="steps from one fault to the next, on average")
    parser.add_argument("--changes-every", type=int, default=30, help="the same of joins and leaves")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4), help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the faults, the model and the sampling")
    parser.add_argument("--report", action="store_true", help="write the report of what is in OUT again")
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.hours is not None:
        options.steps = ENDLESS
    if not options.report and options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty; name a new folder")
    return options


def facts(options) -> dict:
    """What the report says of the machine and the code."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "steps": None if options.hours is not None else options.steps,
        "hours": options.hours,
        "seed": options.seed,
        "ranks": options.ranks,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "commit": commit or "unknown",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{psutil.cpu_count()} cores of {models[0] if models else platform.machine()}, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
    }


def main() -> int:
    options = parse_arguments()
    out = options.out
    if not options.report:
        out.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        adopt_orphans()
        (out / "soak.json").write_text(json.dumps(facts(options)))
        soak(out, options)
    status = write_report(out)
    print((out / "soak.md").read_text())
    return status


if __name__ == "__main__":
    sys.exit(main())
