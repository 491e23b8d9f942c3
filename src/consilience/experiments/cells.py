"""Cells of an experiment: what each is, and running them one by one, to stop and go on at will.

A cell is one fit and what was measured on it. When it is done its numbers are written to
`cells/`, and `results.csv` holds the numbers of all. A cell that is there is not run again.
Figures show the first seed, whose cells keep their arrays too.
"""

import csv
import dataclasses
import io
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tqdm.auto import tqdm

from consilience.core.files import whole, write

logger = logging.getLogger(__name__)

TABLE = "results.csv"
PROTOCOLS = ("paper", "default")
Row: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fit of an experiment.

    `samples`: K, or 0 without self-consistency. `variant`: of the problem, or of the networks.
    """

    protocol: str
    method: str
    variant: str
    budget: int
    samples: int
    seed: int

    @property
    def name(self) -> str:
        """As a file is called."""
        parts = (self.protocol, self.method, self.variant, self.budget, f"K{self.samples}")
        return "-".join(str(part) for part in (*parts, f"seed{self.seed}") if part).lower()

    def __str__(self) -> str:
        what = [f"{self.budget:,} runs", f"K = {self.samples}" * bool(self.samples)]
        words = (f"{self.method} ({self.protocol})", self.variant, *what, f"seed {self.seed}")
        return ", ".join(word for word in words if word)


FIELDS = tuple(field.name for field in dataclasses.fields(Cell))


@dataclasses.dataclass(frozen=True)
class Block:
    """Cells with everything in common but protocol, budget, K and seed."""

    method: str
    budgets: Sequence[int]
    samples: Sequence[int] = (0,)
    protocols: Sequence[str] = PROTOCOLS
    variant: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which cells are wanted; None stands for those of the experiment itself."""

    budgets: Sequence[int] | None = None
    samples: Sequence[int] | None = None
    seeds: int | None = None
    methods: Sequence[str] | None = None
    protocols: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """What was measured on a cell: numbers for its row, arrays for the figures."""

    numbers: dict[str, float]
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def plan(blocks: Iterable[Block], choice: Choice, seeds: int) -> list[Cell]:
    """The cells of some blocks, as chosen; all of one seed before those of the next."""
    blocks = list(blocks)
    known = list(dict.fromkeys(block.method for block in blocks))
    methods = _among(choice.methods, known, "method")
    protocols = _among(choice.protocols, PROTOCOLS, "protocol")
    if seeds < 1:
        raise ValueError(f"There must be at least one seed, got {seeds}.")
    if choice.samples and min(choice.samples) < 2:
        raise ValueError(
            "Self-consistency compares values of theta with one another: K must be 2 or more, got "
            f"{min(choice.samples)}. Methods without it have none: choose them by name."
        )
    cells: dict[Cell, None] = {}
    for seed, block in itertools.product(range(seeds), blocks):
        if block.method.lower() not in methods:
            continue
        consistent = tuple(block.samples) != (0,)
        samples = choice.samples if choice.samples and consistent else block.samples
        for protocol, n, k in itertools.product(
            block.protocols, choice.budgets or block.budgets, samples
        ):
            if protocol in protocols:
                cells[Cell(protocol, block.method, block.variant, n, k, seed)] = None
    return list(cells)


def _among(chosen: Sequence[str] | None, known: Sequence[str], what: str) -> list[str]:
    every = [name.lower() for name in known]
    if chosen is None:
        return every
    for name in chosen:
        if name.lower() not in every:
            raise ValueError(f"There is no {what} {name!r} here, only {', '.join(known)}.")
    return [name.lower() for name in chosen]


def run_cells(
    cells: Sequence[Cell],
    run: Callable[[Cell], Found],
    folder: str | Path,
    *,
    cost: Callable[[Cell], float] = lambda cell: cell.budget * (4 + cell.samples),
    progress: bool = True,
) -> list[Row]:
    """Run the cells that the folder does not hold yet; the rows of all it holds come back.

    `cost`: how long a cell takes beside others, in any unit, for the time left.
    Several processes may work on one folder, on cells of their own.
    """
    kept = Path(folder) / "cells"
    kept.mkdir(parents=True, exist_ok=True)
    place = lambda cell: kept / f"{cell.name}.json"  # noqa: E731
    waiting = [cell for cell in cells if not place(cell).exists()]
    logger.info("%d cells, %d of them done before.", len(cells), len(cells) - len(waiting))
    shape = "{desc} |{bar}| {percentage:3.0f} %, {elapsed} gone, {remaining} left"
    total, quiet = sum(map(cost, waiting)), None if progress else True
    with tqdm(total=total, bar_format=shape, disable=quiet) as bar:
        for number, cell in enumerate(waiting, 1):
            if place(cell).exists():
                continue
            bar.set_description(f"cell {number} of {len(waiting)}: {cell}")
            start, begun = time.perf_counter(), time.process_time()
            found = run(cell)
            if found.arrays and cell.seed == 0:
                write_arrays(kept / f"{cell.name}.npz", found.arrays)
            spent = {
                "seconds": round(time.perf_counter() - start, 1),
                "cpu_seconds": round(time.process_time() - begun, 1),
            }
            row = {**dataclasses.asdict(cell), **found.numbers, **spent}
            write(place(cell), json.dumps(row).encode(), shared=True)
            write_table(folder)
            bar.update(cost(cell))
    return read_rows(folder)


def read_rows(folder: str | Path) -> list[Row]:
    """What was measured on all cells of a folder, in the order of their names."""
    paths = sorted((Path(folder) / "cells").glob("*.json"))
    rows = [json.loads(path.read_text()) for path in paths]
    return sorted(rows, key=lambda row: tuple(row[name] for name in FIELDS))


def write_table(folder: str | Path) -> Path:
    """All rows of a folder as one table."""
    rows = read_rows(folder)
    columns = list(dict.fromkeys(itertools.chain(FIELDS, *rows)))
    # Time comes last, whatever else was measured.
    columns.sort(key=lambda name: name in ("seconds", "cpu_seconds"))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    path = Path(folder) / TABLE
    write(path, text.getvalue().encode(), shared=True)
    return path


def write_arrays(path: Path, arrays: dict[str, Any]):
    """Arrays in a file, which is there only when it is whole."""
    with whole(path, shared=True) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_arrays(folder: str | Path, row: Row) -> dict[str, np.ndarray]:
    """The arrays that a cell of the first seed left for the figures."""
    cell = Cell(**{name: row[name] for name in FIELDS})
    path = Path(folder) / "cells" / f"{cell.name}.npz"
    if not path.exists():
        return {}
    with np.load(path) as arrays:
        return dict(arrays)
