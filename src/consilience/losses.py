r"""What training minimises.

Neural posterior estimation (NPE) and joint posterior and likelihood estimation (NPLE) are
maximum likelihood over the joint model of parameters and data (Schmitt et al. 2024,
arXiv:2310.04395, equations 2 and 3):
$$\mathcal{L}_\mathrm{NPE}(\phi) = \mathbb{E}_{p(\theta, x)}[-\log q_\phi(\theta \mid x)], \qquad
  \mathcal{L}_\mathrm{NPLE}(\phi, \eta) = \mathbb{E}_{p(\theta, x)}
  [-\log q_\phi(\theta \mid x) - \log q_\eta(x \mid \theta)].$$
Self-consistency is added with a weight that grows over training, at the simulated data, at
data made up from them, and at unlabelled data.

Where theta were not drawn from the prior but from any proposal, the posterior is learned by
telling a run's theta from other runs' (automatic posterior transformation with atomic
proposals, Greenberg et al. 2019, arXiv:1905.07488):
$$\mathcal{L}_\mathrm{APT} = -\log \frac{q_\phi(\theta_1 \mid x) / p(\theta_1)}
  {\sum_{m=1}^M q_\phi(\theta_m \mid x) / p(\theta_m)}.$$
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.approximators import (
    LearnedPrior,
    Likelihood,
    Networks,
    Posterior,
    likelihood_standard,
)
from consilience.consistency import SelfConsistency, Spot, consistency, propose
from consilience.data import DataSpace
from consilience.evidence import Joint, make_joint
from consilience.proposals import EpochCopy
from consilience.spaces import ParameterSpace
from consilience.types import Data, Flat, PRNGKey, Scalar


class Example(NamedTuple):
    """One run: its parameters as networks see them, its data as the user does."""

    u: Flat | Float[Array, "n d"]
    x: Data


class Batch(NamedTuple):
    """What one step sees: runs, and the datasets where self-consistency is asked."""

    runs: Example
    spots: Spot | None
    unlabeled: Spot | None


class Objective(eqx.Module):
    """The sum that training minimises, and the batches it is made of.

    `model`: prior and likelihood; None where maximum likelihood alone needs neither.
    `settings`: self-consistency, or None for maximum likelihood alone.
    `exact`: the identity takes the model's own log-likelihood, not the learned one.
    `unlabeled`: observed data without parameters, with a leading axis.
    `atoms`: M, where theta came from a proposal, not from the prior; else None.
    """

    model: Any
    parameters: ParameterSpace
    data: DataSpace
    settings: SelfConsistency | None = eqx.field(static=True, default=None)
    exact: bool = eqx.field(static=True, default=False)
    spread: Any = None
    unlabeled: Any = None
    atoms: int | None = eqx.field(static=True, default=None)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The densities whose best epochs are picked together: those that share a term."""
        tied = self.settings is not None and not self.exact
        return (
            (("posterior", "likelihood", "prior"),)
            if tied
            else (("posterior",), ("likelihood",), ("prior",))
        )

    def maximum_likelihood(
        self, networks: Networks, run: Example, key: PRNGKey | None
    ) -> dict[str, Scalar]:
        """The negative log densities of one run; with a key, dropout is on."""
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)
        x = self.data.standardise(run.x)
        flow = networks.posterior
        context = flow.prepare(networks.summary(x))
        terms = {"posterior": -flow.log_prob(run.u, context, keys[0])}
        if networks.likelihood is not None:
            x = self.data.dequantise(x, keys[1])
            terms["likelihood"] = -likelihood_standard(
                networks.likelihood, self.data.layout, run.u, x, keys[2]
            )
        if networks.prior is not None:
            empty = networks.prior.prepare(jnp.zeros(0))
            terms["prior"] = -networks.prior.log_prob(run.u, empty, keys[3])
        return terms

    def batches(self, networks: Networks, runs: Example, batch_size: int, key: PRNGKey) -> Batch:
        """The batches of one epoch, along a leading axis of steps."""
        n = len(runs.u)
        k_order, k_spots, k_unlabeled = jax.random.split(key, 3)
        steps = n // batch_size
        order = jax.random.permutation(k_order, n)[: steps * batch_size]
        runs = _split(take(runs, order), steps)
        if self.settings is None:
            return Batch(runs, None, None)
        spots = self._spots(networks, runs.x, runs.u, k_spots)
        if self.unlabeled is None:
            return Batch(runs, spots, None)
        m = len(jax.tree.leaves(self.unlabeled)[0])
        size = min(m, self.settings.unlabeled_batch or batch_size)
        pick = lambda k: jax.random.permutation(k, m)[:size]  # noqa: E731
        k_pick, k_unlabeled = jax.random.split(k_unlabeled)
        picked = jax.vmap(pick)(jax.random.split(k_pick, steps))
        unlabeled = self._spots(networks, take(self.unlabeled, picked), None, k_unlabeled)
        return Batch(runs, spots, unlabeled)

    def _spots(self, networks: Networks, x, u, key: PRNGKey) -> Spot:
        """Datasets to ask at, augmented, with their draws if those are made once an epoch."""
        settings, layout = self.settings, self.data.layout
        assert settings is not None
        k_augment, k_draws = jax.random.split(key)
        shape = jax.tree.leaves(x)[0].shape[:2]
        if settings.augmentation is not None:
            change = lambda x, k: settings.augmentation(  # noqa: E731
                layout.named(x), k, layout, self.spread
            )
            x = _twice(lambda x, k: layout.unnamed(change(x, k)))(
                x, jax.random.split(k_augment, shape)
            )
        spot = Spot(x, u, None)
        if not isinstance(settings.proposal, EpochCopy):
            return spot
        posterior = self._posterior(networks)
        draw = lambda s, k: propose(settings, posterior, self.model.prior, s, k)  # noqa: E731
        return spot._replace(draws=_twice(draw)(spot, jax.random.split(k_draws, shape)))

    def __call__(
        self, networks: Networks, batch: Batch, key: PRNGKey, progress: Scalar
    ) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """The weighted terms of a batch, and counts of what was left out."""
        k_runs, k_spots, k_unlabeled, k_atoms = jax.random.split(key, 4)
        keys = jax.random.split(k_runs, len(batch.runs.u))
        each = lambda run, k: self.maximum_likelihood(networks, run, k)  # noqa: E731
        terms = jax.tree.map(jnp.mean, jax.vmap(each)(batch.runs, keys))
        if self.atoms is not None:
            terms["posterior"] = self._atomic(networks, batch.runs, self.atoms, k_atoms)
        if self.settings is None or batch.spots is None:
            return terms, {}
        weight = self.settings.weight(progress)
        loss, trust, info = self._consistency(networks, batch.spots, k_spots, weight)
        terms["consistency"] = weight * loss
        labels = self.settings.maximum_likelihood(progress)
        terms["posterior"] *= labels + jnp.maximum(1.0 - labels, 0.0) * (1.0 - trust)
        if batch.unlabeled is not None:
            loss, _, more = self._consistency(networks, batch.unlabeled, k_unlabeled, weight)
            terms["unlabeled"] = weight * self.settings.unlabeled_weight * loss
            info = jax.tree.map(jnp.add, info, more)
        return terms, info

    def _atomic(self, networks: Networks, runs: Example, atoms: int, key: PRNGKey) -> Scalar:
        """How well each run's theta is told from those of others in the batch."""
        n, flow = len(runs.u), networks.posterior
        log_prior = jax.vmap(self._log_prior)(runs.u)

        def each(i, x, key):
            context = flow.prepare(networks.summary(self.data.standardise(x)))
            others = jax.random.permutation(key, n - 1)[: atoms - 1]
            index = jnp.concatenate([i[None], (i + 1 + others) % n])
            log_q = jax.vmap(lambda u: flow.log_prob(u, context))(runs.u[index])
            return -jax.nn.log_softmax(log_q - log_prior[index])[0]

        keys = jax.random.split(key, n)
        return jnp.mean(jax.vmap(each)(jnp.arange(n), runs.x, keys))

    def _log_prior(self, u: Flat) -> Scalar:
        theta, log_det = self.parameters.from_vector_with_log_det(u)
        return self.model.prior.log_prob(theta) - log_det

    def _consistency(self, networks: Networks, spots: Spot, key: PRNGKey, weight: Scalar):
        """The mean loss, how far it is to be trusted, and counts of what was left out."""
        settings = self.settings
        assert settings is not None
        limit = settings.limit
        posterior, joint = self._posterior(networks), self._joint(networks)
        n = len(jax.tree.leaves(spots.x)[0])

        def ask():
            each = lambda spot, k: consistency(  # noqa: E731
                settings, posterior, joint, self.model.prior, spot, k, networks.multipliers
            )
            loss, usable, valid = jax.vmap(each)(spots, jax.random.split(key, n))
            trust = jnp.ones(n) if limit is None else limit / (limit + jnp.maximum(loss, 0.0))
            # Of made-up data, the likelihood may know nothing; that is no mistake.
            invalid = 0.0 if settings.augmentation else jnp.sum(1.0 - valid)
            return (
                jnp.mean(loss * trust),
                jax.lax.stop_gradient(jnp.mean(trust)),
                jnp.mean(1.0 - usable),
                jnp.asarray(invalid, float),
            )

        skip = lambda: (jnp.zeros(()), jnp.ones(()), jnp.zeros(()), jnp.zeros(()))  # noqa: E731
        # While the weight is zero, nothing is drawn and nothing evaluated.
        loss, trust, dropped, invalid = jax.lax.cond(weight > 0, ask, skip)
        return loss, trust, {"dropped": dropped, "invalid": invalid}

    def _posterior(self, networks: Networks) -> Posterior:
        return Posterior(networks.summary, networks.posterior, self.parameters, self.data)

    def _joint(self, networks: Networks) -> Joint:
        prior, flow = networks.prior, networks.likelihood
        return make_joint(
            self.model,
            None if prior is None else LearnedPrior(prior, self.parameters),
            None if flow is None else Likelihood(flow, self.parameters, self.data),
            exact=self.exact,
        )


def take(tree, index):
    """Some of the entries along the leading axis."""
    return jax.tree.map(lambda a: a[index], tree)


def _split(tree, steps: int):
    return jax.tree.map(lambda a: a.reshape(steps, -1, *a.shape[1:]), tree)


def _twice(function):
    return jax.vmap(jax.vmap(function))
