r"""Named, constrained parameters to and from one flat, unconstrained, standardised vector.

For parameters $\theta = T(v)$ with $v$ free, and $u = (v - m) / s$, a density of $u$ becomes
one of $\theta$ by $\log p(\theta) = \log q(u) - \sum \log s - \log|\det \partial T/\partial v|$.
Networks live in $u$; everything that leaves the library is in $\theta$.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool
from numpyro.distributions.transforms import Transform

from consilience.compiling import compiled, on_device
from consilience.priors import BARE, Prior
from consilience.types import Flat, Scalar, Theta

LIMIT = 80.0
"""Free values are kept within this bound: beyond it `exp` leaves float32."""


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
            log_det -= jnp.sum(transform.log_abs_det_jacobian(v, value))
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
        v = jnp.clip(u * self.scale + self.loc, -LIMIT, LIMIT)
        theta, log_det = {}, -jnp.sum(jnp.log(self.scale))
        for name, part in zip(self.names, jnp.split(v, np.cumsum(self.sizes)[:-1]), strict=True):
            transform = self.transforms[name]
            free = part.reshape(transform.inverse_shape(self.shapes[name]))
            theta[name] = transform(free)
            log_det -= jnp.sum(transform.log_abs_det_jacobian(free, theta[name]))
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
        arrays = {name: np.asarray(theta[name]) for name in self.names}
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


def parameter_space(prior: Prior, theta: Theta) -> ParameterSpace:
    """The space of a prior, standardised by the parameters of a training set."""
    raw = ParameterSpace(prior)
    v = np.asarray(to_vectors(raw, raw.check(theta)))
    # Quantiles, not moments: heavy tails must not set the scale.
    low, loc, high = np.quantile(v, [0.25, 0.5, 0.75], axis=0)
    scale = (high - low) / 1.349
    return ParameterSpace(prior, loc, np.where(scale > 0, scale, 1.0))


@compiled
def to_vectors(space: ParameterSpace, theta: Theta):
    return jax.vmap(lambda t: space.to_vector(t)[0])(theta)
