"""Which priors are refused: those without one proper density, and those that cannot be drawn."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint

from consilience.core.types import PRNGKey, Theta
from consilience.model.fingerprint import describe

CHECKED_DRAWS = 4
"""Draws of a prior that are looked at."""


def parts_of(part: dist.Distribution) -> Iterator[dist.Distribution]:
    """A distribution and all that it is made of."""
    yield part
    for value in vars(part).values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, dist.Distribution):
                yield from parts_of(inner)


def is_masked(part: dist.Distribution) -> bool:
    """Whether a mask leaves any of the density out."""
    return isinstance(part, dist.MaskedDistribution) and not np.all(part._mask)


def refuse_improper(part: dist.Distribution, name: str):
    """Refuse a distribution whose draws and density are not those of one proper density."""
    # A factor first: where it is masked too, it is the factor that is of no use.
    for inner in sorted(parts_of(part), key=lambda inner: not isinstance(inner, dist.Unit)):
        reason = _improper(inner)
        if reason is not None:
            raise ValueError(f"The prior of {name!r} {reason}.")


def _improper(part: dist.Distribution) -> str | None:
    if isinstance(part, dist.Delta):
        return (
            "has a point mass (Delta), which has no density to learn: leave the parameter out, and "
            "write its value into the simulator and the likelihood (in a NumPyro model: "
            "numpyro.deterministic)"
        )
    if isinstance(part, HURDLES) and not part.support.is_discrete:
        return f"has a point mass ({type(part).__name__}), which has no density to learn"
    if isinstance(part, dist.ImproperUniform):
        return "is improper (ImproperUniform) and cannot be drawn from: pass a proper prior"
    if isinstance(part, dist.Unit):
        return (
            "comes from numpyro.factor, which changes the density and not the draws: leave it out"
        )
    if isinstance(part, CENSORED):
        return "is censored, which changes the density and not the draws: truncate it instead"
    if is_masked(part):
        return "is masked, which changes the density and not the draws: leave the mask out"
    return None


def _there(*names: str) -> tuple[Any, ...]:
    """Distributions that not every version of NumPyro has."""
    return tuple(getattr(dist, name) for name in names if hasattr(dist, name))


HURDLES = _there("HurdleProbs", "HurdleLogits")
CENSORED = _there(
    "LeftCensoredDistribution", "RightCensoredDistribution", "IntervalCensoredDistribution"
)


def check_draws(part: dist.Distribution, name: str):
    """Refuse a distribution of one value, or of which no draw is finite and in its support."""
    value = part.sample(jax.random.key(0), (CHECKED_DRAWS,))
    rows = lambda array: jnp.reshape(array, (CHECKED_DRAWS, -1)).all(axis=1)  # noqa: E731
    good = rows(jnp.isfinite(value)) & rows(part.support(value))
    if isinstance(good, jax.core.Tracer):
        return
    if not good.any():
        raise ValueError(
            f"The prior of {name!r}, {describe(part)}, draws values that are not finite or not in "
            f"its support, such as {np.asarray(value[0])}: check its numbers."
        )
    if _has_no_width(part.support):
        raise ValueError(
            f"The prior of {name!r}, {describe(part)}, allows one value only where its bounds are "
            "equal: leave what is known out, and write its value into the simulator and the "
            "likelihood."
        )


def _has_no_width(support: Constraint) -> bool:
    """Whether the lower and the upper bound of any entry are the same number."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    low, high = (getattr(support, f"{side}_bound", None) for side in ("lower", "upper"))
    if low is None or high is None:
        return False
    return bool(jnp.any(jnp.asarray(low) == jnp.asarray(high)))


def check_implicit(draw: Callable[[PRNGKey], Theta], support: Mapping[str, Constraint]):
    """Refuse a parameter of which no draw is finite and in its support."""
    draws = [draw(jax.random.key(i)) for i in range(CHECKED_DRAWS)]
    for name, part in support.items():
        values = [jnp.asarray(one[name]) for one in draws]
        good = [jnp.all(jnp.isfinite(value) & jnp.all(part(value))) for value in values]
        if any(isinstance(one, jax.core.Tracer) for one in good) or any(good):
            continue
        raise ValueError(
            f"The prior draws values of {name!r} that are not finite or not in its support, "
            f"{part}, such as {np.asarray(values[0])}: check the function, and "
            "ImplicitPrior(support=...)."
        )
