r"""Named, constrained parameters to and from one flat, unconstrained, standardised vector.

For parameters $\theta = T(v)$ with $v$ free, and $u = (v - m) / s$, a density of $u$ becomes
one of $\theta$ by $\log p(\theta) = \log q(u) - \sum \log s - \log|\det \partial T/\partial v|$.
Networks live in $u$; everything that leaves the library is in $\theta$.
"""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool
from numpyro.distributions import transforms as maps
from numpyro.distributions.transforms import Transform

from consilience.core.arrays import as_numbers, computed_in, finite_rows, warn_if_coarse
from consilience.core.compiling import compiled, on_device
from consilience.core.types import Flat, Scalar, Theta
from consilience.model.priors import BARE, Prior


class ParameterSpace(eqx.Module):
    """The parameters of one prior, as people name them and as networks see them."""

    transforms: dict[str, Transform]
    loc: Flat
    scale: Flat
    names: tuple[str, ...] = eqx.field(static=True)
    sizes: tuple[int, ...] = eqx.field(static=True)
    _shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __init__(self, prior: Prior, loc: ArrayLike | None = None, scale: ArrayLike | None = None):
        self.transforms = prior.transforms
        self.names = prior.names
        self.sizes = tuple(prior.n_real(name) for name in prior.names)
        self._shapes = tuple(prior.shapes[name] for name in prior.names)
        self.loc = on_device(np.zeros(self.dim) if loc is None else loc)
        self.scale = on_device(np.ones(self.dim) if scale is None else scale)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(self.names, self._shapes, strict=True))

    @property
    def dim(self) -> int:
        return sum(self.sizes)

    def to_vector(self, theta: Theta) -> tuple[Flat, Scalar]:
        r"""One set of parameters as $u$, and $\log |\det \partial u / \partial \theta|$."""
        free, log_det = [], jnp.zeros(())
        for name in self.names:
            transform = self.transforms[name]
            value = jnp.asarray(theta[name], dtype=float)
            v = transform.inv(value)
            # A parameter on the bound of a closed support has an infinite free value.
            low, high = free_range(transform, v.shape)
            v = jnp.clip(v, low, high)
            log_det -= _log_det(transform, v, value)
            free.append(jnp.ravel(v))
        u = (jnp.concatenate(free) - self.loc) / self.scale
        return u, log_det - jnp.sum(jnp.log(self.scale))

    def from_vector(self, u: Flat) -> dict[str, jax.Array]:
        """One set of parameters from `u`, always inside the support."""
        return self.from_vector_with_log_det(u)[0]

    def from_vector_with_log_det(self, u: Flat) -> tuple[dict[str, jax.Array], Scalar]:
        r"""One set of parameters from $u$, and $\log |\det \partial u / \partial \theta|$ there.

        Unlike `to_vector` of them, it loses nothing where they touch a bound.
        """
        v = u * self.scale + self.loc
        theta, log_det = {}, -jnp.sum(jnp.log(self.scale))
        for name, part in zip(self.names, jnp.split(v, np.cumsum(self.sizes)[:-1]), strict=True):
            transform = self.transforms[name]
            shape = transform.inverse_shape(self.shapes[name])
            free = jnp.clip(part.reshape(shape), *free_range(transform, shape))
            value = transform(free)
            log_det -= _log_det(transform, free, value)
            # Several values inside the range may still add up to one beyond the largest number.
            largest = jnp.finfo(value.dtype).max
            theta[name] = jnp.clip(value, -largest, largest)
        return theta, log_det

    def contains(self, theta: Theta) -> Bool[Array, ""]:
        """Whether one set of parameters lies in the support."""
        checks = [jnp.all(self.transforms[name].codomain(theta[name])) for name in self.names]
        return jnp.all(jnp.stack(checks))

    def check(self, theta: Any, what: str = "theta") -> dict[str, np.ndarray]:
        """Named arrays with any leading axes, all the same, or an error that says what is off."""
        if not isinstance(theta, Mapping):
            if self.names != (BARE,):
                raise TypeError(
                    f"{what} must be a dictionary of the parameters {list(self.names)}, "
                    f"got {type(theta).__name__}."
                )
            theta = {BARE: theta}
        missing, unknown = set(self.names) - set(theta), set(theta) - set(self.names)
        if missing or unknown:
            raise ValueError(
                f"{what} must name the parameters {list(self.names)}; "
                f"missing: {sorted(missing)}, unknown: {sorted(map(str, unknown))}."
            )
        arrays = {name: as_numbers(theta[name], f"{what}[{name!r}]") for name in self.names}
        leading = set()
        for name, array in arrays.items():
            shape = self.shapes[name]
            if array.shape[array.ndim - len(shape) :] != shape or array.ndim < len(shape):
                raise ValueError(
                    f"{what}[{name!r}] must have the shape (..., {', '.join(map(str, shape))}), "
                    f"got {array.shape}."
                )
            leading.add(array.shape[: array.ndim - len(shape)])
        if len(leading) > 1:
            raise ValueError(
                f"The arrays of {what} must agree in their leading axes, got {sorted(leading)}."
            )
        return arrays


def _log_det(transform: Transform, free: Array, value: Array) -> Scalar:
    if isinstance(_parts(transform)[0], maps.StickBreakingTransform):
        # The logarithm is taken of each entry, and small ones are zero in floating point.
        value = jnp.maximum(value, jnp.finfo(value.dtype).tiny)
    return jnp.sum(transform.log_abs_det_jacobian(free, value))


LINEAR = (maps.IdentityTransform, maps.AffineTransform, maps.ZeroSumTransform)
TRIANGULAR = (
    maps.LowerCholeskyTransform,
    maps.ScaledUnitLowerCholeskyTransform,
    maps.SoftplusLowerCholeskyTransform,
)


def free_range(transform: Transform, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The least and largest free values at which a transform stays inside its support.

    Where it takes an exponential, that leaves the floating-point numbers beyond them. Entries
    that it only shifts and scales have no bound.

    >>> free_range(maps.ExpTransform(), (1,))[1], free_range(maps.OrderedTransform(), (2,))[1]
    (array([87.], dtype=float32), array([inf, 87.], dtype=float32))
    """
    dtype = computed_in()
    reach = np.floor(-np.log(np.finfo(dtype).tiny))
    low, high = np.full(shape, -reach, dtype), np.full(shape, reach, dtype)
    first, rest = _parts(transform)
    linear = all(isinstance(part, LINEAR) for part in rest)
    free = np.inf if linear else np.sqrt(np.finfo(dtype).max)
    if isinstance(first, LINEAR) and linear:
        low[...], high[...] = -free, free
    elif isinstance(first, maps.SoftplusTransform) and linear:
        high[...] = free
    elif isinstance(first, maps.OrderedTransform):
        # The first value is as it is, the others add exponentials; or all that is a logarithm.
        if linear:
            low[..., 0], high[..., 0] = -free, free
        else:
            high[..., 1:] = np.log(reach)
    elif isinstance(first, TRIANGULAR):
        # The values below the diagonal of a triangle of n rows, then the n on it. A covariance
        # is the square of the triangle.
        below = shape[-1] - (math.isqrt(8 * shape[-1] + 1) - 1) // 2
        low[..., :below], high[..., :below] = -free, free
        if not linear:
            low[..., below:], high[..., below:] = -reach / 2, reach / 2
    return low, high


def _parts(transform: Transform) -> tuple[Transform, list[Transform]]:
    """The first of the transforms that a transform is composed of, and the rest."""
    if isinstance(transform, maps.IndependentTransform):
        return _parts(transform.base_transform)
    if isinstance(transform, maps.ComposeTransform):
        first, *rest = transform.parts
        inner, more = _parts(first)
        return inner, [*more, *rest]
    return transform, []


def parameter_space(prior: Prior, theta: Theta) -> ParameterSpace:
    """The space of a prior, standardised by the parameters of a training set."""
    raw = ParameterSpace(prior)
    named = raw.check(theta)
    for name, values in named.items():
        # Entries of a triangle or a simplex may be constant; those of a real vector may not.
        first, rest = _parts(prior.transforms[name])
        free = all(isinstance(part, LINEAR) for part in (first, *rest))
        warn_if_coarse(values, f"The parameter {name!r}", constant_too=free)
    v = np.asarray(to_vectors(raw, named))
    bad = np.flatnonzero(~finite_rows(v))
    if len(bad):
        raise ValueError(
            f"{len(bad)} of {len(v)} simulations, the first at {bad[:5].tolist()}, have parameters "
            f"on the border of their support, to the precision of {v.dtype}, such as a singular "
            "matrix. Choose a prior that keeps away from it, or leave these simulations out."
        )
    # Quantiles, not moments: heavy tails must not set the scale.
    low, loc, high = np.quantile(v, [0.25, 0.5, 0.75], axis=0)
    scale = (high - low) / 1.349
    return ParameterSpace(prior, loc, np.where(scale > 0, scale, 1.0))


@compiled
def to_vectors(space: ParameterSpace, theta: Theta):
    return jax.vmap(lambda t: space.to_vector(t)[0])(theta)
