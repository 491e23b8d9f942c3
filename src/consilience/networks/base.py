"""The densities that flows start from: Student-t and Gaussian, standard, of any dimension."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey

Vectors = Float[Array, "*values d"]
Numbers = Float[Array, "*values"]


def base_log_prob(z: Vectors, df: float) -> Numbers:
    """The log density of the standard multivariate Student-t (Gaussian at infinity)."""
    d = z.shape[-1]
    squares = jnp.sum(z**2, axis=-1)
    if math.isinf(df):
        return -0.5 * (squares + d * math.log(2 * math.pi))
    constant = math.lgamma((df + d) / 2) - math.lgamma(df / 2) - d / 2 * math.log(df * math.pi)
    return constant - (df + d) / 2 * jnp.log1p(squares / df)


def base_sample(key: PRNGKey, shape: tuple[int, ...], df: float) -> Vectors:
    r"""Draws of the standard multivariate Student-t (Gaussian at infinity), of this shape.

    Given the squares $S_j$ of the first $j$ pairs of coordinates, the next pair is again
    Student-t, with $\nu + 2j$ degrees of freedom and a scale that $S_j$ sets, and the
    radius of a pair has a closed quantile function:
    $\nu + S_{j+1} = (\nu + S_j)\, U_j^{-2 / (\nu + 2j)}$. So no rejection is needed.
    """
    if math.isinf(df):
        return jax.random.normal(key, shape)
    *lead, dim = shape
    pairs = (dim + 1) // 2
    uniform, turn = jax.random.uniform(key, (2, *lead, pairs))
    # On (0, 1]: the logarithm of zero would be an infinite draw.
    growth = -2 * jnp.log(1 - uniform) / (df + 2 * jnp.arange(pairs))
    before = jnp.cumsum(growth, axis=-1) - growth
    radius = jnp.sqrt(df * jnp.exp(before) * jnp.expm1(growth))
    angle = 2 * jnp.pi * turn
    both = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)
    return both.reshape(*lead, 2 * pairs)[..., :dim]
