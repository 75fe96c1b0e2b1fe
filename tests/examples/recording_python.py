"""In place of the recipes' python: writes down what it is to run; servers only answer /health, training
ends at once, or with status 7 on SIGTERM where TRAINING_WAITS names a file for its process id. SERVERS_STAY
names a file for the process ids of servers' children, where no server ends on SIGTERM; beside it FILE.told
says that one came.

Everything else, as the reading of columns and `megatron-rl-corr`, is run as it is.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

words = sys.argv[1:]
with open(os.environ["RECORD"], "a") as record:
    names = (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_HOME",
        "PATH",
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "LD_LIBRARY_PATH",
    )
    record.write(json.dumps({"words": words, **{name: os.environ.get(name) for name in names}}) + "\n")


ENDING = Path(os.environ["RECORD"]).with_suffix(".ending")
"""Process id of the server at PORT_THAT_ENDS, which ends as another server is asked."""


def end(pid):
    """Kill it, and wait until it has ended: a signal takes effect a moment later."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # its parent has waited for it
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        if os.environ.get("PORT_THAT_ENDS") not in (None, str(self.server.server_port)):
            end(int(ENDING.read_text()))
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


if words[:2] == ["-m", "sglang.launch_server"]:
    if os.environ.get("SERVERS_END"):
        sys.exit(1)
    address = (words[words.index("--host") + 1], int(words[words.index("--port") + 1]))
    if str(address[1]) == os.environ.get("PORT_THAT_ENDS"):
        ENDING.write_text(str(os.getpid()))
    if os.environ.get("SERVERS_STAY"):
        told = Path(os.environ["SERVERS_STAY"] + ".told")
        signal.signal(signal.SIGTERM, lambda *_: told.touch())
        with open(os.environ["SERVERS_STAY"], "a") as children:
            print(subprocess.Popen(["sleep", "300"]).pid, file=children)
    HTTPServer(address, Health).serve_forever()
elif words[:2] == ["-m", "torch.distributed.run"] and os.environ.get("TRAINING_WAITS"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    Path(os.environ["TRAINING_WAITS"]).write_text(str(os.getpid()))
    while True:
        signal.pause()
elif os.environ.get("SKIP_PLAN") and "plan" in words[:3]:
    print("(a plan)")
elif words[:2] != ["-m", "torch.distributed.run"] and not words[0].endswith("dry_run.py"):
    os.execv(sys.executable, [sys.executable, *words])
