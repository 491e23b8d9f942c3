"""The journal of a store: which runs are there, their checksums, and the failures.

A line is written after the data that it vouches for, with a checksum of its own. A line that
a crash cut short, or that was damaged later, vouches for nothing.
"""

import json
import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from consilience.files import append, write
from consilience.runs import Failure

logger = logging.getLogger(__name__)

MISSING, DONE, FAILED = 0, 1, 2


class Journal:
    """What a store holds, run by run; `record` adds to it, on the disk and here."""

    def __init__(self, path: Path):
        self.path = path
        self.state, self.crc = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        self.failed: dict[int, Failure] = {}
        self.attempts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.state)

    def resize(self, n: int):
        self.state, self.crc = _resized(self.state, n), _resized(self.crc, n)

    @property
    def settled(self) -> np.ndarray:
        """The runs that are there, as data or as a failure."""
        return np.flatnonzero(self.state)

    def missing(self, n: int, retry: int) -> np.ndarray:
        """The numbers below `n` of runs that are not there, or failed and worth a new attempt."""
        state = _resized(self.state, n)
        state[[i for i in self.failed if i < n and self.attempts[i] <= retry]] = MISSING
        return np.flatnonzero(state == MISSING)

    def record(self, numbers: np.ndarray, crc: np.ndarray, failed: dict[int, Failure]):
        """Vouch for runs; `failed` are failures by position in `numbers`."""
        attempts = {i: self.attempts.get(int(numbers[i]), 0) + 1 for i in failed}
        entry = {
            "runs": numbers.tolist(),
            "crc": crc.tolist(),
            "failed": [[i, attempts[i], *failure] for i, failure in failed.items()],
        }
        append(self.path, _line(entry))
        self._note(entry)

    def forget(self, numbers: list[int]):
        """Count runs as missing."""
        self.state[numbers] = MISSING
        for number in numbers:
            self.failed.pop(number, None)

    def replay(self, mend: bool):
        """Read the file; `mend` cuts off a last line that is not whole."""
        if not self.path.exists():
            return
        # After the last line break is nothing, or a line that a crash cut short.
        *whole, torn = self.path.read_bytes().split(b"\n")
        entries = [_entry(line) for line in whole]
        for entry in entries:
            if entry is not None:
                self._note(entry)
        if None in entries:
            count = entries.count(None)
            logger.warning("%s: %d lines are damaged; their runs are missing.", self.path, count)
        if torn and mend:
            write(self.path, b"".join(line + b"\n" for line in whole))

    def _note(self, entry: dict[str, Any]):
        numbers = np.array(entry["runs"], int)
        if len(numbers) and numbers.max() >= len(self):
            self.resize(int(numbers.max()) + 1)
        self.state[numbers] = DONE
        self.crc[numbers] = entry["crc"]
        for number in entry["runs"] if self.failed else ():
            self.failed.pop(number, None)
        for i, attempts, reason, message in entry["failed"]:
            number = entry["runs"][i]
            self.state[number] = FAILED
            self.failed[number] = Failure(reason, message)
            self.attempts[number] = attempts


def _resized(array: np.ndarray, n: int) -> np.ndarray:
    result = np.zeros(n, array.dtype)
    result[: len(array)] = array[:n]
    return result


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _entry(line: bytes) -> dict[str, Any] | None:
    """An entry, or None where the line is not as it was written."""
    crc, _, text = line.partition(b" ")
    return json.loads(text) if crc == b"%08x" % zlib.crc32(text) else None
