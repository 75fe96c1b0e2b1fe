"""`make mutants`: plants small faults in a copy of the package, one at a time, runs the fast tests that
reach each, and lists those that no test finds.

    python -m tools.mutants --mutants 600 --seed 0

A first run notes which lines each test runs. A fault is then tried in a fork of this process, which has
imported what the tests import except what is tested.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from hashlib import sha256
from pathlib import Path

import pytest

from tools.mutants.faults import Fault, choose, faults_of
from tools.mutants.recorder import Recorder, Some
from tools.process_group import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "runs/mutants"
TREE = OUT / "tree"
"""The copy: also processes that tests start find the fault there."""
MADE = OUT / "recording.json"
ACCEPTED = Path(__file__).with_name("accepted.toml")
PARSERS = "responses answer_fields detailed_samples routed_experts logprob_rows server_version"
FILES = [
    *("core/**/*.py", "logprobs/*.py", "reduce/*.py", "weight_sync/**/*.py"),
    *("engines/answers.py", "engines/answer_types.py"),
    *(f"engines/*/{name}.py" for name in PARSERS.split()),
    *(f"mcore/{name}.py" for name in ("loss", "step", "batch/rollout_batch", "batch/packs")),
]
SHARED = re.compile(r"(?!tools/mutants/)(?!.*/test_\w+\.py$).*\.py")
"""What a test file may import: if it has changed, all tests are run again."""
TABLES = ("tests/docs/test_docs.py::test_generated", "tests/observability/", "tests/commands/correct/")
"""Tests that look at tables of metrics, which are made at the import."""
OURS = ("megatron_rl_corr", "tests", "tools")
SLOW = {
    "logprobs": ["tests/logprobs/test_label_logprobs.py", "tests/reduce/test_vocab.py"],
    "mcore": [f"tests/mcore/test_{name}.py" for name in ("batch", "bypass", "packed")],
    "reduce": [f"tests/reduce/test_{name}.py" for name in ("groups", "reduce", "failure")],
    "weight_sync": ["tests/weight_sync/test_push.py", "tests/weight_sync/test_memory_real_server.py"],
}
"""With --slow: tests that start processes, for what no fast test finds, by the fault's folder."""
FIRST_S, ALL_S = 3.0, 60.0
"""Seconds of tests that a fault is tried with at first, and at most: the quickest files."""


def lay_tree() -> str:
    """Copy what git tracks, or would; the hash of the Python in it that several tests run."""
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    shutil.rmtree(TREE, ignore_errors=True)
    digest = sha256()
    for name in sorted(filter(None, listed.split("\0"))):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
            if SHARED.fullmatch(name):
                digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    (TREE / ".venv").symlink_to(ROOT / ".venv")
    return digest.hexdigest()


def forked(arguments: list[str], plugin, limit: float) -> int | None:
    """What pytest ends with in a fork, whose package is the copy's; None after `limit` seconds."""
    pid = os.fork()
    if not pid:
        status = 70
        try:
            os.setsid()
            os.dup2(os.open(OUT / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), 1)
            os.dup2(1, 2)
            os.chdir(TREE)
            os.environ["PYTHONPATH"] = str(TREE)
            sys.path[:] = [str(TREE), *(path for path in sys.path if path not in ("", str(ROOT)))]
            for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
                del sys.modules[name]
            common = ["-qx", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={TEMPORARY}/t"]
            status = pytest.main([*common, *arguments], plugins=[plugin])
        finally:
            sys.stdout.flush()
            os._exit(status)
    end = time.monotonic() + limit
    ended = status = 0
    while not ended and time.monotonic() < end:
        time.sleep(0.02)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return None
    return os.waitstatus_to_exitcode(status)


IMPORTED = (
    *(
        "aiohttp.web",
        "hypothesis",
        "jinja2",
        "numpy",
        "orjson",
        "psutil",
        "pyarrow.parquet",
        "safetensors.torch",
    ),
    *("torch", "torch.distributed", "torch.utils.checkpoint", "transformers", "yaml"),
)
"""What a fork need not import: what tests use, and what does not change how others work."""
PRELOADED = f"""
import os, sys
from tests import preloaded
from tools.cpu import environment
if preloaded.VARIABLE not in os.environ:
    os.execve(sys.executable, sys.orig_argv, environment("megatron"))
ours = {OURS}
preloaded.MODULES["megatron"] = [m for m in preloaded.MODULES["megatron"] if m.partition(".")[0] not in ours]
preloaded.main("megatron", sys.argv[1])
"""


def preload() -> None:
    """Let tests fork Megatron from a process that has imported it, and not the package."""
    folder = Path(TEMPORARY, "preloaded")
    folder.mkdir()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PRELOADED, folder],
            cwd=TREE,
            env=os.environ | {"PYTHONPATH": str(TREE)},
            stdout=subprocess.PIPE,
            stderr=log,
            preexec_fn=die_with_parent(),
        )
    process.stdout.read()  # it listens
    os.environ["TESTS_PRELOADED_MEGATRON"] = str(folder / "socket")


def record(digest: str, files: list[str], tests: list[str]) -> dict:
    """What each test runs; from the last run, for test files that have not changed since."""
    key = [digest, files, tests]
    path = OUT / f"record-{sha256(json.dumps(key[1:]).encode()).hexdigest()[:8]}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if known.get("key") != key:
        known = {"key": key, "hashes": {}, "tests": {}}
    paths = [Path(path) for start in tests or ["tests"] for path in TREE.glob(start)]
    paths = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    hashes = {file.relative_to(TREE).as_posix(): sha256(file.read_bytes()).hexdigest() for file in paths}
    hashes = {file: value for file, value in hashes.items() if not file.startswith("tests/matrix")}
    if changed := [file for file, value in hashes.items() if known["hashes"].get(file) != value]:
        print(f"runs the fast tests of {len(changed)} files, to note which lines each runs", flush=True)
        status = forked(["--fast", "--maxfail=1000", *changed], Recorder(TREE, set(files), MADE), 3600)
        if status not in (0, 1, 5):
            raise SystemExit(f"the tests ended with {status}; {OUT / 'log'} says why")
        made = json.loads(MADE.read_text())
        kept = {name: test for name, test in known["tests"].items() if file_of(name) not in changed}
        known |= {"hashes": hashes, "tests": kept | made["tests"]}
        path.write_text(json.dumps(known))
    return known


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Reach:
    """Which tests run a fault, from a record."""

    def __init__(self, tests: dict[str, list]):
        self.seconds = {name: seconds for name, (seconds, _) in tests.items()}
        self.sound: set[str] = set()
        self._names: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._of_file: dict[str, set[str]] = defaultdict(set)
        for name, (_, lines) in tests.items():
            for file, numbers in lines.items():
                self._of_file[file].add(name)
                for number in numbers:
                    self._names[file, number].add(name)

    def tests(self, fault: Fault) -> set[str]:
        """Those that run a line of it; of its file, if its lines run at the import or behind a cache."""
        first, last = fault.lines
        names = set().union(*(self._names.get((fault.file, line), ()) for line in range(first, last + 1)))
        if not fault.watched or names == {""}:
            tables = {name for name in self.seconds if name.startswith(TABLES)} if "" in names else set()
            names = self._of_file[fault.file] | tables
        return names & self.seconds.keys() - {""}

    def batches(self, fault: Fault) -> list[tuple[dict[str, set[str]], float]]:
        """Its tests by file, with their seconds: a quick batch, then the rest; the files that are named like
        the fault's first, then the quickest.
        """
        by_file: dict[str, set[str]] = defaultdict(set)
        for name in self.tests(fault):
            by_file[file_of(name)].add(name)
        cost = {file: sum(self.seconds[name] for name in names) for file, names in by_file.items()}
        stem = Path(fault.file).stem
        found, total = [], 0.0
        for file in sorted(by_file, key=lambda file: (stem not in file or cost[file] > FIRST_S, cost[file])):
            if total and total + cost[file] > ALL_S:
                continue
            if not found or total <= FIRST_S < total + cost[file]:
                found.append(({}, 0.0))
            batch, seconds = found[-1]
            batch[file] = by_file[file]
            found[-1], total = (batch, seconds + cost[file]), total + cost[file]
        return found


def tried(fault: Fault, reach: Reach, *, slow: bool, control: bool) -> tuple[str, str]:
    """The outcome of a fault, killed, timeout, survived or unreached, and the test that found it."""
    path, told = TREE / fault.file, OUT / "failed"
    source, times = path.read_bytes(), path.stat()
    trials = [
        (["--fast", *batch], Some(batch, told), 30 + 10 * taken) for batch, taken in reach.batches(fault)
    ]
    inside = fault.file.removeprefix("megatron_rl_corr/")
    if slow:
        trials += [([test], Some(None, told), 900) for test in SLOW.get(inside.partition("/")[0], ())]
    compile(fault.planted(source), fault.file, "exec")
    told.unlink(missing_ok=True)
    try:
        if not control:
            path.write_bytes(fault.planted(source))
            # another time than the compiled file of the source has, which is not written anew
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**12))
        for arguments, plugin, limit in trials:
            status = forked(arguments, plugin, limit)
            if status is None:
                return "timeout", ""
            if status == 70 or status == 5:
                raise SystemExit(f"no test was run; {OUT / 'log'} says why")
            if status:
                return "killed", told.read_text() if told.exists() else f"pytest ended with {status}"
        return "survived" if trials else "unreached", ""
    finally:
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(TREE / ".hypothesis", ignore_errors=True)


def sound(test: str, reach: Reach) -> bool:
    """True if the test passes alone without a fault; else it is left out from now on."""
    if test in reach.seconds and test not in reach.sound:
        if forked(["--fast", file_of(test)], Some({file_of(test): {test}}, OUT / "failed"), 300) != 0:
            print(f"left out, as it fails without a fault: {test}", flush=True)
            del reach.seconds[test]
            return False
        reach.sound.add(test)
    return True


def accepted() -> dict[tuple[str, str, str], str]:
    """Reasons of accepted.toml, by the names of the faults."""
    listed = tomllib.loads(ACCEPTED.read_text("utf-8")).get("fault", [])
    return {(one["file"], one["function"], one["change"]): one["reason"] for one in listed}


def report(results: list[dict]) -> str:
    """A table by folder and the faults that no test finds, in Markdown."""
    folders: dict[str, Counter] = {}
    for one in results:
        outcome = "accepted" if one["reason"] else one["outcome"]
        for row in (one["file"].split("/")[1], "all"):
            folders.setdefault(row, Counter())[outcome] += 1
    columns = ("killed", "timeout", "accepted", "survived", "unreached")
    lines = [f"| folder | planted | {' | '.join(columns)} |", "|---|" + "---:|" * 6]
    for folder, counts in sorted(folders.items(), key=lambda item: (item[0] == "all", item[0])):
        lines.append(f"| {folder} | {counts.total()} | {' | '.join(str(counts[c]) for c in columns)} |")
    for outcome in ("survived", "unreached"):
        left = [one for one in results if one["outcome"] == outcome and not one["reason"]]
        lines += ["", f"{len(left)} {outcome}:", ""] if left else []
        lines += [f"- {one['file']}:{one['line']} {one['function']}: `{one['change']}`" for one in left]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--mutants", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", default=FILES, help="patterns below megatron_rl_corr")
    parser.add_argument("--tests", nargs="+", default=[], help="these fast tests only")
    parser.add_argument("--again", action="store_true", help="only what the last run left")
    parser.add_argument("--slow", action="store_true", help="then slow tests for what is left")
    parser.add_argument("--control", action="store_true", help="plant nothing: every fault has to survive")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    digest = lay_tree()
    package = TREE / "megatron_rl_corr"
    paths = sorted({path for pattern in args.files for path in package.glob(pattern)})
    files = [path.relative_to(TREE).as_posix() for path in paths]
    faults = {file: faults_of(file, (TREE / file).read_bytes()) for file in files}
    for name in IMPORTED:  # before the record, which is made as faults are tried
        importlib.import_module(name)
    recorded = record(digest, files, args.tests)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if args.slow:
        preload()
    reach = Reach(recorded["tests"])
    gc.freeze()
    reasons, chosen, results = accepted(), choose(faults, args.mutants, args.seed), []
    last = json.loads((OUT / "results.json").read_text()) if args.again else []
    names = [((one["file"], one["function"], one["change"]), one) for one in last]
    known = {
        (*name, one["line"]): one
        for name, one in names
        if one["outcome"] in ("killed", "timeout") or name in reasons
    }
    for number, fault in enumerate(chosen, start=1):
        begun = time.monotonic()
        if not (one := known.get((*fault.name, fault.line))):
            outcome, test = tried(fault, reach, slow=args.slow, control=args.control)
            while outcome == "killed" and not args.control and not sound(test, reach):
                outcome, test = tried(fault, reach, slow=args.slow, control=args.control)
            one = {"file": fault.file, "function": fault.function, "change": fault.change}
            one |= {"line": fault.line, "outcome": outcome, "test": test}
            one["seconds"] = round(time.monotonic() - begun, 2)
            done = f"{number}/{len(chosen)} {outcome} {one['seconds']} s"
            print(f"{done} {fault.file}:{fault.line} {fault.change[:90]}", flush=True)
        lost = one["outcome"] in ("survived", "unreached")
        results.append(one | {"reason": reasons.get(fault.name, "") if lost else ""})
        (OUT / "results.json").write_text(json.dumps(results, indent=1))
    stale = reasons.keys() - {fault.name for found in faults.values() for fault in found}
    (OUT / "report.md").write_text(report(results))
    print(report(results))
    for name in stale if args.files == FILES else ():
        print(f"accepted.toml names a fault that can't be planted any more: {name}")


if __name__ == "__main__":
    TEMPORARY = tempfile.mkdtemp(prefix="mutants-")
    try:
        main()
    finally:
        shutil.rmtree(TEMPORARY, ignore_errors=True)
