"""Find and end the processes that a program started, in its process group or below it (Linux)."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


def group_members(group: int) -> list[int]:
    """The ids of the living processes of process group `group`; zombies are left out, they only
    await their parent.
    """
    return [
        process.pid for process in psutil.process_iter() if _is_alive(process) and _group_of(process) == group
    ]


def descendants(ancestor: int) -> list[int]:
    """The ids of the living processes below `ancestor`, in whatever groups and sessions they are."""
    return [
        process.pid for process in psutil.Process(ancestor).children(recursive=True) if _is_alive(process)
    ]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def shared_memory(group: int) -> set[Path]:
    """The files in /dev/shm that the group's processes have mapped; a killed process leaves them behind."""
    mapped = set()
    for pid in group_members(group):
        try:
            mapped.update(Path(area.path) for area in psutil.Process(pid).memory_maps())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended meanwhile
    return {path for path in mapped if path.is_relative_to("/dev/shm")}


def end_group(group: int, *, grace_s: float, reap: Callable[[], object]) -> None:
    """End every process of the group: SIGTERM to its leader, SIGKILL to the leader, SIGKILL to the rest.

    The leader goes first, because its children know how to clean up after it.

    Args:
        group: process group, which is the process id of its leader.
        grace_s: seconds that each signal gets to empty the group.
        reap: called while waiting, to collect the caller's own child.

    Raises:
        RuntimeError: a process outlived SIGKILL.
    """
    for kill, sent in ((os.kill, signal.SIGTERM), (os.kill, signal.SIGKILL), (os.killpg, signal.SIGKILL)):
        if not group_members(group):
            break
        try:
            kill(group, sent)
        except ProcessLookupError:
            pass  # the leader has ended before its children
        deadline = time.monotonic() + grace_s
        while group_members(group) and time.monotonic() < deadline:
            reap()
            time.sleep(POLL_S)
    reap()
    left = group_members(group)
    if left:
        raise RuntimeError(f"processes {left} of group {group} outlived SIGKILL: the kernel holds them")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends, so that
    end_descendants finds it.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(*, keep_group: int) -> None:
    """SIGKILL everything below this process but the group `keep_group`; for a process that adopts orphans."""
    kept = set(group_members(keep_group))
    for pid in descendants(os.getpid()):
        if pid not in kept:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended meanwhile


def die_with_parent(sent: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A function for the child, between fork and exec: `sent` reaches the child when the thread that
    started it ends.

    SIGTERM for a child that has children of its own to end.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: a child must not load libraries
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(PR_SET_PDEATHSIG, sent)
        if os.getppid() != parent:  # the parent ended before the signal was armed
            os._exit(1)

    return arm
