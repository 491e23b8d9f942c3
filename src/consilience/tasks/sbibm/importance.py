"""Reference posteriors by importance: many proposals, resampled by their weights."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey
from consilience.identity.evidence import resample
from consilience.networks.layers import generator


def importance_draws(
    propose: Callable[[Array, PRNGKey], tuple[Any, Any]],
    x: Float[Array, "*batch d"],
    n: int,
    key: PRNGKey,
) -> Float[np.ndarray, "*batch n dim"]:
    """Draws of the posterior of each dataset.

    `propose`: a dataset and a key give parameters and the logarithms of their weights. Weights
    are summed in double precision: in single, a million of them would lose the small ones.
    """
    k_propose, k_pick = jax.random.split(key)
    rng = generator(k_pick)
    flat = x.reshape(-1, x.shape[-1])

    def one(row, key) -> np.ndarray:
        theta, log_w = map(np.asarray, propose(row, key))
        return theta[resample((log_w - log_w.max())[None], n, rng)[0]]

    keys = jax.random.split(k_propose, len(flat))
    draws = np.stack([one(row, k) for row, k in zip(flat, keys, strict=True)])
    return draws.reshape(*x.shape[:-1], *draws.shape[1:])
