"""Faults of this process and its host, told apart from those of servers; and how many
descriptors a run needs.

A process that has no descriptor, port or memory left can't open a connection to any server,
however well they are.
"""

from __future__ import annotations

import errno
import os
import resource
import socket

import aiohttp

from megatron_rl_corr.engines.errors import RolloutError

WAIT_S = 5.0
"""How long a request waits for its own process: what others hold comes free as they end."""
PAUSES_S = (0.05, 0.1, 0.2, 0.4)
"""Between its attempts to connect; the last comes again and again."""
OTHERS = 256
"""Descriptors that a rank may need beside those of requests: libraries, files, pipes and groups
that open later.
"""
_RESOLVER = {
    socket.EAI_AGAIN: "the resolver of this host gives no answer",
    socket.EAI_FAIL: "the resolver of this host fails",
    socket.EAI_MEMORY: "the resolver has no memory",
    socket.EAI_SYSTEM: "the resolver of this host fails",
}
"""What getaddrinfo fails with for any name. A name that does not exist is not here: its
server may be gone.
"""


class LocalFault(RolloutError):
    """This process could not send a request; the server has not been asked, and nothing is known of it.

    Attributes:
        remedy: what to do.
        sent: a connection was there, so the request may have gone out; False: nothing has.
    """

    def __init__(self, url: str, endpoint: str, detail: str, remedy: str, *, sent: bool = False):
        message = (
            f"this process can't reach rollout server {url}: {detail}; this is a fault of its own host, not "
            f"of the server: {remedy}"
        )
        super().__init__(url, endpoint, detail, message)
        self.remedy, self.sent = remedy, sent

    def __reduce__(self):
        return _local_fault, (self.url, self.endpoint, self.detail, self.remedy, self.sent)


def local_fault(error: BaseException, *, needed: int | None = None) -> tuple[str, str] | None:
    """(what is wrong, the remedy) where an error of a request lies with this process or host;
    None: it need not.

    Args:
        error: of aiohttp, of a socket or of a thread's start.
        needed: descriptors that the process needs (`descriptors_needed`), if that is known.
    """
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, RuntimeError) and "can't start new thread" in str(cause):
        return (
            "it can't start a thread, which resolving a name takes",
            "raise `ulimit -u`, or run fewer processes",
        )
    if not isinstance(cause, OSError):
        return None
    named, code = isinstance(cause, socket.gaierror), cause.errno
    if (
        named
        and (code == socket.EAI_SYSTEM or code in _RESOLVER)
        and (none_left := _descriptors_left()) is not None
    ):
        code, named = none_left, False  # the resolver could open no file
    if named:
        what = _RESOLVER.get(code)
        remedy = "see /etc/resolv.conf, or give the servers' addresses as numbers"
        return None if what is None else (f"{what} ({cause.strerror})", remedy)
    remedy = _remedy(code, needed)
    return None if remedy is None else (f"{os.strerror(code)} ({errno.errorcode[code]})", remedy)


def _remedy(code: int | None, needed: int | None) -> str | None:
    """What helps against an errno of this host; None: it may be another's fault."""
    if code == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        enough = needed if needed is not None and needed > soft else 2 * soft
        return (
            f"it may have {soft} open files: start it after `ulimit -n {enough}` (the hard limit is "
            f"{_told(hard)}), or lower `max_concurrency`"
        )
    return {
        errno.ENFILE: "the host's table of open files is full: raise `sysctl fs.file-max`, or run fewer "
        "processes",
        errno.ENOMEM: "the kernel has no memory for a socket: free memory on this host",
        errno.ENOBUFS: "the kernel has no memory for a socket: free memory on this host",
        errno.EADDRNOTAVAIL: "no local port towards that address is free: widen `sysctl "
        "net.ipv4.ip_local_port_range`, or lower `max_concurrency`; or this host has no address of that "
        "kind, as without IPv6",
        errno.ENETDOWN: "its network interface is down",
    }.get(code)


def _descriptors_left() -> int | None:
    """EMFILE or ENFILE, if no file can be opened now; else None."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno if error.errno in (errno.EMFILE, errno.ENFILE) else None
    return None


def descriptors_needed(in_flight: int, servers: int) -> int:
    """Descriptors of a process with so many requests in flight: theirs, a control and a watch of
    each server, others.

    Others are those that are open now, and OTHERS.
    """
    return in_flight + 2 * servers + _open_now() + OTHERS


def _open_now() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64


def raise_descriptor_limit(needed: int, what: str) -> str | None:
    """Raise the soft limit of open files to the hard one, where `needed` is above it; a line
    about that, or None.

    Args:
        needed: descriptors, of `descriptors_needed`.
        what: which setting they are for, for the error.

    Raises:
        ValueError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(
            f"{what} needs about {needed} open files (`ulimit -n`), and this process may have {hard} "
            f"(`ulimit -Hn`): raise the hard limit to {needed} (limits.conf, LimitNOFILE= of systemd, "
            "--ulimit of docker), or lower it"
        )
    for limit in (hard, needed):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return (
                f"raised the limit of open files (`ulimit -n`) from {soft} to {_told(limit)}: {what} "
                f"needs {needed}"
            )
        except (ValueError, OSError):  # the kernel allows no unlimited soft limit
            continue
    return f"the limit of open files (`ulimit -n`) is {soft} and can't be raised: {what} needs {needed}"


def _local_fault(url, endpoint, detail, remedy, sent):
    return LocalFault(url, endpoint, detail, remedy, sent=sent)


def _told(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
