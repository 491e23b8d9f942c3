"""A fit: the learned densities of a model, and how they are used.

Requests of any size run in blocks of bounded memory and of few shapes, so that few are
compiled.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import xarray as xr

from consilience.approximators import LearnedPrior, Likelihood, Posterior
from consilience.flows import Coupling
from consilience.model import Model
from consilience.results import draws_to_dataset
from consilience.summaries import Summary
from consilience.types import Data, PRNGKey, Theta

BLOCK = 4096
"""Parameter vectors that go through a flow at once: fits a CPU's cache."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The descriptions of the networks of a fit."""

    posterior: Coupling
    likelihood: Coupling | None
    prior: Coupling | None
    summary: Summary | eqx.Module


@dataclasses.dataclass(frozen=True)
class History:
    """How training went.

    `terms`: named losses, one value an epoch; `skipped` counts steps that were not finite.
    `best_epochs`: the epoch whose weights were kept, for each learned density.
    `stopped`: "finished", "early" or "interrupted".
    """

    terms: dict[str, np.ndarray]
    best_epochs: dict[str, int]
    stopped: str
    seconds: float
    simulations: int


class Fit(eqx.Module):
    """The posterior of a model for any dataset, and the likelihood if it was learned."""

    model: Model
    posterior: Posterior
    likelihood: Likelihood | None
    prior: LearnedPrior | None
    recipe: Recipe = eqx.field(static=True)
    history: History = eqx.field(static=True)

    def sample(self, x: Data, n: int = 1000, *, key: PRNGKey) -> xr.Dataset:
        """Posterior draws for one dataset, or for each of a batch with a leading axis.

        Returns a variable for each parameter, with the dimensions `chain` (one), `draw`
        and its own; for a batch, behind `observation`.
        """
        if n < 1:
            raise ValueError(f"The number of draws must be at least one, got {n}.")
        layout = self.posterior.data.layout
        arrays, batched = layout.check(x)
        m = len(arrays[layout.names[0]])
        space = self.posterior.parameters
        dtype = space.loc.dtype
        draws = {name: np.empty((m, n, *shape), dtype) for name, shape in space.shapes.items()}
        for i, j in _blocks(m, n):
            part = {name: array[np.minimum(i, m - 1)] for name, array in arrays.items()}
            block = _draw(self.posterior, key, layout.unnamed(part), i, j[0], len(j))
            keep_i, keep_j = i[i < m], j[j < n]
            for name, values in jax.device_get(block).items():
                draws[name][np.ix_(keep_i, keep_j)] = values[: len(keep_i), : len(keep_j)]
        return draws_to_dataset(draws, batched=batched)

    def log_prob(self, theta: Theta | xr.Dataset | np.ndarray, x: Data) -> np.ndarray:
        """The log posterior density at named parameters.

        For one dataset, arrays of `theta` may have any leading axes, and the result has
        them. For a batch of datasets their first axis is the batch's. Draws of `sample`
        are accepted as they are. Outside the prior's support: minus infinity.
        """
        layout, space = self.posterior.data.layout, self.posterior.parameters
        arrays, batched = layout.check(x)
        m = len(arrays[layout.names[0]])
        if isinstance(theta, xr.Dataset):
            theta = {str(name): array.values for name, array in theta.data_vars.items()}
        named = space.check(theta)
        first = space.names[0]
        lead = named[first].shape[: named[first].ndim - len(space.shapes[first])]
        if batched and lead[:1] != (m,):
            raise ValueError(
                f"x is a batch of {m} datasets, so the arrays of theta must have {m} as their "
                f"first axis, got the leading axes {lead}."
            )
        n = math.prod(lead[1:] if batched else lead)
        flat = {name: a.reshape(m, n, *space.shapes[name]) for name, a in named.items()}
        result = np.empty((m, n), space.loc.dtype)
        for i, j in _blocks(m, n):
            rows, columns = np.minimum(i, m - 1), np.minimum(j, n - 1)
            part = {name: array[rows] for name, array in arrays.items()}
            values = {name: a[np.ix_(rows, columns)] for name, a in flat.items()}
            block = np.asarray(_log_prob(self.posterior, values, layout.unnamed(part)))
            keep_i, keep_j = i[i < m], j[j < n]
            result[np.ix_(keep_i, keep_j)] = block[: len(keep_i), : len(keep_j)]
        return result.reshape(lead)

    def save(self, path: str | Path) -> Path:
        """Write the fit to a file that `cs.load` reads."""
        from consilience.storage import save

        return save(self, path)

    def __repr__(self) -> str:
        h = self.history
        kept = ", ".join(f"{name} {epoch}" for name, epoch in h.best_epochs.items())
        last = {name: values[-1] for name, values in h.terms.items()}
        losses = ", ".join(f"{name} {value:.3f}" for name, value in last.items() if value)
        return (
            f"Fit: {' and '.join(h.best_epochs)} of {', '.join(self.posterior.parameters.names)}\n"
            f"  {h.simulations} simulations, {len(h.terms['loss'])} epochs, {h.seconds:.1f} s, "
            f"{h.stopped}\n"
            f"  last epoch: {losses}\n"
            f"  kept epoch: {kept}"
        )


def _blocks(m: int, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of datasets and draws, of one shape; the last may reach beyond `m` and `n`.

    Sizes are powers of two, or one dataset: requests of many sizes share few shapes.
    """
    columns = min(BLOCK, 1 << max(4, (n - 1).bit_length())) if n else 1
    rows = 1 if m == 1 else max(1, min(BLOCK // columns, 1 << (m - 1).bit_length()))
    for i in range(0, m, rows):
        for j in range(0, n, columns):
            yield np.arange(i, i + rows), np.arange(j, j + columns)


@eqx.filter_jit
def _draw(posterior: Posterior, key: PRNGKey, x: Any, numbers, start, n: int):
    def each(x, number):
        context = posterior.context(x)
        key_here = jax.random.fold_in(jax.random.fold_in(key, number), start)
        keys = jax.random.split(key_here, n)
        return jax.vmap(lambda k: posterior.sample_in_context(k, context))(keys)

    return jax.vmap(each)(x, numbers)


@eqx.filter_jit
def _log_prob(posterior: Posterior, theta: Theta, x: Any):
    def each(theta, x):
        context = posterior.context(x)
        return jax.vmap(lambda t: posterior.log_prob_in_context(t, context))(theta)

    return jax.vmap(each)(theta, x)
