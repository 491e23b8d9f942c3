"""The arrays of a store: their names, shapes and types, and how Zarr describes them.

A name becomes a folder, so that names which are no safe folder names are refused.
"""

import dataclasses
import json
import math
import unicodedata
import warnings
import zlib
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import numpy as np
import zarr

from consilience.core.types import Theta
from consilience.model.run import Spec, blank
from consilience.simulation.lock import StoreError

FORMAT = 1
MARK = "consilience simulations"
ROOT, JOURNAL, LOCK = "zarr.json", "journal.jsonl", "lock"
RESERVED = {name + end for name in (ROOT, JOURNAL, LOCK) for end in ("", ".part")}
"""The store's own files, and the names that they have while they are written."""

LONGEST = 200
"""Bytes of a name: file systems take 255, Zarr and temporary files add some."""


@dataclasses.dataclass(frozen=True)
class Arrays:
    """What a store holds for each run: data, parameters and a status.

    `data`: variable, the simulator's own name, shape and type of each array. A variable differs
    from its name where a parameter has that name. `theta`: name, shape and type.
    """

    data: tuple[tuple[str, str, tuple[int, ...], str], ...]
    bare: bool
    theta: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def plan(cls, spec: Spec, theta: Theta) -> "Arrays":
        """Room for data as `spec` says and parameters like `theta`, which has runs ahead."""
        parts = tuple((name, tuple(a.shape[1:]), a.dtype.str) for name, a in theta.items())
        names = ["x"] if spec.bare else list(spec.shapes)
        check_names([*theta, *names])
        taken = set(theta)
        kept = [_free(name, taken) for name in names]
        data = tuple((v, *array) for v, array in zip(kept, spec.arrays, strict=True))
        return cls(data, spec.bare, parts)

    @classmethod
    def read(cls, held: dict[str, Any]) -> "Arrays":
        """What the description of a store says."""
        data = tuple((v, name, tuple(s), dtype) for v, name, s, dtype in held["data"]["arrays"])
        theta = tuple((name, tuple(shape), dtype) for name, shape, dtype in held["theta"])
        plan = cls(data, held["data"]["bare"], theta)
        # Stores of version 0.1.0 have no checksum of it.
        if held.get("checksum", plan.checksum) != plan.checksum:
            raise ValueError("its names, shapes or types of arrays were changed")
        names = [name for row in data for name in row[:2]] + [row[0] for row in theta]
        kinds = [np.dtype(row[-1]).kind for row in (*data, *theta)]
        if not all(isinstance(name, str) for name in names) or not set(kinds) <= set("biuf"):
            raise ValueError("its arrays are not named arrays of numbers")
        return plan

    @property
    def checksum(self) -> int:
        """Of the names, shapes and types: data in another type would pass as other numbers."""
        return zlib.crc32(json.dumps(dataclasses.astuple(self)).encode())

    @property
    def spec(self) -> Spec:
        return Spec(tuple(row[1:] for row in self.data), self.bare)

    @property
    def x_names(self) -> dict[str, str]:
        """The variables of the data, by the simulator's own names."""
        return {name: variable for variable, name, _, _ in self.data}

    @property
    def theta_names(self) -> dict[str, str]:
        return {name: name for name, _, _ in self.theta}

    @property
    def status(self) -> str:
        """The variable that says of each run whether it is there."""
        return _free("status", {*self.x_names.values(), *self.theta_names})

    @property
    def all(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """The shape for one run and the type of each variable."""
        found = {name: (shape, np.dtype(dtype)) for name, shape, dtype in self.theta}
        found |= {variable: (shape, np.dtype(dtype)) for variable, _, shape, dtype in self.data}
        return found | {self.status: ((), np.dtype("u1"))}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes that one run takes in each variable."""
        return {name: math.prod(s) * dtype.itemsize for name, (s, dtype) in self.all.items()}

    def metadata(self, n: int, rows: int, about: dict[str, Any]) -> dict[str, bytes]:
        """Zarr's own files for `n` runs, `rows` in a chunk; the root last: it makes a store."""
        memory: dict[str, Any] = {}
        held = {**about, "data": {"arrays": self.data, "bare": self.bare}, "theta": self.theta}
        held |= {"what": MARK, "format": FORMAT, "checksum": self.checksum}
        held["version"] = about.get("version", version("consilience"))
        group = zarr.create_group(zarr.storage.MemoryStore(memory), attributes=held)
        status = self.status
        for name, (shape, dtype) in self.all.items():
            group.create_array(
                name,
                shape=(n, *shape),
                chunks=(rows, *shape),
                dtype=dtype,
                compressors=None,
                filters=None,
                fill_value=blank(1, (), dtype)[0],
                dimension_names=("run", *(f"{name}_{i}" for i in range(len(shape)))),
                attributes={"flag_values": [0, 1, 2], "flag_meanings": "missing done failed"}
                if name == status
                else {},
            )
        with warnings.catch_warnings():
            # All readers in Python know it, and xarray warns where it is not there.
            warnings.filterwarnings("ignore", message="Consolidated metadata")
            zarr.consolidate_metadata(group.store)
        files = {name: part.to_bytes() for name, part in memory.items()}
        return {name: files[name] for name in sorted(files, key=lambda name: name == ROOT)}

    def checksums(self, numbers: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray:
        """A checksum of each run, from all its arrays."""
        parts = []
        for name, (_, dtype) in self.all.items():
            column = np.ascontiguousarray(columns[name], dtype)
            parts.append(column.reshape(len(numbers), math.prod(column.shape[1:])).view(np.uint8))
        rows = np.concatenate(parts, axis=1)
        pairs = zip(rows, numbers.tolist(), strict=True)
        return np.array([zlib.crc32(row, number) for row, number in pairs], np.uint32)


def check_names(names: Iterable[str]):
    """Refuse names of parameters or data that are no safe folder in a store.

    >>> check_names(["mu", "log sigma"])
    >>> check_names(["../mu"])
    Traceback (most recent call last):
    consilience.simulation.lock.StoreError: '../mu' cannot name parameters or data in a store, \
where it becomes a folder: it has a slash. Call it something else.
    """
    for name in names:
        reason = _fault(name)
        if reason is not None:
            raise StoreError(
                f"{name!r} cannot name parameters or data in a store, where it becomes a folder: "
                f"it {reason}. Call it something else."
            )


def _fault(name: str) -> str | None:
    if not name.strip():
        return "is empty"
    if "/" in name or "\\" in name:
        return "has a slash"
    if name.startswith("."):
        return "begins with a dot"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return "has characters that cannot be shown"
    if _folded(name) in RESERVED:
        return "is a file of the store's own"
    if len(name.encode()) > LONGEST:
        return f"is longer than {LONGEST} bytes"
    return None


def check_distinct(names: Iterable[str]):
    """Refuse names that a file system takes for one, where case does not count."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(_folded(name), name)
        if other != name:
            raise StoreError(
                f"{other!r} and {name!r} name the same folder on this file system, where upper and "
                "lower case are one: rename one of them, or keep the store elsewhere."
            )


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
