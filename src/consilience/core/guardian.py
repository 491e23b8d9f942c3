"""What this process has started ends with it, however it dies.

A process that is killed by SIGKILL can clean nothing up, so another one does: the guardian, a bare
interpreter that runs `processes.py`. It holds one end of a pipe, and this process alone holds the
other: when that closes, this process is dead, and the guardian ends what it was told to keep.
"""

import itertools
import os
import subprocess
import sys
import threading
import uuid
from collections import Counter

from consilience.core import processes


class Guardian:
    """The guardian of this process; it starts when it is first told of another."""

    def __init__(self):
        self._mark = uuid.uuid4().hex
        self._names = itertools.count()
        self._kept: Counter[int] = Counter()
        self._pipe: int | None = None
        self.lock = threading.Lock()

    def start(self):
        """Be there before processes are, so that none is without a guardian for long."""
        with self.lock:
            if self._pipe is None:
                self._start()

    def mark(self) -> str:
        """A new mark for a command about to start: if it cannot be told of, that is found."""
        self.start()
        return f"{self._mark}-{next(self._names)}."

    def keep(self, pid: int):
        """End this process, and what it has started, when the process that calls this is dead."""
        with self.lock:
            self._kept[pid] += 1
            self._tell(f"+{pid}\n")

    def release(self, pid: int):
        """This process has ended, or may go on: called as often as `keep`."""
        with self.lock:
            self._kept[pid] -= 1
            if self._kept[pid] <= 0:
                del self._kept[pid]
                self._tell(f"-{pid}\n")

    def forget(self):
        """Close the pipe: in a forked child it would stay open when the parent is dead."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)

    def _tell(self, line: str):
        if self._pipe is None:
            self._start()
        elif not self._write(line):
            self.forget()  # the guardian was killed
            self._start()

    def _start(self):
        """Start the guardian, and tell it of all."""
        if not sys.executable or not hasattr(os, "fork"):
            return  # an interpreter inside another program, or Windows
        theirs, self._pipe = os.pipe()
        # Without the mark of a command that this process may itself be part of.
        environment = {k: v for k, v in os.environ.items() if k != processes.MARK}
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", str(processes.__file__), self._mark],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        self._write("".join(f"+{pid}\n" for pid in self._kept))

    def _write(self, text: str) -> bool:
        assert self._pipe is not None
        try:
            os.write(self._pipe, text.encode())
        except BrokenPipeError:
            return False
        return True


_guardian = Guardian()


def guardian() -> Guardian:
    """The guardian of this process: a forked child has one of its own."""
    return _guardian


def _before_fork():
    # A child that is forked while the guardian starts would hold the ends of its pipes.
    _guardian.lock.acquire()


def _in_parent():
    _guardian.lock.release()


def _in_child():
    global _guardian
    _guardian.forget()
    _guardian = Guardian()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
