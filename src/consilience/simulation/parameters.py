"""The parameters of runs outside JAX: drawn by JAX, named by the key and a run's number."""

import functools

import jax
import numpy as np

from consilience.core.compiling import compiled
from consilience.core.types import PRNGKey, Theta
from consilience.model.priors import Prior

THETA_AT_ONCE = 1024
"""Parameters drawn at once, in blocks that begin at fixed numbers."""


class Draws:
    """The parameters of runs by their numbers, the same whichever are asked for together.

    >>> import numpyro.distributions as dist
    >>> from consilience.model.priors import as_prior
    >>> draw = Draws(as_prior({"a": dist.Normal(0, 1)}), jax.random.key(0))
    >>> bool(draw(np.array([7]))["a"][0] == draw(np.arange(3000))["a"][7])
    True
    """

    def __init__(self, prior: Prior, key: PRNGKey):
        self._block = functools.lru_cache(maxsize=8)(
            lambda i: jax.device_get(
                _draw_block(
                    prior,
                    key,
                    np.arange(i * THETA_AT_ONCE, (i + 1) * THETA_AT_ONCE, dtype=np.uint32),
                )
            )
        )

    def __call__(self, numbers: np.ndarray) -> Theta:
        blocks = {i: self._block(i) for i in np.unique(numbers // THETA_AT_ONCE).tolist()}
        joined = {
            name: np.concatenate([block[name] for block in blocks.values()])
            for name in next(iter(blocks.values()))
        }
        rows = (
            np.searchsorted(list(blocks), numbers // THETA_AT_ONCE) * THETA_AT_ONCE
            + numbers % THETA_AT_ONCE
        )
        return {name: array[rows] for name, array in joined.items()}


@compiled
def _draw_block(prior: Prior, key: PRNGKey, numbers):
    one = lambda i: prior.draw(jax.random.split(jax.random.fold_in(key, i))[0])  # noqa: E731
    return jax.vmap(one)(numbers)
