"""Summary networks: data of any shape to a vector that a posterior is conditioned on.

A description (`DeepSet()`, `SetTransformer()`, `Convolutions()`, `Dense()`, `Identity()`)
builds a network for the shape of the data. `Summary` says how to write another.
"""

import dataclasses
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.random import Generator

from consilience.core.types import Flat, SummaryNetwork
from consilience.model.data import Layout, Series, Set
from consilience.networks.layers import MLP, Attention, Linear, normal, silu

Named = dict[str, Array]

Pooling: TypeAlias = Literal["mean", "max"]

KERNEL = 5
"""How many steps of a series a convolution sees at once."""


@runtime_checkable
class Summary(Protocol):
    """The description of a summary network: what `cs.fit` takes as `summary=`.

    `cs.DeepSet`, `cs.SetTransformer`, `cs.Convolutions`, `cs.Dense` and `cs.Identity` are such.

    **How to write your own.** The simplest is an Equinox module, passed as it is. It is called
    with one standardised dataset, a dictionary of named arrays (`"data"` where x is one array),
    and returns a vector. Its arrays are trained. `cs.load(path, model, parts=[...])` takes an
    instance of it.

    A network whose weights depend on the shape of the data gets a description: a frozen
    dataclass with a method `build`. `cs.load` then takes the class.

    `build(rng, layout, dim)` returns such a module. `rng` is a NumPy generator for the first
    weights; `layout` knows the data: `layout.features(x)` are a dataset's rows with their side
    information, of the shape `(layout.rows, layout.n_features)`, and `layout.mask(x)` is 1 for
    rows that are there and 0 for padding. `dim` is the number of parameters.

    >>> import jax, consilience as cs, numpyro.distributions as dist
    >>> class Sums(eqx.Module):
    ...     weight: jax.Array
    ...     layout: object = eqx.field(static=True)
    ...
    ...     def __call__(self, x):
    ...         rows = self.layout.features(x) @ self.weight
    ...         return self.layout.mask(x) @ jax.nn.tanh(rows)
    >>> @dataclasses.dataclass(frozen=True)
    ... class SumOf:
    ...     size: int = 4
    ...
    ...     def build(self, rng, layout, dim):
    ...         weight = rng.standard_normal((layout.n_features, self.size))
    ...         return Sums(jnp.asarray(weight, float), layout)
    >>> model = cs.Model(
    ...     dist.Normal(0, 1), lambda key, t: t + jax.random.normal(key, (5, 1)), data=cs.Set()
    ... )
    >>> sims = cs.simulate(model, 128, key=jax.random.key(0))
    >>> fit = cs.fit(
    ...     model, sims, key=jax.random.key(1), summary=SumOf(size=3), epochs=2,
    ...     posterior=cs.Coupling(layers=1, width=8), self_consistency=False, progress=False,
    ... )
    >>> fit.recipe.summary
    SumOf(size=3)
    """

    def build(self, rng: Generator, layout: Layout, dim: int, /) -> SummaryNetwork:
        """A new network for data of this layout, about `dim` parameters."""
        ...


@dataclasses.dataclass(frozen=True)
class Identity:
    """No network: data and side information, flat. For short vectors."""

    def build(self, rng: Generator, layout: Layout, dim: int) -> "_Identity":
        return _Identity(layout)


class _Identity(eqx.Module):
    layout: Layout = eqx.field(static=True)

    def __call__(self, x: Named) -> Flat:
        return self.layout.features(x).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Dense:
    """Dense layers with a skip connection, for long vectors.

    `out`: the length of the summary; by default twice the number of parameters plus four.
    """

    out: int | None = None
    width: int = 128
    depth: int = 2

    def build(self, rng: Generator, layout: Layout, dim: int) -> "_Dense":
        return _Dense(self, rng, layout, self.out or default_size(dim))


class _Dense(eqx.Module):
    layout: Layout = eqx.field(static=True)
    skip: Linear
    layers: MLP

    def __init__(self, spec: Dense, rng: Generator, layout: Layout, out: int):
        n = layout.n_features * layout.rows
        self.layout = layout
        self.skip = Linear(n, out, rng)
        self.layers = MLP((n, *[spec.width] * spec.depth, out), rng)

    def __call__(self, x: Named) -> Flat:
        flat = self.layout.features(x).reshape(-1)
        return self.skip(flat) + self.layers(flat)


@dataclasses.dataclass(frozen=True)
class Convolutions:
    """Strided convolutions along time, then dense layers, for series.

    Each block halves the length, until at most eight steps are left.
    """

    out: int | None = None
    width: int = 32

    def build(self, rng: Generator, layout: Layout, dim: int) -> "_Convolutions":
        return _Convolutions(self, rng, layout, self.out or default_size(dim))


class _Convolutions(eqx.Module):
    layout: Layout = eqx.field(static=True)
    blocks: tuple[Linear, ...]
    head: MLP

    def __init__(self, spec: Convolutions, rng: Generator, layout: Layout, out: int):
        channels, length, blocks = layout.n_features, layout.rows, []
        while length > 8:
            blocks.append(Linear(KERNEL * channels, spec.width, rng))
            channels, length = spec.width, (length + 1) // 2
        self.layout = layout
        self.blocks = tuple(blocks)
        self.head = MLP((channels * length, 4 * spec.width, out), rng)

    def __call__(self, x: Named) -> Flat:
        h = self.layout.features(x)
        for block in self.blocks:
            # A convolution as one product over windows: faster on a CPU than the operation.
            length = (h.shape[0] + 1) // 2
            padded = jnp.pad(h, ((KERNEL // 2, KERNEL), (0, 0)))
            windows = [padded[i : i + 2 * length : 2] for i in range(KERNEL)]
            h = silu(jax.vmap(block)(jnp.concatenate(windows, axis=1)))
        return self.head(h.reshape(-1))


@dataclasses.dataclass(frozen=True)
class DeepSet:
    """Equivariant blocks, then pooling over rows, for sets (Zaheer et al. 2017).

    `pooling`: "mean", "max" or both. The maximum sees extremes, which matter where a
    parameter bounds the data, and overfits small budgets where it does not.
    """

    out: int | None = None
    width: int = 64
    blocks: int = 2
    pooling: tuple[Pooling, ...] = ("mean",)

    def __post_init__(self):
        if tuple(self.pooling) not in (("mean",), ("max",), ("mean", "max")):
            raise ValueError(
                f'pooling must be ("mean",), ("max",) or ("mean", "max"), got {self.pooling!r}.'
            )

    def build(self, rng: Generator, layout: Layout, dim: int) -> "_DeepSet":
        return _DeepSet(self, rng, layout, self.out or default_size(dim))


class _DeepSet(eqx.Module):
    layout: Layout = eqx.field(static=True)
    rows: tuple[Linear, ...]
    pooled: tuple[Linear, ...]
    head: MLP
    skip: Linear
    pooling: tuple[Pooling, ...] = eqx.field(static=True)

    def __init__(self, spec: DeepSet, rng: Generator, layout: Layout, out: int):
        sizes = [layout.n_features, *[spec.width] * (spec.blocks - 1)]
        self.layout = layout
        self.rows = tuple(Linear(n, spec.width, rng) for n in sizes)
        n_pools = len(spec.pooling)
        self.pooling = spec.pooling
        self.pooled = tuple(Linear(n_pools * n, spec.width, rng) for n in sizes)
        self.head = MLP((n_pools * spec.width + 1, spec.width, spec.width, out), rng)
        self.skip = Linear(n_pools * layout.n_features, out, rng)

    def __call__(self, x: Named) -> Flat:
        h, mask = self.layout.features(x), self.layout.mask(x)
        # Means of the data themselves go straight through: often they say most.
        direct = self.skip(_pool(h, mask, self.pooling))
        for rows, pooled in zip(self.rows, self.pooled, strict=True):
            shared = pooled(_pool(h, mask, self.pooling))
            h = jax.vmap(lambda row, f=rows, s=shared: silu(f(row) + s))(h)
        # Pooling forgets how many rows there were, and the posterior must not.
        count = jnp.log1p(jnp.sum(mask))[None] - jnp.log1p(self.layout.rows)
        return direct + self.head(jnp.concatenate([_pool(h, mask, self.pooling), count]))


def _pool(
    h: Float[Array, "rows n"], mask: Float[Array, " rows"], pooling: tuple[Pooling, ...]
) -> Float[Array, " m"]:
    there = mask[:, None] > 0
    parts = []
    if "mean" in pooling:
        total = jnp.sum(jnp.where(there, h, 0.0), axis=0)
        parts.append(total / jnp.maximum(jnp.sum(mask), 1.0))
    if "max" in pooling:
        top = jnp.max(jnp.where(there, h, -jnp.inf), axis=0)
        parts.append(jnp.where(jnp.isfinite(top), top, 0.0))
    return jnp.concatenate(parts)


@dataclasses.dataclass(frozen=True)
class SetTransformer:
    """Induced attention among rows, then pooling by attention, for sets whose rows interact.

    Costs more than a `DeepSet` (Lee et al. 2019, arXiv:1810.00825).
    """

    out: int | None = None
    width: int = 64
    heads: int = 4
    inducing: int = 16
    blocks: int = 2

    def build(self, rng: Generator, layout: Layout, dim: int) -> "_SetTransformer":
        return _SetTransformer(self, rng, layout, self.out or default_size(dim))


class _SetTransformer(eqx.Module):
    layout: Layout = eqx.field(static=True)
    embed: Linear
    inducing: Float[Array, "blocks m width"]
    gather: tuple[Attention, ...]
    spread: tuple[Attention, ...]
    seed: Float[Array, "1 width"]
    pool: Attention
    head: MLP

    def __init__(self, spec: SetTransformer, rng: Generator, layout: Layout, out: int):
        attention = lambda: Attention(spec.width, spec.heads, rng)  # noqa: E731
        self.layout = layout
        self.embed = Linear(layout.n_features, spec.width, rng)
        self.inducing = normal(rng, (spec.blocks, spec.inducing, spec.width))
        self.gather = tuple(attention() for _ in range(spec.blocks))
        self.spread = tuple(attention() for _ in range(spec.blocks))
        self.seed = normal(rng, (1, spec.width))
        self.pool = attention()
        self.head = MLP((spec.width + 1, spec.width, out), rng)

    def __call__(self, x: Named) -> Flat:
        h, mask = jax.vmap(self.embed)(self.layout.features(x)), self.layout.mask(x)
        for points, gather, spread in zip(self.inducing, self.gather, self.spread, strict=True):
            induced = gather(points, h, mask)
            h = spread(h, induced, jnp.ones(induced.shape[0]))
        count = jnp.log1p(jnp.sum(mask))[None] - jnp.log1p(self.layout.rows)
        return self.head(jnp.concatenate([self.pool(self.seed, h, mask)[0], count]))


def default_size(dim: int) -> int:
    """The length of a summary of data about `dim` parameters."""
    return 2 * dim + 4


def default_summary(layout: Layout, *, large: bool = False) -> Summary:
    """A sensible network for data of a kind and shape; `large` where it cannot overfit."""
    if isinstance(layout.kind, Set):
        return DeepSet(width=128, blocks=3) if large else DeepSet()
    if isinstance(layout.kind, Series) and layout.rows > 8:
        return Convolutions()
    return Identity() if layout.n_features * layout.rows <= 32 else Dense()
