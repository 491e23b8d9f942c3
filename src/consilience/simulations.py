"""Running a model's simulator, and the runs it gives."""

import math
from collections.abc import Mapping

import jax
import numpy as np

from consilience.compiling import compiled
from consilience.model import Model
from consilience.spaces import ParameterSpace
from consilience.types import Data, PRNGKey, Theta

BLOCK = 4096
"""Runs compiled and made at once: bounds memory, and small budgets compile once."""


class Simulations:
    """Parameters and the data that they gave, run by run: equal leading axes.

    `theta`: a dictionary of named arrays, or one array for a prior without names.
    `x`: an array, or a dictionary of arrays.

    >>> sims = Simulations({"mu": np.zeros(3)}, np.array([[1.0, 2.0], [3.0, 4.0], [5.0, np.nan]]))
    >>> sims
    Simulations: 3 runs, theta: mu (); x: (2,); 1 run with NaN or infinite values
    >>> len(sims.drop_invalid())
    2
    """

    def __init__(self, theta: Theta | np.ndarray, x: Data):
        self.theta = _arrays(theta if isinstance(theta, Mapping) else {"theta": theta}, "theta")
        self.x = _arrays(x, "x") if isinstance(x, Mapping) else _arrays({"x": x}, "x")["x"]
        lengths = {len(array) for array in (*self.theta.values(), *jax.tree.leaves(self.x))}
        if len(lengths) != 1:
            raise ValueError(
                "theta and x must hold one entry for each run; their leading axes are "
                f"{sorted(lengths)}."
            )

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.x)[0])

    def __getitem__(self, index) -> "Simulations":
        take = np.arange(len(self))[index]
        return Simulations(*jax.tree.map(lambda a: a[np.atleast_1d(take)], (self.theta, self.x)))

    @property
    def invalid(self) -> np.ndarray:
        """Which runs have NaN or infinite values in their data or parameters."""
        leaves = jax.tree.leaves((self.theta, self.x))
        finite = [np.isfinite(a.reshape(len(a), -1)).all(axis=1) for a in leaves]
        return ~np.all(finite, axis=0)

    def drop_invalid(self) -> "Simulations":
        """The runs without NaN or infinite values.

        A posterior trained on the rest stays right: an observation is itself a valid run. A
        learned likelihood becomes p(x | theta, valid): it lacks the factor p(valid | theta).
        """
        return self[~self.invalid]

    def __repr__(self) -> str:
        theta = ", ".join(f"{name} {a.shape[1:]}" for name, a in self.theta.items())
        x = jax.tree.map(lambda a: a.shape[1:], self.x)
        bad = int(self.invalid.sum())
        note = f"; {bad} run{'s' * (bad != 1)} with NaN or infinite values" if bad else ""
        return f"Simulations: {len(self)} runs, theta: {theta}; x: {x}{note}"


def _arrays(parts: Mapping, what: str) -> dict[str, np.ndarray]:
    arrays = {}
    for name, part in parts.items():
        try:
            array = np.asarray(part)
        except ValueError as error:
            raise ValueError(f"The shapes in {what} vary from run to run: {error}") from error
        if array.dtype == object:
            raise ValueError(f"The shapes in {what} vary from run to run: pad them, with a mask.")
        if array.ndim == 0:
            raise ValueError(f"{what} must have a leading axis of runs, got one number.")
        arrays[str(name)] = array
    return arrays


def simulate(model: Model, n: int, *, key: PRNGKey) -> Simulations:
    """Draw `n` parameters from the prior and run the simulator on each.

    A run depends on the key and its own number alone: the first runs of a longer call are
    the runs of a shorter one.

    >>> import numpyro.distributions as dist
    >>> model = Model(dist.Normal(0, 1), lambda key, theta: theta + jax.random.normal(key, (2,)))
    >>> simulate(model, 100, key=jax.random.key(0))
    Simulations: 100 runs, theta: theta (); x: (2,)
    """
    if n < 1:
        raise ValueError(f"The number of simulations must be at least one, got {n}.")
    size = min(n, BLOCK)
    blocks = []
    for start in range(0, math.ceil(n / size) * size, size):
        numbers = np.arange(start, start + size, dtype=np.uint32)
        blocks.append(jax.device_get(_simulate_block(model, key, numbers)))
    theta, x = jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *blocks)
    return Simulations(theta, x)


@compiled
def _simulate_block(model: Model, key: PRNGKey, numbers):
    return jax.vmap(lambda i: model.simulate_one(jax.random.fold_in(key, i)))(numbers)


def simulate_at(model: Model, theta: Theta, *, key: PRNGKey) -> Simulations:
    """Run the simulator on parameters of the user's own choice, with a leading axis of runs.

    >>> import numpyro.distributions as dist
    >>> model = Model(dist.Normal(0, 1), lambda key, theta: theta + jax.random.normal(key, (2,)))
    >>> simulate_at(model, {"theta": np.zeros(5)}, key=jax.random.key(0))
    Simulations: 5 runs, theta: theta (); x: (2,)
    """
    arrays = ParameterSpace(model.prior).check(theta)
    n = len(next(iter(arrays.values())))
    size = min(n, BLOCK)
    blocks = []
    for start in range(0, n, size):
        numbers = np.arange(start, start + size, dtype=np.uint32)
        part = {name: array[np.minimum(numbers, n - 1)] for name, array in arrays.items()}
        blocks.append(jax.device_get(_run_block(model, key, numbers, part)))
    return Simulations(arrays, jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *blocks))


@compiled
def _run_block(model: Model, key: PRNGKey, numbers, theta):
    run = lambda i, t: model.simulate_at(jax.random.fold_in(key, i), t)  # noqa: E731
    return jax.vmap(run)(numbers, theta)
