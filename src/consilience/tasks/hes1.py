r"""Oscillating expression of Hes1: experiment 3 of Schmitt et al. (2024), after Silk et al. (2011).

$$\frac{dm}{dt} = -k m + \frac{1}{1 + (p_2 / p_0)^h}, \qquad
  \frac{dp_1}{dt} = -k p_1 + \nu m - k_1 p_1, \qquad
  \frac{dp_2}{dt} = -k p_2 + k_1 p_1,$$
from $m = 2$, $p_1 = 5$, $p_2 = 3$, with $k = 0.03$ a minute. Messenger RNA is measured eight
times, from 30 to 240 minutes: $x_t \sim \mathcal{N}(m_t, 1)$. The priors, by shape and rate:
$p_0 \sim \Gamma(2, 1)$, $h \sim \Gamma(10, 1)$, $k_1 \sim \Gamma(2, 50)$, $\nu \sim \Gamma(2, 50)$.
All four are positive, so networks see their logarithms.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar, Theta
from consilience.model.data import Series
from consilience.model.model import Model
from consilience.tasks.ode import solve

DEGRADATION = 0.03
START = (2.0, 5.0, 3.0)
POINTS = 8
NAMES = ("p0", "h", "k1", "nu")
SUBSTEPS = 30
"""Runge-Kutta steps in half an hour: within 2e-3 of the exact solution over the prior."""
STARTS, DOUBLINGS = 20_000, 7
OBSERVED = np.array([1.20, 5.90, 4.58, 2.64, 5.38, 6.42, 5.60, 4.48], np.float32)
"""Measured by Silk et al. (2011), as fold changes relative to a control."""
SHAPE, RATE = (2.0, 10.0, 2.0, 2.0), (1.0, 1.0, 50.0, 50.0)


def messenger(theta: Theta) -> Float[Array, "8"]:
    """The concentration of messenger RNA at the times of measurement."""

    p0, h, k1, nu = (theta[name] for name in NAMES)

    def slope(state):
        m, p1, p2 = state
        # By logarithms: the power itself leaves float32.
        made = jax.nn.sigmoid(h * (jnp.log(p0) - jnp.log(p2)))
        return jnp.stack(
            [
                made - DEGRADATION * m,
                nu * m - (DEGRADATION + k1) * p1,
                k1 * p1 - DEGRADATION * p2,
            ]
        )

    return solve(slope, jnp.array(START), interval=30.0, points=POINTS, substeps=SUBSTEPS)[:, 0]


def simulator(key: PRNGKey, theta: Theta) -> Float[Array, "8"]:
    return messenger(theta) + jax.random.normal(key, (POINTS,))


def log_likelihood(theta: Theta, x: Float[Array, "8"]) -> Scalar:
    return jnp.sum(dist.Normal(messenger(theta), 1.0).log_prob(x))


@functools.cache
def model(*, likelihood: bool = False) -> Model:
    """Hes1, without its log-likelihood or with it.

    >>> model()
    Model
      p0  Gamma(concentration=2, rate=1)
      h   Gamma(concentration=10, rate=1)
      k1  Gamma(concentration=2, rate=50)
      nu  Gamma(concentration=2, rate=50)
      x   (8,), Series()
      log-likelihood: not given
    """
    prior = {name: dist.Gamma(*pair) for name, *pair in zip(NAMES, SHAPE, RATE, strict=True)}
    return Model(prior, simulator, log_likelihood if likelihood else None, data=Series())


class Reference(NamedTuple):
    """Draws of the logarithms of the parameters, (datasets, n, 4), and R-hat, (datasets, 4)."""

    draws: Float[Array, "datasets n 4"]
    r_hat: Float[Array, "datasets 4"]


@functools.partial(jax.jit, static_argnames=("n", "length", "warmup", "chains"))
def reference_sample(
    x: Float[Array, "datasets 8"],
    key: PRNGKey,
    *,
    n: int = 1000,
    length: int = 2000,
    warmup: int = 1000,
    chains: int = 4,
) -> Reference:
    """Posterior draws by NUTS: `n` from `chains` chains of `length` steps, for all datasets.

    Prior draws, weighted by their likelihood, give the chains of a dataset their first points
    and their scales.
    """
    import blackjax

    prior = dist.Gamma(jnp.array(SHAPE), jnp.array(RATE))

    def log_density(u, x):
        theta = jnp.exp(u)
        named = dict(zip(NAMES, theta, strict=True))
        value = log_likelihood(named, x) + jnp.sum(prior.log_prob(theta) + u)
        return jnp.where(jnp.isnan(value), -jnp.inf, value)

    def chain(x, start, scale, key):
        k_warm, k_run = jax.random.split(key)
        density = lambda z: log_density(start + scale @ z, x)  # noqa: E731
        limit = {"max_num_doublings": DOUBLINGS}
        warm = blackjax.window_adaptation(blackjax.nuts, density, **limit)
        (state, settings), _ = warm.run(k_warm, jnp.zeros(4), num_steps=warmup)
        kernel = blackjax.nuts(density, **settings)

        def step(state, k):
            state, _ = kernel.step(k, state)
            return state, start + scale @ state.position

        return jax.lax.scan(step, state, jax.random.split(k_run, length))[1]

    k_prior, k_pick, k_chain = jax.random.split(key, 3)
    theta = prior.sample(k_prior, (STARTS,))
    made = jax.vmap(lambda row: messenger(dict(zip(NAMES, row, strict=True))))(theta)
    fits = -0.5 * jnp.sum((x[:, None] - made) ** 2, axis=-1)
    starts, scales = jax.vmap(_start, in_axes=(None, 0, 0, None))(
        jnp.log(theta), fits, jax.random.split(k_pick, len(x)), chains
    )
    keys = jax.random.split(k_chain, (len(x), chains))
    us = jax.vmap(jax.vmap(chain, in_axes=(None, 0, None, 0)))(x, starts, scales, keys)
    r_hat = jax.vmap(blackjax.diagnostics.rhat)(us)
    every = us.reshape(len(x), chains * length, 4)
    return Reference(every[:, jnp.linspace(0, chains * length - 1, n).astype(int)], r_hat)


def _start(points: Float[Array, "n 4"], fits: Float[Array, " n"], key: PRNGKey, chains: int):
    """Points picked by their likelihood, and a factor of their covariance."""
    starts = points[jax.random.categorical(key, fits, shape=(chains,))]
    # By the root of the weights: wider than the posterior, and never a single point.
    weights = jax.nn.softmax(0.5 * fits)
    away = points - weights @ points
    covariance = (weights[:, None] * away).T @ away
    return starts, jnp.linalg.cholesky(covariance + 1e-4 * jnp.eye(4))
