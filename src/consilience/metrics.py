r"""How far one sample is from another, and a posterior from the truth.

The squared maximum mean discrepancy of samples $X$ and $Y$ under a kernel $k$ is
$$\mathrm{MMD}^2 = \overline{k(X, X)} + \overline{k(Y, Y)} - 2\,\overline{k(X, Y)},$$
with means over all pairs in its biased form (Gretton et al. 2012). `mmd` uses the sum of
nineteen Gaussian kernels with which the paper's figures were made.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

BANDWIDTHS = (
    *(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0),
    *(1e2, 1e3, 1e4, 1e5, 1e6),
)


@functools.partial(jax.jit, static_argnames="bandwidths")
def mmd(
    a: Float[Array, "*batch n d"],
    b: Float[Array, "*batch m d"],
    *,
    bandwidths: tuple[float, ...] = BANDWIDTHS,
) -> Float[Array, "*batch"]:
    r"""The biased squared MMD under the kernel $\sum_s \exp(-d^2 / (2 s))$.

    Leading axes are pairs of samples; they are compared one pair at a time, so that memory
    does not grow with their number.

    >>> same = jax.random.normal(jax.random.key(0), (500, 2))
    >>> bool(mmd(same, same) < 1e-5), bool(mmd(same, same + 3) > 1)
    (True, True)
    """

    def kernel_mean(x, y):
        # Differences, not the expanded square: that cancels, and the narrow kernels show it.
        squares = jnp.sum((x[:, None] - y) ** 2, axis=-1)
        return jnp.mean(sum(jnp.exp(-squares / (2 * s)) for s in bandwidths))

    def one(pair):
        x, y = pair
        return kernel_mean(x, x) + kernel_mean(y, y) - 2 * kernel_mean(x, y)

    batch = a.shape[:-2]
    flat = (a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]))
    return jax.lax.map(one, flat).reshape(batch)
