r"""Two moons as the benchmark has it (Lueckmann et al. 2021, arXiv:2101.04653, T.8).

$$\theta \sim \mathrm{Uniform}(-1, 1)^2, \quad
  a \sim \mathrm{Uniform}(-\pi/2, \pi/2), \quad r \sim \mathcal{N}(0.1, 0.01^2),$$
$$x = \begin{pmatrix} r \cos a + 0.25 \\ r \sin a \end{pmatrix}
    + \frac{1}{\sqrt 2}
      \begin{pmatrix} -|\theta_1 + \theta_2| \\ -\theta_1 + \theta_2 \end{pmatrix}.$$

Its prior is half as wide as in `consilience.tasks.two_moons`, whose simulator and likelihood
it shares.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.core.types import PRNGKey
from consilience.tasks.sbibm.task import Task, cube
from consilience.tasks.two_moons import exact_sample, log_likelihood, simulator

BOUND, WIDER = 1.0, 6


@functools.partial(jax.jit, static_argnames="n")
def reference(
    x: Float[Array, "*batch 2"], n: int = 10_000, *, key: PRNGKey
) -> Float[Array, "*batch n 2"]:
    """Exact posterior draws for one dataset or a batch of them: two crescents.

    Priors are flat, so draws of the wider prior's posterior that are inside this prior's
    square are draws of this posterior: the first `n` out of `WIDER` times as many.
    """
    wide = exact_sample(x, key, n=WIDER * n)
    inside = jnp.all(jnp.abs(wide) <= BOUND, axis=-1)
    first = jnp.argsort(~inside, axis=-1, stable=True)[..., :n]
    # Where too few are inside, those there are come up again.
    count = jnp.clip(jnp.sum(inside, axis=-1, keepdims=True), 1, n)
    picked = jnp.take_along_axis(first, jnp.arange(n) % count, axis=-1)
    return jnp.take_along_axis(wide, picked[..., None], axis=-2)


TASK = Task(2, lambda: cube(BOUND, 2), simulator, log_likelihood, reference)
