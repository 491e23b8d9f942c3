r"""How far one sample is from another, and a posterior from the truth.

The squared maximum mean discrepancy of samples $X$ and $Y$ under a kernel $k$ is
$$\mathrm{MMD}^2 = \overline{k(X, X)} + \overline{k(Y, Y)} - 2\,\overline{k(X, Y)},$$
with means over all pairs in its biased form (Gretton et al. 2012). `mmd` uses the sum of
nineteen Gaussian kernels with which the paper's figures were made.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from consilience.types import PRNGKey

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


def c2st(a: Float[Array, "n d"], b: Float[Array, "m d"], *, key: PRNGKey, folds: int = 5) -> float:
    """The classifier two-sample test: how often a network tells two samples apart.

    The held-out accuracy, over `folds`, of a network with two hidden layers: 0.5 for samples
    of one distribution, 1 for samples that never overlap (Lopez-Paz and Oquab 2017).

    >>> k_a, k_b, k = jax.random.split(jax.random.key(0), 3)
    >>> a, b = jax.random.normal(k_a, (500, 2)), jax.random.normal(k_b, (500, 2))
    >>> bool(c2st(a, b, key=k) < 0.6), bool(c2st(a, b + 3.0, key=k) > 0.9)
    (True, True)
    """
    n = min(len(a), len(b)) // folds * folds
    if n < 10 * folds:
        raise ValueError(
            f"c2st needs {10 * folds} draws or more a side, got {len(a)} and {len(b)}."
        )
    return float(_c2st(jnp.asarray(a)[:n], jnp.asarray(b)[:n], key, folds))


C2ST_EPOCHS, C2ST_BATCH, C2ST_RATE = 150, 200, 2e-3


@functools.partial(jax.jit, static_argnames="folds")
def _c2st(a, b, key, folds: int):
    n, d = a.shape
    # Equally many of both in every fold, so that guessing scores one half.
    parts = jnp.stack([a, b], axis=1).reshape(folds, -1, d)
    loc, scale = parts.mean((0, 1)), parts.std((0, 1))
    parts = (parts - loc) / jnp.where(scale > 0, scale, 1.0)
    label = jnp.tile(jnp.array([0.0, 1.0]), n // folds)
    width = max(20, 10 * d)

    def initial(key):
        sizes = (d, width, width, 1)
        keys = jax.random.split(key, 3)
        pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
        return [(jax.random.normal(k, (i, o)) * (2 / i) ** 0.5, jnp.zeros(o)) for k, i, o in pairs]

    def logit(layers, x):
        for weight, bias in layers[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        weight, bias = layers[-1]
        return (x @ weight + bias)[:, 0]

    def loss(layers, x, y):
        decay = sum(jnp.sum(weight**2) for weight, _ in layers)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logit(layers, x), y)) + 1e-4 * decay

    def one(fold, key):
        keep = (jnp.arange(folds - 1) + fold + 1) % folds
        x, y = parts[keep].reshape(-1, d), jnp.tile(label, folds - 1)
        size = min(C2ST_BATCH, len(x))
        steps = len(x) // size
        optimizer = optax.adam(optax.cosine_decay_schedule(C2ST_RATE, C2ST_EPOCHS * steps))
        k_start, k_order = jax.random.split(key)
        layers = initial(k_start)

        def epoch(state, k):
            order = jax.random.permutation(k, len(x))[: steps * size].reshape(steps, size)
            return jax.lax.scan(step, state, order)

        def step(state, index):
            layers, opt_state = state
            gradient = jax.grad(loss)(layers, x[index], y[index])
            updates, opt_state = optimizer.update(gradient, opt_state)
            return (optax.apply_updates(layers, updates), opt_state), None

        keys = jax.random.split(k_order, C2ST_EPOCHS)
        (layers, _), _ = jax.lax.scan(epoch, (layers, optimizer.init(layers)), keys)
        return jnp.mean((logit(layers, parts[fold]) > 0) == (label > 0.5))

    return jnp.mean(jax.vmap(one)(jnp.arange(folds), jax.random.split(key, folds)))
