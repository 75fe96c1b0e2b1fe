"""Notes what a process writes, binds and starts: Python imports this in every process of a run whose
PYTHONPATH has this folder, before anything else.

Each line of AUDIT_FILE is JSON: {"pid": N, "what": the audit event, "of": path, address or words}; the
first one of a process is what it "begins" with, its command line.
"""

import json
import os
import sys

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = (
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
)
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system")


def _note(event, arguments):
    if event == "open":
        path, _, flags = arguments
        if not (isinstance(flags, int) and flags & WRITES) or not isinstance(path, (str, bytes, os.PathLike)):
            return
        found = os.path.abspath(os.fsdecode(path))
    elif event in CHANGES:
        found = [os.path.abspath(os.fsdecode(one)) for one in arguments if isinstance(one, (str, bytes))]
    elif event == "socket.bind":
        found = repr(arguments[1])
    elif event in STARTS:
        found = repr(arguments[:2])
    else:
        return
    os.write(_FILE, json.dumps({"pid": os.getpid(), "what": event, "of": found}).encode() + b"\n")


if "AUDIT_FILE" in os.environ:
    _FILE = os.open(os.environ["AUDIT_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(
        _FILE, json.dumps({"pid": os.getpid(), "what": "begins", "of": repr(sys.orig_argv)}).encode() + b"\n"
    )
    sys.addaudithook(_note)
