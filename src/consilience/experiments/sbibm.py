"""The scoreboard: six tasks of the SBI benchmark, with its C2ST, beside published figures.

Two leagues. Without the likelihood, as the published methods: `default`, which is `cs.fit` with
default settings, and `NPE`, which is `self_consistency=False`. With it: `exact`, whose draws
and corrected draws are both measured. Training sets, observations and judging runs have fixed
keys: those of a cell are `jax.random.key(seed)`, observations those of the benchmark's files or
of `consilience.tasks.sbibm`, and runs to judge the density on `TEST_KEY`.
"""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from consilience.core.files import write
from consilience.experiments.cells import Block, Cell, Found
from consilience.experiments.classifier import c2st
from consilience.experiments.experiment import (
    EXACT_KEY,
    Experiment,
    Table,
    computed_once,
    test_set,
    training_set,
)
from consilience.experiments.published import FILE, read_published, write_published
from consilience.experiments.sbibm_page import SOURCE_FILE, sections
from consilience.posterior.fit import Fit
from consilience.tasks.sbibm.registry import TASKS, Problem, data_file, fingerprint, sbibm_data
from consilience.training.train import fit

REFERENCE_DRAWS, QUICK_DRAWS = 10_000, 1000
RUNS, QUICK_RUNS = 1000, 200
"""Fresh runs at which the mean log density of the posterior is taken."""
QUICK_OBSERVATIONS = 2
DRAW_KEY, CLASSIFIER_KEY = 30_000, 40_000


def open_data(folder: Path, data: Path | None) -> Callable[[Cell, Path, bool], Found]:
    """What runs a cell, with the benchmark's files in `data` or with problems of our own.

    The folder of results keeps which files these are, and the published figures, so that
    results of different observations are never mixed and the report needs no files.
    """
    here = {} if data is None else {name: fingerprint(data_file(data, name)) for name in TASKS}
    path = folder / SOURCE_FILE
    held = json.loads(path.read_text()) if path.exists() else here
    if held != here:
        raise ValueError(
            f"{folder} holds results for {_source(held)}, and this run has {_source(here)}: pass "
            "the same files with --data, or another folder with --out."
        )
    published = [] if data is None else read_published(data)
    folder.mkdir(parents=True, exist_ok=True)
    if published:
        write_published(folder / FILE, published)
    write(path, json.dumps(here).encode())
    return functools.partial(run, data=data)


def _source(files: dict[str, str]) -> str:
    return "the benchmark's files" if files else "observations made by this library"


def problem(name: str, folder: Path, data: Path | None) -> Problem:
    """Observations and reference draws: the benchmark's, or our own, kept in the folder."""
    if data is not None:
        return sbibm_data(data, name)
    task = TASKS[name]

    def make() -> dict[str, np.ndarray]:
        made = task.observations()
        x = jnp.asarray(made.observations)
        draws = task.reference(x, REFERENCE_DRAWS, key=jax.random.key(EXACT_KEY))
        return {**made._asdict(), "reference": np.asarray(draws)}

    return Problem(**computed_once(folder / "problems" / f"{name}.npz", make))


def run(cell: Cell, folder: Path, quick: bool, *, data: Path | None = None) -> Found:
    """One fit, and its C2ST for each observation, held-out log density and seconds."""
    known = problem(cell.variant, folder, data)
    if quick:
        known = Problem(*(part[:QUICK_OBSERVATIONS] for part in known))
    model = TASKS[cell.variant].model(likelihood=cell.method == "exact")
    sims, key = training_set(model, cell)
    settings: dict[str, Any] = {"self_consistency": False} if cell.method == "NPE" else {}
    start = time.perf_counter()
    fitted = fit(model, sims, key=key, progress=False, **settings)
    seconds = time.perf_counter() - start
    tests = test_set(model, QUICK_RUNS if quick else RUNS)
    n = min(QUICK_DRAWS if quick else REFERENCE_DRAWS, known.reference.shape[1])
    numbers = {
        "draws": float(n),
        "log_density": float(np.mean(fitted.log_prob(tests.theta, tests.x))),
        "fit_seconds": round(seconds, 1),
    }
    numbers |= scores(fitted, known, cell.seed, n, corrected=False)
    if cell.method == "exact":
        numbers |= scores(fitted, known, cell.seed, n, corrected=True)
    return Found(numbers)


def scores(fitted: Fit, known: Problem, seed: int, n: int, *, corrected: bool) -> dict[str, float]:
    """The C2ST of `n` draws for each observation, and their mean."""
    key = jax.random.key(DRAW_KEY + seed)
    drawn = fitted.sample(known.observations, n, key=key, corrected=corrected)["theta"].values
    name = "c2st_corrected" if corrected else "c2st"
    each = {
        f"{name}_{i + 1}": c2st(reference[:n], draws[0], key=jax.random.key(CLASSIFIER_KEY + i))
        for i, (reference, draws) in enumerate(zip(known.reference, drawn, strict=True))
    }
    return {name: float(np.mean(list(each.values()))), **each}


BUDGETS = (100, 1000, 10_000)
METHODS = ("default", "NPE", "exact")
MEASURES = {
    "c2st": "C2ST",
    "c2st_corrected": "C2ST of corrected draws",
    "log_density": "mean held-out log density",
    "fit_seconds": "seconds of the fit",
}
EXPERIMENT = Experiment(
    name="sbibm",
    title="The SBI benchmark",
    blocks=[
        Block(method, BUDGETS, protocols=("default",), variant=task)
        for method in METHODS
        for task in TASKS
    ],
    quick=[
        Block(method, (100,), protocols=("default",), variant="two_moons") for method in METHODS
    ],
    run=run,
    tables=[
        Table(measure, f"{task}: {title}", higher=measure == "log_density", variants=(task,))
        for measure, title in MEASURES.items()
        for task in TASKS
    ],
    open=open_data,
    sections=sections,
    notes=(
        "C2ST by the benchmark's classifier: two hidden layers of ten times the number of "
        "parameters, five folds, data standardised by the reference; 0.5 is perfect. "
        "*default* is `cs.fit` with default settings, *NPE* the same with "
        "`self_consistency=False`, and *exact* has the log-likelihood. The training set of seed s "
        "has `jax.random.key(s)`, the same for all methods; log densities are means over fresh "
        "runs, the same for all cells. Seconds are those of a machine that may have done other "
        "work. The recipes of the default were chosen on these six tasks, with other runs (keys "
        "100 and 1000), observations of the library's own and test runs of key 999."
    ),
)
