"""Processes found by their parents, their groups and a mark, and ended.

As a script this file is a guardian (`guardian.py`): it outlives the process that started it by a
moment, and ends what that process had under its care. A bare interpreter runs it, so nothing of
the package and little else is imported here.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

MARK = "CONSILIENCE_RUN"
"""The environment variable that commands and what they start have in common."""

PAUSES = (0.0, 0.1, 0.5)
"""Seconds between looks for marked processes: one may be about to start when its parent dies."""


class Process(NamedTuple):
    """A process that is not a zombie."""

    pid: int
    parent: int
    group: int


def running() -> list[Process]:
    """All processes of this machine."""
    if not os.path.isdir("/proc/self"):
        return _listed()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            # The name of the program comes before the last bracket, and may hold anything.
            state, parent, group = file.read().rpartition(b")")[2].split()[:3]
            if state != b"Z":
                found.append(Process(int(name), int(parent), int(group)))
    return found


def _listed() -> list[Process]:
    import subprocess

    listing = ["/bin/ps", "-A", "-o", "pid=,ppid=,pgid=,state="]
    try:
        rows = subprocess.run(listing, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []  # a chroot without either
    fields = [row.split() for row in rows]
    return [Process(*map(int, row[:3])) for row in fields if not row[3].startswith("Z")]


def families(roots: set[int]) -> set[int]:
    """Those of the roots that run, with all that they and theirs have started, in any session."""
    everyone = running()
    found = {one.pid for one in everyone if one.pid in roots or one.group in roots}
    grown = True
    while grown:
        more = {one.pid for one in everyone if one.parent in found or one.group in found}
        grown = not more <= found
        found |= more
    return found


def marked(mark: str) -> set[int]:
    """Processes whose mark begins so, whoever their parents are; found on Linux alone."""
    start = f"{MARK}={mark}".encode()
    found: set[int] = set()
    for pid in [one.pid for one in running()] if sys.platform == "linux" else []:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if any(entry.startswith(start) for entry in file.read().split(b"\0")):
                found.add(pid)
    return found


def end(roots: set[int], mark: str | None = None):
    """Kill processes with all that they have started, and all that bear the mark."""
    held: set[int] = set()
    # Stopped first: what is killed loses its children, which could then not be found.
    while new := _found(roots, mark) - held:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        held |= new
    for pid in held | roots:
        _signal(pid, signal.SIGKILL)
    for group in roots:  # also where no process can be listed
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _found(roots: set[int], mark: str | None) -> set[int]:
    found = families(roots) if roots else set()
    if mark is not None:
        found |= marked(mark)
    return found - {os.getpid()}


def _signal(pid: int, number: int):
    # It may have ended, or have become another user's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


@contextlib.contextmanager
def children_end() -> Iterator[None]:
    """End a child that was forked inside and comes out: it would go on as a second worker."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(1)


def guard(mark: str):
    """Read which processes to keep, until the other end closes; then end them."""
    kept: set[int] = set()
    rest = b""
    while data := os.read(0, 4096):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            (kept.add if line[:1] == b"+" else kept.discard)(int(line[1:]))
    for pause in PAUSES:
        time.sleep(pause)
        end(kept, mark)
        kept = set()


if __name__ == "__main__":
    # A process of its own, nobody's child: what ends the other must not end it first.
    if os.fork():
        os._exit(0)
    for heard in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(heard, signal.SIG_IGN)
    guard(sys.argv[1])
