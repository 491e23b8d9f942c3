"""Observations of a benchmark task: the data of ten true parameters, by fixed keys."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from consilience.model.model import Model
from consilience.simulation.simulate import simulate

OBSERVATIONS = 10
KEY = 2101_04653
"""The benchmark's number on arXiv; observations of a task fold the place of the task into it."""


class Observed(NamedTuple):
    """Ten datasets, and the parameters that made them."""

    observations: Float[np.ndarray, "10 dim_x"]
    parameters: Float[np.ndarray, "10 dim_theta"]


def observe(model: Model, task: int) -> Observed:
    """Ten draws of the prior and their data, the same every time.

    `task`: the place of the task in the benchmark's list, so that each has a key of its own.
    """
    key = jax.random.fold_in(jax.random.key(KEY), task)
    sims = simulate(model, OBSERVATIONS, key=key)
    return Observed(np.asarray(sims.x), np.asarray(sims.theta["theta"]))
