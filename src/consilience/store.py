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
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from consilience.files import Lock, StoreError, write
from consilience.journal import DONE, FAILED, Journal
from consilience.runs import Failure, Spec, blank
from consilience.types import Theta

logger = logging.getLogger(__name__)

FORMAT = 1
MARK = "consilience simulations"
ROOT, JOURNAL, LOCK = "zarr.json", "journal.jsonl", "lock"
CHUNK_BYTES, CHUNK_RUNS = 2**20, 1024
"""A chunk of an array holds as many runs as fit into both."""

OPEN_CHUNKS = 4
"""Chunks that are kept in memory while their runs come in."""


class Store:
    """The runs of one campaign in a folder.

    `about` says whose runs they are, and locks the store for writing; without it the store is
    only read, and may be one that another process is writing to.
    `verify`: whether all data are read, so that what is damaged counts as missing.
    """

    def __init__(
        self, path: str | Path, about: dict[str, Any] | None = None, *, verify: bool = True
    ):
        self.path = Path(path)
        self.spec: Spec | None = None
        self._journal = Journal(self.path / JOURNAL)
        self._buffers: dict[int, dict[str, np.ndarray]] = {}
        self._lock: Lock | None = None
        self.about = {} if about is None else about
        if about is not None:
            self._lock = self._acquire()
        try:
            self._open(about, verify)
        except BaseException:
            self.close()
            raise

    def _acquire(self) -> Lock:
        known = (self.path / ROOT).exists() or (self.path / LOCK).exists()
        with self._explained():
            if self.path.exists() and not known and any(self.path.iterdir()):
                raise StoreError(f"{self.path} is there already, and is no store of simulations.")
            self.path.mkdir(parents=True, exist_ok=True)
            return Lock(self.path / LOCK)

    def _open(self, about: dict[str, Any] | None, verify: bool):
        if not (self.path / ROOT).exists():
            if about is None:
                raise StoreError(f"There is no store of simulations at {self.path}.")
            return
        try:
            root = json.loads((self.path / ROOT).read_text())
            held = root["attributes"]
            if held.get("what") != MARK:
                raise StoreError(f"{self.path} is a Zarr store, but not one of simulations.")
            if held["format"] != FORMAT:
                raise StoreError(
                    f"{self.path} has the format {held['format']}; this version reads {FORMAT}."
                )
            if about is not None:
                self._check(held, about)
            self.about = {name: held[name] for name in held if name not in ("data", "theta")}
            self._set_arrays(held)
            shape = root["consolidated_metadata"]["metadata"][self._status]["shape"]
            self._journal.resize(shape[0])
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise StoreError(
                f"The description of {self.path} ({ROOT}) is damaged: {error!r}. Its data may be "
                "whole: bring that file back from a copy."
            ) from error
        with self._explained():
            self._journal.replay(mend=self._lock is not None)
        if verify:
            self._verify()

    def _check(self, held: dict[str, Any], about: dict[str, Any]):
        for name, given in about.items():
            if name != "version" and json.loads(json.dumps(given)) != held.get(name):
                raise StoreError(
                    f"{self.path} holds runs of another campaign. Its {name}: {held.get(name)}; "
                    f"the {name} given: {given}. Pass the model and key that it was made with, "
                    "or another store."
                )

    # What the arrays are.

    def begin(self, spec: Spec, theta: Theta):
        """Fix the arrays: data as `spec` says, parameters like `theta`, which has runs ahead."""
        if self.spec is not None:
            if (spec.shapes, spec.bare) != (self.spec.shapes, self.spec.bare):
                raise StoreError(
                    f"{self.path} holds data of the shapes {self.spec.shapes}, but the model "
                    f"gives {spec.shapes}: pass another store."
                )
            return
        parts = [(name, list(a.shape[1:]), a.dtype.str) for name, a in theta.items()]
        taken = {name for name, _, _ in parts}
        names = ["x"] if spec.bare else list(spec.shapes)
        kept = [_free(name, taken) for name in names]
        data = [[v, *array] for v, array in zip(kept, spec.arrays, strict=True)]
        self._set_arrays({"data": {"arrays": data, "bare": spec.bare}, "theta": parts})

    def _set_arrays(self, held: dict[str, Any]):
        rows = [(v, n, tuple(s), dtype) for v, n, s, dtype in held["data"]["arrays"]]
        self.spec = Spec(tuple(row[1:] for row in rows), held["data"]["bare"])
        self._x_names = {name: variable for variable, name, _, _ in rows}
        self._theta_names = [name for name, _, _ in held["theta"]]
        self._arrays = {name: (tuple(shape), np.dtype(d)) for name, shape, d in held["theta"]}
        self._arrays |= {variable: (s, np.dtype(dtype)) for variable, _, s, dtype in rows}
        self._status = _free("status", set(self._arrays))
        self._arrays[self._status] = ((), np.dtype("u1"))
        self._layout = {"data": held["data"], "theta": held["theta"]}
        largest = max(math.prod(s) * dtype.itemsize for s, dtype in self._arrays.values())
        self.rows = max(1, min(CHUNK_RUNS, CHUNK_BYTES // max(largest, 1)))

    def grow(self, n: int):
        """Make room for `n` runs; those that are there stay."""
        if n <= len(self._journal):
            return
        with self._explained():
            for name, content in self._metadata(n).items():
                write(self.path / name, content)
        self._journal.resize(n)

    def _metadata(self, n: int) -> dict[str, bytes]:
        """Zarr's own files for `n` runs, the root last: with it the store is there."""
        memory: dict[str, Any] = {}
        held = {**self.about, **self._layout, "what": MARK, "format": FORMAT}
        held["version"] = self.about.get("version", version("consilience"))
        group = zarr.create_group(zarr.storage.MemoryStore(memory), attributes=held)
        for name, (shape, dtype) in self._arrays.items():
            group.create_array(
                name,
                shape=(n, *shape),
                chunks=(self.rows, *shape),
                dtype=dtype,
                compressors=None,
                filters=None,
                fill_value=blank(1, (), dtype)[0],
                dimension_names=("run", *(f"{name}_{i}" for i in range(len(shape)))),
                attributes={"flag_values": [0, 1, 2], "flag_meanings": "missing done failed"}
                if name == self._status
                else {},
            )
        with warnings.catch_warnings():
            # All readers in Python know it, and xarray warns where it is not there.
            warnings.filterwarnings("ignore", message="Consolidated metadata")
            zarr.consolidate_metadata(group.store)
        files = {name: part.to_bytes() for name, part in memory.items()}
        return {name: files[name] for name in sorted(files, key=lambda name: name == ROOT)}

    # What is there.

    def missing(self, n: int, retry: int = 0) -> np.ndarray:
        """The numbers below `n` that are to be run: missing, or failed and worth a new attempt."""
        return self._journal.missing(n, retry)

    @property
    def total(self) -> int:
        """How many runs were asked for."""
        return len(self._journal)

    @property
    def numbers(self) -> np.ndarray:
        """The runs that are there, as data or as a failure."""
        return self._journal.settled

    def failures(self, numbers: np.ndarray) -> dict[int, Failure]:
        """Failures among these runs, by their position in `numbers`."""
        failed = self._journal.failed
        return {i: failed[j] for i, j in enumerate(numbers.tolist()) if j in failed}

    def theta(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The parameters of these runs, by name."""
        names = {name: name for name in self._theta_names}
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
        return result

    def _checked(self, chunk: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        columns = self._columns(chunk, rows, self._arrays)
        wrong = self._wrong(chunk * self.rows + rows, columns)
        if len(wrong):
            raise StoreError(
                f"{len(wrong)} runs of {self.path}, the first of them run {wrong[0]}, were damaged "
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
            self._journal.record(numbers, self._checksums(numbers, columns), failed)

    def touch(self):
        """A sign of life for other machines that may want the store."""
        if self._lock is not None:
            self._lock.touch()

    def stopped(self, n: int) -> str:
        """What to say when a campaign ends early."""
        return (
            f"{n - len(self.missing(n))} of {n} runs are stored in {self.path}. The same call "
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
        try:
            raw = self._file(chunk, name).read_bytes()
        except FileNotFoundError:
            raw = b""
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
                *(self.path, len(damaged), damaged[0]),
            )

    def _wrong(self, numbers: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray:
        return numbers[self._checksums(numbers, columns) != self._journal.crc[numbers]]

    def _checksums(self, numbers: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray:
        parts = []
        for name, (_, dtype) in self._arrays.items():
            column = np.ascontiguousarray(columns[name], dtype).reshape(len(numbers), -1)
            parts.append(column.view(np.uint8))
        rows = np.concatenate(parts, axis=1)
        pairs = zip(rows, numbers.tolist(), strict=True)
        return np.array([zlib.crc32(row, number) for row, number in pairs], np.uint32)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What the system says about a file, in words that help."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "its disk is full" if full else error.strerror or str(error)
            raise StoreError(
                f"{self.path} cannot be written: {why}. {len(self.numbers)} runs are stored "
                "there and whole; once this is mended, the same call goes on from them."
            ) from error


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
