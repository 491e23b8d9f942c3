r"""The two-dimensional Gaussian mixture: experiment 1 of Schmitt et al. (2024).

$$\theta \sim \mathcal{N}(0, I), \qquad
  x_j \mid \theta \sim \tfrac12 \mathcal{N}(\theta, I/2) + \tfrac12 \mathcal{N}(-\theta, I/2),
  \quad j = 1, \dots, 10.$$

The posterior is symmetric under $\theta \to -\theta$, and mostly has two modes.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.identity.consistency import SelfConsistency
from consilience.identity.criteria import Bounded
from consilience.identity.schedules import Constant, Step
from consilience.model.data import Set
from consilience.model.model import Model, PerRow
from consilience.networks.flow import Coupling
from consilience.networks.summary import DeepSet
from consilience.tasks.grid import grid_sample

ROWS = 10
VARIANCE = 0.5


def simulator(key: PRNGKey, theta: Float[Array, "2"]) -> Float[Array, "10 2"]:
    k_sign, k_noise = jax.random.split(key)
    sign = jax.random.rademacher(k_sign, (ROWS, 1), dtype=theta.dtype)
    return sign * theta + math.sqrt(VARIANCE) * jax.random.normal(k_noise, (ROWS, 2))


def row_log_likelihood(theta: Float[Array, "2"], row: Float[Array, "2"]) -> Scalar:
    squares = jnp.stack([jnp.sum((row - theta) ** 2), jnp.sum((row + theta) ** 2)])
    normal = math.log(2 * math.pi * VARIANCE) + math.log(2)
    return jax.nn.logsumexp(-squares / (2 * VARIANCE)) - normal


@functools.cache
def model() -> Model:
    """The mixture, with its log-likelihood.

    >>> model()
    Model
      theta  Normal(loc=0, scale=1)
      x      (10, 2), Set()
      log-likelihood: given
    """
    prior = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
    return Model(prior, simulator, PerRow(row_log_likelihood), data=Set())


@functools.partial(jax.jit, static_argnames="n")
def exact_sample(
    x: Float[Array, "*batch 10 2"], key: PRNGKey, *, n: int = 1000
) -> Float[Array, "*batch n 2"]:
    """Exact posterior draws for one dataset or a batch of them."""

    def one(pair):
        x, key = pair

        def log_density(theta):
            rows = jax.vmap(row_log_likelihood, in_axes=(None, 0))(theta, x)
            return jnp.sum(rows) - 0.5 * jnp.sum(theta**2)

        return grid_sample(log_density, n, key, low=-5.0, high=5.0)

    flat = x.reshape(-1, ROWS, 2)
    draws = jax.lax.map(one, (flat, jax.random.split(key, flat.shape[0])))
    return draws.reshape(*x.shape[:-2], n, 2)


PAPER_POSTERIOR = Coupling(layers=4, width=128, df=100.0, dropout=0.2, l2=1e-3)
"""The paper's flow: four spline layers over a Student-t with 100 degrees of freedom."""
CONSISTENT_POSTERIOR = Coupling(layers=4, width=128, depth=3, df=100.0, l2=1e-5)
CONSISTENT_SUMMARY = DeepSet(out=4, width=128, blocks=3)
"""For self-consistency, which does not overfit the labels: no dropout, and deeper networks."""
PAPER_CONSISTENCY = SelfConsistency(
    samples=10,
    weight=Step(5 / 35),
    maximum_likelihood=Constant(),
    criterion=Bounded(importance=0.0),
    augmentation=None,
    limit=None,
)
"""The paper's loss, with the bounded criterion: lambda is 0 for 5 of 35 epochs, then 1."""
PAPER_SUMMARY = DeepSet(out=4)
PAPER_EPOCHS = 35
PAPER_BATCH = 32
