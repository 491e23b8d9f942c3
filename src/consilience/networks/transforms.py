"""The transforms of a coupling flow: monotone maps of single numbers, set by raw parameters."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.networks import spline

Many = Float[Array, "*d"]
Raw = Float[Array, "p *d"]


@runtime_checkable
class CouplingTransform(Protocol):
    """A monotone map of single numbers: what `cs.Coupling(transform=...)` takes.

    `cs.Spline` and `cs.Affine` are two.

    **How to write your own.** Write a frozen dataclass with a property and a call.

    `n_raw`: how many raw parameters each number takes. A network computes them; they are any
    real numbers, and near zero in a new network.
    `__call__(value, raw, *, inverse)`: the transformed values and the logarithms of the
    derivative, for values of any shape and `raw` with one more axis in front, of length `n_raw`.
    With `inverse=True`, the inverse map and its own log derivative. It must invert numbers of
    any size, and be differentiable.

    Training then takes the derivative with `jax.vjp`. A transform whose derivative is known in
    closed form can have it computed faster: see `RecordedTransform`.

    >>> import consilience as cs
    >>> @dataclasses.dataclass(frozen=True)
    ... class Sinh:
    ...     strength: float = 0.5
    ...     n_raw = 2
    ...
    ...     def __call__(self, value, raw, *, inverse):
    ...         shift, log_scale = raw[0], self.strength * jnp.tanh(raw[1])
    ...         if inverse:
    ...             inner = jnp.arcsinh(value) * jnp.exp(-log_scale)
    ...             slope = jnp.log(jnp.cosh(inner)) - log_scale - jnp.log1p(value**2) / 2
    ...             return jnp.sinh(inner) - shift, slope
    ...         inner = jnp.arcsinh(value + shift) * jnp.exp(log_scale)
    ...         slope = jnp.log(jnp.cosh(inner)) + log_scale - jnp.log1p((value + shift) ** 2) / 2
    ...         return jnp.sinh(inner), slope
    >>> flow = cs.Coupling(Sinh(), layers=1).build(jax.random.key(0), dim=2, condition=3)
    >>> flow.log_prob(jnp.zeros(2), flow.prepare(jnp.ones(3))).shape
    ()
    """

    @property
    def n_raw(self) -> int:
        """How many raw parameters each number takes."""
        ...

    def __call__(self, value: Many, raw: Raw, /, *, inverse: bool) -> tuple[Many, Many]:
        """The transformed values, and the log derivative at each."""
        ...


@runtime_checkable
class RecordedTransform(CouplingTransform, Protocol):
    """A transform that computes its own derivative from a record of the pass, as `cs.Spline`."""

    def record(self, value: Many, raw: Raw, /, *, inverse: bool) -> tuple[Many, Many, Any]:
        """The transform, and what `pull` needs of it."""
        ...

    def pull(
        self, value: Many, saved: Any, grad_value: Many, grad_log_det: Many, /
    ) -> tuple[Many, Raw]:
        """The derivative of the way forward, for the value and the raw parameters."""
        ...


def record(transform: CouplingTransform, value: Many, raw: Raw, *, inverse: bool):
    """A transform, and what `pull` needs of it: the raw parameters, unless it says otherwise."""
    if isinstance(transform, RecordedTransform):
        return transform.record(value, raw, inverse=inverse)
    return *transform(value, raw, inverse=inverse), raw


def pull(transform: CouplingTransform, value: Many, saved, grad_value: Many, grad_log_det: Many):
    """The derivative of the way forward, for the value and the raw parameters."""
    if isinstance(transform, RecordedTransform):
        return transform.pull(value, saved, grad_value, grad_log_det)
    forward = lambda *at: transform(*at, inverse=False)  # noqa: E731
    return jax.vjp(forward, value, saved)[1]((grad_value, grad_log_det))


@dataclasses.dataclass(frozen=True)
class Spline:
    """Monotone rational-quadratic splines on `[-bound, bound]`, the identity beyond."""

    bins: int = 8
    bound: float = 5.0

    @property
    def n_raw(self) -> int:
        return spline.n_raw(self.bins)

    def __call__(self, value: Many, raw: Raw, *, inverse: bool):
        return spline.spline(value, raw, bound=self.bound, inverse=inverse)

    def record(self, value: Many, raw: Raw, *, inverse: bool):
        """The transform, and what `pull` needs of it."""
        return spline.record(value, raw, bound=self.bound, inverse=inverse)

    def pull(self, value: Many, saved, grad_value: Many, grad_log_det: Many):
        """The derivative of the way forward, for the value and the raw parameters."""
        return spline.pull(value, saved, grad_value, grad_log_det, bound=self.bound)


@dataclasses.dataclass(frozen=True)
class Affine:
    """A shift, and a scale between `exp(-limit)` and `exp(limit)`."""

    limit: float = 3.0

    @property
    def n_raw(self) -> int:
        return 2

    def __call__(self, value: Many, raw: Raw, *, inverse: bool):
        shift, log_scale = raw[0], self.limit * jnp.tanh(raw[1] / self.limit)
        if inverse:
            return (value - shift) * jnp.exp(-log_scale), -log_scale
        return value * jnp.exp(log_scale) + shift, log_scale
