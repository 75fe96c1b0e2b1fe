"""Answers GET /metrics from a thread of its own, so also while the main thread hangs in a collective."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_CONNECTIONS = 8
CONNECTION_TIMEOUT_S = 5.0
"""From the connection to the end of the answer: a client that is slower, at any of it, is hung up on."""


class Endpoint(ThreadingTCPServer):  # HTTPServer would look its own name up, which may take seconds
    """Serves text() at /metrics until it is closed, or the process ends, which waits for nobody who reads.

    Args:
        address, port: where it listens. A connection of an earlier process that is not yet forgotten
            does not matter.
        text: called for each request, on a thread of the endpoint.
        patience_s: how long a port that is in use is tried again, as after a restart: what the killed process
            has started may hold it until it ends too.

    Raises:
        OSError: the address is not of this host, or the port is in use.
    """

    allow_reuse_address = True  # a port in TIME_WAIT is free; one that somebody listens at is not
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, port: int, text: Callable[[], str], *, patience_s: float = 0.0):
        self.text, self.address_family = text, socket.AF_INET6 if ":" in address else socket.AF_INET
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        end = time.monotonic() + patience_s
        while True:
            try:
                super().__init__((address, port), _Handler)
                break
            except OSError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.2)
        # A fork, such as a writer of checkpoints, may outlive this process, and would keep the port.
        os.register_at_fork(after_in_child=self.socket.close)
        threading.Thread(target=self.serve_forever, name="metrics-endpoint", daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server_address[1]

    def close(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()

    def process_request(self, request, client_address) -> None:
        """Answer on a thread, or hang up where too many are being answered."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:
        """Answer, then leave the place to another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request, client_address) -> None:
        """A client that hung up is its own affair."""


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def setup(self) -> None:
        """Set the deadline: a timeout of the socket's would begin anew with each byte."""
        super().setup()
        self._deadline = threading.Timer(CONNECTION_TIMEOUT_S, self._hang_up)
        self._deadline.daemon = True
        self._deadline.start()

    def finish(self) -> None:
        """The answer is sent."""
        try:
            super().finish()
        finally:
            self._deadline.cancel()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        if self.path.partition("?")[0].strip("/") != "metrics":
            self.send_error(404, "only /metrics is here")
            return
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No line for each scrape."""
