r"""An epidemic: experiment 5 of Schmitt et al. (2024), after Lueckmann et al. (2021).

$$\frac{dS}{dt} = -\beta \frac{S I}{N}, \qquad
  \frac{dI}{dt} = \beta \frac{S I}{N} - \gamma I, \qquad \frac{dR}{dt} = \gamma I,$$
with $N = 10^6$ people, one of them infected at first. On each of 160 days, 1,000 people are
asked: $x_t \sim \mathrm{Binomial}(1000, I_t / N)$. The parameters are the logarithms of
the rates, $\log \beta \sim \mathcal{N}(\log 0.4, 0.5)$ and
$\log \gamma \sim \mathcal{N}(\log 1/8, 0.2)$, by standard deviations.
"""

import functools

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.data import Series
from consilience.model import Model
from consilience.types import PRNGKey, Scalar

DAYS, PEOPLE, ASKED = 160, 1e6, 1000
SUBSTEPS = 8
"""Runge-Kutta steps a day: within 1e-4 of the exact share, three deviations out."""


def infected(theta: Float[Array, "2"]) -> Float[Array, " days"]:
    """The share of people infected on each day."""
    beta, gamma = jnp.exp(theta)

    def slope(state):
        susceptible, infected = state
        new = beta * susceptible * infected
        return jnp.stack([-new, new - gamma * infected])

    def step(state, _):
        h = 1.0 / SUBSTEPS
        a = slope(state)
        b = slope(state + h / 2 * a)
        c = slope(state + h / 2 * b)
        d = slope(state + h * c)
        return state + h / 6 * (a + 2 * b + 2 * c + d), None

    def day(state, _):
        state, _ = jax.lax.scan(step, state, None, length=SUBSTEPS)
        return state, state[1]

    start = jnp.array([1.0 - 1.0 / PEOPLE, 1.0 / PEOPLE])
    return jax.lax.scan(day, start, None, length=DAYS)[1]


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
    loc, scale = jnp.log(jnp.array([0.4, 1 / 8])), jnp.array([0.5, 0.2])
    prior = dist.Normal(loc, scale).to_event(1)
    return Model(prior, simulator, log_likelihood if likelihood else None, data=Series(counts=True))
