r"""The classifier two-sample test with the settings of the SBI benchmark.

A network learns to tell draws $\theta \sim p$ from draws $\theta' \sim q$, and
$$\mathrm{C2ST} = \Pr(\text{a held-out draw is put on its own side})$$
over five folds: 0.5 where the two are alike, 1 where they never overlap (Lopez-Paz and Oquab 2017,
arXiv:1610.06545; Lueckmann et al. 2021, arXiv:2101.04653).

The network and its training are those of scikit-learn's `MLPClassifier` with
`hidden_layer_sizes=(10 d, 10 d)` and `max_iter=1000`, its defaults for the rest: relu, Adam at
1e-3, batches of 200, an L2 penalty of 1e-4, and an end once the training loss has not improved
by 1e-4 for more than ten epochs. All folds train here in one compiled program, several times
as fast. `consilience.metrics.c2st` is another classifier, with a fixed number of epochs: its
figures are not those of the benchmark.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from consilience.core.compiling import compiled
from consilience.core.types import PRNGKey, Scalar

FOLDS, WIDTH = 5, 10
EPOCHS, BATCH, RATE, PENALTY = 1000, 200, 1e-3, 1e-4
TOLERANCE, PATIENCE = 1e-4, 10
"""Training ends when the loss is no lower than its best by this, for more epochs than this."""

Layers = list[tuple[Array, Array]]


class Progress(NamedTuple):
    """Training of one network: its weights, Adam's state, and how the loss has gone."""

    layers: Layers
    adam: optax.OptState
    best: Scalar
    stalled: Int[Array, ""]
    epoch: Int[Array, ""]


def c2st(
    reference: Float[Array | np.ndarray, "n d"],
    draws: Float[Array | np.ndarray, "m k"],
    *,
    key: PRNGKey,
    epochs: int = EPOCHS,
) -> float:
    """The benchmark's C2ST of posterior draws, both samples standardised by the reference.

    >>> k_a, k_b, k = jax.random.split(jax.random.key(0), 3)
    >>> a, b = jax.random.normal(k_a, (500, 2)), 3.0 + jax.random.normal(k_b, (500, 2))
    >>> c2st(a, b, key=k) > 0.9
    True
    """
    reference, draws = (np.asarray(part, np.float64) for part in (reference, draws))
    if reference.ndim != 2 or draws.ndim != 2 or reference.shape[1] != draws.shape[1]:
        raise ValueError(
            "c2st compares two arrays (draws, dimensions) of one dimension, got "
            f"{reference.shape} and {draws.shape}."
        )
    if not np.isfinite(reference).all() or not np.isfinite(draws).all():
        raise ValueError("c2st needs finite draws, but some are NaN or infinite.")
    if min(len(reference), len(draws)) < BATCH // 2:
        raise ValueError(
            f"c2st needs {BATCH // 2} draws or more a side, got {len(reference)} and {len(draws)}."
        )
    loc, scale = reference.mean(axis=0), reference.std(axis=0, ddof=1)
    both = np.concatenate([reference, draws])
    points = jnp.asarray((both - loc) / np.where(scale > 0, scale, 1.0), float)
    sides = jnp.asarray(np.arange(len(both)) >= len(reference), float)
    return float(_accuracy(points, sides, key, epochs))


@compiled
def _accuracy(points: Float[Array, "n d"], sides: Float[Array, " n"], key: PRNGKey, epochs: int):
    n = len(points)
    k_folds, k_train = jax.random.split(key)
    order = jax.random.permutation(k_folds, n)
    size = math.ceil(n / FOLDS)
    # The last fold is smaller where n is no multiple: its first places are another fold's.
    starts = jnp.minimum(jnp.arange(FOLDS) * size, n - size)

    def one(pair):
        start, key = pair
        rolled = order[(start + jnp.arange(n)) % n]
        held, kept = rolled[:size], rolled[size:]
        layers = _train(points[kept], sides[kept], key, epochs)
        return jnp.mean((_logits(layers, points[held]) > 0) == (sides[held] > 0.5))

    return jnp.mean(jax.lax.map(one, (starts, jax.random.split(k_train, FOLDS))))


def _train(x: Float[Array, "n d"], y: Float[Array, " n"], key: PRNGKey, epochs: int) -> Layers:
    n = len(x)
    size = min(BATCH, n)
    batches = math.ceil(n / size)
    adam = optax.adam(RATE)
    k_start, k_order = jax.random.split(key)
    layers = _initial(x.shape[1], k_start)

    def loss(layers: Layers, x, y, there: Bool[Array, " n"]):
        squares = sum(jnp.sum(weight**2) for weight, _ in layers)
        each = optax.sigmoid_binary_cross_entropy(_logits(layers, x), y)
        count = jnp.sum(there)
        return (jnp.sum(jnp.where(there, each, 0.0)) + 0.5 * PENALTY * squares) / count

    def step(state, part):
        layers, opt_state = state
        index, there = part
        value, gradient = jax.value_and_grad(loss)(layers, x[index], y[index], there)
        updates, opt_state = adam.update(gradient, opt_state)
        return (optax.apply_updates(layers, updates), opt_state), value * jnp.sum(there)

    there = (jnp.arange(batches * size) < n).reshape(batches, size)

    def epoch(now: Progress) -> Progress:
        order = jax.random.permutation(jax.random.fold_in(k_order, now.epoch), n)
        index = jnp.resize(order, (batches * size,)).reshape(batches, size)
        (layers, state), losses = jax.lax.scan(step, (now.layers, now.adam), (index, there))
        mean = jnp.sum(losses) / n
        stalled = jnp.where(mean > now.best - TOLERANCE, now.stalled + 1, 0)
        return Progress(layers, state, jnp.minimum(mean, now.best), stalled, now.epoch + 1)

    goes_on = lambda now: (now.stalled <= PATIENCE) & (now.epoch < epochs)  # noqa: E731
    zero = jnp.zeros((), int)
    first = Progress(layers, adam.init(layers), jnp.array(jnp.inf), zero, zero)
    return jax.lax.while_loop(goes_on, epoch, first).layers


def _initial(dim: int, key: PRNGKey) -> Layers:
    """Glorot's uniform weights and biases."""
    sizes = (dim, WIDTH * dim, WIDTH * dim, 1)

    def layer(key: PRNGKey, i: int, o: int, factor: float):
        k_weight, k_bias = jax.random.split(key)
        bound = math.sqrt(factor / (i + o))
        draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
        return draw(k_weight, (i, o)), draw(k_bias, (o,))

    parts = zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], (6.0, 6.0, 6.0), strict=True)
    return [layer(*part) for part in parts]


def _logits(layers: Layers, x: Float[Array, "n d"]) -> Float[Array, " n"]:
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return (x @ weight + bias)[:, 0]
