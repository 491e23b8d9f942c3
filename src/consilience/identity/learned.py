r"""The learned densities: posterior $q(\theta \mid x)$, likelihood $q(x \mid \theta)$, prior.

Each is a network with the spaces it works in. Methods take and return one example in the
user's own parameters and data, Jacobians included; `log_probs` takes several datasets at
once, and several sets of parameters for each, and is the fast way. Functions with `_standard`
in their name work on the standardised vectors that training uses.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.random import Generator

from consilience.core.types import Data, Flat, PRNGKey, Scalar, SummaryNetwork, Theta
from consilience.model.data import DataSpace, Layout
from consilience.model.spaces import ParameterSpace
from consilience.networks.density import (
    BatchedDensity,
    ConditionalDensity,
    Context,
    Dropout,
    build_density,
)
from consilience.networks.recipe import Recipe
from consilience.networks.summary import Summary
from consilience.networks.validity import Validity

Each = Float[Array, "n k"]
"""One value for each of `k` sets of parameters for each of `n` datasets."""


class Networks(eqx.Module):
    """All that is trained."""

    summary: SummaryNetwork
    posterior: BatchedDensity
    likelihood: BatchedDensity | None
    prior: BatchedDensity | None
    criterion: Any = None
    """A criterion of the self-consistency loss with parameters of its own, else None."""

    def penalty(self) -> Scalar:
        flows = [self.posterior, self.likelihood, self.prior]
        parts = [flow.penalty() for flow in flows if flow is not None]
        return sum(parts, start=jnp.zeros(()))


class Posterior(eqx.Module):
    """A posterior for every dataset: a summary network and a conditional density."""

    summary: SummaryNetwork
    flow: BatchedDensity
    parameters: ParameterSpace
    data: DataSpace

    def context(self, x: Data) -> Context:
        """What the density needs of one dataset, shared by all parameters evaluated on it."""
        return self.flow.prepare(self.summary(self.data.standardise(x)))

    def contexts(self, x: Data) -> Context:
        """What the density needs of several datasets, along a leading axis."""
        return jax.vmap(self.context)(x)

    def log_prob(self, theta: Theta, x: Data) -> Scalar:
        """The log density of one set of parameters given one dataset."""
        return only(self.log_probs, theta, x)

    def log_probs(self, theta: Theta, x: Data) -> Each:
        """The log densities of several sets of parameters given each of several datasets."""
        u, log_det = twice(self.parameters.to_vector)(theta)
        inside = twice(self.parameters.contains)(theta)
        return jnp.where(inside, self.flow.log_prob(u, self.contexts(x)) + log_det, -jnp.inf)

    def sample(self, key: PRNGKey, x: Data) -> Theta:
        """One draw given one dataset, inside the prior's support."""
        return self.parameters.from_vector(self.flow.sample(key, self.context(x))[0])


class Likelihood(eqx.Module):
    """A density of data given parameters; i.i.d. rows share one network and multiply.

    `validity`: where runs failed and were dropped, the probability of giving data at all. The
    density is then that of a valid run with these data, p(valid, x | theta).
    """

    flow: BatchedDensity
    parameters: ParameterSpace
    data: DataSpace
    validity: Validity | None = None

    def log_prob(self, theta: Theta, x: Data) -> Scalar:
        """The log density of one dataset given one set of parameters.

        Of counts: the log probability, taken from the density in the middle of their unit.
        """
        return only(self.log_probs, theta, x)

    def log_probs(self, theta: Theta, x: Data) -> Each:
        """The log densities of several datasets, each given several sets of parameters."""
        x_standard = jax.vmap(lambda x: self.data.dequantise(x, None))(x)
        u, _ = twice(self.parameters.to_vector)(theta)
        mask = jax.vmap(lambda x: self.data.layout.units(x).mask)(x_standard)
        correction = jnp.sum(jnp.sum(jax.vmap(self.data.log_scale)(x), axis=2) * mask, axis=1)
        log_prob = likelihood_standard(self.flow, self.data.layout, u, x_standard)
        if self.validity is not None:
            log_prob += twice(self.validity.log_prob)(u)
        return log_prob - correction[:, None]

    def sample(self, key: PRNGKey, theta: Theta, x: Data | None = None) -> Any:
        """One dataset given one set of parameters, of a run that does not fail.

        Side information and masks are not learned: where data have them, pass a dataset
        `x` to take them from.
        """
        layout = self.data.layout
        if layout.aside and x is None:
            raise ValueError(
                f"Pass x, a dataset to take {list(layout.aside)} from: they are not simulated."
            )
        known = {} if x is None else layout.named(x)
        blank = {name: jnp.zeros(shape) for name, shape in layout.shapes.items()}
        units = layout.units(self.data.standardise(layout.unnamed({**blank, **known})))
        u, _ = self.parameters.to_vector(theta)
        values, _ = self.flow.sample(key, jax.vmap(_prepare(self.flow, u))(units.side))
        return self.data.from_units(values, {name: known[name] for name in layout.aside})


def likelihood_standard(
    flow: BatchedDensity,
    layout: Layout,
    u: Float[Array, "n k d"],
    x: dict[str, Array],
    dropout: Dropout | None = None,
) -> Each:
    """The log densities of standardised data given standardised parameter vectors."""
    units = jax.vmap(layout.units)(x)
    shape = (*u.shape[:2], *units.values.shape[1:])
    if units.side.shape[2]:
        prepare = lambda u, side: jax.vmap(_prepare(flow, u))(side)  # noqa: E731
        contexts = jax.vmap(jax.vmap(prepare, in_axes=(0, None)))(u, units.side)
    else:
        # Rows without side information share the part that sees only theta.
        contexts = twice(flow.prepare)(u)
    values = flow.log_prob(jnp.broadcast_to(units.values[:, None], shape), contexts, dropout)
    return jnp.sum(jnp.where(units.mask[:, None] > 0, values, 0.0), axis=2)


def _prepare(flow: BatchedDensity, u: Flat):
    return lambda side: flow.prepare(jnp.concatenate([u, side]))


def twice(function):
    """Over datasets, and over several sets of parameters for each."""
    return jax.vmap(jax.vmap(function))


def only(function, theta: Theta, x: Data) -> Scalar:
    """A function of several sets of parameters and datasets, for one of each."""
    theta = jax.tree.map(lambda a: jnp.asarray(a)[None, None], theta)
    return function(theta, jax.tree.map(lambda a: jnp.asarray(a)[None], x))[0, 0]


class LearnedPrior(eqx.Module):
    """A density for a prior that can only be sampled."""

    flow: BatchedDensity
    parameters: ParameterSpace

    def log_prob(self, theta: Theta) -> Scalar:
        return only(lambda theta, _: self.log_probs(theta), theta, 0)

    def log_probs(self, theta: Theta) -> Each:
        u, log_det = twice(self.parameters.to_vector)(theta)
        log_prob = self.flow.log_prob(u, self.flow.prepare(jnp.zeros(0))) + log_det
        return jnp.where(twice(self.parameters.contains)(theta), log_prob, -jnp.inf)

    def sample(self, key: PRNGKey) -> Theta:
        return self.parameters.from_vector(
            self.flow.sample(key, self.flow.prepare(jnp.zeros(0)))[0]
        )


def build_networks(
    recipe: Recipe,
    parameters: ParameterSpace,
    data: DataSpace,
    rng: Generator,
    criterion: Any = None,
) -> Networks:
    """New networks for parameters and data of these shapes."""
    for_summary, for_posterior, for_likelihood, for_prior = rng.spawn(4)
    dim, layout = parameters.dim, data.layout
    summary: Any = recipe.summary
    if not isinstance(summary, eqx.Module):
        if isinstance(summary, type) or not isinstance(summary, Summary):
            raise TypeError(
                "A summary is an Equinox module, or an object with the method build(rng, layout, "
                f"dim), such as cs.DeepSet(), got {summary!r}."
            )
        summary = summary.build(for_summary, layout, dim)
    dtype = parameters.loc.dtype
    x = {name: jax.ShapeDtypeStruct(s, dtype) for name, s in layout.shapes.items()}
    out = jax.eval_shape(summary, x)
    if getattr(out, "ndim", None) != 1:
        raise ValueError(
            "A summary network must return a vector for one standardised dataset, got "
            f"{getattr(out, 'shape', type(out).__name__)}."
        )
    n_values, n_side = layout.unit_sizes

    def density(spec: ConditionalDensity | None, rng: Generator, dim: int, condition: int):
        return None if spec is None else build_density(spec, rng, dim=dim, condition=condition)

    return Networks(
        summary=summary,
        posterior=build_density(recipe.posterior, for_posterior, dim=dim, condition=out.shape[0]),
        likelihood=density(recipe.likelihood, for_likelihood, n_values, dim + n_side),
        prior=density(recipe.prior, for_prior, dim, 0),
        criterion=criterion,
    )
