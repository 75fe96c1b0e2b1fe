"""Ports for servers: of two processes that choose at one time, each gets its own."""

import errno
import socket
import subprocess
import sys

import pytest

from tools import local_server
from tools.local_server import HOST, PORTS, free_port

ASK = """
from tools import local_server
local_server.PORTS = range({}, {})
print(*[local_server.free_port() for _ in range(6)])
"""


def test_ports_when_two_processes_choose_among_few_then_none_is_given_twice(monkeypatch):
    first = free_port(16)
    while local_server._held:  # what it has given is free again
        local_server._held.popleft().close()
    monkeypatch.setattr(local_server, "PORTS", range(first, first + 16))
    with socket.socket() as taken:
        taken.bind((HOST, first + 3))
        own = [free_port() for _ in range(6)]
        ask = [sys.executable, "-c", ASK.format(first, first + 16)]
        others = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    given = {*own, *map(int, others)}
    assert len(given) == 12 and given <= set(range(first, first + 16)) - {first + 3}


def test_ports_when_this_process_can_open_no_socket_then_the_error_is_told(monkeypatch):
    def fails(*given):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(local_server.socket, "socket", fails)
    with pytest.raises(OSError, match="Too many open files"):
        free_port()


def test_ports_in_a_row_then_all_are_free_and_none_is_one_that_sglang_or_linux_draws():
    first = free_port(50)
    for port in range(first, first + 50):
        with socket.socket() as probe:
            probe.bind((HOST, port))
    assert PORTS.start <= first and first + 50 <= PORTS.stop <= 22_000


def test_ports_when_many_are_given_then_the_first_ones_are_forgotten():
    for _ in range(2 * local_server.MOST_HELD):
        free_port()
    assert len(local_server._held) == local_server.MOST_HELD
