"""Exact posteriors in two dimensions: a density on a grid, fine where the mass is."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.types import PRNGKey, Scalar

NEGLIGIBLE = 20.0
"""Cells this many nats below the highest hold no mass that a sample could show."""


def grid_sample(
    log_density: Callable[[Float[Array, "2"]], Scalar],
    n: int,
    key: PRNGKey,
    *,
    low: float,
    high: float,
    coarse: int = 64,
    fine: int = 256,
) -> Float[Array, "n 2"]:
    """Draws from an unnormalised log density on the square `[low, high]^2`.

    A coarse grid finds the box that holds the mass; a fine grid covers that box; a cell is
    drawn by its density and a point uniformly within it: exact up to the fine cells.

    >>> gaussian = lambda theta: -0.5 * jnp.sum(theta**2)
    >>> draws = grid_sample(gaussian, 1000, jax.random.key(0), low=-6.0, high=6.0)
    >>> draws.shape
    (1000, 2)
    """
    k_cell, k_point = jax.random.split(key)
    first = jnp.full(2, low), jnp.full(2, high)
    _, values = _evaluate(log_density, *first, coarse)
    width = (high - low) / coarse
    there = values.reshape(coarse, coarse) > jnp.max(values) - NEGLIGIBLE
    box = [_extent(jnp.any(there, axis=1 - axis)) for axis in (0, 1)]
    # A cell more on each side: the mass may reach across the border of the last one.
    start = jnp.clip(low + width * jnp.stack([a - 1 for a, _ in box]), low, high)
    stop = jnp.clip(low + width * jnp.stack([b + 2 for _, b in box]), low, high)
    centres, values = _evaluate(log_density, start, stop, fine)
    # By the distribution function: a categorical draw costs a Gumbel number for every cell.
    cumulative = jnp.cumsum(jax.nn.softmax(values))
    level = jax.random.uniform(k_cell, (n,)) * cumulative[-1]
    chosen = centres[jnp.minimum(jnp.searchsorted(cumulative, level), fine**2 - 1)]
    return chosen + (stop - start) / fine * (jax.random.uniform(k_point, (n, 2)) - 0.5)


def _evaluate(log_density, start: Float[Array, "2"], stop: Float[Array, "2"], cells: int):
    """The centres of a grid of cells and the log density there."""
    along = start[:, None] + (stop - start)[:, None] * (jnp.arange(cells) + 0.5) / cells
    centres = jnp.stack(jnp.meshgrid(*along, indexing="ij"), axis=-1).reshape(-1, 2)
    return centres, jax.lax.map(log_density, centres, batch_size=4096)


def _extent(there: Array) -> tuple[Array, Array]:
    """The first and the last place that is true."""
    return jnp.argmax(there), there.shape[0] - 1 - jnp.argmax(there[::-1])
