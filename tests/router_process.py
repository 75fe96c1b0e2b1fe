"""A real SGLang router in a process of its own, which a test starts, gives servers to, and stops."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tools.local_server import free_port

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RouterProcess:
    """`url`; add(server) registers one, and returns once the router lists it."""

    def __init__(self, log_path):
        self.url, self._log = f"http://127.0.0.1:{free_port()}", log_path

    def __enter__(self):
        port = self.url.rpartition(":")[2]
        command = [
            sys.executable,
            "-m",
            "sglang_router.launch_router",
            "--host",
            "127.0.0.1",
            "--port",
            port,
            "--prometheus-port",
            str(free_port()),
        ]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._until(lambda: self.workers() is not None)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc_info):
        self._stop()

    def workers(self):
        """The addresses that it lists; None while it does not answer."""
        try:
            with OPENER.open(f"{self.url}/workers", timeout=5) as answer:
                return [worker["url"] for worker in json.load(answer)["workers"]]
        except urllib.error.URLError:
            return None

    def add(self, server):
        body = json.dumps({"url": server}).encode()
        request = urllib.request.Request(f"{self.url}/workers", body, {"Content-Type": "application/json"})
        OPENER.open(request, timeout=10).close()
        self._until(lambda: server in self.workers())

    def remove(self, server):
        with OPENER.open(f"{self.url}/workers", timeout=5) as answer:
            ids = {worker["url"]: worker["id"] for worker in json.load(answer)["workers"]}
        request = urllib.request.Request(f"{self.url}/workers/{ids[server]}", method="DELETE")
        OPENER.open(request, timeout=10).close()
        self._until(lambda: server not in self.workers())

    def _until(self, holds):
        for _ in range(240):
            if self._process.poll() is not None:
                break
            if holds():
                return
            time.sleep(0.25)
        raise TimeoutError(Path(self._log).read_text()[-2000:])

    def _stop(self):
        self._process.kill()  # it has nothing to save, and waits 30 s for connections to end
        self._process.wait()
