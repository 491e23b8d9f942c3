r"""Conditional densities $q(v \mid c)$: what a user writes, and what the library calls.

A posterior, a learned likelihood and a learned prior are conditional densities. The user passes
a description, a `ConditionalDensity`; once shapes are known its `build` returns a network.
The network is a `Density`, written for one value and one condition, or a `BatchedDensity`,
which takes many at once. `Vectorized` makes the second of the first.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from consilience.core.types import Flat, PRNGKey, Scalar
from consilience.networks.base import Numbers, Vectors

T = TypeVar("T")

Context: TypeAlias = Any
"""What a density needs of its conditions: arrays that share their leading axes."""

Noise: TypeAlias = Any
"""The random numbers that draws are made from: arrays that share the leading axes of the draws."""


@runtime_checkable
class Density(Protocol):
    """A network with the density of one value under one condition.

    **How to write your own.** Write an Equinox module; its arrays are trained.

    `log_prob(value, condition)`: the log density of a vector under a vector, differentiable
    in the weights and in both vectors. Values are standardised and unconstrained.
    `sample(key, condition)`: one draw, a vector.

    Both are vectorised with `jax.vmap`; what depends on the condition alone is computed once
    for all values under it. Where self-consistency takes the log density of a draw, the draw
    is a constant: `sample` need not be differentiable.

    `penalty()`, which is optional, returns a number that is added to the training loss.

    For dropout, or for draws whose density costs nothing more, write a `BatchedDensity`.

    >>> class Gaussian(eqx.Module):
    ...     weight: jax.Array
    ...     log_sd: jax.Array
    ...
    ...     def log_prob(self, value, condition):
    ...         z = (value - self.weight @ condition) / jnp.exp(self.log_sd)
    ...         return jnp.sum(jax.scipy.stats.norm.logpdf(z) - self.log_sd)
    ...
    ...     def sample(self, key, condition):
    ...         noise = jax.random.normal(key, self.log_sd.shape)
    ...         return self.weight @ condition + jnp.exp(self.log_sd) * noise
    >>> density = Gaussian(jnp.ones((2, 3)), jnp.zeros(2))
    >>> isinstance(density, Density)
    True
    """

    def log_prob(self, value: Flat, condition: Flat, /) -> Scalar:
        """The log density of one value under one condition."""
        ...

    def sample(self, key: PRNGKey, condition: Flat, /) -> Flat:
        """One draw under one condition."""
        ...


@runtime_checkable
class Penalized(Protocol):
    """A density with a regularisation term."""

    def penalty(self) -> Scalar:
        """What the training loss gets beside the log density."""
        ...


@runtime_checkable
class ConditionalDensity(Protocol):
    """The description of a conditional density: what `cs.fit` takes as `posterior=`,
    `likelihood=` and `prior=`.

    `cs.Coupling` is one.

    **How to write your own.** Write a frozen dataclass with a method `build`. Fields that are
    numbers, words, tuples of them, or further such dataclasses go into the file of a saved fit;
    `cs.load(path, model, parts=[...])` then takes the class. A description with other fields
    can be saved too, and is passed to `parts` as an instance.

    `build(rng, *, dim, condition)` returns a `Density` or a `BatchedDensity` of values of
    length `dim` under conditions of length `condition`, which is 0 for a prior. `rng` is a NumPy
    generator for the first weights; libraries that take a JAX key get one from it, as below.

    >>> import dataclasses
    >>> import consilience as cs, numpyro.distributions as dist
    >>> class LinearGaussian(eqx.Module):
    ...     linear: eqx.nn.Linear
    ...     log_sd: jax.Array
    ...
    ...     def log_prob(self, value, condition):
    ...         z = (value - self.linear(condition)) / jnp.exp(self.log_sd)
    ...         return jnp.sum(jax.scipy.stats.norm.logpdf(z) - self.log_sd)
    ...
    ...     def sample(self, key, condition):
    ...         noise = jax.random.normal(key, self.log_sd.shape)
    ...         return self.linear(condition) + jnp.exp(self.log_sd) * noise
    >>> @dataclasses.dataclass(frozen=True)
    ... class Linear:
    ...     sd: float = 1.0
    ...
    ...     def build(self, rng, *, dim, condition):
    ...         key = jax.random.key(int(rng.integers(2**31)))
    ...         linear = eqx.nn.Linear(condition, dim, key=key)
    ...         return LinearGaussian(linear, jnp.full(dim, jnp.log(self.sd)))
    >>> model = cs.Model(dist.Normal(0, 1), lambda key, t: t + jax.random.normal(key, (3,)))
    >>> sims = cs.simulate(model, 128, key=jax.random.key(0))
    >>> fit = cs.fit(
    ...     model, sims, key=jax.random.key(1), posterior=Linear(sd=0.5),
    ...     self_consistency=False, epochs=2, progress=False,
    ... )
    >>> fit.recipe.posterior
    Linear(sd=0.5)
    """

    def build(
        self, rng: np.random.Generator, /, *, dim: int, condition: int
    ) -> "Density | BatchedDensity":
        """A new network for values of length `dim` under conditions of length `condition`."""
        ...


class Dropout(NamedTuple):
    """Units are dropped at random: for the first `first` of the values, or for all."""

    key: PRNGKey
    first: int | None = None


class BatchedDensity(eqx.Module):
    """A network with the density of many values under many conditions: what the library calls.

    **How to write your own.** Most authors write a `Density` and get this interface by
    `jax.vmap`. Subclass this one where you can do better: `Flow`, the network of `cs.Coupling`,
    computes large products and takes the log density of a draw from the pass that made it.

    A context, what `prepare` returns, is a tree of arrays. Below it has no leading axes, or
    those of several conditions; values have the same leading axes, then any more for several
    values under each condition, then their own. Results have one number for each value.

    >>> class Standard(BatchedDensity):
    ...     dim: int
    ...     dropout = 0.0
    ...
    ...     def prepare(self, condition):
    ...         return condition
    ...
    ...     def log_prob(self, value, context, dropout=None):
    ...         return jnp.sum(jax.scipy.stats.norm.logpdf(value), axis=-1)
    ...
    ...     def noise(self, key, shape):
    ...         return jax.random.normal(key, (*shape, self.dim))
    ...
    ...     def values(self, noise, context):
    ...         return noise
    ...
    ...     def draw(self, noise, context):
    ...         return noise, self.log_prob(noise, context)
    ...
    ...     def sample(self, key, context, shape=()):
    ...         return self.draw(self.noise(key, (*context.shape[:-1], *shape)), context)
    ...
    ...     def starts(self, key, context, n):
    ...         return self.sample(key, context, (n,))
    ...
    ...     def from_base(self, point, context):
    ...         return point, jnp.zeros(point.shape[:-1])
    ...
    ...     def penalty(self):
    ...         return jnp.zeros(())
    >>> Standard(dim=2).sample(jax.random.key(0), jnp.ones((5, 3)), (4,))[1].shape
    (5, 4)
    """

    dim: eqx.AbstractVar[int]

    @property
    @abc.abstractmethod
    def dropout(self) -> float:
        """The share of units that `log_prob` drops where it is told to."""

    @abc.abstractmethod
    def prepare(self, condition: Flat) -> Context:
        """What the density needs of one condition, to be shared by all values under it."""

    @abc.abstractmethod
    def log_prob(self, value: Vectors, context: Context, dropout: Dropout | None = None) -> Numbers:
        """The log densities of values, with dropout where it is given."""

    @abc.abstractmethod
    def noise(self, key: PRNGKey, shape: tuple[int, ...]) -> Noise:
        """The random numbers of draws of this shape."""

    @abc.abstractmethod
    def values(self, noise: Noise, context: Context) -> Vectors:
        """The draws that noise makes."""

    @abc.abstractmethod
    def draw(self, noise: Noise, context: Context) -> tuple[Vectors, Numbers]:
        """The draws that noise makes, constant in differentiation, and their log densities."""

    @abc.abstractmethod
    def sample(
        self, key: PRNGKey, context: Context, shape: tuple[int, ...] = ()
    ) -> tuple[Vectors, Numbers]:
        """Draws of this shape under each condition, and their log densities, as `draw`."""

    @abc.abstractmethod
    def starts(self, key: PRNGKey, context: Context, n: int) -> tuple[Vectors, Numbers]:
        """Draws in the space that Markov chains run in, and their log densities there."""

    @abc.abstractmethod
    def from_base(self, point: Vectors, context: Context) -> tuple[Vectors, Numbers]:
        """The values at points of the chains' space, and the log-determinant of that map."""

    @abc.abstractmethod
    def penalty(self) -> Scalar:
        """What the training loss gets beside the log density."""


class Vectorized(BatchedDensity):
    """A density of one value under one condition, for many.

    Noise is a random key for each draw, and chains run in the space of the values.
    """

    density: Density
    dim: int = eqx.field(static=True)
    dropout = 0.0

    def prepare(self, condition: Flat) -> Context:
        return condition

    def log_prob(self, value: Vectors, context: Context, dropout: Dropout | None = None) -> Numbers:
        return _each(self.density.log_prob, value.ndim - 1, context)(value, context)

    def noise(self, key: PRNGKey, shape: tuple[int, ...]) -> Noise:
        return jax.random.split(key, shape)

    def values(self, noise: Noise, context: Context) -> Vectors:
        return _each(self.density.sample, noise.ndim, context)(noise, context)

    def draw(self, noise: Noise, context: Context) -> tuple[Vectors, Numbers]:
        values = freeze(self).values(noise, jax.lax.stop_gradient(context))
        return values, self.log_prob(values, context)

    def sample(
        self, key: PRNGKey, context: Context, shape: tuple[int, ...] = ()
    ) -> tuple[Vectors, Numbers]:
        return self.draw(self.noise(key, (*context.shape[:-1], *shape)), context)

    def starts(self, key: PRNGKey, context: Context, n: int) -> tuple[Vectors, Numbers]:
        return self.sample(key, context, (n,))

    def from_base(self, point: Vectors, context: Context) -> tuple[Vectors, Numbers]:
        return point, jnp.zeros(point.shape[:-1], point.dtype)

    def penalty(self) -> Scalar:
        return self.density.penalty() if isinstance(self.density, Penalized) else jnp.zeros(())


def freeze(tree: T) -> T:
    """A tree whose arrays are constants in differentiation."""
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(arrays), rest)


def _each(function: Callable, lead: int, context: Float[Array, "*conditions c"]) -> Callable:
    """A function of one value, with `lead` leading axes, and of the condition it is under."""
    shared = context.ndim - 1
    for _ in range(lead - shared):
        function = jax.vmap(function, in_axes=(0, None))
    for _ in range(shared):
        function = jax.vmap(function)
    return function


def build_density(
    spec: ConditionalDensity, rng: np.random.Generator, *, dim: int, condition: int
) -> BatchedDensity:
    """The network of a description, for many values; refused where it is not a density."""
    name = getattr(spec, "__name__", type(spec).__name__)
    if isinstance(spec, type) or not isinstance(spec, ConditionalDensity):
        raise TypeError(
            "A posterior, likelihood or prior is an object with the method build(rng, *, dim, "
            f"condition), such as cs.Coupling(), got {name}."
        )
    built: Any = spec.build(rng, dim=dim, condition=condition)
    if isinstance(built, BatchedDensity):
        return built
    if not isinstance(built, eqx.Module) or not isinstance(built, Density):
        raise TypeError(
            f"{name}.build must return an Equinox module with log_prob(value, condition) and "
            f"sample(key, condition), got {type(built).__name__}."
        )
    _check_shapes(built, name, dim, condition)
    return Vectorized(density=built, dim=dim)


def _check_shapes(density: Density, name: str, dim: int, condition: int):
    """Refuse a density that does not take and return vectors of these lengths."""
    vector = lambda n: jax.ShapeDtypeStruct((n,), jnp.result_type(float))  # noqa: E731
    key = jax.eval_shape(lambda: jax.random.key(0))
    found = {
        "log_prob(value, condition)": (
            eqx.filter_eval_shape(density.log_prob, vector(dim), vector(condition)),
            (),
        ),
        "sample(key, condition)": (
            eqx.filter_eval_shape(density.sample, key, vector(condition)),
            (dim,),
        ),
    }
    for call, (out, expected) in found.items():
        shape = getattr(out, "shape", type(out).__name__)
        if shape != expected:
            raise ValueError(
                f"{call} of what {name}.build returns must have the shape {expected} for a value "
                f"of length {dim}, got {shape}."
            )
