"""Runs on disk: a Zarr store that a campaign can be killed upon at any moment.

Data go into the chunks of Zarr arrays, whole files put in place in one step; only then a line
of the journal says that these runs are there, with a checksum for each. What no line vouches
for is run again. Chunks are not compressed, so that a damaged byte costs one run, not a chunk.
"""

import contextlib
import errno
import json
import logging
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from consilience.core.files import write
from consilience.core.types import Theta
from consilience.model.priors import Prior
from consilience.model.run import Failure, Spec, blank
from consilience.simulation.arrays import (
    FORMAT,
    JOURNAL,
    LOCK,
    MARK,
    ROOT,
    Arrays,
    check_distinct,
)
from consilience.simulation.journal import CREDIBLE, DONE, FAILED, Journal
from consilience.simulation.limits import MOST, check_disk
from consilience.simulation.lock import Lock, StoreError, content
from consilience.simulation.metadata import check_campaign

logger = logging.getLogger(__name__)

CHUNK_BYTES, CHUNK_RUNS = 2**20, 1024
"""A chunk of an array holds as many runs as fit into both."""

OPEN_CHUNKS = 4
"""Chunks that are kept in memory while their runs come in."""


class Store:
    """The runs of one campaign in a folder.

    `about` says whose runs they are, and locks the store for writing; without it the store is
    only read, and may be one that another process is writing to. `prior`: that of the campaign,
    which tells more than its texts in `about`.
    `verify`: whether all data are read, so that what is damaged counts as missing.
    """

    def __init__(
        self,
        path: str | Path,
        about: dict[str, Any] | None = None,
        *,
        prior: Prior | None = None,
        verify: bool = True,
    ):
        # Resolved here: a simulator in a thread may change the folder of the process.
        self.path, self._given = Path(path).absolute(), str(path)
        self.spec: Spec | None = None
        self._journal = Journal(self.path / JOURNAL)
        self._claim = 0
        self._changed = False
        self._buffers: dict[int, dict[str, np.ndarray]] = {}
        self._lock: Lock | None = None
        self.about = {} if about is None else about
        if about is not None:
            self._lock = self._acquire()
        try:
            self._open(about, prior, verify)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return self._given

    def _acquire(self) -> Lock:
        known = (self.path / ROOT).exists() or (self.path / LOCK).exists()
        with self._explained():
            if self.path.exists() and not known and any(self.path.iterdir()):
                raise StoreError(f"{self} is there already, and is no store of simulations.")
            self.path.mkdir(parents=True, exist_ok=True)
            return Lock(self.path / LOCK)

    def _open(self, about: dict[str, Any] | None, prior: Prior | None, verify: bool):
        if not (self.path / ROOT).exists():
            if about is None:
                raise StoreError(f"There is no store of simulations at {self}.")
            return
        try:
            self._describe(json.loads(content(self.path / ROOT)), about, prior)
        except StoreError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"The description of {self} ({ROOT}) is damaged: {error!r}. Its data may be "
                "whole: bring that file back from a copy."
            ) from error
        with self._explained():
            self._journal.replay(self._lock is not None, self._most)
        if verify:
            self._verify()
            if not len(self.numbers):
                self._warn_of_strays()

    def _describe(self, root: dict[str, Any], about: dict[str, Any] | None, prior: Prior | None):
        """Take over what the root of the store says, once it is seen to be of this campaign."""
        held = root["attributes"]
        if held.get("what") != MARK:
            raise StoreError(f"{self} is a Zarr store, but not one of simulations.")
        if held["format"] != FORMAT:
            raise StoreError(
                f"{self} has the format {held['format']}; this version reads {FORMAT}."
            )
        if about is not None:
            check_campaign(str(self), held, about, prior)
        self.about = {name: held[name] for name in held if name not in ("data", "theta")}
        if about is not None and "fingerprint" in about and "fingerprint" not in held:
            self.remember(fingerprint=about["fingerprint"])
        self._set_arrays(Arrays.read(held))
        shape = root["consolidated_metadata"]["metadata"][self._status]["shape"]
        self._claim = max(0, operator.index(shape[0]))

    # What the arrays are.

    def begin(self, spec: Spec, theta: Theta):
        """Fix the arrays: data as `spec` says, parameters like `theta`, which has runs ahead."""
        if self.spec is not None:
            if (spec.shapes, spec.bare) != (self.spec.shapes, self.spec.bare):
                raise StoreError(
                    f"{self} holds data of the shapes {self.spec.shapes}, but the model "
                    f"gives {spec.shapes}: pass another store."
                )
            return
        arrays = Arrays.plan(spec, theta)
        if (self.path / LOCK.upper()).exists():
            check_distinct(arrays.all)
        self._set_arrays(arrays)

    def _set_arrays(self, arrays: Arrays):
        self._plan, self.spec = arrays, arrays.spec
        self._arrays, self._status = arrays.all, arrays.status
        self._x_names, self._theta_names = arrays.x_names, arrays.theta_names
        largest = max(arrays.sizes.values())
        self.rows = max(1, min(CHUNK_RUNS, CHUNK_BYTES // max(largest, 1)))

    def remember(self, **about: Any):
        """Add to what the store says of itself; written when the store next grows."""
        self.about = {**self.about, **about}
        self._changed = True

    def grow(self, n: int):
        """Make room for `n` runs; those that are there stay."""
        # A number of runs that nobody can have asked for gives way.
        claim = self._claim if self._claim <= MOST else 0
        if n <= claim == self._claim and not self._changed:
            return
        room = max(n, claim, len(self._journal))
        with self._explained():
            check_disk(self.path, str(self), n - len(self.numbers), sum(self._plan.sizes.values()))
            for name, content in self._plan.metadata(room, self.rows, self.about).items():
                write(self.path / name, content)
        self._claim, self._changed = room, False

    def _most(self) -> int:
        """A bound to the numbers of runs, for a journal or a description that is damaged."""
        chunks = self._chunks_of(self._status)
        on_disk = (max(chunks) + 1) * self.rows if chunks else 0
        return min(MOST, max(on_disk, self._claim if self._claim <= CREDIBLE else 0))

    def _chunks_of(self, name: str) -> list[int]:
        """The numbers of the chunks of an array that are on the disk."""
        try:
            files = os.listdir(self.path / name / "c")
        except OSError:
            return []
        return [int(file) for file in files if file.isascii() and file.isdigit()]

    # What is there.

    def missing(self, n: int, retry: int = 0) -> np.ndarray:
        """The numbers below `n` that are to be run: missing, or failed and worth a new attempt."""
        return self._journal.missing(n, retry)

    @property
    def total(self) -> int:
        """How many runs were asked for."""
        return max(self._claim, len(self._journal))

    @property
    def numbers(self) -> np.ndarray:
        """The runs that are there, as data or as a failure."""
        return self._journal.settled

    @property
    def done(self) -> np.ndarray:
        """The runs that are there as data."""
        return np.flatnonzero(self._journal.state == DONE)

    def failures(self, numbers: np.ndarray) -> dict[int, Failure]:
        """Failures among these runs, by their position in `numbers`."""
        failed = self._journal.failed
        here = np.flatnonzero(np.isin(numbers, list(failed)))
        return {i: failed[int(numbers[i])] for i in here.tolist()}

    def theta(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The parameters of these runs, by name."""
        names = self._theta_names
        return self._gather(names, numbers, lambda chunk, rows: self._columns(chunk, rows, names))

    def x(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The data of these runs, by name, once they are seen to be as they were stored."""
        return self._gather(self._x_names, numbers, self._checked)

    def _gather(
        self,
        names: dict[str, str],
        numbers: np.ndarray,
        read: Callable[[int, np.ndarray], dict[str, np.ndarray]],
    ) -> dict[str, np.ndarray]:
        result = {name: blank(len(numbers), *self._arrays[v]) for name, v in names.items()}
        for chunk, here in self._chunks(numbers):
            columns = read(chunk, numbers[here] - chunk * self.rows)
            for name, variable in names.items():
                result[name][here] = columns[variable]
        # Files are little-endian, on any machine.
        return {n: a.astype(a.dtype.newbyteorder("="), copy=False) for n, a in result.items()}

    def _checked(self, chunk: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        columns = self._columns(chunk, rows, self._arrays)
        wrong = self._wrong(chunk * self.rows + rows, columns)
        if len(wrong):
            raise StoreError(
                f"{len(wrong)} runs of {self}, the first of them run {wrong[0]}, were damaged "
                "or changed since it was opened: open it again, or repeat the call that made it."
            )
        return columns

    def _columns(self, chunk: int, rows: np.ndarray, names: Iterable) -> dict[str, np.ndarray]:
        return {name: self._read(chunk, name)[rows] for name in names}

    def _chunks(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Chunks, and the positions of those of the numbers that lie in each."""
        order = np.argsort(numbers, kind="stable")
        chunks, starts = np.unique(numbers[order] // self.rows, return_index=True)
        # Strict would not do: a split of nothing still has one part.
        return zip(chunks.tolist(), np.split(order, starts[1:]), strict=False)

    # Writing.

    def put(
        self,
        numbers: np.ndarray,
        theta: Theta,
        x: dict[str, np.ndarray],
        failed: dict[int, Failure],
    ):
        """Store runs; `failed` are failures by position. They are on the disk when this returns."""
        status = np.full(len(numbers), DONE, np.uint8)
        status[list(failed)] = FAILED
        columns = {**theta, self._status: status}
        columns |= {self._x_names[name]: array for name, array in x.items()}
        with self._explained():
            for chunk, here in self._chunks(numbers):
                buffers = self._buffer(chunk)
                for name, column in columns.items():
                    buffers[name][numbers[here] - chunk * self.rows] = column[here]
                    write(self._file(chunk, name), buffers[name].tobytes())
            self._journal.record(numbers, self._plan.checksums(numbers, columns), failed)

    def touch(self):
        """A sign of life for other machines that may want the store."""
        if self._lock is not None:
            self._lock.touch()

    def stopped(self, n: int) -> str:
        """What to say when a campaign ends early."""
        return (
            f"{n - len(self.missing(n))} of {n} runs are stored in {self}. The same call "
            "goes on from there."
        )

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object):
        self.close()

    def close(self):
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _buffer(self, chunk: int) -> dict[str, np.ndarray]:
        buffers = self._buffers.pop(chunk, None)
        if buffers is None:
            buffers = {name: self._read(chunk, name) for name in self._arrays}
        self._buffers[chunk] = buffers
        while len(self._buffers) > OPEN_CHUNKS:
            self._buffers.pop(next(iter(self._buffers)))
        return buffers

    def _file(self, chunk: int, name: str) -> Path:
        trailing = ["0"] * len(self._arrays[name][0])
        return self.path.joinpath(name, "c", str(chunk), *trailing)

    def _read(self, chunk: int, name: str) -> np.ndarray:
        """One chunk of an array; what is not whole is as if it were not there."""
        shape, dtype = self._arrays[name]
        raw = content(self._file(chunk, name))
        if len(raw) != self.rows * math.prod(shape) * dtype.itemsize:
            return blank(self.rows, shape, dtype)
        return np.frombuffer(raw, dtype).reshape(self.rows, *shape).copy()

    # Whether the data are as the journal says.

    def _verify(self):
        """Count as missing what is not as the journal says."""
        damaged, numbers = [], self.numbers
        for chunk, here in self._chunks(numbers):
            rows = numbers[here] - chunk * self.rows
            columns = self._columns(chunk, rows, self._arrays)
            damaged += self._wrong(numbers[here], columns).tolist()
        self._journal.forget(damaged)
        if damaged:
            logger.warning(
                "%s: %d runs are damaged, the first of them run %d. They count as missing, and "
                "are run again when the campaign goes on.",
                *(self, len(damaged), damaged[0]),
            )

    def _warn_of_strays(self):
        """Say that there are data, where the journal has no run."""
        chunks = self._chunks_of(self._status)
        strays = sum(int(np.count_nonzero(self._read(i, self._status))) for i in chunks)
        if strays:
            logger.warning(
                "%s has data of %d runs, but its journal (%s) is gone or empty, and nothing else "
                "tells whole data from damaged ones: these runs count as missing, and are run "
                "again when the campaign goes on. To keep them, bring that file back from a copy.",
                *(self, strays, JOURNAL),
            )

    def _wrong(self, numbers: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray:
        return numbers[self._plan.checksums(numbers, columns) != self._journal.crc[numbers]]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What the system says about a file, in words that help."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "its disk is full" if full else error.strerror or str(error)
            if isinstance(error, IsADirectoryError):
                place = error.filename2 or error.filename
                why = f"a folder is where the file {place} should be; move it away"
            raise StoreError(
                f"{self} cannot be written: {why}. {len(self.numbers)} runs are stored "
                "there and whole; once this is fixed, the same call continues from them."
            ) from error
