"""The kind of data with two axes that were not declared: found from the likelihood or the runs.

Rows are exchangeable if their order says nothing. A log-likelihood shows it by giving the same
number for any order. Without one the runs are tested: if rows are exchangeable, the order of
each run is one of many that were as likely, so that a statistic of the order lies among its values
for random orders. Rows are independent given the parameters if the log-likelihood is a sum
over rows.
"""

import logging
import math

import jax
import numpy as np
from numpy.random import Generator
from scipy import stats

from consilience.core.compiling import compiled
from consilience.model.data import Kind, Series, Set, default_kind, layout_of
from consilience.model.host import OnHost
from consilience.model.model import Model, short
from consilience.simulation.simulations import Simulations

logger = logging.getLogger(__name__)

VALUES = 40_000
"""The most values that are tested, those of the first runs."""
FEWEST = 20
"""With fewer runs the order of rows cannot be tested."""
LONGEST = 1000
"""The most values of a run that are tested."""
ORDERS = 999
"""Random orders that a statistic is compared with."""
LEVEL = 0.01
"""Rows count as ordered below this p-value, divided by the number of statistics."""
LAGS = 3
"""How far apart rows are whose likeness is looked at."""
LIKELIHOODS = 32
"""Runs at which a log-likelihood is evaluated."""
TOLERANCE = 1e-5
"""How far sums of log-likelihoods may differ by rounding, relative to their size."""


def find_kind(model: Model, simulations: Simulations, *, rows_open: bool = True) -> Kind | None:
    """The kind of the data of a model: what the user declared, else what can be found.

    The finding is logged once, with how to declare it. Runs show that rows are exchangeable, and
    not that they are independent. `rows_open`: whether that is left to recipes that compete; if
    not, a likelihood is learned of all rows together.
    """
    if model.data is not None:
        return model.data
    layout = layout_of(simulations.blank, None)
    guess = default_kind(layout.shapes)
    if not isinstance(guess, Series) or layout.rows < 2:
        return None
    name = layout.names[0]
    # Not the key of the fit: what is found does not depend on it.
    rng = np.random.default_rng(0)
    size = math.prod(layout.shapes[layout.names[0]])
    most = max(LIKELIHOODS, VALUES // size)
    runs = simulations[: min(most, len(simulations))]
    x = np.asarray(layout.named(runs.x)[name])
    if model.likelihood is not None and not isinstance(model.likelihood, OnHost):
        kind, why = _by_likelihood(model, runs, x, rng)
    else:
        kind, why = _by_runs(x, rng)
        if isinstance(kind, Set) and not rows_open:
            kind = Set(independent=False)
    if kind is not None:
        logger.warning(
            "Data of the shape %s are taken as %s: %s. To declare it: cs.Model(..., data=cs.%s), "
            "or data=cs.%s if that is wrong.",
            layout.show(layout.shapes),
            "a set of rows" if isinstance(kind, Set) else "a series",
            why,
            short(kind),
            short(Series() if isinstance(kind, Set) else Set()),
        )
    return kind


@compiled
def _likelihoods(model: Model, theta, x):
    return jax.vmap(model.log_likelihood)(theta, x)


def _by_likelihood(model: Model, runs: Simulations, x: np.ndarray, rng: Generator):
    """Whether a log-likelihood changes with the order of rows, and whether it is a sum of them."""
    n = min(LIKELIHOODS, len(runs))
    few = runs[:n]
    x = x[:n]

    def at(values: np.ndarray) -> np.ndarray:
        found = values if not isinstance(few.x, dict) else {next(iter(few.x)): values}
        return np.asarray(_likelihoods(model, few.theta, found), float)

    base = at(x)
    usable = np.isfinite(base)
    if not usable.any():
        return Series(), "the log-likelihood is not finite at the runs"
    mixed = [at(np.stack([row[rng.permutation(len(row))] for row in x])) for _ in range(3)]
    if not all(_close(base, one, usable) for one in mixed):
        return Series(), "the log-likelihood changes with the order of rows"
    # A sum over rows has no interaction: changing two rows adds what changing each does.
    other = x[rng.permutation(n)]
    first, second, both = x.copy(), x.copy(), x.copy()
    first[:, 0] = both[:, 0] = other[:, 0]
    second[:, -1] = both[:, -1] = other[:, -1]
    changes = [at(part) for part in (first, second, both)]
    here = usable & np.all(np.isfinite(changes), axis=0)
    alone = here.any() and _close(base + changes[2], changes[0] + changes[1], here)
    if alone:
        return Set(), "the log-likelihood is a sum over rows"
    return Set(independent=False), "the log-likelihood is the same for any order of rows"


def _close(first: np.ndarray, second: np.ndarray, where: np.ndarray) -> bool:
    first, second = first[where], second[where]
    scale = np.maximum(1.0, np.maximum(np.abs(first), np.abs(second)))
    near = np.abs(first - second) <= TOLERANCE * scale
    return bool(np.all(near & np.isfinite(first) & np.isfinite(second)))


def _by_runs(x: np.ndarray, rng: Generator):
    """Whether the order of rows says anything, by permutation tests."""
    n, rows = x.shape[:2]
    if n < FEWEST:
        return Series(), f"{n} runs are too few to test whether rows are exchangeable"
    flat = x.reshape(n, rows, -1).astype(float)
    # Of large data, some columns and the first rows.
    rows = min(rows, LONGEST)
    flat = flat[:, :rows, :: -(-flat.shape[2] * rows // LONGEST)]
    # Ranks among all rows: the test must not hang on a few extreme values.
    ranks = stats.rankdata(flat.reshape(n * rows, -1), axis=0)
    flat = (ranks / (n * rows) - 0.5).reshape(flat.shape)
    found = _statistics(flat)
    shuffled = []
    for _ in range(ORDERS):
        places = rng.permuted(np.broadcast_to(np.arange(rows), (n, rows)), axis=1)
        shuffled.append(_statistics(np.take_along_axis(flat, places[:, :, None], axis=1)))
    low = 1 + np.sum(np.array(shuffled) >= found, axis=0)
    p = low / (1 + ORDERS)
    if (p <= LEVEL / len(p)).any():
        return Series(), f"the order of rows matters in {n} runs"
    return Set(), f"the order of rows shows no effect in {n} runs (permutation test)"


def _statistics(x: np.ndarray) -> np.ndarray:
    """How much the order of rows shows: in level, in spread, and in likeness of neighbours."""
    own = x - x.mean(axis=1, keepdims=True)
    level = np.sum(own.mean(axis=0) ** 2)
    size = own**2 - (own**2).mean(axis=1, keepdims=True)
    spread = np.sum(size.mean(axis=0) ** 2)
    # Squared for each run: neighbours may be alike in some runs and unlike in others.
    rows = x.shape[1]
    near = sum(
        np.sum(np.sum(own[:, lag:] * own[:, :-lag], axis=1) ** 2)
        for lag in range(1, min(LAGS, rows - 1) + 1)
    )
    # Where rows move with the parameters: a slope over time that differs from run to run.
    time = np.linspace(-1, 1, x.shape[1])
    slope = np.sum(np.einsum("t,ntk->nk", time, own) ** 2)
    return np.array([level, spread, near, slope])
