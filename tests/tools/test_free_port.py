"""Ports for servers: of two processes that choose at one time, each gets its own."""

import socket
import subprocess
import sys

from tools import local_server
from tools.local_server import HOST, PORTS, free_port

ASK = """
from tools import local_server
local_server.PORTS = range({}, {})
print(*[local_server.free_port() for _ in range(3)])
"""


def test_ports_when_two_processes_choose_among_few_then_none_is_given_twice(monkeypatch):
    first = free_port(8)
    while local_server._held:  # what it has given is free again
        local_server._held.popleft().close()
    monkeypatch.setattr(local_server, "PORTS", range(first, first + 8))  # the last one is never drawn
    with socket.socket() as taken:
        taken.bind((HOST, first + 3))
        own = [free_port() for _ in range(3)]
        ask = [sys.executable, "-c", ASK.format(first, first + 8)]
        others = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert sorted([*own, *map(int, others)]) == [first + at for at in (0, 1, 2, 4, 5, 6)]


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
