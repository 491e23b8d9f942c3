r"""Two moons: experiment 2 of Schmitt et al. (2024), after Greenberg et al. (2019).

$$\theta \sim \mathrm{Uniform}(-2, 2)^2, \quad
  a \sim \mathrm{Uniform}(-\pi/2, \pi/2), \quad r \sim \mathcal{N}(0.1, 0.01^2),$$
$$x = \begin{pmatrix} r \cos a + 0.25 \\ r \sin a \end{pmatrix}
    + \frac{1}{\sqrt 2}
      \begin{pmatrix} -|\theta_1 + \theta_2| \\ -\theta_1 + \theta_2 \end{pmatrix}.$$

The posterior is two crescents. With $m$ for the moving part and $d = x - (0.25, 0) - m$, the
likelihood is that of the polar coordinates of $d$ with the Jacobian $1 / |d|$:
$p(x \mid \theta) = \mathcal{N}(\pm|d| ; 0.1, 0.01^2) / (\pi |d|)$, the sign that of $d_1$. Hence
$\mathbb{E}[\log p(x \mid \theta)] = 4.35$ nats: no learned likelihood can do better.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey, Scalar
from consilience.model.data import Vector
from consilience.model.model import Model

BOUND = 2.0
RADIUS, NOISE, OFFSET = 0.1, 0.01, 0.25


def _crescent(key: PRNGKey) -> Float[Array, "2"]:
    k_angle, k_radius = jax.random.split(key)
    a = jax.random.uniform(k_angle, minval=-math.pi / 2, maxval=math.pi / 2)
    r = RADIUS + NOISE * jax.random.normal(k_radius)
    return jnp.stack([r * jnp.cos(a) + OFFSET, r * jnp.sin(a)])


def _moved(theta: Float[Array, "2"]) -> Float[Array, "2"]:
    return jnp.stack([-jnp.abs(theta[0] + theta[1]), theta[1] - theta[0]]) / math.sqrt(2)


def simulator(key: PRNGKey, theta: Float[Array, "2"]) -> Float[Array, "2"]:
    return _crescent(key) + _moved(theta)


def log_likelihood(theta: Float[Array, "2"], x: Float[Array, "2"]) -> Scalar:
    d = x - _moved(theta) - jnp.array([OFFSET, 0.0])
    length = jnp.sqrt(jnp.maximum(jnp.sum(d**2), 1e-12))
    r = jnp.where(d[0] > 0, length, -length)
    square = ((r - RADIUS) / NOISE) ** 2
    normal = -0.5 * square - math.log(NOISE * math.sqrt(2 * math.pi))
    return normal - jnp.log(length) - math.log(math.pi)


@functools.cache
def model(*, likelihood: bool = True) -> Model:
    """Two moons, with its log-likelihood or without.

    >>> model()
    Model
      theta  Uniform(low=-2, high=2)
      x      (2,), Vector()
      log-likelihood: given
    """
    prior = dist.Uniform(-BOUND, BOUND).expand([2]).to_event(1)
    return Model(prior, simulator, log_likelihood if likelihood else None, data=Vector())


@functools.partial(jax.jit, static_argnames=("n", "tries"))
def exact_sample(
    x: Float[Array, "*batch 2"], key: PRNGKey, *, n: int = 1000, tries: int = 16
) -> Float[Array, "*batch n 2"]:
    """Exact posterior draws for one dataset or a batch of them.

    Since the prior is flat, a draw c of the crescent gives the theta with
    x = c + m(theta): two of them, of which one is taken at random. Those that do not exist
    or leave the prior's square are thrown away, out of `tries` times as many.
    """

    def one(x, key):
        k_crescent, k_sign = jax.random.split(key)
        c = jax.vmap(_crescent)(jax.random.split(k_crescent, tries * n))
        plus, minus = math.sqrt(2) * (c[:, 0] - x[0]), math.sqrt(2) * (x[1] - c[:, 1])
        sign = jax.random.rademacher(k_sign, (tries * n,), dtype=float)
        total = sign * plus
        theta = jnp.stack([(total - minus) / 2, (total + minus) / 2], axis=1)
        inside = (plus >= 0) & jnp.all(jnp.abs(theta) <= BOUND, axis=1)
        first = jnp.argsort(~inside, stable=True)[:n]
        # Where too few are left, those there are come up again.
        return theta[first[jnp.arange(n) % jnp.clip(jnp.sum(inside), 1, n)]]

    flat = x.reshape(-1, 2)
    draws = jax.lax.map(lambda pair: one(*pair), (flat, jax.random.split(key, flat.shape[0])))
    return draws.reshape(*x.shape[:-1], n, 2)
