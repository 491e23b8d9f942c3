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

from consilience.fingerprints import agree, fingerprint
from consilience.types import PRNGKey, Scalar, Theta

TRUNCATED = (
    dist.LeftTruncatedDistribution,
    dist.RightTruncatedDistribution,
    dist.TwoSidedTruncatedDistribution,
)

BARE = "theta"
"""The name of the only parameter, where the prior is one distribution without a name."""


DRAWS = 4
"""Draws that tell priors apart which can only be sampled."""


class Prior(eqx.Module):
    """Named parameters: how to draw them, their density, and their map to real numbers.

    `draw` makes one draw, a dictionary; `density` is its log density, or None where the
    prior can only be sampled. `transforms` map real numbers to each parameter's support.
    `earlier`: the texts that version 0.1.0 put into files, where they differ.
    `identify`: what the fingerprint is made of, such as the distributions; by default a few draws.
    """

    draw: Callable[[PRNGKey], Theta] = eqx.field(static=True)
    density: Callable[[Theta], Scalar] | None = eqx.field(static=True)
    transforms: dict[str, Transform]
    names: tuple[str, ...] = eqx.field(static=True)
    _shapes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    _texts: tuple[str, ...] = eqx.field(static=True)
    _earlier: tuple[str, ...] = eqx.field(static=True)
    _identify: Callable[[], Any] | None = eqx.field(static=True)

    def __init__(
        self,
        draw: Callable[[PRNGKey], Theta],
        density: Callable[[Theta], Scalar] | None,
        *,
        supports: dict[str, Constraint],
        shapes: dict[str, tuple[int, ...]],
        texts: dict[str, str],
        earlier: dict[str, str] | None = None,
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
        self._identify = identify

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
        found = self._draws() if self._identify is None else self._identify()
        return fingerprint({"names": self.names, "shapes": self._shapes, "prior": found})

    def _draws(self) -> list[Theta]:
        return [self.draw(jax.random.key(i, impl="threefry2x32")) for i in range(DRAWS)]

    def differs_from(self, texts: Mapping[str, str] | None, held: str | None) -> bool:
        """Whether a description kept in a file, by text and by fingerprint, is of another prior.

        Files of earlier versions have no fingerprint, and shorter texts.
        """
        same = None if held is None else agree(held, self.fingerprint)
        if same is not None:
            return not same
        earlier = dict(zip(self.names, self._earlier, strict=True))
        return texts is not None and dict(texts) not in (self.texts, earlier)

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
    parts = {str(name): part.to_event() for name, part in prior.items()}
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

    return Prior(
        draw=draw,
        density=density,
        supports={name: part.support for name, part in parts.items()},
        shapes={name: part.event_shape for name, part in parts.items()},
        texts={name: describe(part) for name, part in parts.items()},
        earlier={name: describe_briefly(part) for name, part in parts.items()},
        identify=lambda: parts,
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


def refuse_improper(part: dist.Distribution, name: str):
    """Refuse a distribution whose draws and density are not those of one proper density."""
    reason = None
    if isinstance(part, dist.Delta):
        reason = (
            "has a point mass (Delta), which has no density to learn: leave the parameter out, and "
            "write its value into the simulator and the likelihood"
        )
    elif isinstance(part, dist.ImproperUniform):
        reason = "is improper (ImproperUniform) and cannot be drawn from: pass a proper prior"
    elif isinstance(part, dist.Unit):
        reason = (
            "comes from numpyro.factor, which changes the density and not the draws: leave it out"
        )
    elif isinstance(part, dist.MaskedDistribution) and not np.all(part._mask):
        reason = "is masked, which changes the density and not the draws: leave the mask out"
    if reason is not None:
        raise ValueError(f"The prior of {name!r} {reason}.")
    for value in vars(part).values():
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, dist.Distribution):
                refuse_improper(inner, name)


RESERVED = ("observation", "chain", "draw", "pareto_k", "ess", "gradients", "divergences")
"""Names of dimensions and diagnostics in a dataset of draws."""

UNPRINTED = ("Cc", "Cs")
"""Unicode's control characters, and the halves of those that UTF-16 writes in two."""


def check_names(shapes: Mapping[str, tuple[int, ...]]):
    """Refuse names that a dataset of draws gives to its dimensions and diagnostics."""
    taken = {**dict.fromkeys(RESERVED, "datasets of draws"), "joint density": "calibrations"}
    for name, shape in shapes.items():
        own = [f"r_hat_{name}", f"ess_{name}", *(f"{name}_dim_{i}" for i in range(len(shape)))]
        own += [f"{name}[{', '.join(map(str, i))}]" for i in np.ndindex(shape) if i]
        taken |= dict.fromkeys(own, f"the draws of {name!r}")
    for name in shapes:
        if not name or any(unicodedata.category(letter) in UNPRINTED for letter in name):
            raise ValueError(
                f"A parameter cannot be called {name!r}: files and figures take no name that is "
                "empty or has control characters. Call it something else."
            )
        if name in taken:
            raise ValueError(
                f"A parameter cannot be called {name!r}: {taken[name]} use that name for a "
                "dimension or a diagnostic. Call it something else."
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


def describe(part: dist.Distribution) -> str:
    """A distribution in a line, with the distributions and transforms that it is made of.

    >>> describe(dist.TruncatedNormal(0.0, 1.0, low=-1.0))
    'LeftTruncatedDistribution(Normal(loc=0, scale=1), low=-1)'
    """
    while isinstance(part, dist.Independent | dist.ExpandedDistribution):
        part = part.base_dist
    fields = {name: vars(part).get(name) for name in sorted(part.gather_pytree_data_fields())}
    numbers = {name: fields[name] for name in part.arg_constraints if name in fields}
    # A distribution with numbers of its own makes its inner ones from them.
    made = numbers and not isinstance(part, TRUNCATED)
    shown = [] if made else [text for value in fields.values() for text in _inside(value)]
    shown += [f"{name}={_number(value)}" for name, value in numbers.items()]
    return f"{type(part).__name__}({', '.join(shown)})"


def _inside(value: Any) -> list[str]:
    """Texts of the distributions and transforms in a field of a distribution."""
    if isinstance(value, list | tuple):
        return [text for part in value for text in _inside(part)]
    if isinstance(value, dist.Distribution):
        return [describe(value)]
    if not isinstance(value, Transform):
        return []
    named = {name: v for name, v in vars(value).items() if not name.startswith("_")}
    numbers = {name: v for name, v in named.items() if np.asarray(v).dtype.kind in "biuf"}
    shown = ", ".join(f"{name}={_number(v)}" for name, v in numbers.items())
    return [f"{type(value).__name__}({shown})"]


def describe_briefly(part: dist.Distribution) -> str:
    """The line that version 0.1.0 put into files."""
    while isinstance(part, dist.Independent | dist.ExpandedDistribution):
        part = part.base_dist
    if isinstance(part, dist.MaskedDistribution | dist.TransformedDistribution):
        inner = describe_briefly(part.base_dist)
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
