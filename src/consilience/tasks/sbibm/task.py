"""A task of the benchmark: its parts, and the model and the observations made from them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import Scalar
from consilience.model.data import Kind, Vector
from consilience.model.model import Model
from consilience.simulation.simulate import simulate

OBSERVATIONS = 10
KEY = 2101_04653
"""The benchmark's number on arXiv; observations of a task fold the place of the task into it."""


class Observed(NamedTuple):
    """Ten datasets, and the parameters that made them."""

    observations: Float[np.ndarray, "10 dim_x"]
    parameters: Float[np.ndarray, "10 dim_theta"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of the benchmark.

    `place`: in the benchmark's list, from 0. `prior`: a function, so that importing a task
    makes no array. `reference`: `(x, n, *, key)` to draws of the posterior of one dataset or of
    a batch of them.
    """

    place: int
    prior: Callable[[], dist.Distribution]
    simulator: Callable[..., Array]
    log_likelihood: Callable[..., Scalar]
    reference: Callable[..., Any]
    kind: Kind = Vector()

    @functools.cache  # noqa: B019 - there are six tasks
    def model(self, *, likelihood: bool = True) -> Model:
        """The model, with its log-likelihood or without."""
        log_likelihood = self.log_likelihood if likelihood else None
        return Model(self.prior(), self.simulator, log_likelihood, data=self.kind)

    def observations(self) -> Observed:
        """Ten draws of the prior and their data, the same every time.

        They stand in for those of the benchmark where its files are absent.
        """
        key = jax.random.fold_in(jax.random.key(KEY), self.place)
        sims = simulate(self.model(), OBSERVATIONS, key=key)
        return Observed(np.asarray(sims.x), np.asarray(sims.theta["theta"]))


def cube(bound: float, dim: int) -> dist.Distribution:
    """The flat prior from `-bound` to `bound` in each of `dim` dimensions."""
    return dist.Uniform(-bound, bound).expand([dim]).to_event(1)
