"""What a prior is to the library: named parameters that can be drawn and, mostly, evaluated.

A user passes a NumPyro distribution, a dictionary of them, or an `ImplicitPrior` that can
only be sampled; `as_prior` makes a `Prior` of any of them. `model.py` makes one of a
NumPyro model.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import Transform

from consilience.types import PRNGKey, Scalar, Theta

BARE = "theta"
"""The name of the only parameter, where the prior is one distribution without a name."""


class Prior(eqx.Module):
    """Named parameters: how to draw them, their density, and their map to real numbers.

    `draw` makes one draw, a dictionary; `density` is its log density, or None where the
    prior can only be sampled. `transforms` map real numbers to each parameter's support.
    """

    draw: Callable[[PRNGKey], Theta] = eqx.field(static=True)
    density: Callable[[Theta], Scalar] | None = eqx.field(static=True)
    transforms: dict[str, Transform]
    names: tuple[str, ...] = eqx.field(static=True)
    _shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    _texts: tuple[str, ...] = eqx.field(static=True)

    def __init__(
        self,
        draw: Callable[[PRNGKey], Theta],
        density: Callable[[Theta], Scalar] | None,
        *,
        supports: dict[str, Constraint],
        shapes: dict[str, tuple[int, ...]],
        texts: dict[str, str],
    ):
        self.draw = draw
        self.density = density
        self.transforms = {name: transform_to(part, name) for name, part in supports.items()}
        self.names = tuple(supports)
        # Tuples, since what is static to a compiled function must hash.
        self._shapes = tuple(shapes[name] for name in self.names)
        self._texts = tuple(texts[name] for name in self.names)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(self.names, self._shapes, strict=True))

    @property
    def texts(self) -> dict[str, str]:
        """A line about each parameter's distribution."""
        return dict(zip(self.names, self._texts, strict=True))

    def n_real(self, name: str) -> int:
        """How many real numbers stand for a parameter."""
        return math.prod(self.transforms[name].inverse_shape(self.shapes[name]))

    def log_prob(self, theta: Theta) -> Scalar:
        """The log density of one set of parameters, minus infinity outside the support."""
        if self.density is None:
            raise ValueError(
                "This prior can only be sampled: it has no density. Pass NumPyro "
                "distributions, or learn a density with `prior=cs.Coupling()` in `cs.fit`."
            )
        return self.density(theta)


@dataclasses.dataclass(frozen=True)
class ImplicitPrior:
    """A prior that can only be sampled: a function of a key that returns named parameters.

    `support` names the constraint of each parameter that is not free to be any real number.

    >>> from numpyro.distributions import constraints
    >>> def draw(key):
    ...     a = jax.random.normal(key)
    ...     return {"a": a, "b": jnp.exp(a) + 1.0}
    >>> prior = ImplicitPrior(draw, support={"b": constraints.greater_than(1.0)})
    """

    draw: Callable[[PRNGKey], Theta]
    support: Mapping[str, Constraint] = dataclasses.field(default_factory=dict)


def as_prior(prior: Any) -> Prior:
    """Whatever a user may pass as a prior, as a `Prior`."""
    if isinstance(prior, ImplicitPrior):
        return _from_draws(prior)
    if isinstance(prior, dist.Distribution):
        prior = {BARE: prior}
    if not isinstance(prior, Mapping) or not prior:
        raise TypeError(
            "A prior is a NumPyro distribution, a dictionary of named ones, or an "
            f"ImplicitPrior; got {_show(prior)}."
        )
    for name, part in prior.items():
        if not isinstance(part, dist.Distribution):
            raise TypeError(
                f"The prior of {name!r} must be a NumPyro distribution, got {_show(part)}."
            )
    parts = {str(name): part.to_event() for name, part in prior.items()}

    def draw(key: PRNGKey) -> Theta:
        keys = jax.random.split(key, len(parts))
        return {n: p.sample(k) for (n, p), k in zip(parts.items(), keys, strict=True)}

    def density(theta: Theta) -> Scalar:
        return sum(
            (log_prob_in_support(part, theta[name]) for name, part in parts.items()),
            start=jnp.zeros(()),
        )

    return Prior(
        draw=draw,
        density=density,
        supports={name: part.support for name, part in parts.items()},
        shapes={name: part.event_shape for name, part in parts.items()},
        texts={name: describe(part) for name, part in parts.items()},
    )


def _from_draws(prior: ImplicitPrior) -> Prior:
    shapes = jax.eval_shape(prior.draw, jax.random.key(0))
    if not isinstance(shapes, Mapping):
        raise TypeError(
            "An ImplicitPrior's function must return a dictionary of named parameters, "
            f"got {_show(shapes)}."
        )
    unknown = set(prior.support) - set(shapes)
    if unknown:
        raise ValueError(
            f"The support names {sorted(unknown)}, which the prior does not draw: "
            f"it draws {sorted(shapes)}."
        )
    support = {name: prior.support.get(name, constraints.real) for name in shapes}
    return Prior(
        draw=prior.draw,
        density=None,
        supports=support,
        shapes={name: leaf.shape for name, leaf in shapes.items()},
        texts={name: f"drawn on {part}" for name, part in support.items()},
    )


def log_prob_in_support(part: dist.Distribution, value) -> Scalar:
    """The log density, minus infinity outside the support (NumPyro leaves that undefined)."""
    inside = jnp.all(part.support(value))
    safe = jnp.where(inside, value, part.support.feasible_like(value))
    return jnp.where(inside, jnp.sum(part.log_prob(safe)), -jnp.inf)


def transform_to(support: Constraint, name: str) -> Transform:
    """The map from real numbers to a support, or an error that says why there is none."""
    try:
        if not support.is_discrete:
            return biject_to(support)
        reason = "its values are discrete: sum over them in the likelihood, and leave it out"
    except NotImplementedError:
        reason = "NumPyro knows no map from real numbers to it"
    raise ValueError(f"The prior of {name!r} has the support {support}, but {reason}.")


def describe(part: dist.Distribution) -> str:
    """A distribution in a line, the same for the same distribution in every process."""
    while isinstance(part, dist.Independent | dist.ExpandedDistribution):
        part = part.base_dist
    if isinstance(part, dist.MaskedDistribution | dist.TransformedDistribution):
        inner = describe(part.base_dist)
        return f"{type(part).__name__}({inner})"
    numbers = {n: getattr(part, n) for n in part.arg_constraints if hasattr(part, n)}
    shown = ", ".join(f"{name}={_number(value)}" for name, value in numbers.items())
    return f"{type(part).__name__}({shown})"


def _number(value) -> str:
    flat = np.asarray(value, dtype=float).ravel()
    # Shortened for people; the sum keeps long vectors that differ apart.
    if flat.size > 4:
        return f"<{flat.size} numbers, sum {flat.sum():.6g}>"
    text = ", ".join(f"{v:.6g}" for v in flat)
    return text if flat.size == 1 else f"[{text}]"


def _show(value) -> str:
    return f"{type(value).__name__} {value!r}"[:120]
