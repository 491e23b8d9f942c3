r"""Finding a source: experiment 4 of Schmitt et al. (2024), after Foster et al. (2021).

A source at $\theta \sim \mathcal{N}(0, I)$ in the plane is measured at 30 fixed points $\xi_j$:
$$\nu(\theta, \xi) = b + \frac{\alpha}{(m + \lVert \theta - \xi \rVert)^2}, \qquad
  x_j \sim \mathcal{N}(\nu(\theta, \xi_j), \sigma^2) \quad \text{("raw")}$$
with $b = 0.1$, $\alpha = 1$, $m = 10^{-4}$, $\sigma = 0.5$. So the paper has it. Foster et al.
(arXiv:2103.02438) measure the logarithm, $x_j \sim \mathcal{N}(\log \nu(\theta, \xi_j), \sigma^2)$
("log"): the intensity itself is up to $10^8$.

The points are the same in every run, so a dataset is the vector of its 30 signals. With
`as_set` it is a set of measurements, `signal`, each with its point, `where`, as side information.
"""

import functools
import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.model.data import Set
from consilience.model.model import Model, PerRow
from consilience.tasks.grid import grid_sample

Signal: TypeAlias = Literal["raw", "log"]

BACKGROUND, STRENGTH, NEAREST, NOISE = 0.1, 1.0, 1e-4, 0.5
POINTS, RADIUS = 30, 1.7


def _sunflower(n: int, radius: float) -> np.ndarray:
    """Points spread evenly over a disk: turned by the golden angle, each has the same area."""
    k = np.arange(n)
    distance, angle = radius * np.sqrt((k + 0.5) / n), k * math.pi * (3 - math.sqrt(5))
    points = distance[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return np.round(points, 3).astype(np.float32)


WHERE = _sunflower(POINTS, RADIUS)
"""The measurement points: a sunflower of radius 1.7, to three decimals."""


def intensity(theta: Float[Array, "2"], where: Float[Array, "*n 2"]) -> Float[Array, "*n"]:
    # The square root of zero has no derivative.
    distance = jnp.sqrt(jnp.sum((theta - where) ** 2, axis=-1) + 1e-16)
    return BACKGROUND + STRENGTH / (NEAREST + distance) ** 2


def _mean(theta, where, signal: Signal):
    nu = intensity(theta, where)
    return jnp.log(nu) if signal == "log" else nu


@functools.cache
def model(*, signal: Signal = "log", as_set: bool = False) -> Model:
    """The source, measured by its intensity ("raw") or its logarithm ("log").

    >>> model()
    Model
      theta  Normal(loc=0, scale=1)
      x      (30,), Vector()
      log-likelihood: given
    >>> model(as_set=True)
    Model
      theta  Normal(loc=0, scale=1)
      x      {'signal': (30,), 'where': (30, 2)}, Set(side=('where',))
      log-likelihood: given
    """
    if signal not in ("raw", "log"):
        raise ValueError(f'signal must be "raw" or "log", got {signal!r}.')

    def simulator(key: PRNGKey, theta: Float[Array, "2"]):
        mean = _mean(theta, jnp.asarray(WHERE), signal)
        return mean + NOISE * jax.random.normal(key, (POINTS,))

    def set_simulator(key: PRNGKey, theta: Float[Array, "2"]):
        return {"signal": simulator(key, theta), "where": jnp.asarray(WHERE)}

    prior = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
    if as_set:
        return Model(prior, set_simulator, PerRow(_row(signal)), data=Set(side=("where",)))
    return Model(prior, simulator, functools.partial(log_likelihood, signal=signal))


def log_likelihood(
    theta: Float[Array, "2"], x: Float[Array, "30"], *, signal: Signal = "log"
) -> Scalar:
    """The log-likelihood of 30 signals."""
    return jnp.sum(dist.Normal(_mean(theta, jnp.asarray(WHERE), signal), NOISE).log_prob(x))


@functools.cache
def _row(signal: Signal):
    def row_log_likelihood(theta: Float[Array, "2"], row) -> Scalar:
        mean = _mean(theta, row["where"], signal)
        return dist.Normal(mean, NOISE).log_prob(row["signal"])

    return row_log_likelihood


@functools.partial(jax.jit, static_argnames=("n", "signal"))
def exact_sample(
    x: Float[Array, "datasets 30"], key: PRNGKey, *, n: int = 1000, signal: Signal = "log"
) -> Float[Array, "datasets n 2"]:
    """Exact posterior draws for a batch of datasets, each the vector of its signals.

    On a grid of polar coordinates around the strongest measurement: of a source close by, its
    distance is known far better than its direction.
    """

    def one(pair):
        x, key = pair
        centre = jnp.asarray(WHERE)[jnp.argmax(x)]

        def place(polar):
            angle = polar[1]
            return centre + jnp.exp(polar[0]) * jnp.stack([jnp.cos(angle), jnp.sin(angle)])

        def log_density(polar):
            theta = place(polar)
            # The area of a cell grows with the square of the distance.
            prior = 2 * polar[0] - 0.5 * jnp.sum(theta**2)
            return log_likelihood(theta, x, signal=signal) + prior

        low, high = jnp.array([-12.0, -math.pi]), jnp.array([math.log(12.0), math.pi])
        polar = grid_sample(log_density, n, key, low=low, high=high, fine=512, zooms=4)
        return jax.vmap(place)(polar)

    return jax.lax.map(one, (x, jax.random.split(key, len(x))))
