"""Where the addresses of a fleet come from while it changes: files, folders, names, routers. Decides when a
reading is believed.

A reading is either a list of addresses or "unread", with the reason. Only two equal lists, one after the
other, are believed; an empty one only after EMPTY_READINGS of them. What can't be read says nothing: the
last list stays.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from megatron_rl_corr.config.urls import DNS, checked_urls, is_router
from megatron_rl_corr.engines.errors import RolloutError
from megatron_rl_corr.rollout.blocking import LoopThread
from megatron_rl_corr.rollout.client import RolloutClient

READINGS = 2
"""Equal lists, one after the other, before a change is believed: a file may be met half-written."""
EMPTY_READINGS = 5
"""The same of an empty list, which would take every server from the run."""
ROUTER_S = 5.0
"""How long a router may take to list its servers."""

logger = logging.getLogger(__name__)


class Unread(Exception):
    """A source could not be read, or holds what is no list of addresses: it says nothing about servers."""


class Believed:
    """The list of one source that is believed now.

    Example: lists read ["a"], ["a", "b"], ["a", "b"], unread, [] leave ["a", "b"].

    Args:
        name: of the source, as the user gave it.
        read: returns its addresses, or raises Unread.
    """

    def __init__(self, name: str, read: Callable[[], Sequence[str]]):
        self.name, self._read = name, read
        self.urls: tuple[str, ...] | None = None
        """None: none has been believed yet."""
        self.unread = ""
        """Why the last reading said nothing; "": it was read."""
        self._last: tuple[str, ...] | None = None
        self._equal = 0

    def look(self) -> tuple[str, ...] | None:
        """Read once more, and return the list that is believed then."""
        try:
            found = tuple(dict.fromkeys(self._read()))
        except Unread as error:
            if str(error) != self.unread:
                logger.warning("%s: %s; the servers stay as they are", self.name, error)
            self.unread, self._last, self._equal = str(error), None, 0
            return self.urls
        self._equal = self._equal + 1 if found == self._last else 1
        self.unread, self._last = "", found
        if self._equal >= (READINGS if found else EMPTY_READINGS):
            self.urls = found
        return self.urls


class ServerList:
    """All sources of a run, as one list.

    Args:
        sources: files, folders, dns://NAME:PORT, or http(s):// addresses of routers.
        fixed: addresses that are always in it.
        ask_router: ask_router(url) returns the addresses behind a router, or raises Unread.
    """

    def __init__(
        self, sources: Sequence[str], fixed: Sequence[str], ask_router: Callable[[str], Sequence[str]]
    ):
        self._fixed = tuple(fixed)
        self._sources = [Believed(name, _reader(name, ask_router)) for name in sources]

    def look(self) -> tuple[str, ...]:
        """Read every source once more; the addresses that are believed now, each once."""
        lists = [source.look() or () for source in self._sources]
        return tuple(dict.fromkeys([*self._fixed, *(url for urls in lists for url in urls)]))

    @property
    def known(self) -> bool:
        """Every source has given a list that is believed."""
        return all(source.urls is not None for source in self._sources)

    @property
    def unread(self) -> dict[str, str]:
        """Source -> why its last reading said nothing."""
        return {source.name: source.unread for source in self._sources if source.unread}


def addresses_in(text: str, where: str) -> list[str]:
    """The addresses in a text: one a line; what follows a # is a comment.

    Args:
        text: of a file.
        where: names the file in the error.

    Raises:
        Unread: a line is no address.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += checked_urls([line]) if line else []
        except ValueError as error:
            raise Unread(f"line {number} of {where}: {error}") from None
    return found


def in_file(path: Path) -> list[str]:
    """The addresses in a file. Raises Unread."""
    try:
        return addresses_in(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise Unread(f"{path} can't be read: {error}") from None


def in_folder(path: Path) -> list[str]:
    """The addresses in all files of a folder but hidden ones, which may be unfinished. Raises Unread."""
    try:
        files = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
    except OSError as error:
        raise Unread(f"{path} can't be read: {error}") from None
    return [url for one in files for url in in_file(one)]


def in_path(path: Path) -> list[str]:
    """The addresses in a file or folder, which is looked at anew each time: a folder may be made, or mounted,
    later. Raises Unread.
    """
    # os.path's: Path.is_dir raises where a file system does not answer
    return in_folder(path) if os.path.isdir(path) else in_file(path)


def behind_name(source: str) -> list[str]:
    """The addresses that a name has now, as http://ADDRESS:PORT.

    A name that is not known has none, as one of a Kubernetes service without a pod; a resolver that does not
    answer says nothing.

    Raises:
        Unread: the resolver does not answer.
    """
    parts = urlsplit(source)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            return []
        raise Unread(f"{source} is not resolved: {error.strerror or error}") from None
    except OSError as error:
        raise Unread(f"{source} is not resolved: {error}") from None
    hosts = sorted({address[0] for *_, address in found})
    return [f"http://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts]


def behind_router(client: RolloutClient, loop: LoopThread, url: str) -> tuple[str, ...]:
    """The addresses of the servers that a router lists now.

    Args:
        client: one like it asks the router.
        loop: of the client.
        url: of the router.

    Raises:
        Unread: it does not answer, has no server, has servers that can't be used, or is a server itself.
    """
    router = client.another([url])
    try:
        found = tuple(loop.call(router.find_servers(ROUTER_S)))
    except RolloutError as error:
        raise Unread(f"this router gives no list of servers: {error}") from None
    finally:
        loop.call(router.close())
    if found == (url,):
        raise Unread("this is a server and no router; give it to --rollout-url, or in a file")
    return found


def _reader(source: str, ask_router: Callable[[str], Sequence[str]]) -> Callable[[], Sequence[str]]:
    if source.startswith(DNS):
        return lambda: behind_name(source)
    if is_router(source):
        return lambda: ask_router(source.rstrip("/"))
    path = Path(source)
    return lambda: in_path(path)
