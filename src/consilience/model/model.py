"""A model: a prior, a simulator, and, where it is known, a log-likelihood.

The three functions work on one set of parameters; the library vectorises and compiles.
Where the prior is one distribution without a name, or a dictionary with the single name "theta",
they get an array for `theta`; otherwise they get a dictionary.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array

from consilience.core.html import notebook
from consilience.core.types import Data, PRNGKey, Scalar, Theta
from consilience.model.data import Kind, Layout, Set, make_layout
from consilience.model.external import External, is_external
from consilience.model.host import OnHost
from consilience.model.priors import BARE, ImplicitPrior, Prior, as_prior
from consilience.model.purity import trace_likelihood, trace_simulator
from consilience.model.run import DATA, Spec


@dataclasses.dataclass(frozen=True)
class PerRow:
    """A log-likelihood of one row, `(theta, row) -> scalar`; rows are i.i.d. given theta.

    >>> PerRow(lambda theta, row: -0.5 * jnp.sum((row - theta) ** 2))  # doctest: +ELLIPSIS
    PerRow(...)
    """

    log_likelihood: Callable[[Any, Any], Scalar]


class Model(eqx.Module):
    """A prior, a simulator and an optional log-likelihood.

    `prior`: a NumPyro distribution, a dictionary of named ones, or an `ImplicitPrior`.
    `simulator`: `(key, theta) -> x` for one theta, in JAX; `x` is an array of any shape or
    a dictionary of arrays. Or a `cs.external` function, a `cs.command`, or an object of your own
    with their interface, `consilience.model.external.External`. None if simulations come from
    elsewhere.
    `log_likelihood`: `(theta, x) -> scalar`, or `PerRow` of a function of one row, or `OnHost`
    of one that is not written in JAX.
    `data`: what the shape of `x` does not say: `Set()`, `Series()`, or `Vector()`.

    >>> model = Model(
    ...     prior={"mu": dist.Normal(0, 1), "sigma": dist.HalfNormal(1)},
    ...     simulator=lambda key, t: t["mu"] + t["sigma"] * jax.random.normal(key, (10, 1)),
    ...     data=Set(),
    ... )
    >>> model
    Model
      mu     Normal(loc=0, scale=1)
      sigma  HalfNormal(scale=1)
      x      (10, 1), Set()
      log-likelihood: not given
    """

    prior: Prior
    simulator: Callable[[PRNGKey, Any], Data] | External | None = eqx.field(static=True)
    likelihood: Callable[[Any, Any], Scalar] | PerRow | OnHost | None = eqx.field(static=True)
    data: Kind | None = eqx.field(static=True)
    spec: Spec | None = eqx.field(static=True)
    """The arrays of the data of a simulator outside JAX, once runs have shown them."""
    _layout: Layout | None = eqx.field(static=True)
    _outside: bool = eqx.field(static=True)

    def __init__(
        self,
        prior: dist.Distribution | Mapping[str, dist.Distribution] | ImplicitPrior | Prior,
        simulator: Callable[[PRNGKey, Any], Data] | External | None = None,
        log_likelihood: Callable[[Any, Any], Scalar] | PerRow | OnHost | None = None,
        *,
        data: Kind | None = None,
    ):
        self.prior = prior if isinstance(prior, Prior) else as_prior(prior)
        self.simulator = simulator
        self.likelihood = log_likelihood
        self.data = Set() if data is None and isinstance(log_likelihood, PerRow) else data
        self.spec, self._layout = None, None
        # Once: to look at the interface may run properties of the user's simulator.
        self._outside = is_external(simulator)
        if self.external is not None:
            self.external.check(self.prior.shapes)
        elif simulator is not None:
            inside: Any = simulator
            self._layout = self._layout_of_x(inside)
            if log_likelihood is not None:
                self._check_likelihood(inside)

    @property
    def layout(self) -> Layout | None:
        """The layout of the data; None where only a run would show it."""
        return self._layout

    @property
    def external(self) -> External | None:
        """The simulator, if it is one outside JAX."""
        simulator: Any = self.simulator
        return simulator if self._outside else None

    @property
    def simulator_name(self) -> str:
        """What the simulator is called."""
        if self.external is not None:
            return self.external.name
        return getattr(self.simulator, "__qualname__", type(self.simulator).__name__)

    def with_spec(self, spec: Spec) -> "Model":
        """This model with what its runs have shown of the data, and so with their layout."""
        known = copy.copy(self)
        layout = make_layout(spec.shapes, self.data, spec.bare)
        # Modules are frozen, but nobody has seen this one yet.
        object.__setattr__(known, "spec", spec)
        object.__setattr__(known, "_layout", layout)
        return known

    @classmethod
    def from_numpyro(cls, function: Callable, observed=None, *, args=(), kwargs=None) -> "Model":
        """Prior, simulator and likelihood from a NumPyro model, nothing else written.

        `observed`: the name of the observed site, or several; by default the sites that
        the model observes when called with `args` and `kwargs`. A plate of i.i.d.
        observations becomes a `Set`, whole-numbered data get `counts=True`.

        >>> import numpyro
        >>> def coin(y=None):
        ...     p = numpyro.sample("p", dist.Beta(2, 2))
        ...     with numpyro.plate("flips", 20):
        ...         numpyro.sample("y", dist.Bernoulli(p), obs=y)
        >>> Model.from_numpyro(coin, observed="y").data
        Set(side=(), counts=True, mask=None, independent=True)
        """
        from consilience.model.numpyro import trace_model

        prior, simulator, likelihood, kind = trace_model(function, observed, args, kwargs or {})
        return cls(prior, simulator, likelihood, data=kind)

    def simulate_one(self, key: PRNGKey) -> tuple[Theta, Any]:
        """One draw of the parameters and of the data."""
        k_theta, k_x = jax.random.split(key)
        theta = self.prior.draw(k_theta)
        return theta, self.simulate_at(k_x, theta)

    def simulate_at(self, key: PRNGKey, theta: Theta) -> Any:
        """The data of one run at given parameters."""
        if self.external is not None:
            raise TypeError("An external simulator cannot be compiled: use cs.simulate_at.")
        if self.simulator is None:
            raise ValueError(
                "This model has no simulator. Pass one to cs.Model, or bring runs made "
                "elsewhere as cs.Simulations(theta, x)."
            )
        simulator: Any = self.simulator
        return simulator(key, self.unwrap(theta))

    def log_likelihood(self, theta: Theta, x: Data) -> Array:
        """The model's own log-likelihood of one dataset under one set of parameters."""
        theta = self.unwrap(theta)
        if self.likelihood is None:
            raise ValueError("This model has no log-likelihood: pass log_likelihood to cs.Model.")
        if not isinstance(self.likelihood, PerRow):
            return self.likelihood(theta, x)
        # A row of a dictionary x is a dictionary of that row's data and side information.
        mask_name = self.data.mask if isinstance(self.data, Set) else None
        named: Any = x
        rows = x if mask_name is None else {n: a for n, a in named.items() if n != mask_name}
        each = jax.vmap(self.likelihood.log_likelihood, in_axes=(None, self._row_axes(rows)))
        values = each(theta, rows)
        return jnp.sum(values if mask_name is None else jnp.where(named[mask_name], values, 0.0))

    def _row_axes(self, rows: Data):
        if not isinstance(rows, Mapping):
            return 0
        side = () if self.data is None else self.data.side
        n = next(part.shape[0] for name, part in rows.items() if name not in side)
        return {name: 0 if part.shape[:1] == (n,) else None for name, part in rows.items()}

    def unwrap(self, theta: Mapping[str, Any]) -> Any:
        """Parameters as the user's functions take them."""
        return theta[BARE] if self.prior.names == (BARE,) else dict(theta)

    def _example_theta(self):
        return self.unwrap(jax.eval_shape(self.prior.draw, jax.random.key(0)))

    def _layout_of_x(self, simulator: Callable) -> Layout:
        shape = trace_simulator(simulator, self._example_theta(), list(self.prior.names))
        bare = not isinstance(shape, Mapping)
        shapes = {DATA: shape} if bare else shape
        return make_layout({name: leaf.shape for name, leaf in shapes.items()}, self.data, bare)

    def _check_likelihood(self, simulator: Callable):
        function = self.likelihood
        while isinstance(function, PerRow | OnHost):
            function = function.log_likelihood
        if not callable(function) or isinstance(function, dist.Distribution):
            raise TypeError(
                "A log-likelihood is a function (theta, x) -> number, "
                f"got {type(function).__name__}."
            )
        theta = jax.eval_shape(self.prior.draw, jax.random.key(0))
        x = jax.eval_shape(simulator, jax.random.key(0), self._example_theta())
        trace_likelihood(self.log_likelihood, theta, x, self._example_theta())

    def _repr_html_(self) -> str:
        return notebook(self)

    def __repr__(self) -> str:
        width = max(map(len, (*self.prior.names, "x")))
        lines = [f"  {n:<{width}}  {text}" for n, text in self.prior.texts.items()]
        if self.layout is not None:
            shown = self.layout.show(self.layout.shapes)
            lines.append(f"  {'x':<{width}}  {shown}, {short(self.layout.kind)}")
        elif self.simulator is not None:
            lines.append(f"  {'x':<{width}}  {self.simulator}, shape known after its first run")
        given = "not given" if self.likelihood is None else "given"
        return "\n".join(["Model", *lines, f"  log-likelihood: {given}"])


def short(described: Any) -> str:
    """A kind, or another description, with only what differs from its defaults."""
    names = [(f.name, f.default) for f in dataclasses.fields(described)]
    values = {name: (getattr(described, name), default) for name, default in names}
    said = [f"{name}={value!r}" for name, (value, default) in values.items() if value != default]
    return f"{type(described).__name__}({', '.join(said)})"
