"""Runs each part in a process with a limit and a log of its own, so that one that crashes or
hangs is a result.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tools.cpu import environment
from tools.gpu_check.outcome import Outcome
from tools.gpu_check.parts import REHEARSAL, TOTAL_S, Part
from tools.toolkit import with_toolkit

ROOT = Path(__file__).resolve().parents[2]
HOLDS, FAILED, NOT_RUN = "holds", "FAILED", "not run"


@dataclass(frozen=True)
class Result:
    """What became of a part."""

    part: Part
    state: str
    """HOLDS, FAILED or NOT_RUN."""
    reason: str = ""
    """Why, for the two others."""
    outcome: Outcome | None = None
    seconds: float = 0.0

    def left_out(self, device: str) -> str:
        """What of the part was not run, as the summary names it; empty where nothing was."""
        if self.state == NOT_RUN:
            return f"{self.part.name} ({self.reason})"
        if device == "cpu" and self.part.only_on_a_gpu:
            return f"{self.part.name}: {self.part.only_on_a_gpu} (there is no GPU)"
        return ""


def run_all(parts: Iterable[Part], device: str, logs: Path, say: Callable[[str], None]) -> list[Result]:
    """The result of each part, told as it ends.

    Args:
        parts: in order.
        device: "cuda" or "cpu".
        logs: an existing folder for their logs.
        say: prints a line.
    """
    deadline, results = time.monotonic() + TOTAL_S * slower(device), []
    for part in parts:
        say(f"{part.name}: {part.shows}")
        result = _run(part, device, logs, deadline - time.monotonic())
        results.append(result)
        say(
            f"{part.name}: {result.state} after {result.seconds:.0f} s"
            + (f": {result.reason}" * bool(result.reason))
        )
    return results


def _run(part: Part, device: str, logs: Path, left_s: float) -> Result:
    missing = [name for name in needed(part, device) if not is_installed(name)]
    if missing:
        return Result(part, NOT_RUN, f"{' and '.join(missing)} not installed")
    own_s, over = part.limit_s * slower(device), f"the {TOTAL_S * slower(device)} s of all parts were over"
    if left_s <= 0:
        return Result(part, NOT_RUN, over)
    return run_process(
        part,
        [sys.executable, "-m", "tools.gpu_check.one_part", part.name, device],
        variables(part, device, logs),
        logs,
        min(own_s, left_s),
        cut_off=over if left_s < own_s else "",
    )


def run_process(
    part: Part,
    command: list[str],
    variables: dict[str, str],
    logs: Path,
    limit_s: float,
    *,
    cut_off: str = "",
) -> Result:
    """The result of a command, to which the path of the outcome's file is added; its whole
    group ends with it.

    Args:
        limit_s: when it is ended. The part has failed then, unless the limit was not its own.
        cut_off: why it was not run to its end where the limit is not its own; empty where it is.
    """
    log, found = logs / f"{part.name}.log", logs / f"{part.name}.json"
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, str(found)],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - started
    if status is None and cut_off:
        return Result(part, NOT_RUN, f"{cut_off}; it was cut off after {seconds:.0f} s", seconds=seconds)
    if status is None:
        return Result(part, FAILED, f"no end within {limit_s:.0f} s; see {log}", seconds=seconds)
    if status < 0:
        reason = f"ended by {signal.Signals(-status).name}; see {log}"
        return Result(part, FAILED, reason, seconds=seconds)
    if status or not found.exists():
        return Result(part, FAILED, f"{last_error(log)}; see {log}", seconds=seconds)
    outcome = Outcome.load(found)
    if outcome.not_run:
        return Result(part, NOT_RUN, outcome.not_run, outcome, seconds)
    return Result(part, HOLDS, "", outcome, seconds)


def slower(device: str) -> int:
    """What limits are multiplied by."""
    return 1 if device == "cuda" else REHEARSAL


def needed(part: Part, device: str) -> tuple[str, ...]:
    """Modules that the part imports."""
    return ("torch", *part.packages, *(part.gpu_packages if device == "cuda" else ()))


def is_installed(module: str) -> bool:
    """Whether it is found; it is not imported, but the packages above it are."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def variables(part: Part, device: str, logs: Path) -> dict[str, str]:
    """The environment of the part's process: no network, and without a GPU what stands in for one."""
    base = {
        **with_toolkit(os.environ),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "GPU_CHECK_LOGS": str(logs),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    base.setdefault("OMP_NUM_THREADS", "1")
    if device == "cpu":
        base["CUDA_VISIBLE_DEVICES"] = ""
        if part.runs_as == "megatron":
            return environment("megatron", base)
        if part.runs_as == "interpreter":
            base["TRITON_INTERPRET"] = "1"
    return base


def last_error(log: Path) -> str:
    """The last line of a log that begins in its first column: of a traceback, the exception."""
    lines = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if line.strip() and not line[0].isspace()
    ]
    return lines[-1][:300] if lines else "it printed nothing"
