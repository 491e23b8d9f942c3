"""A loss that is skipped, derivative and all, while its weight is zero."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from consilience.core.types import Scalar


def only_if(active: Any, loss: Callable, arguments: tuple, otherwise: Any) -> tuple[Scalar, Any]:
    """`loss(*arguments)`, a number and what comes with it; where inactive, zero and `otherwise`.

    The derivative is taken inside the branch: from outside, everything that it needs would
    have to leave the branch.

    >>> double = lambda a: (2 * a, a)
    >>> slope = lambda active: jax.grad(
    ...     lambda a: only_if(active, double, (a,), jnp.zeros(()))[0]
    ... )(jnp.array(3.0))
    >>> float(slope(True)), float(slope(False))
    (2.0, 0.0)
    """
    arrays, static = eqx.partition(arguments, eqx.is_inexact_array)
    frozen = jax.lax.stop_gradient(arrays)

    def run():
        beside = lambda arrays: loss(*eqx.combine(arrays, static))  # noqa: E731
        return jax.value_and_grad(beside, has_aux=True)(frozen)

    def skip():
        return (jnp.zeros(()), otherwise), jax.tree.map(jnp.zeros_like, frozen)

    (value, more), slope = jax.lax.cond(active, run, skip)
    return _with_slope(arrays, value, slope), more


@jax.custom_vjp
def _with_slope(arrays: Any, value: Scalar, slope: Any) -> Scalar:
    """A value whose derivative in the arrays is `slope`."""
    return value


_with_slope.defvjp(
    lambda arrays, value, slope: (value, slope),
    lambda slope, grad: (jax.tree.map(lambda s: grad * s, slope), None, None),
)
