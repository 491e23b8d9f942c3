r"""An epidemic: experiment 5 of Schmitt et al. (2024), after Lueckmann et al. (2021).

$$\frac{dS}{dt} = -\beta \frac{S I}{N}, \qquad
  \frac{dI}{dt} = \beta \frac{S I}{N} - \gamma I, \qquad \frac{dR}{dt} = \gamma I,$$
with $N = 10^6$ people, one of them infected at first. On each of 160 days, 1,000 people are
asked: $x_t \sim \mathrm{Binomial}(1000, I_t / N)$. The parameters are the logarithms of
the rates, $\log \beta \sim \mathcal{N}(\log 0.4, 0.5)$ and
$\log \gamma \sim \mathcal{N}(\log 1/8, 0.2)$, by standard deviations.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.model.data import Series
from consilience.model.model import Model
from consilience.tasks.grid import grid_sample
from consilience.tasks.ode import solve

DAYS, PEOPLE, ASKED = 160, 1e6, 1000
LOC, SCALE = (math.log(0.4), math.log(1 / 8)), (0.5, 0.2)
SUBSTEPS = 8
"""Runge-Kutta steps a day: within 1e-4 of the exact share, three deviations out."""


def infected(theta: Float[Array, "2"]) -> Float[Array, " days"]:
    """The share of people infected on each day."""
    beta, gamma = jnp.exp(theta)

    def slope(state):
        susceptible, infected = state
        new = beta * susceptible * infected
        return jnp.stack([-new, new - gamma * infected])

    start = jnp.array([1.0 - 1.0 / PEOPLE, 1.0 / PEOPLE])
    return solve(slope, start, interval=1.0, points=DAYS, substeps=SUBSTEPS)[:, 1]


def _counts(theta: Float[Array, "2"]) -> dist.Distribution:
    # Strictly inside (0, 1), where counts have a finite log probability.
    return dist.Binomial(ASKED, jnp.clip(infected(theta), 1e-8, 1 - 1e-6))


def simulator(key: PRNGKey, theta: Float[Array, "2"]) -> Float[Array, " days"]:
    return _counts(theta).sample(key).astype(float)


def log_likelihood(theta: Float[Array, "2"], x: Float[Array, " days"]) -> Scalar:
    return jnp.sum(_counts(theta).log_prob(x))


@functools.cache
def model(*, likelihood: bool = True) -> Model:
    """The epidemic, with its log-likelihood or without.

    >>> model()
    Model
      theta  Normal(loc=[-0.916291, -2.07944], scale=[0.5, 0.2])
      x      (160,), Series(counts=True)
      log-likelihood: given
    """
    prior = dist.Normal(jnp.array(LOC), jnp.array(SCALE)).to_event(1)
    return Model(prior, simulator, log_likelihood if likelihood else None, data=Series(counts=True))


@functools.partial(jax.jit, static_argnames="n")
def exact_sample(
    x: Float[Array, "*batch days"], key: PRNGKey, *, n: int = 1000
) -> Float[Array, "*batch n 2"]:
    """Exact posterior draws for one dataset or a batch of them.

    They take seconds a dataset: the posterior is a thousandth of the prior's width.
    """
    loc, scale = jnp.array(LOC), jnp.array(SCALE)

    def one(pair):
        x, key = pair

        def log_density(theta):
            return log_likelihood(theta, x) - 0.5 * jnp.sum(((theta - loc) / scale) ** 2)

        ends = {"low": loc - 6 * scale, "high": loc + 6 * scale}
        return grid_sample(log_density, n, key, **ends, coarse=48, fine=128, zooms=4)

    flat = x.reshape(-1, DAYS)
    draws = jax.lax.map(one, (flat, jax.random.split(key, flat.shape[0])))
    return draws.reshape(*x.shape[:-1], n, 2)
