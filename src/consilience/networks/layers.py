"""The small parts that networks are made of, for one example each.

Matrices multiply from the left, `weight @ value`: vectorised over examples this keeps
features on the leading axis, where the splines want their parameters. First weights come from
a NumPy generator: drawing them with JAX would compile for longer than many fits train.
"""

import itertools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.core.compiling import on_device
from consilience.core.types import Flat, PRNGKey


def generator(key: PRNGKey) -> np.random.Generator:
    """A NumPy generator that a JAX key determines. Unlike the key, it compiles nothing."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())


def random_key(rng: np.random.Generator, like: PRNGKey) -> PRNGKey:
    """A new JAX key of the same kind as another."""
    shape = jax.random.key_data(like).shape
    data = rng.integers(2**32, size=shape, dtype=np.uint32)
    return jax.random.wrap_key_data(jax.device_put(data), impl=jax.random.key_impl(like))


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    return on_device(scale * rng.standard_normal(shape))


class Linear(eqx.Module):
    """An affine map, its weight divided by its largest singular value if `spectral`."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"]
    spectral: bool = eqx.field(static=True)

    def __init__(
        self,
        n_in: int,
        n_out: int,
        rng: np.random.Generator,
        *,
        scale: float = 1.0,
        fan_in: int | None = None,
        spectral: bool = False,
    ):
        fan_in = max(1, n_in if fan_in is None else fan_in)
        self.weight = normal(rng, (n_out, n_in), scale * fan_in**-0.5)
        self.bias = on_device(np.zeros(n_out))
        self.spectral = spectral

    def matrix(self) -> Float[Array, "out in"]:
        """The weight as it is applied."""
        if self.spectral and self.weight.size:
            return self.weight / largest_singular_value(self.weight)
        return self.weight

    def __call__(self, value: Float[Array, " in"]) -> Float[Array, " out"]:
        return self.matrix() @ value + self.bias


@jax.custom_jvp
def silu(value: Array) -> Array:
    """`jax.nn.silu`, written with tanh and with a short derivative: faster on a CPU."""
    return value * (0.5 + 0.5 * jnp.tanh(0.5 * value))


@silu.defjvp
def _silu_jvp(primals, tangents):
    (value,), (tangent,) = primals, tangents
    share = 0.5 + 0.5 * jnp.tanh(0.5 * value)
    return value * share, tangent * (share * (1 + value * (1 - share)))


def activation(name: str) -> Callable:
    """An activation by its name in `jax.nn`."""
    return silu if name == "silu" else getattr(jax.nn, name)


def largest_singular_value(weight: Float[Array, "m n"], squarings: int = 8) -> Float[Array, ""]:
    """By repeated squaring of the Gram matrix, differentiable in the weight.

    Eight squarings are 256 steps of power iteration, in eight products.
    """
    narrow = weight if weight.shape[0] >= weight.shape[1] else weight.T
    power = gram = jax.lax.stop_gradient(narrow.T @ narrow)
    for _ in range(squarings):
        power = power / jnp.maximum(jnp.trace(power), 1e-30)
        power = power @ power
    right = power @ (1 + 0.1 * jnp.cos(jnp.arange(gram.shape[0]) * 2.4))
    right = right / jnp.maximum(jnp.linalg.norm(right), 1e-30)
    left = jax.lax.stop_gradient(narrow @ right)
    left = left / jnp.maximum(jnp.linalg.norm(left), 1e-30)
    return left @ narrow @ right


class Mixing(eqx.Module):
    """The orthogonal matrices between coupling steps, two for each layer.

    The first is a fixed permutation (the same for every key, so that another key triggers
    no recompilation), times learned reflections if `learn`; the second swaps the halves.
    Reflections come in pairs that start equal and so cancel: a new matrix is the
    permutation. The inverse is the transpose, the log-determinant zero.
    """

    reflections: Float[Array, "layers n d"] | None
    dim: int = eqx.field(static=True)
    layers: int = eqx.field(static=True)

    def __init__(self, dim: int, layers: int, rng: np.random.Generator, *, learn: bool):
        self.dim, self.layers = dim, layers
        pairs = min(dim, 8) // 2
        vectors = np.repeat(rng.standard_normal((layers, pairs, dim)), 2, axis=1)
        self.reflections = on_device(vectors) if learn and pairs else None

    def matrices(self) -> Float[Array, "steps d d"]:
        dim, rng = self.dim, np.random.default_rng(0)
        permute = np.stack([np.eye(dim)[rng.permutation(dim)] for _ in range(self.layers)])
        swap = np.broadcast_to(np.roll(np.eye(dim), dim // 2, axis=0), permute.shape)
        first = jnp.asarray(permute)
        if self.reflections is not None:
            unit = self.reflections / jnp.linalg.norm(self.reflections, axis=-1, keepdims=True)
            for i in range(unit.shape[1]):
                v = unit[:, i]
                first = first - 2 * v[:, :, None] * jnp.einsum("li,lij->lj", v, first)[:, None]
        return jnp.stack([first, jnp.asarray(swap)], axis=1).reshape(-1, dim, dim)


class MLP(eqx.Module):
    """Dense layers with an activation between them, none after the last."""

    layers: tuple[Linear, ...]
    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        sizes: tuple[int, ...],
        rng: np.random.Generator,
        activation: Callable = silu,
    ):
        pairs = itertools.pairwise(sizes)
        self.layers = tuple(Linear(n_in, n_out, rng) for n_in, n_out in pairs)
        self.activation = activation

    def __call__(self, value: Flat) -> Flat:
        for layer in self.layers[:-1]:
            value = self.activation(layer(value))
        return self.layers[-1](value)


class Attention(eqx.Module):
    """Queries attend to rows, then each passes a dense layer; residual and normalised."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    dense: MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, rng: np.random.Generator):
        self.query, self.key, self.value, self.out = (Linear(width, width, rng) for _ in range(4))
        self.dense = MLP((width, width, width), rng)
        self.norms = (eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width))
        self.heads = heads

    def __call__(
        self,
        queries: Float[Array, "m width"],
        rows: Float[Array, "n width"],
        mask: Float[Array, " n"],
    ) -> Float[Array, "m width"]:
        split = lambda h: h.reshape(h.shape[0], self.heads, -1)  # noqa: E731
        q, k = split(jax.vmap(self.query)(queries)), split(jax.vmap(self.key)(rows))
        scores = jnp.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
        # A large number, not infinity: a set without rows must not give NaN.
        weights = jax.nn.softmax(jnp.where(mask > 0, scores, -1e30), axis=-1) * mask
        mixed = jnp.einsum("hmn,nhd->mhd", weights, split(jax.vmap(self.value)(rows)))
        h = queries + jax.vmap(self.out)(mixed.reshape(queries.shape))
        h = jax.vmap(self.norms[0])(h)
        return jax.vmap(self.norms[1])(h + jax.vmap(self.dense)(h))
