"""What an experiment is, and what all of them measure."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from consilience.core.files import write
from consilience.core.types import Data, PRNGKey
from consilience.diagnostics.calibration import calibrate
from consilience.experiments.cells import (
    Block,
    Cell,
    Choice,
    Found,
    Row,
    plan,
    run_cells,
    write_arrays,
)
from consilience.identity.consistency import SelfConsistency
from consilience.identity.criteria import Bounded
from consilience.identity.schedules import Constant, Schedule
from consilience.metrics import mmd
from consilience.model.model import Model
from consilience.posterior.fit import Fit
from consilience.simulation.simulate import simulate
from consilience.simulation.simulations import Simulations

POSTERIOR_DRAWS, RANK_DRAWS, SHOWN = 1000, 199, 500
TEST_KEY, EXACT_KEY = 10_000, 20_000
NAME_FILE = "experiment.txt"


@dataclasses.dataclass(frozen=True)
class Published:
    """A row of a table of the paper: by budget, or by K where the budget is one and the same."""

    label: str
    values: Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the report: one measure, methods down and budgets (or K) across.

    `limit`: the best there can be, in words. `variants`: those of the cells to show.
    `digits`: behind the point; by default as many as the size of a number asks for.
    """

    measure: str
    title: str
    across: str = "budget"
    higher: bool = False
    limit: str = ""
    variants: Sequence[str] = ("",)
    published: Sequence[Published] = ()
    digits: int | None = None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment of the paper: its cells, how one is run, and what is shown of them.

    `run`: a cell, the folder for what is computed once, and whether a quick look is enough.
    `draw`: the figures beyond the measures against the budget, by name.
    `open`: for an experiment that takes files of the user's: the folder of results and that of
    the files, or None, give the `run` of its cells.
    `sections`: the report's sections, from the rows and the folder of results, in place of a
    table for each of `tables` and of figures.
    """

    name: str
    title: str
    blocks: Sequence[Block]
    quick: Sequence[Block]
    run: Callable[[Cell, Path, bool], Found]
    tables: Sequence[Table]
    seeds: int = 3
    draw: Callable[[Sequence[Row], Path], dict[str, Any]] = lambda rows, folder: {}
    notes: str = ""
    open: Callable[[Path, Path | None], Callable[[Cell, Path, bool], Found]] | None = None
    sections: Callable[[Sequence[Row], Path], list[str]] | None = None

    def cells(self, choice: Choice | None = None, *, quick: bool = False) -> list[Cell]:
        """The chosen cells, or all."""
        choice = choice or Choice()
        seeds = (1 if quick else self.seeds) if choice.seeds is None else choice.seeds
        return plan(self.quick if quick else self.blocks, choice, seeds)

    def reproduce(
        self,
        folder: str | Path,
        choice: Choice | None = None,
        *,
        quick: bool = False,
        data: Path | None = None,
        progress: bool = True,
    ) -> list[Row]:
        """Run the chosen cells that are not in the folder yet; the rows of all come back.

        `data`: the folder of files of an experiment that takes some.
        """
        if data is not None and self.open is None:
            raise ValueError(f"The experiment {self.name} takes no files: leave --data out.")
        folder, cells = Path(folder), self.cells(choice, quick=quick)
        _claim(folder, f"{self.name}{' quick' * quick}")
        run = self.run if self.open is None else self.open(folder, data)
        return run_cells(cells, lambda cell: run(cell, folder, quick), folder, progress=progress)


def read_name(folder: Path) -> tuple[str, bool]:
    """Which experiment a folder holds, and whether it is the quick one."""
    if not (folder / NAME_FILE).exists():
        raise ValueError(
            f"{folder} holds no results of an experiment ({NAME_FILE} is missing): run "
            "`consilience reproduce` first."
        )
    name, *quick = (folder / NAME_FILE).read_text().split()
    return name, bool(quick)


def _claim(folder: Path, name: str):
    """Say whose results a folder holds; refuse one that holds others."""
    path = folder / NAME_FILE
    held = path.read_text().strip() if path.exists() else name
    if held != name:
        raise ValueError(f"{folder} holds results of {held}: pass another folder for {name}.")
    folder.mkdir(parents=True, exist_ok=True)
    write(path, f"{name}\n".encode(), shared=True)


def published_loss(
    samples: int, weight: Schedule, *, limit: float | None = None, exact: bool | None = None
) -> SelfConsistency:
    """The paper's self-consistency, with lambda over training; its variance is bounded."""
    return SelfConsistency(
        max(2, samples),
        weight=weight,
        maximum_likelihood=Constant(),
        criterion=Bounded(importance=0.0),
        augmentation=None,
        limit=limit,
        exact=exact,
    )


def training_set(model: Model, cell: Cell) -> tuple[Simulations, PRNGKey]:
    """The runs of a cell, and the key of its fit: the same for every method and protocol."""
    sims = simulate(model, cell.budget, key=jax.random.key(cell.seed))
    return sims, jax.random.key(100 + cell.seed)


def test_set(model: Model, n: int) -> Simulations:
    """New runs to judge on, the same for all cells."""
    return simulate(model, n, key=jax.random.key(TEST_KEY))


def draw(fit: Fit, x: Data, seed: int, n: int = POSTERIOR_DRAWS) -> dict[str, np.ndarray]:
    """Posterior draws by parameter, (datasets, n, ...)."""
    drawn = fit.sample(x, n, key=jax.random.key(seed))
    return {str(name): values.values[:, 0] for name, values in drawn.items()}


def distances(draws: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The squared MMD of every test set's draws to exact ones."""
    return np.asarray(mmd(jnp.asarray(draws), jnp.asarray(exact)))


def against_exact(fit: Fit, x: Data, exact: np.ndarray, seed: int) -> Found:
    """The mean MMD over test sets, that of each, and draws for the first to show."""
    draws = draw(fit, x, seed)["theta"]
    each = distances(draws, exact)
    shown = {"draws": draws[0, :SHOWN], "exact": exact[0, :SHOWN]}
    return Found({"mmd": float(each.mean())}, {"mmd": each, **shown})


def ranked(fit: Fit, n: int, seed: int = 0) -> Found:
    """Simulation-based calibration: the error and the verdict for every parameter, and ranks.

    `seed`: of the test sets; those of another are independent.
    """
    table = calibrate(fit, n=n, key=jax.random.key(TEST_KEY + 1 + seed), draws=RANK_DRAWS).table
    each = table.isel(quantity=slice(0, -1))
    numbers = {"calibration_error": float(each["error"].mean())}
    for name in each["quantity"].values:
        row = each.sel(quantity=name)
        numbers[f"error_{name}"] = float(row["error"])
        numbers[f"inside_{name}"] = float(row["inside"])
    names = np.asarray(table["quantity"].values, dtype=str)
    return Found(numbers, {"ranks": table["ranks"].values, "ranked": names})


def computed_once(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays from a file, or made and kept there for the next time."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, make())
    with np.load(path) as arrays:
        return dict(arrays)
