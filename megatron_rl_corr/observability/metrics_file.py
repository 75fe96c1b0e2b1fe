"""Keeps one JSON object per training step in a file, and reads them back.

The file is strict JSON, one object a line. A NaN or infinite value is written as null, and its kind is kept
under "nonfinite": {"loss/policy": null, ..., "nonfinite": {"loss/policy": "nan"}}.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path

from megatron_rl_corr.files import METRICS_NAME, open_to_append, refuse_link

FILE_NAME = METRICS_NAME
NONFINITE = "nonfinite"

logger = logging.getLogger(__name__)


def host_number(name: str, value: object) -> int | float:
    """The value as a plain int or float.

    Args:
        name: of the metric, for the error.
        value: what a step reports for it.

    Raises:
        TypeError: it is no number of the host.

    A tensor is refused on purpose: converting it here would hide a device synchronisation in the logger.
    """
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"metric {name!r} must be an int or a float, got {type(value).__name__}; reduce it and read it back "
        "to the host first, or leave the key out when there is no value"
    )


def step_of(metrics: dict) -> int:
    """The step the metrics belong to; a ValueError if `step` is missing or is not a whole number."""
    if "step" not in metrics:
        raise ValueError(f"metrics need the key 'step', got {sorted(metrics)}; add the training step")
    step = host_number("step", metrics["step"])
    if not isinstance(step, int):
        raise ValueError(f"metric 'step' must be a whole number, got {step!r}; pass it as an int")
    return step


class MetricsFile:
    """Appends steps to `path`, creating its folder; a line is in the file at once, so that a crash keeps it.

    The file is opened for each step: where a run is restarted within its process, rows were cut meanwhile,
    and the file is another one.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        refuse_link(self.path)
        _mend_torn_end(self.path)
        self.path.touch()

    def write(self, metrics: Mapping[str, int | float]) -> None:
        """Append one step.

        Args:
            metrics: by their logged names, `step` among them.

        Raises:
            TypeError: a value is no number of the host.
            ValueError: there is no `step`, or it is no whole number.
        """
        line = encode_line(metrics)
        with open_to_append(self.path, encoding="ascii") as file:
            file.write(line)


def encode_line(metrics: Mapping[str, int | float]) -> str:
    """One step as a line of strict JSON, newline included; `step` comes first.

    Args:
        metrics: by their logged names; NaN and infinities become null, and are spelled out under `nonfinite`.

    Raises:
        TypeError, ValueError: as `MetricsFile.write`, or a metric is called `nonfinite`.
    """
    if NONFINITE in metrics:
        raise ValueError(f"metric name {NONFINITE!r} is reserved for the metrics file; choose another name")
    row: dict = {"step": step_of(metrics)}
    nonfinite = {}
    for name, value in metrics.items():
        number = host_number(name, value)
        if math.isfinite(number):
            row[name] = number
        else:
            row[name] = None
            nonfinite[name] = str(number)
    if nonfinite:
        row[NONFINITE] = nonfinite
    return json.dumps(row, allow_nan=False) + "\n"


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The steps in order, NaN and infinities restored.

    A step that was already there means the run was resumed from before it: the later row wins, and rows of
    later steps, which belong to the abandoned attempt, go. A last line cut short by a crash is left out and a
    warning says so. Any other line that is not a step raises ValueError with file and line number.
    """
    path = Path(path)
    content = path.read_bytes()
    torn = bool(content) and not content.endswith(b"\n")
    lines = content.splitlines()
    rows: list[dict] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _decode_line(line)
        except ValueError as error:
            if torn and number == len(lines):
                logger.warning("%s:%d: the last line is incomplete and was left out", path, number)
                break
            raise ValueError(f"{path}:{number}: not a step's metrics: {error}; repair or drop it") from error
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    return rows


def _decode_line(line: bytes) -> dict:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    kinds = row.pop(NONFINITE, {})
    if not isinstance(kinds, dict):
        raise ValueError(f"{NONFINITE!r} must be an object of name to kind, got {json.dumps(kinds)}")
    for name, value in row.items():
        if value is None and name in kinds:
            row[name] = float(str(kinds[name]))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"metric {name!r} must be a number, got {json.dumps(value)}")
    step_of(row)
    return row


def _mend_torn_end(path: Path) -> None:
    """Make the file end with a newline, so that a line cut short by a crash cannot swallow the next one."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    try:
        _decode_line(content[start:])
    except ValueError:
        logger.warning("%s: cut off an incomplete last line of %d bytes", path, len(content) - start)
        os.truncate(path, start)
    else:
        with path.open("ab") as file:
            file.write(b"\n")
