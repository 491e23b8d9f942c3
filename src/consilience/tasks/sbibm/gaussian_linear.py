r"""Gaussian linear: a ten-dimensional mean (Lueckmann et al. 2021, arXiv:2101.04653, T.1).

$$\theta \sim \mathcal{N}(0, 0.1\, I), \qquad x \mid \theta \sim \mathcal{N}(\theta, 0.1\, I),
  \qquad \theta \mid x \sim \mathcal{N}(x / 2, 0.05\, I).$$
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.tasks.sbibm.task import Task

DIM, VARIANCE = 10, 0.1


def simulator(key: PRNGKey, theta: Float[Array, "10"]) -> Float[Array, "10"]:
    return theta + math.sqrt(VARIANCE) * jax.random.normal(key, (DIM,))


def log_likelihood(theta: Float[Array, "10"], x: Float[Array, "10"]) -> Scalar:
    return jnp.sum(dist.Normal(theta, math.sqrt(VARIANCE)).log_prob(x))


def prior() -> dist.Distribution:
    return dist.Normal(0.0, math.sqrt(VARIANCE)).expand([DIM]).to_event(1)


@functools.partial(jax.jit, static_argnames="n")
def reference(
    x: Float[Array, "*batch 10"], n: int = 10_000, *, key: PRNGKey
) -> Float[Array, "*batch n 10"]:
    """Exact posterior draws for one dataset or a batch of them: the closed form."""
    noise = jax.random.normal(key, (*x.shape[:-1], n, DIM))
    return x[..., None, :] / 2 + math.sqrt(VARIANCE / 2) * noise


TASK = Task(0, prior, simulator, log_likelihood, reference)
