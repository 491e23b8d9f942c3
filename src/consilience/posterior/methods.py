"""The ways to draw from a posterior: as learned, resampled by importance, or by Markov chains."""

from typing import Literal, TypeAlias, get_args

import jax
import numpy as np

from consilience.core.types import PRNGKey
from consilience.identity.evidence import Terms, resample, weigh_all
from consilience.networks.layers import generator

Method: TypeAlias = Literal["amortized", "corrected", "nuts"]

OVERSAMPLE, FEWEST = 4, 1000
"""How many draws a corrected draw is chosen from, and the least number of them in all."""


def chosen(method: Method | None, corrected: bool) -> Method:
    """The way to sample: `method`, or what `corrected` asks for where it is left out."""
    if method not in (None, *get_args(Method)):
        raise ValueError(f'method must be "amortized", "corrected" or "nuts", got {method!r}.')
    if corrected and method not in (None, "corrected"):
        raise ValueError(
            'corrected=True resamples draws by importance, as method="corrected" does, and '
            f'method="{method}" does not: pass one of the two.'
        )
    return method or ("corrected" if corrected else "amortized")


def correct(draws: dict[str, np.ndarray], terms: Terms, n: int, key: PRNGKey):
    """Draws of each dataset resampled to `n` by importance; Pareto's k and the effective size."""
    weights = jax.device_get(weigh_all(terms))
    picked = resample(weights.log_weights, n, generator(key))
    rows = np.arange(len(picked))[:, None]
    kept = {name: values[rows, picked] for name, values in draws.items()}
    return kept, {"pareto_k": weights.pareto_k, "ess": weights.ess}
