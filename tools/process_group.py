"""The processes of a group, and how to end them all (Linux, stdlib only)."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def group_members(group: int) -> list[int]:
    """The ids of the living processes of group `group`; no zombies, which only await their parent."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since the listing
        # The command's name, in parentheses, may hold spaces; state, parent and group follow it.
        state, _, process_group = stat.rpartition(")")[2].split()[:3]
        if int(process_group) == group and state not in "ZX":
            members.append(int(entry.name))
    return members


def shared_memory(group: int) -> set[Path]:
    """The files in /dev/shm that the group's processes have mapped; a killed process leaves them behind."""
    mapped = set()
    for pid in group_members(group):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # ended since the listing
        mapped.update(Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line)
    return mapped


def end_group(group: int, *, grace_s: float, reap: Callable[[], object]) -> None:
    """Ends every process of the group: SIGTERM to its leader, SIGKILL to the leader, SIGKILL to the rest.

    The leader goes first, because its children know how to clean up after it. Each step waits up to
    `grace_s` for the group to be empty; `reap` is called meanwhile, to collect the caller's own child.
    """
    for kill, sent in ((os.kill, signal.SIGTERM), (os.kill, signal.SIGKILL), (os.killpg, signal.SIGKILL)):
        if not group_members(group):
            break
        try:
            kill(group, sent)
        except ProcessLookupError:
            pass  # the leader is gone already, its children are not
        deadline = time.monotonic() + grace_s
        while group_members(group) and time.monotonic() < deadline:
            reap()
            time.sleep(0.05)
    reap()
    left = group_members(group)
    if left:
        raise RuntimeError(
            f"processes {left} of group {group} outlived SIGKILL; they wait on the kernel, look at them"
        )


def adopt_orphans() -> None:
    """From now on a descendant whose parent has ended becomes a child of this process, and can be found by it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(ancestor: int) -> list[int]:
    """The ids of the living processes below `ancestor`, in whatever groups and sessions they are."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent, _ = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since the listing
        parents[int(entry.name)] = int(parent), state not in "ZX"
    below, waiting = [], [ancestor]
    while waiting:
        parent = waiting.pop()
        children = [pid for pid, (of, _) in parents.items() if of == parent]
        waiting += children
        below += [pid for pid in children if parents[pid][1]]
    return below


def end_descendants(*, keep_group: int) -> None:
    """SIGKILL everything below this process but the group `keep_group`; for a process that adopts orphans."""
    kept = set(group_members(keep_group))
    for pid in descendants(os.getpid()):
        if pid not in kept:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended since the listing


def die_with_parent(sent: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """A function for the child, between fork and exec: `sent` reaches it when the thread that started it ends.

    SIGTERM for a child that has children of its own to end.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork: a child must not load libraries
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(PR_SET_PDEATHSIG, sent)
        if os.getppid() != parent:  # it died before the signal was armed
            os._exit(1)

    return arm
