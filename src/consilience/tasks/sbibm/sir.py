r"""An epidemic seen ten times (Lueckmann et al. 2021, arXiv:2101.04653, T.9).

$$\frac{dS}{dt} = -\beta \frac{S I}{N}, \qquad
  \frac{dI}{dt} = \beta \frac{S I}{N} - \gamma I, \qquad \frac{dR}{dt} = \gamma I,$$
with $N = 10^6$ people, one of them infected at first, and
$x_t \sim \mathrm{Binomial}(1000, I_t / N)$ at $t = 0, 17, \dots, 153$. The parameters are the
rates themselves, $\beta \sim \mathrm{LogNormal}(\log 0.4, 0.5)$ and
$\gamma \sim \mathrm{LogNormal}(\log 1/8, 0.2)$; `consilience.tasks.sir` is another epidemic, seen
on 160 days.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.model.data import Vector
from consilience.tasks.grid import grid_sample
from consilience.tasks.ode import solve
from consilience.tasks.sbibm.task import Task

PEOPLE, ASKED, TIMES, EVERY = 1e6, 1000, 10, 17.0
LOC, SCALE = (math.log(0.4), math.log(1 / 8)), (0.5, 0.2)
SUBSTEPS = 8 * 17
"""Runge-Kutta steps between two counts: eight a day."""
LEAST = 1e-12
"""A share of people below which the log-likelihood is held: float32 may round it below zero."""


def infected(theta: Float[Array, "2"]) -> Float[Array, "10"]:
    """The share of people infected at each time.

    Shares, not numbers of people: with those, products of states go beyond float32's digits.
    """
    beta, gamma = theta

    def slope(state):
        susceptible, infected = state
        new = beta * susceptible * infected
        return jnp.stack([-new, new - gamma * infected])

    start = jnp.array([1.0 - 1.0 / PEOPLE, 1.0 / PEOPLE])
    later = solve(slope, start, interval=EVERY, points=TIMES - 1, substeps=SUBSTEPS)
    return jnp.concatenate([start[1:], later[:, 1]])


def _counts(theta: Float[Array, "2"]) -> dist.Distribution:
    # Strictly inside (0, 1), where counts have a finite log probability.
    return dist.Binomial(ASKED, jnp.clip(infected(theta), LEAST, 1 - 1e-6))


def simulator(key: PRNGKey, theta: Float[Array, "2"]) -> Float[Array, "10"]:
    return _counts(theta).sample(key).astype(float)


def log_likelihood(theta: Float[Array, "2"], x: Float[Array, "10"]) -> Scalar:
    share = jnp.clip(infected(theta), LEAST, 1 - 1e-6)
    chosen = jax.scipy.special.gammaln(ASKED + 1.0) - (
        jax.scipy.special.gammaln(x + 1.0) + jax.scipy.special.gammaln(ASKED - x + 1.0)
    )
    return jnp.sum(chosen + x * jnp.log(share) + (ASKED - x) * jnp.log1p(-share))


def prior() -> dist.Distribution:
    return dist.LogNormal(jnp.array(LOC), jnp.array(SCALE)).to_event(1)


@functools.partial(jax.jit, static_argnames="n")
def reference(
    x: Float[Array, "*batch 10"], n: int = 10_000, *, key: PRNGKey
) -> Float[Array, "*batch n 2"]:
    """Exact posterior draws for one dataset or a batch of them, by a grid of logarithms."""
    loc, scale = jnp.array(LOC), jnp.array(SCALE)

    def one(pair):
        x, key = pair

        def log_density(u):
            return log_likelihood(jnp.exp(u), x) - 0.5 * jnp.sum(((u - loc) / scale) ** 2)

        ends = {"low": loc - 6 * scale, "high": loc + 6 * scale}
        return jnp.exp(grid_sample(log_density, n, key, **ends, coarse=48, fine=192, zooms=4))

    flat = x.reshape(-1, TIMES)
    draws = jax.lax.map(one, (flat, jax.random.split(key, flat.shape[0])))
    return draws.reshape(*x.shape[:-1], n, 2)


TASK = Task(5, prior, simulator, log_likelihood, reference, Vector(counts=True))
