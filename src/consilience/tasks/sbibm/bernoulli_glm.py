r"""A Bernoulli GLM and its sufficient statistics (Lueckmann et al. 2021, arXiv:2101.04653, T.5).

$$\theta \sim \mathcal{N}(0, P^{-1}), \qquad
  y_t \mid \theta \sim \mathrm{Bernoulli}(\sigma(X_t \theta)), \quad t = 1, \dots, 100, \qquad
  x = X^\top y,$$
with $P = \mathrm{diag}(\tfrac12, F^\top F)$, $F = D D + \mathrm{diag}(\sqrt{i / 9})$ for
$i = 0, \dots, 8$, and $D$ the first difference. The columns of $X$ are ones and the lags 0 to 8
of a fixed white stimulus. As $x$ is sufficient,
$$\log p(x \mid \theta) = x \cdot \theta - \sum_t \log(1 + e^{X_t \theta}) + c(x);$$
the unknown $c(x)$ does not depend on $\theta$, and is left out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.tasks.sbibm.importance import importance_draws
from consilience.tasks.sbibm.task import Task

DIM, STEPS, STIMULUS_SEED = 10, 100, 42
NEWTON, PROPOSALS, FREEDOM = 50, 2**19, 20.0


def _design() -> np.ndarray:
    stimulus = np.random.RandomState(STIMULUS_SEED).randn(STEPS).astype(np.float32)
    lags = [np.concatenate([np.zeros(j), stimulus[: STEPS - j]]) for j in range(DIM - 1)]
    return np.stack([np.ones(STEPS), *lags], axis=1).astype(np.float32)


def _precision() -> np.ndarray:
    m = DIM - 1
    d = np.eye(m) - np.eye(m, k=-1)
    f = d @ d + np.diag(np.sqrt(np.arange(m) / m))
    precision = np.zeros((DIM, DIM))
    precision[0, 0], precision[1:, 1:] = 0.5, f.T @ f
    return precision


DESIGN, PRECISION = _design(), _precision()


def simulator(key: PRNGKey, theta: Float[Array, "10"]) -> Float[Array, "10"]:
    fires = jax.random.uniform(key, (STEPS,)) < jax.nn.sigmoid(DESIGN @ theta)
    return fires.astype(float) @ DESIGN


def log_likelihood(theta: Float[Array, "10"], x: Float[Array, "10"]) -> Scalar:
    """Up to a term that does not depend on `theta`."""
    return x @ theta - jnp.sum(jax.nn.softplus(DESIGN @ theta))


def prior() -> dist.Distribution:
    covariance = np.linalg.inv(PRECISION)
    return dist.MultivariateNormal(jnp.zeros(DIM), jnp.asarray(covariance, float))


def reference(
    x: Float[Array, "*batch 10"], n: int = 10_000, *, key: PRNGKey, proposals: int = PROPOSALS
) -> Float[np.ndarray, "*batch n 10"]:
    """Posterior draws for one dataset or a batch of them, resampled by importance.

    The posterior is log-concave and close to normal: proposals are a Student-t distribution
    at its mode.
    """
    return importance_draws(functools.partial(_weighted, proposals=proposals), x, n, key)


@functools.partial(jax.jit, static_argnames="proposals")
def _weighted(x: Float[Array, "10"], key: PRNGKey, *, proposals: int):
    """Proposals and the logarithms of their weights."""
    k_normal, k_gamma = jax.random.split(key)
    precision = jnp.asarray(PRECISION, float)
    mode, root = _laplace(x, precision)
    z = jax.random.normal(k_normal, (proposals, DIM))
    mixing = jax.random.gamma(k_gamma, FREEDOM / 2, (proposals, 1)) / (FREEDOM / 2)
    z = z / jnp.sqrt(mixing)
    log_q = -0.5 * (FREEDOM + DIM) * jnp.log1p(jnp.sum(z**2, axis=1) / FREEDOM)

    def log_density(theta):
        return log_likelihood(theta, x) - 0.5 * theta @ precision @ theta

    theta = mode + z @ root
    return theta, jax.lax.map(log_density, theta, batch_size=2**14) - log_q


def _laplace(x: Float[Array, "10"], precision: Float[Array, "10 10"]):
    """The posterior's mode by Newton's method, and a root of the inverse of the curvature there."""

    def curvature(theta):
        share = jax.nn.sigmoid(DESIGN @ theta)
        return share, DESIGN.T @ ((share * (1 - share))[:, None] * DESIGN) + precision

    def step(_, theta):
        share, matrix = curvature(theta)
        move = jnp.linalg.solve(matrix, x - DESIGN.T @ share - precision @ theta)
        # No further than a unit of length: far from the mode a whole step goes astray.
        return theta + move / jnp.maximum(1.0, jnp.linalg.norm(move))

    mode = jax.lax.fori_loop(0, NEWTON, step, jnp.zeros(DIM))
    factor = jnp.linalg.cholesky(curvature(mode)[1])
    return mode, jnp.linalg.inv(factor)


TASK = Task(4, prior, simulator, log_likelihood, reference)
