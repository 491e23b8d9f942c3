r"""Simple likelihood, complex posterior (Lueckmann et al. 2021, arXiv:2101.04653, T.3).

$$\theta \sim \mathrm{Uniform}(-3, 3)^5, \qquad
  x_j \mid \theta \sim \mathcal{N}\!\left(\mu, \Sigma\right), \quad j = 1, \dots, 4,$$
$$\mu = (\theta_1, \theta_2), \qquad
  \Sigma = \begin{pmatrix} s_1^2 & \rho s_1 s_2 \\ \rho s_1 s_2 & s_2^2 \end{pmatrix}
         + 10^{-6} I, \qquad
  s_1 = \theta_3^2, \quad s_2 = \theta_4^2, \quad \rho = \tanh \theta_5.$$

The term $10^{-6} I$ is in the benchmark's code and not in its text: it bounds the density where
$\theta_3$ or $\theta_4$ is near zero. The four points are one vector of eight values. The
posterior has four modes, by the signs of $\theta_3$ and $\theta_4$.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.tasks.sbibm.importance import importance_draws
from consilience.tasks.sbibm.task import Task, cube

BOUND, POINTS, FLOOR = 3.0, 4, 1e-6
FREEDOM, PROPOSALS = 2.5, 2**20


def spread(theta: Float[Array, "5"]) -> tuple[Scalar, Scalar, Scalar]:
    r"""The factor of $\Sigma$: the first scale, the slope of the second value on the first times
    that scale, and the scale that remains.
    """
    s1, s2, rho = theta[2] ** 2, theta[3] ** 2, jnp.tanh(theta[4])
    a = jnp.sqrt(s1**2 + FLOOR)
    b = rho * s1 * s2 / a
    # 1 - rho^2 by the hyperbolic cosine: the difference has no digits left where rho is near 1.
    rest = (s2 / jnp.cosh(theta[4])) ** 2 + (rho * s2) ** 2 * (FLOOR / a**2) + FLOOR
    return a, b, jnp.sqrt(rest)


def simulator(key: PRNGKey, theta: Float[Array, "5"]) -> Float[Array, "8"]:
    z = jax.random.normal(key, (POINTS, 2))
    a, b, c = spread(theta)
    return jnp.stack([theta[0] + a * z[:, 0], theta[1] + b * z[:, 0] + c * z[:, 1]], -1).ravel()


def log_likelihood(theta: Float[Array, "5"], x: Float[Array, "8"]) -> Scalar:
    a, b, c = spread(theta)
    away = x.reshape(POINTS, 2) - theta[:2]
    first = away[:, 0] / a
    second = (away[:, 1] - b * first) / c
    squares = jnp.sum(first**2 + second**2)
    return -0.5 * squares - POINTS * (jnp.log(a) + jnp.log(c) + math.log(2 * math.pi))


def reference(
    x: Float[Array, "*batch 8"], n: int = 10_000, *, key: PRNGKey, proposals: int = PROPOSALS
) -> Float[np.ndarray, "*batch n 5"]:
    r"""Posterior draws for one dataset or a batch of them, resampled by importance.

    With the flat prior, $\Sigma$ follows about an inverse Wishart distribution with the scatter
    of the four points, and $\mu$ a normal one around their mean. Proposals from these with
    $\nu = 2.5$ have weights $(1 - \rho^2)^{1/4}$ inside the prior's cube, which none exceeds,
    but for the term $10^{-6} I$.
    """
    k_draw, k_sign = jax.random.split(key)
    draws = importance_draws(functools.partial(_weighted, proposals=proposals), x, n, k_draw)
    signs = jax.random.rademacher(k_sign, (*draws.shape[:-1], 2), dtype=draws.dtype)
    draws[..., 2:4] *= np.asarray(signs)
    return draws


@functools.partial(jax.jit, static_argnames="proposals")
def _weighted(x: Float[Array, "8"], key: PRNGKey, *, proposals: int):
    """Proposals and the logarithms of their weights."""
    theta, log_q = _propose(x, key, proposals)
    log_w = jax.vmap(log_likelihood, in_axes=(0, None))(theta, x) - log_q
    inside = jnp.all(jnp.abs(theta) <= BOUND, axis=1) & jnp.isfinite(log_w)
    return theta, jnp.where(inside, log_w, -jnp.inf)


def _propose(x: Float[Array, "8"], key: PRNGKey, n: int):
    """Parameters with positive scales, and the log density of each, up to a constant."""
    k_first, k_second, k_slope, k_mean = jax.random.split(key, 4)
    rows = x.reshape(POINTS, 2)
    mean = jnp.mean(rows, axis=0)
    away = rows - mean
    a11, a12 = jnp.sum(away[:, 0] ** 2), jnp.sum(away[:, 0] * away[:, 1])
    slope = a12 / a11
    rest = jnp.sum((away[:, 1] - slope * away[:, 0]) ** 2)
    # An inverse Wishart as a chain: the first variance, the rest of the second, and the slope.
    shape = (n,)
    s11 = a11 / (2 * jax.random.gamma(k_first, (FREEDOM - 1) / 2, shape))
    c2 = rest / (2 * jax.random.gamma(k_second, FREEDOM / 2, shape))
    beta = slope + jnp.sqrt(c2 / a11) * jax.random.normal(k_slope, shape)
    s12, s22 = beta * s11, c2 + beta**2 * s11
    z = jax.random.normal(k_mean, (n, 2)) / math.sqrt(POINTS)
    mu1 = mean[0] + jnp.sqrt(s11) * z[:, 0]
    mu2 = mean[1] + beta * jnp.sqrt(s11) * z[:, 0] + jnp.sqrt(c2) * z[:, 1]
    theta3, theta4 = s11**0.25, s22**0.25
    theta5 = jnp.arcsinh(s12 / jnp.sqrt(s11 * c2))
    theta = jnp.stack([mu1, mu2, theta3, theta4, theta5], axis=1)
    log_det = jnp.log(s11) + jnp.log(c2)
    log_scatter = -0.5 * (a11 / s11 + rest / c2 + a11 * (beta - slope) ** 2 / c2)
    log_wishart = -0.5 * (FREEDOM + 3) * log_det + log_scatter
    # From the covariance to the parameters: 16 s1^5 s2^5 (1 - rho^2), powers of theta.
    log_jacobian = 1.25 * (jnp.log(s11) + jnp.log(s22)) + jnp.log(c2) - jnp.log(s22)
    log_mean = -0.5 * jnp.sum(POINTS * z**2, axis=1) - 0.5 * log_det
    return theta, log_wishart + log_jacobian + log_mean


TASK = Task(3, lambda: cube(BOUND, 5), simulator, log_likelihood, reference)
