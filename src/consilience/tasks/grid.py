"""Exact posteriors in two dimensions: a density on a grid, fine where the mass is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar

NEGLIGIBLE = 20.0
"""Cells this many nats below the highest hold no mass that a sample could show."""


def grid_sample(
    log_density: Callable[[Float[Array, "2"]], Scalar],
    n: int,
    key: PRNGKey,
    *,
    low: float | Float[Array, "2"],
    high: float | Float[Array, "2"],
    coarse: int = 64,
    fine: int = 256,
    zooms: int = 1,
) -> Float[Array, "n 2"]:
    """Draws from an unnormalised log density on the rectangle from `low` to `high`.

    A coarse grid finds the box that holds the mass, and one on that box a smaller one,
    `zooms` times; a fine grid covers the last; a cell is drawn by its density and a point
    uniformly within it: exact up to the fine cells.

    >>> gaussian = lambda theta: -0.5 * jnp.sum(theta**2)
    >>> draws = grid_sample(gaussian, 1000, jax.random.key(0), low=-6.0, high=6.0)
    >>> draws.shape
    (1000, 2)
    """
    k_cell, k_point = jax.random.split(key)
    start, stop = (jnp.broadcast_to(jnp.asarray(end, float), 2) for end in (low, high))
    for _ in range(zooms):
        start, stop = _zoom(log_density, start, stop, coarse)
    centres, values = _evaluate(log_density, start, stop, fine)
    # By the distribution function: a categorical draw costs a Gumbel number for every cell.
    cumulative = jnp.cumsum(jax.nn.softmax(values))
    level = jax.random.uniform(k_cell, (n,)) * cumulative[-1]
    chosen = centres[jnp.minimum(jnp.searchsorted(cumulative, level), fine**2 - 1)]
    return chosen + (stop - start) / fine * (jax.random.uniform(k_point, (n, 2)) - 0.5)


def _zoom(log_density, start: Float[Array, "2"], stop: Float[Array, "2"], cells: int):
    """The box of the cells that hold mass, a cell wider on each side."""
    values = _evaluate(log_density, start, stop, cells)[1].reshape(cells, cells)
    best = jnp.max(values)
    # Where cells are wider than the mass, their centres miss it: how much they may miss by
    # is how much neighbours differ.
    at = jnp.stack(jnp.unravel_index(jnp.argmax(values), values.shape))
    i, j = jnp.clip(at[:, None] + jnp.arange(-1, 2), 0, cells - 1)
    near = values[i[:, None], j]
    missed = best - jnp.min(jnp.where(jnp.isfinite(near), near, best))
    there = values > best - NEGLIGIBLE - missed
    box = [_extent(jnp.any(there, axis=1 - axis)) for axis in (0, 1)]
    width = (stop - start) / cells
    return (
        jnp.clip(start + width * jnp.stack([a - 1 for a, _ in box]), start, stop),
        jnp.clip(start + width * jnp.stack([b + 2 for _, b in box]), start, stop),
    )


def _evaluate(log_density, start: Float[Array, "2"], stop: Float[Array, "2"], cells: int):
    """The centres of a grid of cells and the log density there."""
    along = start[:, None] + (stop - start)[:, None] * (jnp.arange(cells) + 0.5) / cells
    centres = jnp.stack(jnp.meshgrid(*along, indexing="ij"), axis=-1).reshape(-1, 2)
    return centres, jax.lax.map(log_density, centres, batch_size=4096)


def _extent(there: Array) -> tuple[Array, Array]:
    """The first and the last place that is true."""
    return jnp.argmax(there), there.shape[0] - 1 - jnp.argmax(there[::-1])
