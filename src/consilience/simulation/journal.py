"""The journal of a store: which runs are there, their checksums, and the failures.

A line is written after the data that it vouches for, with a checksum of its own. A line that
a crash cut short, or that was damaged later, vouches for nothing; nor does one that has the right
checksum and cannot have been written here.
"""

import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from consilience.core.files import append, write
from consilience.model.run import Failure

logger = logging.getLogger(__name__)

MISSING, DONE, FAILED = 0, 1, 2
WORD = 2**32
"""Checksums and the numbers of runs lie below it."""

CREDIBLE = 2**28
"""Run numbers beyond it are believed where there are data of them, since they take memory."""


class Journal:
    """What a store holds, run by run; `record` adds to it, on the disk and here.

    Memory goes by the highest number of a run that is there, not by how many were asked for.
    """

    def __init__(self, path: Path):
        self.path = path
        self.state, self.crc = np.zeros(0, np.uint8), np.zeros(0, np.uint32)
        self.failed: dict[int, Failure] = {}
        self.attempts: dict[int, int] = {}

    def __len__(self) -> int:
        """One more than the highest number of a run that is there."""
        settled = self.settled
        return int(settled[-1]) + 1 if len(settled) else 0

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

    def replay(self, writable: bool, most: Callable[[], int] | None = None):
        """Read the file; where it is `writable`, cut off a last line that is not whole.

        `most`: a bound to the numbers of runs, asked for once the file is read.
        """
        if not self.path.exists():
            return
        # After the last line break is nothing, or a line that a crash cut short.
        *whole, torn = self.path.read_bytes().split(b"\n")
        entries = [_entry(line) for line in whole]
        bound = CREDIBLE if most is None else most()
        beyond = sum(self._note(entry, bound) for entry in entries if entry is not None)
        if None in entries:
            count = entries.count(None)
            logger.warning("%s: %d lines are damaged; their runs are missing.", self.path, count)
        if beyond:
            logger.warning("%s: %d runs with odd numbers are left out.", self.path, beyond)
        if torn and writable:
            write(self.path, b"".join(line + b"\n" for line in whole))

    def _note(self, entry: dict[str, Any], bound: int = WORD) -> int:
        """Take over an entry; how many of its runs lie beyond the bound, and are left out."""
        numbers = np.array(entry["runs"], int)
        inside = numbers < bound
        here = numbers[inside]
        if len(here) and here.max() >= len(self.state):
            # Ahead of what is needed, since lines arrive one by one.
            n = min(max(2 * len(self.state), int(here.max()) + 1), WORD)
            self.state, self.crc = _resized(self.state, n), _resized(self.crc, n)
        self.state[here] = DONE
        self.crc[here] = np.array(entry["crc"], np.uint32)[inside]
        for number in entry["runs"] if self.failed else ():
            self.failed.pop(number, None)
        for i, attempts, reason, message in entry["failed"]:
            number = entry["runs"][i]
            if number < bound:
                self.state[number] = FAILED
                self.failed[number] = Failure(reason, message)
                self.attempts[number] = attempts
        return len(numbers) - len(here)


def _resized(array: np.ndarray, n: int) -> np.ndarray:
    result = np.zeros(n, array.dtype)
    part = array[:n]
    result[: len(part)] = part
    return result


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _entry(line: bytes) -> dict[str, Any] | None:
    """An entry, or None where the line is not one that was written here."""
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    try:
        entry = json.loads(text)
        runs, sums, failed = entry["runs"], entry["crc"], entry["failed"]
        lists = all(isinstance(part, list) for part in (runs, sums, failed))
        sound = lists and len(runs) == len(sums) and all(map(_is_word, [*runs, *sums]))
        return entry if sound and all(_is_failure(part, len(runs)) for part in failed) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_word(value: Any) -> bool:
    return type(value) is int and 0 <= value < WORD


def _is_failure(part: Any, n: int) -> bool:
    """Whether a part of an entry is the position, attempts, reason and message of a failure."""
    i, attempts, *texts = part
    known = _is_word(i) and i < n and _is_word(attempts) and len(texts) == 2
    return known and all(isinstance(text, str) for text in texts)
