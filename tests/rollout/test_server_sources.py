"""Lists of servers: what is believed of a file that is replaced, cut short, emptied or gone, of names."""

import errno
import os
import socket

import pytest

from megatron_rl_corr.rollout import server_sources
from megatron_rl_corr.rollout.server_sources import (
    EMPTY_READINGS,
    Believed,
    ServerList,
    Unread,
    addresses_in,
    behind_name,
)

A, B = "http://a:1", "http://b:1"


def never(url):
    raise AssertionError(url)


def readings(*lists):
    """What is believed after each reading; a text in the place of a list can't be read."""
    left = iter(lists)

    def read():
        found = next(left)
        if isinstance(found, str):
            raise Unread(found)
        return found

    believed = Believed("the list", read)
    return [believed.look() for _ in lists]


def test_list_when_two_readings_are_equal_then_it_is_believed():
    assert readings([A], [A], [A, B], [A, B]) == [None, (A,), (A,), (A, B)]


def test_list_when_readings_differ_then_none_is_believed():
    # a half-written file, then the whole one: the half was met once
    assert readings([A, B], [A, B], [A], [A, B], [A, B]) == [None, *[(A, B)] * 4]


def test_list_when_it_is_empty_then_believed_after_more_readings():
    found = readings([A], [A], *[[]] * EMPTY_READINGS)
    assert found == [None, *[(A,)] * EMPTY_READINGS, ()]


def test_list_when_it_can_not_be_read_then_the_last_one_stays():
    assert readings([A], [A], "gone", "gone", "gone") == [None, *[(A,)] * 4]
    # what came before the gap does not count for what comes behind it
    assert readings([A], [A], [B], "gone", [B], [B]) == [None, *[(A,)] * 4, (B,)]


def test_list_when_an_address_is_twice_in_it_then_it_counts_once():
    assert readings([A, A], [A]) == [None, (A,)]


def test_text_when_it_has_comments_and_blanks_then_they_are_left_out():
    assert addresses_in(f"# fleet\n{A}/ # node 1\n\n  {B}  \n", "f") == [A, B]


@pytest.mark.parametrize("line", ["10.0.0.1:30000", "http://", "http://a:0", "http://key@a:1"])
def test_text_when_a_line_is_no_address_then_the_whole_says_nothing(line):
    with pytest.raises(Unread, match="line 2 of f: "):
        addresses_in(f"{A}\n{line}\n", "f")


def test_sources_when_several_then_one_list_with_the_fixed_first(tmp_path):
    folder, file = tmp_path / "nodes", tmp_path / "servers.txt"
    folder.mkdir()
    file.write_text(f"{B}\n")
    (folder / "n2").write_text("http://n2:1\n")
    (folder / "n1").write_text(f"http://n1:1\n{B}\n")
    (folder / ".n3").write_text("http://half-")
    found = ServerList([str(folder), str(file)], [A], never)
    assert found.look() == (A,) and not found.known
    assert found.look() == (A, "http://n1:1", B, "http://n2:1") and found.known
    os.unlink(folder / "n2")
    assert [found.look() for _ in range(2)][-1] == (A, "http://n1:1", B)


def test_file_when_it_is_missing_then_the_servers_stay_and_it_is_named(tmp_path, caplog):
    file = tmp_path / "servers.txt"
    found = ServerList([str(file)], [], never)
    assert found.look() == () and not found.known and "can't be read" in found.unread[str(file)]
    file.write_text(A)
    assert [found.look() for _ in range(2)] == [(), (A,)]
    file.unlink()
    assert [found.look() for _ in range(9)] == [(A,)] * 9
    assert sum("can't be read" in line for line in caplog.messages) == 2  # not at every reading


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_list_when_its_file_system_does_not_answer_then_the_servers_stay(code, tmp_path, monkeypatch):
    file = tmp_path / "servers.txt"
    file.write_text(A)
    found = ServerList([str(file)], [], never)
    assert [found.look() for _ in range(2)] == [(), (A,)]

    def fails(*args, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        for name in ("os.stat", "io.open"):
            patched.setattr(name, fails)
        found_then = [found.look() for _ in range(9)]
    assert found_then == [(A,)] * 9 and os.strerror(code) in found.unread[str(file)]


def test_name_when_resolved_then_an_address_each():
    assert behind_name("dns://localhost:30000")[0] in ("http://127.0.0.1:30000", "http://[::1]:30000")


@pytest.mark.parametrize(("code", "says"), [(socket.EAI_NONAME, []), (socket.EAI_AGAIN, None)])
def test_name_when_it_is_not_known_then_none_and_without_a_resolver_nothing(code, says, monkeypatch):
    def fails(*args, **options):
        raise socket.gaierror(code, "no")

    monkeypatch.setattr(server_sources.socket, "getaddrinfo", fails)
    if says is None:
        with pytest.raises(Unread, match="is not resolved"):
            behind_name("dns://fleet:30000")
    else:
        assert behind_name("dns://fleet:30000") == says


def test_router_when_given_then_it_is_asked_each_time():
    asked = []

    def ask(url):
        asked.append(url)
        return [A, B]

    found = ServerList(["http://router:1/"], [], ask)
    assert [found.look() for _ in range(2)] == [(), (A, B)]
    assert asked == ["http://router:1"] * 2
