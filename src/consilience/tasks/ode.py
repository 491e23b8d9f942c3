"""Differential equations with fixed steps.

By hand: for problems this small, Diffrax takes several times as long for a solution and its
derivative, and to compile them.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

State = Float[Array, " d"]


def solve(
    slope: Callable[[State], State], start: State, *, interval: float, points: int, substeps: int
) -> Float[Array, "points d"]:
    """The solution at the ends of equal intervals, by the classical Runge-Kutta method.

    >>> import jax.numpy as jnp
    >>> end = solve(lambda y: -y, jnp.ones(1), interval=0.5, points=2, substeps=10)[-1, 0]
    >>> bool(abs(end - jnp.exp(-1.0)) < 1e-6)
    True
    """
    h = interval / substeps

    def step(state, _):
        a = slope(state)
        b = slope(state + h / 2 * a)
        c = slope(state + h / 2 * b)
        d = slope(state + h * c)
        return state + h / 6 * (a + 2 * b + 2 * c + d), None

    def to_point(state, _):
        state, _ = jax.lax.scan(step, state, None, length=substeps)
        return state, state

    return jax.lax.scan(to_point, start, None, length=points)[1]
