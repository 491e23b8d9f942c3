r"""Mixtures of networks: the members of a cross-fitted ensemble, and ensembles of several recipes.

$$q(v \mid c) = \sum_m w_m\, q_m(v \mid c_m), \qquad \sum_m w_m = 1.$$

`Ensemble` has equal weights and members of one architecture: their weights are stacked, and a scan
over the members compiles one of them. `Stacked` has weights of its own and parts of any kind. Each
member may have its own summary of the data, so conditions are concatenated: `EnsembleSummary` and
`StackedSummary` make them. Where `shared`, all have the same condition: the parameters, for a
likelihood.
"""

import dataclasses
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.core.compiling import on_device
from consilience.core.types import Flat, PRNGKey, Scalar, SummaryNetwork
from consilience.model.data import Layout
from consilience.networks.base import Numbers, Vectors
from consilience.networks.density import (
    BatchedDensity,
    ConditionalDensity,
    Context,
    Dropout,
    Noise,
    build_density,
    freeze,
)
from consilience.networks.summary import Named, Summary


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The description of a mixture of `members` densities of one kind, with equal weights.

    >>> from consilience.networks.flow import Coupling
    >>> flow = Ensemble(Coupling(layers=1, width=8), members=2)
    >>> density = flow.build(np.random.default_rng(0), dim=2, condition=6)
    >>> density.log_prob(jnp.zeros(2), density.prepare(jnp.ones(6))).shape
    ()
    """

    part: ConditionalDensity
    members: int
    shared: bool = False

    def build(self, rng: np.random.Generator, *, dim: int, condition: int) -> "EnsembleDensity":
        """New members; a condition that is not shared has a part for each of them."""
        each = condition if self.shared else condition // self.members
        built = [
            build_density(self.part, rng, dim=dim, condition=each) for _ in range(self.members)
        ]
        return EnsembleDensity(
            stacked=stack(built), dim=dim, members=self.members, shared=self.shared
        )


@dataclasses.dataclass(frozen=True)
class Stacked:
    """The description of a mixture of densities of different kinds.

    `sizes`: the length of the condition of each part, where conditions are not `shared`.
    """

    parts: tuple[ConditionalDensity, ...]
    sizes: tuple[int, ...]
    shared: bool = False

    def build(self, rng: np.random.Generator, *, dim: int, condition: int) -> "StackedDensity":
        sizes = [condition] * len(self.parts) if self.shared else self.sizes
        built = tuple(
            build_density(part, rng, dim=dim, condition=size)
            for part, size in zip(self.parts, sizes, strict=True)
        )
        even = on_device(np.full(len(built), -np.log(len(built))))
        return StackedDensity(
            parts=built, log_weights=even, dim=dim, sizes=self.sizes, shared=self.shared
        )


@dataclasses.dataclass(frozen=True)
class EnsembleSummary:
    """The description of a summary network for each member, their outputs side by side."""

    part: Summary | eqx.Module
    members: int

    def build(self, rng: np.random.Generator, layout: Layout, dim: int) -> "EnsembleSummaryNetwork":
        one = lambda: _summary(self.part, rng, layout, dim)  # noqa: E731
        return EnsembleSummaryNetwork(stack([one() for _ in range(self.members)]))


@dataclasses.dataclass(frozen=True)
class StackedSummary:
    """The description of several summary networks, their outputs side by side."""

    parts: tuple[Summary | eqx.Module, ...]

    def build(self, rng: np.random.Generator, layout: Layout, dim: int) -> "StackedSummaryNetwork":
        return StackedSummaryNetwork(tuple(_summary(part, rng, layout, dim) for part in self.parts))


def _summary(part: Any, rng: np.random.Generator, layout: Layout, dim: int) -> Any:
    return part if isinstance(part, eqx.Module) else part.build(rng, layout, dim)


def stack(trees: list[Any]) -> Any:
    """Networks of one architecture as one, their arrays along a leading axis.

    >>> stack([jnp.zeros(3), jnp.ones(3)]).shape
    (2, 3)
    """
    arrays, static = zip(*(eqx.partition(tree, eqx.is_array) for tree in trees), strict=True)
    if len({jax.tree.structure(part) for part in (*arrays, *static)}) > 2 or any(
        not eqx.tree_equal(part, static[0]) for part in static[1:]
    ):
        raise ValueError(
            "The members of an ensemble may differ in their arrays alone, and these differ in "
            "something else that `build` draws: keep it in an array, or pass members=1."
        )
    host = jax.device_get(arrays)
    return eqx.combine(jax.tree.map(lambda *a: on_device(np.stack(a)), *host), static[0])


class EnsembleDensity(BatchedDensity):
    """A mixture of densities of one architecture with equal weights.

    Draws are divided evenly among the members, from a random one on.
    """

    stacked: Any
    dim: int = eqx.field(static=True)
    members: int = eqx.field(static=True)
    shared: bool = eqx.field(static=True, default=False)
    dropout = 0.0

    def prepare(self, condition: Flat) -> Context:
        return condition

    def log_prob(self, value: Vectors, context: Context, dropout: Dropout | None = None) -> Numbers:
        one = lambda member, context: member.log_prob(value, context)  # noqa: E731
        each = self._map(one, self._contexts(context))
        return jax.nn.logsumexp(each, axis=0) - jnp.log(self.members)

    def noise(self, key: PRNGKey, shape: tuple[int, ...]) -> Noise:
        k_first, k_noise = jax.random.split(key)
        first = jax.random.randint(k_first, shape, 0, self.members)
        return first, self._first.noise(k_noise, shape)

    def values(self, noise: Noise, context: Context) -> Vectors:
        first, noise = noise
        lead = context.ndim - 1
        if first.ndim == lead:
            # One draw for each condition.
            first, noise = jax.tree.map(lambda a: jnp.expand_dims(a, lead), (first, noise))
            return self.values((first, noise), context)[..., 0, :]
        shape = first.shape
        first, noise = jax.tree.map(
            lambda a: a.reshape(*shape[:lead], -1, *a.shape[len(shape) :]), (first, noise)
        )
        n = first.shape[lead]
        size = -(-n // self.members)
        # Draw i is of the member (first + i) modulo the number of members.
        turn = first[..., :1]
        place = jnp.arange(size * self.members).reshape(size, self.members)
        place = (place - turn[..., None]) % (size * self.members)
        picked = jnp.minimum(place, n - 1).reshape(*shape[:lead], -1)
        mine = jax.tree.map(lambda a: _along(a, picked, lead), noise)
        mine = jax.tree.map(
            lambda a: jnp.moveaxis(
                a.reshape(*a.shape[:lead], size, self.members, *a.shape[lead + 1 :]), lead + 1, 0
            ),
            mine,
        )
        one = lambda member, context, noise: member.values(noise, context)  # noqa: E731
        drawn = jnp.moveaxis(self._map(one, self._contexts(context), mine), 0, lead + 1)
        drawn = drawn.reshape(*shape[:lead], size * self.members, self.dim)
        back = (jnp.arange(n) + turn) % (size * self.members)
        return _along(drawn, back, lead).reshape(*shape, self.dim)

    def draw(self, noise: Noise, context: Context) -> tuple[Vectors, Numbers]:
        values = freeze(self).values(noise, jax.lax.stop_gradient(context))
        return jax.lax.stop_gradient(values), self.log_prob(values, context)

    def sample(
        self, key: PRNGKey, context: Context, shape: tuple[int, ...] = ()
    ) -> tuple[Vectors, Numbers]:
        return self.draw(self.noise(key, (*context.shape[:-1], *shape)), context)

    def starts(self, key: PRNGKey, context: Context, n: int) -> tuple[Vectors, Numbers]:
        return self.sample(key, context, (n,))

    def from_base(self, point: Vectors, context: Context) -> tuple[Vectors, Numbers]:
        return point, jnp.zeros(point.shape[:-1], point.dtype)

    def penalty(self) -> Scalar:
        return jnp.zeros(())

    @property
    def _first(self) -> Any:
        arrays, static = eqx.partition(self.stacked, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda a: a[0], arrays), static)

    def _contexts(self, context: Context) -> Float[Array, "members *conditions c"]:
        """The condition of each member."""
        if self.shared:
            return jnp.broadcast_to(context, (self.members, *context.shape))
        each = context.shape[-1] // self.members
        return jnp.moveaxis(context.reshape(*context.shape[:-1], self.members, each), -2, 0)

    def _map(self, function, conditions: Array, *more):
        """`function` of each member and its context, one member after another."""
        arrays, static = eqx.partition(self.stacked, eqx.is_array)

        def one(part):
            arrays, condition, *more = part
            member = eqx.combine(arrays, static)
            prepare = member.prepare
            for _ in range(condition.ndim - 1):
                prepare = jax.vmap(prepare)
            return function(member, prepare(condition), *more)

        return jax.lax.map(one, (arrays, conditions, *more))


class StackedDensity(BatchedDensity):
    """A mixture of densities of different kinds, with weights."""

    parts: tuple[BatchedDensity, ...]
    log_weights: Float[Array, " parts"]
    dim: int = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)
    shared: bool = eqx.field(static=True, default=False)
    dropout = 0.0

    def prepare(self, condition: Flat) -> Context:
        if self.shared:
            return tuple(part.prepare(condition) for part in self.parts)
        ends = list(itertools.accumulate(self.sizes))[:-1]
        pieces = jnp.split(condition, ends)
        return tuple(p.prepare(c) for p, c in zip(self.parts, pieces, strict=True))

    def log_prob(self, value: Vectors, context: Context, dropout: Dropout | None = None) -> Numbers:
        pairs = zip(self.parts, context, strict=True)
        each = jnp.stack([part.log_prob(value, c) for part, c in pairs], axis=-1)
        return jax.nn.logsumexp(each + jax.nn.log_softmax(self.log_weights), axis=-1)

    def noise(self, key: PRNGKey, shape: tuple[int, ...]) -> Noise:
        k_pick, *keys = jax.random.split(key, 1 + len(self.parts))
        parts = zip(self.parts, keys, strict=True)
        return jax.random.uniform(k_pick, shape), tuple(p.noise(k, shape) for p, k in parts)

    def values(self, noise: Noise, context: Context) -> Vectors:
        pick, noises = noise
        each = [p.values(z, c) for p, z, c in zip(self.parts, noises, context, strict=True)]
        levels = jnp.cumsum(jax.nn.softmax(self.log_weights))[:-1]
        number = jnp.sum(pick[..., None] > levels, axis=-1)
        result = each[0]
        for i, values in enumerate(each[1:], start=1):
            result = jnp.where((number == i)[..., None], values, result)
        return result

    def draw(self, noise: Noise, context: Context) -> tuple[Vectors, Numbers]:
        values = freeze(self).values(noise, jax.lax.stop_gradient(context))
        return jax.lax.stop_gradient(values), self.log_prob(values, context)

    def sample(
        self, key: PRNGKey, context: Context, shape: tuple[int, ...] = ()
    ) -> tuple[Vectors, Numbers]:
        lead = jax.eval_shape(lambda c: self.parts[0].sample(key, c)[1], context[0]).shape
        return self.draw(self.noise(key, (*lead, *shape)), context)

    def starts(self, key: PRNGKey, context: Context, n: int) -> tuple[Vectors, Numbers]:
        return self.sample(key, context, (n,))

    def from_base(self, point: Vectors, context: Context) -> tuple[Vectors, Numbers]:
        return point, jnp.zeros(point.shape[:-1], point.dtype)

    def penalty(self) -> Scalar:
        return jnp.zeros(())


class EnsembleSummaryNetwork(eqx.Module):
    """The summaries of all members, one behind the other."""

    stacked: Any

    def __call__(self, x: Named) -> Flat:
        arrays, static = eqx.partition(self.stacked, eqx.is_array)
        if not jax.tree.leaves(arrays):
            raise ValueError("An ensemble of summaries without weights needs one of them alone.")
        one = lambda arrays: eqx.combine(arrays, static)(x)  # noqa: E731
        return jax.lax.map(one, arrays).reshape(-1)


class StackedSummaryNetwork(eqx.Module):
    """The summaries of all parts, one behind the other."""

    parts: tuple[SummaryNetwork, ...]

    def __call__(self, x: Named) -> Flat:
        return jnp.concatenate([part(x) for part in self.parts])


def _along(array: Array, index: Array, axis: int) -> Array:
    """The entries at `index` along an axis, with any axes behind it."""
    more = array.ndim - index.ndim
    return jnp.take_along_axis(array, index.reshape(*index.shape, *(1,) * more), axis=axis)
