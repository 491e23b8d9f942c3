"""What a prior is to the library: named parameters that can be drawn and, mostly, evaluated.

A user passes a NumPyro distribution, a dictionary of them, or an `ImplicitPrior` that can
only be sampled; `as_prior` makes a `Prior` of any of them. `model.py` makes one of a
NumPyro model.
"""

import dataclasses
import math
import unicodedata
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

from consilience.core.labels import labels
from consilience.core.types import PRNGKey, Scalar, Theta
from consilience.model.fingerprint import agree, describe, describe_briefly, fingerprint
from consilience.model.proper import check_draws, check_implicit, refuse_improper

BARE = "theta"
"""The name of the only parameter, where the prior is one distribution without a name."""


COMPARED_DRAWS = 4
"""Draws that tell priors apart which can only be sampled."""


class _Once:
    """A text that is made when it is first asked for: a model may take seconds to run."""

    def __init__(self, make: Callable[[], str]):
        self.make, self.text = make, ""

    def __call__(self) -> str:
        self.text = self.text or self.make()
        return self.text


class Prior(eqx.Module):
    """Named parameters: how to draw them, their density, and their map to real numbers.

    `draw` makes one draw, a dictionary; `density` is its log density, or None where the
    prior can only be sampled. `transforms` map real numbers to each parameter's support.
    `earlier`: the texts that version 0.1.0 put into files, where they differ; `former`: those of
    versions between it and this one.
    `identify`: what the fingerprint is made of, such as the distributions; by default a few draws.
    """

    draw: Callable[[PRNGKey], Theta] = eqx.field(static=True)
    density: Callable[[Theta], Scalar] | None = eqx.field(static=True)
    transforms: dict[str, Transform]
    names: tuple[str, ...] = eqx.field(static=True)
    _shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    _texts: tuple[str, ...] = eqx.field(static=True)
    _earlier: tuple[str, ...] = eqx.field(static=True)
    _former: tuple[str, ...] = eqx.field(static=True)
    _identity: Callable[[], str] = eqx.field(static=True)

    def __init__(
        self,
        draw: Callable[[PRNGKey], Theta],
        density: Callable[[Theta], Scalar] | None,
        *,
        supports: dict[str, Constraint],
        shapes: dict[str, tuple[int, ...]],
        texts: dict[str, str],
        earlier: dict[str, str] | None = None,
        former: dict[str, str] | None = None,
        identify: Callable[[], Any] | None = None,
    ):
        check_names(shapes)
        self.draw = draw
        self.density = density
        self.transforms = {name: transform_to(part, name) for name, part in supports.items()}
        self.names = tuple(supports)
        # Tuples, since what is static to a compiled function must hash.
        self._shapes = tuple(shapes[name] for name in self.names)
        self._texts = tuple(texts[name] for name in self.names)
        self._earlier = tuple((earlier or texts)[name] for name in self.names)
        self._former = tuple((former or texts)[name] for name in self.names)
        self._identity = _Once(lambda: self._fingerprint(identify))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(self.names, self._shapes, strict=True))

    @property
    def texts(self) -> dict[str, str]:
        """A line about each parameter's distribution."""
        return dict(zip(self.names, self._texts, strict=True))

    @property
    def fingerprint(self) -> str:
        """What tells this prior from others: all numbers that it is made of."""
        return self._identity()

    def _fingerprint(self, identify: Callable[[], Any] | None) -> str:
        made_of = self.draw if identify is None else identify()
        return fingerprint({"names": self.names, "prior": made_of}, self._draws)

    def _draws(self) -> list[Theta]:
        return [self.draw(jax.random.key(i, impl="threefry2x32")) for i in range(COMPARED_DRAWS)]

    def differs_from(self, texts: Mapping[str, str] | None, held: str | None) -> bool:
        """Whether a description kept in a file, by text and by fingerprint, is of another prior.

        Files of earlier versions have no fingerprint, and shorter texts.
        """
        same = None if held is None else agree(held, self.fingerprint)
        if same is not None:
            return not same
        # The order of parameters counts: it is that of their random numbers, and of weights.
        known = (self._texts, self._earlier, self._former)
        return texts is not None and list(texts.items()) not in [
            list(zip(self.names, one, strict=True)) for one in known
        ]

    def hidden(self, texts: Any) -> str:
        """What to add where the texts of another prior are the same as those of this one."""
        same = texts == self.texts
        return ", which differs in numbers that these lines leave out" if same else ""

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
        refuse_improper(part, str(name))
    parts = {str(name): _native(part).to_event() for name, part in prior.items()}
    if len(parts) < len(prior):
        raise ValueError(f"The names of parameters must differ as text, got {list(prior)}.")

    def draw(key: PRNGKey) -> Theta:
        keys = jax.random.split(key, len(parts))
        return {n: p.sample(k) for (n, p), k in zip(parts.items(), keys, strict=True)}

    def density(theta: Theta) -> Scalar:
        return sum(
            (log_prob_in_support(part, theta[name]) for name, part in parts.items()),
            start=jnp.zeros(()),
        )

    for name, part in parts.items():
        transform_to(part.support, name)
        check_draws(part, name)
    return Prior(
        draw=draw,
        density=density,
        supports={name: part.support for name, part in parts.items()},
        shapes={name: part.event_shape for name, part in parts.items()},
        texts={name: describe(part) for name, part in parts.items()},
        earlier={name: describe_briefly(part) for name, part in parts.items()},
        identify=lambda: parts,
    )


def _native(part: dist.Distribution) -> dist.Distribution:
    """A distribution with its arrays in this machine's byte order, which JAX needs."""
    swapped = lambda leaf: isinstance(leaf, np.ndarray) and not leaf.dtype.isnative  # noqa: E731
    try:
        if not any(map(swapped, jax.tree.leaves(part))):
            return part  # as it is: a class of a user's own may not survive being taken apart
    except NotImplementedError:
        return part
    turn = lambda leaf: leaf.astype(leaf.dtype.newbyteorder("=")) if swapped(leaf) else leaf  # noqa: E731
    return jax.tree.map(turn, part)


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
    check_implicit(prior.draw, support)
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


RESERVED = ("observation", "chain", "draw", "pareto_k", "ess", "gradients", "divergences")
"""Names of dimensions and diagnostics in a dataset of draws."""

UNPRINTED = ("Cc", "Cs")
"""Unicode categories of control characters and of halves of characters."""

DENSITY = "joint density"
"""The quantity of a calibration that judges all parameters at once."""


def check_names(shapes: Mapping[str, tuple[int, ...]]):
    """Refuse names that a dataset of draws, or a table, gives to something else."""
    taken = dict.fromkeys(RESERVED, "datasets of draws") | {DENSITY: "calibration tables"}
    for name, shape in shapes.items():
        entries = set(labels(name, shape)) - {name}
        own = [f"r_hat_{name}", f"ess_{name}", *(f"{name}_dim_{i}" for i in range(len(shape)))]
        taken |= dict.fromkeys([*own, *entries], f"the draws of {name!r}")
    for name in shapes:
        if not name.strip() or any(unicodedata.category(c) in UNPRINTED for c in name):
            raise ValueError(
                f"A parameter cannot be called {name!r}: files and figures take no name that is "
                "empty or has control characters. Call it something else."
            )
        if name in taken:
            raise ValueError(
                f"A parameter cannot be called {name!r}: {taken[name]} use that name for a "
                "dimension, an entry or a diagnostic. Call it something else."
            )


def transform_to(support: Constraint, name: str) -> Transform:
    """The map from real numbers to a support, or an error that says why there is none."""
    try:
        if not support.is_discrete:
            return biject_to(support)
        reason = "its values are discrete: sum over them in the likelihood, and leave it out"
    except NotImplementedError:
        reason = "NumPyro knows no map from real numbers to it"
    raise ValueError(f"The prior of {name!r} has the support {support}, but {reason}.")


def _show(value) -> str:
    return f"{type(value).__name__} {value!r}"[:120]
