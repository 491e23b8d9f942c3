r"""Gaussian mixture: one mean, two widths (Lueckmann et al. 2021, arXiv:2101.04653, T.7).

$$\theta \sim \mathrm{Uniform}(-10, 10)^2, \qquad
  x \mid \theta \sim \tfrac12 \mathcal{N}(\theta, I) + \tfrac12 \mathcal{N}(\theta, 0.01\, I).$$

The posterior is the same mixture around $x$, cut off at the prior's square.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.tasks.sbibm.task import Task, cube

BOUND, SCALES = 10.0, (1.0, 0.1)


def simulator(key: PRNGKey, theta: Float[Array, "2"]) -> Float[Array, "2"]:
    k_width, k_noise = jax.random.split(key)
    scale = jax.random.choice(k_width, jnp.array(SCALES))
    return theta + scale * jax.random.normal(k_noise, (2,))


def log_likelihood(theta: Float[Array, "2"], x: Float[Array, "2"]) -> Scalar:
    each = [jnp.sum(dist.Normal(theta, scale).log_prob(x)) for scale in SCALES]
    return jax.nn.logsumexp(jnp.stack(each)) - math.log(2)


@functools.partial(jax.jit, static_argnames="n")
def reference(
    x: Float[Array, "*batch 2"], n: int = 10_000, *, key: PRNGKey
) -> Float[Array, "*batch n 2"]:
    """Exact posterior draws for one dataset or a batch of them.

    A component is drawn by its mass inside the square, a point by its truncated normal.
    """
    k_component, k_point = jax.random.split(key)
    scales = jnp.array(SCALES)[:, None]
    low, high = ((end - x[..., None, :]) / scales for end in (-BOUND, BOUND))
    inside = jax.scipy.special.ndtr(high) - jax.scipy.special.ndtr(low)
    mass = jnp.log(jnp.prod(inside, axis=-1))
    chosen = jax.random.categorical(k_component, mass[..., None, :], shape=(*x.shape[:-1], n))
    start, stop = (jnp.take_along_axis(end, chosen[..., None], axis=-2) for end in (low, high))
    noise = jax.random.truncated_normal(k_point, start, stop)
    return x[..., None, :] + scales[chosen] * noise


TASK = Task(1, lambda: cube(BOUND, 2), simulator, log_likelihood, reference)
