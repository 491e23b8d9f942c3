"""One writer to a folder: the lock of a store, and the errors of stores."""

import json
import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

STALE = 300.0
"""Seconds without a sign of life after which the lock of another machine is taken over."""


class StoreError(ValueError):
    """A store that cannot be used as asked; its message says why and what to do."""


class StoreInUseError(StoreError):
    """Another process works on the store."""


def content(path: Path) -> bytes:
    """What is in a file, nothing where there is none or something else in its place."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return b""
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.") from error


class Owner(NamedTuple):
    """The process that a lock names."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_held: set[Path] = set()
"""The locks of this process. The system's locks are those of a process as a whole, so they cannot
tell two of its threads apart."""


def owner_of(path: Path) -> Owner | None:
    """Who holds a lock, as far as it can be told without taking it; None for nobody."""
    if path.resolve() in _held:
        # Not opened: to close it again would drop the lock that this process holds.
        return Owner(os.getpid(), socket.gethostname())
    try:
        owner, age = _named(path.read_bytes()), time.time() - path.stat().st_mtime
    except OSError:
        return None
    if owner is None:
        return None
    here = owner.host == socket.gethostname()
    return owner if (_alive(owner.pid) if here else age < STALE) else None


class Lock:
    """One writer to a folder: a file that is locked, and names its process and machine.

    The system drops the lock when the process dies, however it dies. Where file systems do not
    share locks between machines, the file's age tells: `touch` keeps it young.
    """

    def __init__(self, path: Path):
        self.path = path.resolve()
        if self.path in _held:
            raise StoreInUseError(f"{path.parent} is in use by another call of this process.")
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take()
        except BaseException:
            os.close(self._handle)
            raise
        _held.add(self.path)

    def _take(self):
        import fcntl  # here: Windows has none, and `import consilience` must work there

        owner = _named(os.pread(self._handle, 1000, 0))
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUseError(self._refusal(owner)) from None
        except OSError:
            # No locks on this file system: the process that the file names has to be asked.
            if owner and owner.host == socket.gethostname() and _alive(owner.pid):
                raise StoreInUseError(self._refusal(owner)) from None
        age = time.time() - os.fstat(self._handle).st_mtime
        if owner and owner.host != socket.gethostname() and age < STALE:
            raise StoreInUseError(self._refusal(owner))
        record = {"pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, json.dumps(record).encode(), 0)

    def _refusal(self, owner: Owner | None) -> str:
        return (
            f"{self.path.parent} is in use by {owner or 'another process'}. Wait until it has "
            f"finished, or use another store. If that process is gone, delete {self.path} and "
            "call again."
        )

    def touch(self):
        """A sign of life, for other machines."""
        os.utime(self._handle)

    def release(self):
        if self.path in _held:
            _held.discard(self.path)
            os.ftruncate(self._handle, 0)
            os.close(self._handle)


def _named(record: bytes) -> Owner | None:
    try:
        found = json.loads(record)
        return Owner(int(found["pid"]), str(found["host"]))
    except (ValueError, KeyError, TypeError):
        return None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
