r"""Stacking: the mixture of recipes with the largest held-out density.

$$\max_{w} \sum_i \log \sum_c w_c\, q_c(\theta_i \mid x_i), \qquad \sum_c w_c = 1,$$
over runs that the densities have not seen (Yao et al. 2023, arXiv:2310.17009).
"""

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

LEAST = 0.05
"""Recipes of a smaller weight are left out: each costs time at every draw."""
STEPS = 500


def stacking_weights(
    log_density: Float[np.ndarray, "runs recipes"],
) -> Float[np.ndarray, " recipes"]:
    """The weights, by expectation maximisation; small ones are set to zero.

    >>> stacking_weights(np.log([[0.9, 0.1], [0.8, 0.1], [0.9, 0.2]])).tolist()
    [1.0, 0.0]
    """
    kept = np.ones(log_density.shape[1], bool)
    while True:
        weights = np.where(kept, 1.0 / kept.sum(), 0.0)
        for _ in range(STEPS):
            with np.errstate(divide="ignore"):
                terms = log_density + np.log(weights)
            share = np.exp(terms - logsumexp(terms, axis=1, keepdims=True))
            weights = share.mean(axis=0)
        small = kept & (weights < LEAST)
        if not small.any():
            return weights / weights.sum()
        # One at a time: the others may take over its part.
        kept[np.argmin(np.where(kept, weights, np.inf))] = False
