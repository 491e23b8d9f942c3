r"""The learned densities: posterior $q(\theta \mid x)$, likelihood $q(x \mid \theta)$, prior.

Each is a network with the spaces it works in. Methods take and return one example in the
user's own parameters and data, Jacobians included; those with `_standard` in their name work
on the standardised vectors that training uses.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from consilience.data import DataSpace, Layout
from consilience.flows import Context, Flow
from consilience.spaces import ParameterSpace
from consilience.types import Data, Flat, PRNGKey, Scalar, SummaryNetwork, Theta


class Networks(eqx.Module):
    """All that is trained."""

    summary: SummaryNetwork
    posterior: Flow
    likelihood: Flow | None
    prior: Flow | None
    multipliers: Flat | None = None

    def penalty(self) -> Scalar:
        flows = [self.posterior, self.likelihood, self.prior]
        parts = [flow.penalty() for flow in flows if flow is not None]
        return sum(parts, start=jnp.zeros(()))


class Posterior(eqx.Module):
    """A posterior for every dataset: a summary network and a flow."""

    summary: SummaryNetwork
    flow: Flow
    parameters: ParameterSpace
    data: DataSpace

    def context(self, x: Data) -> Context:
        """What the flow needs of one dataset, shared by all parameters evaluated on it."""
        return self.flow.prepare(self.summary(self.data.standardise(x)))

    def log_prob(self, theta: Theta, x: Data) -> Scalar:
        """The log density of one set of parameters given one dataset."""
        return self.log_prob_in_context(theta, self.context(x))

    def log_prob_in_context(self, theta: Theta, context: Context) -> Scalar:
        u, log_det = self.parameters.to_vector(theta)
        inside = self.parameters.contains(theta)
        return jnp.where(inside, self.flow.log_prob(u, context) + log_det, -jnp.inf)

    def sample(self, key: PRNGKey, x: Data) -> Theta:
        """One draw given one dataset, inside the prior's support."""
        return self.sample_in_context(key, self.context(x))

    def sample_in_context(self, key: PRNGKey, context: Context) -> Theta:
        return self.parameters.from_vector(self.flow.sample(key, context)[0])


class Likelihood(eqx.Module):
    """A density of data given parameters; i.i.d. rows share one network and multiply."""

    flow: Flow
    parameters: ParameterSpace
    data: DataSpace

    def log_prob(self, theta: Theta, x: Data) -> Scalar:
        """The log density of one dataset given one set of parameters.

        Of counts: the log probability, taken from the density in the middle of their unit.
        """
        x_standard = self.data.dequantise(self.data.standardise(x), None)
        u, _ = self.parameters.to_vector(theta)
        mask = self.data.layout.units(x_standard).mask
        correction = jnp.sum(jnp.sum(self.data.log_scale(), axis=1) * mask)
        return likelihood_standard(self.flow, self.data.layout, u, x_standard) - correction

    def sample(self, key: PRNGKey, theta: Theta, x: Data | None = None) -> Data:
        """One dataset given one set of parameters.

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
        contexts = _contexts(self.flow, u, units.side)
        keys = jax.random.split(key, units.values.shape[0])
        values = jax.vmap(lambda k, c: self.flow.sample(k, c)[0])(keys, contexts)
        return self.data.from_units(values, {name: known[name] for name in layout.aside})


def likelihood_standard(
    flow: Flow, layout: Layout, u: Flat, x: dict[str, Array], key: PRNGKey | None = None
) -> Scalar:
    """The log density of standardised data given a standardised parameter vector."""
    units = layout.units(x)
    keys = None if key is None else jax.random.split(key, units.values.shape[0])
    if units.side.shape[1]:
        contexts, axis = _contexts(flow, u, units.side), 0
    else:
        # Rows without side information share the part that sees only theta.
        contexts, axis = flow.prepare(u), None
    each = jax.vmap(flow.log_prob, in_axes=(0, axis, None if keys is None else 0))
    return jnp.sum(jnp.where(units.mask > 0, each(units.values, contexts, keys), 0.0))


def _contexts(flow: Flow, u: Flat, side: Array) -> Context:
    return jax.vmap(lambda row: flow.prepare(jnp.concatenate([u, row])))(side)


class LearnedPrior(eqx.Module):
    """A density for a prior that can only be sampled."""

    flow: Flow
    parameters: ParameterSpace

    def log_prob(self, theta: Theta) -> Scalar:
        u, log_det = self.parameters.to_vector(theta)
        log_prob = self.flow.log_prob(u, self.flow.prepare(jnp.zeros(0))) + log_det
        return jnp.where(self.parameters.contains(theta), log_prob, -jnp.inf)

    def sample(self, key: PRNGKey) -> Theta:
        return self.parameters.from_vector(
            self.flow.sample(key, self.flow.prepare(jnp.zeros(0)))[0]
        )
