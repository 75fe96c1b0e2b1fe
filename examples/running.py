"""Keep in a file which processes an example started, so that `--stop` can end them from another terminal."""

import json
import os
import signal
import time
from pathlib import Path

import psutil

from tools.process_group import end_group, group_members

STOP_S = 30.0


class Running:
    """Within `with`, the file `running-PID.json` holds this process and the leaders of the
    groups it started.
    """

    def __init__(self, folder, out=None):
        self.folder = Path(folder)
        self.out = str(out)
        self.path = self.folder / f"running-{os.getpid()}.json"
        self.groups = []

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write()
        return self

    def __exit__(self, *exc_info):
        self.path.unlink(missing_ok=True)

    def add(self, group):
        self.groups.append(identity(group))
        self._write()

    def _write(self):
        # Whole at every moment, for a `stop` that reads it meanwhile.
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"driver": identity(os.getpid()), "out": self.out, "groups": self.groups}))
        new.replace(self.path)

    def stop(self, say, name, out=None):
        """End every run of this name in the folder, or the one that writes to `out`; 0 also
        where there is none.
        """
        stopped = 0
        for path in sorted(self.folder.glob("running-*.json")):
            try:
                record = json.loads(path.read_text())
            except FileNotFoundError:  # it has ended
                continue
            if out is None or record.get("out") == str(out):
                end_recorded(record)
                path.unlink(missing_ok=True)
                say(f"stopped the {name} of process {record['driver']['pid']}")
                stopped += 1
        if not stopped:
            say(f"no {name} is running" if out is None else f"no {name} is running that writes to {out}")
        return 0


def end_recorded(record):
    """SIGTERM to the driver, which ends its own children; then whatever of its groups is still there."""
    driver = record["driver"]
    if is_same(driver):
        os.kill(driver["pid"], signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while is_same(driver) and time.monotonic() < deadline:
            time.sleep(0.1)
    for group in record["groups"]:
        # A leader that has ended may have left its children; a number that was given anew
        # leads another group.
        if is_same(group) or (start_time(group["pid"]) is None and group_members(group["pid"])):
            end_group(group["pid"], grace_s=2.0, reap=lambda: None)


def identity(pid):
    """A process id and when it started: together they name one process, though ids are given again."""
    return {"pid": pid, "started": start_time(pid)}


def is_same(recorded):
    started = start_time(recorded["pid"])
    # A second apart at most: the system's clock may have been set meanwhile.
    return None not in (started, recorded["started"]) and abs(started - recorded["started"]) < 1.0


def start_time(pid):
    """Seconds since the epoch, or None for a process that has ended or is a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
