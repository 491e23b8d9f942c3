r"""How far one sample is from another, and a posterior from the truth.

The squared maximum mean discrepancy of samples $X$ and $Y$ under a kernel $k$ is
$$\mathrm{MMD}^2 = \overline{k(X, X)} + \overline{k(Y, Y)} - 2\,\overline{k(X, Y)},$$
with means over all pairs in its biased form, and over pairs of different draws in its
unbiased form (Gretton et al. 2012). `mmd` uses the sum of nineteen Gaussian kernels with
which the paper's figures were made. Leading axes are pairs of samples, compared one pair at
a time, so that memory does not grow with their number.
"""

import functools
import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from consilience.core.arrays import as_numbers
from consilience.core.types import PRNGKey, Scalar

Draws: TypeAlias = Float[Array | np.ndarray, "*batch n d"]
"""The first of two samples, behind any leading axes."""
Reference: TypeAlias = Float[Array | np.ndarray, "*batch m d"]
"""The second, which may have another size."""

BANDWIDTHS = (
    *(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0),
    *(1e2, 1e3, 1e4, 1e5, 1e6),
)


def mmd(
    a: Draws,
    b: Reference,
    *,
    bandwidths: tuple[float, ...] = BANDWIDTHS,
) -> Float[Array, "*batch"]:
    """The biased squared MMD under the kernel Σ exp(-d² / 2s), summed over bandwidths s.

    >>> same = jax.random.normal(jax.random.key(0), (500, 2))
    >>> bool(mmd(same, same) < 1e-5), bool(mmd(same, same + 3) > 1)
    (True, True)
    """
    if not bandwidths or min(bandwidths) <= 0:
        raise ValueError(f"The bandwidths of the kernels must be positive, got {bandwidths}.")
    a, b, batch = _pairs(a, b)
    return _mmd(a, b, bandwidths).reshape(batch)


class Discrepancy(NamedTuple):
    """An MMD, and what two samples of the reference itself score: no posterior is below it."""

    mmd: Float[Array, "*batch"]
    floor: Float[Array, "*batch"]


def mmd_with_floor(
    draws: Draws,
    reference: Reference,
) -> Discrepancy:
    """The MMD to a reference of twice as many draws, or more, and its floor.

    The first `n` draws of the reference stand against `draws`, and against its next `n`.

    >>> k_a, k_b = jax.random.split(jax.random.key(0))
    >>> found = mmd_with_floor(jax.random.normal(k_a, (500, 2)), jax.random.normal(k_b, (1000, 2)))
    >>> bool(found.mmd < 2 * found.floor)
    True
    """
    n = draws.shape[-2]
    if reference.shape[-2] < 2 * n:
        raise ValueError(
            f"The floor of {n} draws needs {2 * n} draws of the reference or more, got "
            f"{reference.shape[-2]}."
        )
    first, second = reference[..., :n, :], reference[..., n : 2 * n, :]
    return Discrepancy(mmd(draws, first), mmd(first, second))


BITS = 8
"""Bits of a float's mantissa that name a knot of the kernel's table: 256 an octave."""


def _tabulate(bandwidths: tuple[float, ...]):
    """The sum of the kernels as a function of the squared distance, read from a table.

    It is linear between knots, which are the floats whose last bits are zero: the first bits
    of a square are its place in the table. So its cost does not depend on the kernels.
    """
    shift = 23 - BITS
    bits = np.arange((0x7F800000 >> shift) + 1, dtype=np.int32) << shift
    squares = bits.view(np.float32).astype(np.float64)
    knots = np.exp(-squares[:, None] / (2 * np.array(bandwidths))).sum(axis=1)
    # Value and slope as one complex number: one look-up gets both.
    table = jnp.asarray(knots + 1j * np.diff(knots, append=0.0), jnp.complex64)

    def kernel(squares: Float[Array, "n m"]) -> Float[Array, "n m"]:
        bits = jax.lax.bitcast_convert_type(squares.astype(jnp.float32), jnp.int32)
        found = table.at[bits >> shift].get(mode="promise_in_bounds")
        within = (bits & ((1 << shift) - 1)).astype(jnp.float32) * np.float32(2.0**-shift)
        return found.real + within * found.imag

    return kernel


def _squares(x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Float[Array, "n m"]:
    # Differences, not the expanded square: that cancels, and the narrow kernels show it.
    if x.shape[1] <= 8:
        parts = [(x[:, i, None] - y[:, i]) ** 2 for i in range(x.shape[1])]
        return functools.reduce(jnp.add, parts)
    return jnp.sum((x[:, None] - y) ** 2, axis=-1)


BLOCKS = 4
"""Blocks of rows when a sample is compared with itself: each pair of blocks once, not twice."""


@functools.partial(jax.jit, static_argnames="bandwidths")
def _mmd(a, b, bandwidths: tuple[float, ...]):
    kernel = _tabulate(bandwidths)

    def among(x):
        size = math.ceil(len(x) / BLOCKS)
        total = jnp.zeros(())
        for i in range(0, len(x), size):
            block, rest = x[i : i + size], x[i + size :]
            total += jnp.sum(kernel(_squares(block, block)))
            total += 2 * jnp.sum(kernel(_squares(block, rest))) if len(rest) else 0.0
        return total / len(x) ** 2

    def one(pair):
        x, y = pair
        return among(x) + among(y) - 2 * jnp.mean(kernel(_squares(x, y)))

    # What is not a number has no place in the table.
    finite = jnp.isfinite(a).all(axis=(1, 2)) & jnp.isfinite(b).all(axis=(1, 2))
    pairs = [jnp.where(finite[:, None, None], part, 0.0) for part in (a, b)]
    return jnp.where(finite, jax.lax.map(one, pairs), jnp.nan)


def mmd_unbiased(a: Draws, b: Reference) -> Float[Array, "*batch"]:
    """The unbiased squared MMD under one Gaussian kernel, as wide as the samples are.

    Its squared width is the median of the squared distances between draws, for each pair of
    samples. Zero on average for samples of one distribution, so it may be negative.

    >>> same = jax.random.normal(jax.random.key(0), (2, 500, 2))
    >>> bool(abs(mmd_unbiased(same[0], same[1])) < 0.01)
    True
    """
    a, b, batch = _pairs(a, b)
    return _mmd_unbiased(a, b).reshape(batch)


MEDIAN_DRAWS = 500


@jax.jit
def _mmd_unbiased(a, b):
    def one(pair):
        x, y = pair
        n, m = len(x), len(y)
        some = jnp.concatenate([x[:MEDIAN_DRAWS], y[:MEDIAN_DRAWS]])
        upper = jnp.triu_indices(len(some), 1)
        width = jnp.maximum(jnp.median(_squares(some, some)[upper]), 1e-30)
        total = lambda x, y: jnp.sum(jnp.exp(-_squares(x, y) / (2 * width)))  # noqa: E731
        within = (total(x, x) - n) / (n * (n - 1)) + (total(y, y) - m) / (m * (m - 1))
        return within - 2 * total(x, y) / (n * m)

    return jax.lax.map(one, (a, b))


def sliced_wasserstein(
    a: Draws,
    b: Reference,
    *,
    key: PRNGKey,
    directions: int = 200,
) -> Float[Array, "*batch"]:
    """The root of the mean squared Wasserstein-2 distance of projections on random directions.

    In the units of the samples: a shift of all draws by a vector v gives |v| / sqrt(d).

    >>> a = jax.random.normal(jax.random.key(0), (1000, 1))
    >>> round(float(sliced_wasserstein(a, a + 2.0, key=jax.random.key(1))), 4)
    2.0
    """
    a, b, batch = _pairs(a, b)
    if a.shape[-2] != b.shape[-2]:
        raise ValueError(
            f"sliced_wasserstein needs equally many draws a side, got {a.shape[-2]} and "
            f"{b.shape[-2]}."
        )
    return _sliced(a, b, key, directions).reshape(batch)


@functools.partial(jax.jit, static_argnames="directions")
def _sliced(a, b, key, directions: int):
    v = jax.random.normal(key, (a.shape[-1], directions))
    v = v / jnp.linalg.norm(v, axis=0)

    def one(pair):
        x, y = (jnp.sort(part @ v, axis=0) for part in pair)
        return jnp.sqrt(jnp.mean((x - y) ** 2))

    return jax.lax.map(one, (a, b))


class MomentErrors(NamedTuple):
    """Errors of posterior means and standard deviations, in units of the reference's own."""

    mean: Float[Array, "*batch d"]
    sd: Float[Array, "*batch d"]


def moment_errors(
    draws: Draws,
    reference: Reference,
) -> MomentErrors:
    """How far the means are off in reference standard deviations, and the ratio of those less 1.

    >>> a = jax.random.normal(jax.random.key(0), (1000, 2))
    >>> [round(float(part[0]), 3) for part in moment_errors(2 * a - a.mean(0) + a.std(0), a)]
    [1.0, 1.0]
    """
    draws, reference = _numbers(draws), _numbers(reference)
    sd = jnp.std(reference, axis=-2)
    shift = jnp.mean(draws, axis=-2) - jnp.mean(reference, axis=-2)
    return MomentErrors(shift / sd, jnp.std(draws, axis=-2) / sd - 1)


def _pairs(a, b):
    """Samples with one leading axis of pairs, and the leading axes they had."""
    a, b = _numbers(a), _numbers(b)
    if a.ndim < 2 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-1]:
        raise ValueError(
            "Samples must be arrays (..., draws, dimensions) that differ in their draws alone, "
            f"got {a.shape} and {b.shape}."
        )
    batch = a.shape[:-2]
    return a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), batch


def _numbers(sample) -> Array:
    known = sample if isinstance(sample, jax.Array) else as_numbers(sample, "A sample")
    if jnp.issubdtype(known.dtype, jnp.complexfloating):
        raise TypeError("A sample must be real numbers, but it is complex.")
    return jnp.asarray(known, float)


def c2st(
    a: Draws,
    b: Reference,
    *,
    key: PRNGKey,
    folds: int = 5,
) -> Float[Array, "*batch"]:
    """The classifier two-sample test: how often a network tells two samples apart.

    The held-out accuracy, over `folds`, of a network with two hidden layers: 0.5 for samples
    of one distribution, 1 for samples that never overlap (Lopez-Paz and Oquab 2017). For n
    draws a side of one distribution it varies by 0.5 / sqrt(2 n) around 0.5.

    >>> k_a, k_b, k = jax.random.split(jax.random.key(0), 3)
    >>> a, b = jax.random.normal(k_a, (500, 2)), jax.random.normal(k_b, (500, 2))
    >>> bool(c2st(a, b, key=k) < 0.6), bool(c2st(a, b + 3.0, key=k) > 0.9)
    (True, True)
    """
    a, b, batch = _pairs(a, b)
    n = min(a.shape[1], b.shape[1]) // folds * folds
    if n < 10 * folds:
        raise ValueError(
            f"c2st needs {10 * folds} draws or more a side, got {a.shape[1]} and {b.shape[1]}."
        )
    return _c2st(a[:, :n], b[:, :n], jax.random.split(key, len(a)), folds).reshape(batch)


C2ST_EPOCHS, C2ST_BATCH, C2ST_RATE = 150, 200, 2e-3


@functools.partial(jax.jit, static_argnames="folds")
def _c2st(a, b, keys, folds: int):
    return jax.lax.map(lambda part: _told_apart(part[0], part[1], part[2], folds), (a, b, keys))


def _told_apart(a, b, key, folds: int) -> Scalar:
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
