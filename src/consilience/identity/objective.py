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

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from consilience.core.types import Data, Flat, PRNGKey, Scalar
from consilience.identity.consistency import Known, SelfConsistency, Spots, consistency, propose
from consilience.identity.evidence import Joint, make_joint
from consilience.identity.learned import (
    LearnedPrior,
    Likelihood,
    Networks,
    Posterior,
    likelihood_standard,
    twice,
)
from consilience.identity.proposals import EpochCopy
from consilience.model.data import DataSpace
from consilience.model.spaces import ParameterSpace
from consilience.networks.base import Numbers
from consilience.networks.validity import Validity


class Example(NamedTuple):
    """Runs: their parameters as networks see them, their data as the user does."""

    u: Float[Array, "*n d"]
    x: Data


class Batch(NamedTuple):
    """What one step sees: runs, and the datasets where self-consistency is asked."""

    runs: Example
    spots: Spots | None
    unlabeled: Spots | None


class Objective(eqx.Module):
    """The sum that training minimises, and the batches it is made of.

    `model`: prior and likelihood; None where maximum likelihood alone needs neither.
    `settings`: self-consistency, or None for maximum likelihood alone.
    `exact`: the identity takes the model's own log-likelihood, not the learned one.
    `unlabeled`: observed data without parameters, with a leading axis.
    `atoms`: M, where theta came from a proposal, not from the prior; else None.
    `validity`: the factor of the learned likelihood for runs that failed and were dropped.
    """

    N_KEYS: ClassVar[int] = 5
    """How many random keys a step takes."""

    model: Any
    parameters: ParameterSpace
    data: DataSpace
    settings: SelfConsistency | None = eqx.field(static=True, default=None)
    exact: bool = eqx.field(static=True, default=False)
    spread: Any = None
    unlabeled: Any = None
    atoms: int | None = eqx.field(static=True, default=None)
    validity: Validity | None = None

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The densities whose best epochs are picked together: those that share a term."""
        tied = self.settings is not None and not self.exact
        return (
            (("posterior", "likelihood", "prior"),)
            if tied
            else (("posterior",), ("likelihood",), ("prior",))
        )

    def maximum_likelihood(self, networks: Networks, runs: Example) -> dict[str, Numbers]:
        """The negative log densities of runs."""
        contexts = self._posterior(networks).contexts(runs.x)
        posterior = -networks.posterior.log_prob(runs.u, contexts)
        return {"posterior": posterior, **self._joint_terms(networks, runs, None)}

    def _joint_terms(
        self, networks: Networks, runs: Example, key: PRNGKey | None
    ) -> dict[str, Numbers]:
        """The negative log densities of learned likelihood and prior; with a key, dropout is on."""
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        terms = {}
        if networks.likelihood is not None:
            if keys[0] is None:
                x = jax.vmap(lambda x: self.data.dequantise(x, None))(runs.x)
            else:
                x = jax.vmap(self.data.dequantise)(runs.x, jax.random.split(keys[0], len(runs.u)))
            terms["likelihood"] = -likelihood_standard(
                networks.likelihood, self.data.layout, runs.u[:, None], x, keys[1]
            )[:, 0]
        if networks.prior is not None:
            empty = networks.prior.prepare(jnp.zeros(0))
            terms["prior"] = -networks.prior.log_prob(runs.u, empty, keys[2])
        return terms

    def batches(
        self,
        networks: Networks,
        runs: Example,
        order: Int[Array, "steps batch"],
        keys: Key[Array, " n"],
    ) -> Batch:
        """The batches of one epoch, along a leading axis of steps."""
        steps, batch_size = order.shape
        runs = take(runs, order)
        if self.settings is None:
            return Batch(runs, None, None)
        k_spots, k_unlabeled, *_ = keys
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

    def _spots(self, networks: Networks, x, u, key: PRNGKey) -> Spots:
        """Datasets to ask at, augmented, with their draws if those are made once an epoch."""
        settings, layout = self.settings, self.data.layout
        assert settings is not None
        k_augment, k_draws = jax.random.split(key)
        shape = jax.tree.leaves(x)[0].shape[:2]
        if settings.augmentation is not None:
            change = lambda x, k: settings.augmentation(  # noqa: E731
                layout.named(x), k, layout, self.spread
            )
            x = twice(lambda x, k: layout.unnamed(change(x, k)))(
                x, jax.random.split(k_augment, shape)
            )
        if not isinstance(settings.proposal, EpochCopy):
            return Spots(x, u, None)
        posterior, prior, beside = self._posterior(networks), self.model.prior, u is not None

        def draw(part):
            contexts = posterior.contexts(part[0])
            return propose(settings, posterior, contexts, prior, part[1], beside=beside)[0]

        keys = jax.random.split(k_draws, shape[0])
        return Spots(x, u, jax.lax.stop_gradient(jax.lax.map(draw, (x, keys))))

    def __call__(
        self, networks: Networks, batch: Batch, keys: Key[Array, " n"], progress: Scalar
    ) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """The weighted terms of a batch, and counts of what was left out."""
        k_posterior, k_joint, k_spots, k_unlabeled, k_atoms = keys
        log_q, known, known_unlabeled = self._posterior_at(networks, batch, k_posterior)
        terms = {"posterior": -log_q, **self._joint_terms(networks, batch.runs, k_joint)}
        terms = jax.tree.map(jnp.mean, terms)
        if self.atoms is not None:
            terms["posterior"] = self._atomic(networks, batch.runs, self.atoms, k_atoms)
        if self.settings is None or batch.spots is None or known is None:
            return terms, {}
        weight, labels = (schedule(progress) for schedule in self.settings.schedules)
        loss, trust, info = self._consistency(networks, batch.spots, known, k_spots, weight)
        terms["consistency"] = weight * loss
        terms["posterior"] *= labels + jnp.maximum(1.0 - labels, 0.0) * (1.0 - trust)
        if batch.unlabeled is not None and known_unlabeled is not None:
            loss, _, more = self._consistency(
                networks, batch.unlabeled, known_unlabeled, k_unlabeled, weight
            )
            terms["unlabeled"] = weight * self.settings.unlabeled_weight * loss
            info = jax.tree.map(jnp.add, info, more)
        return terms, info

    def _posterior_at(
        self, networks: Networks, batch: Batch, key: PRNGKey
    ) -> tuple[Float[Array, " n"], Known | None, Known | None]:
        """The log density of each run, and what is known of spots and of unlabelled data.

        All datasets pass the summary network together, and all training theta the flow:
        one large product is faster, and compiles faster, than several small ones.
        """
        runs, spots, unlabeled = batch
        flow, n = networks.posterior, len(runs.u)
        augmented = self.settings is not None and self.settings.augmentation is not None
        parts = [runs.x]
        if spots is not None and augmented:
            parts.append(spots.x)
        if unlabeled is not None:
            parts.append(unlabeled.x)
        contexts = self._posterior(networks).contexts(
            jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
        )
        of_runs, of_spots = take(contexts, slice(n)), take(contexts, slice(n))
        if augmented:
            of_spots = take(contexts, slice(n, 2 * n))
        of_unlabeled = None
        if unlabeled is not None:
            of_unlabeled = Known(take(contexts, slice(n + n * augmented, None)), None)
        if spots is None:
            return flow.log_prob(runs.u, of_runs, key), None, None
        if not augmented and flow.spec.dropout == 0:
            log_q = flow.log_prob(runs.u, of_runs)
            return log_q, Known(of_spots, log_q), of_unlabeled
        # Where self-consistency is asked, nothing is dropped.
        twice_u = jnp.concatenate([runs.u, runs.u])
        both = jax.tree.map(lambda *parts: jnp.concatenate(parts), of_runs, of_spots)
        log_q = flow.log_prob(twice_u, both, key, dropped=n)
        return log_q[:n], Known(of_spots, log_q[n:]), of_unlabeled

    def _atomic(self, networks: Networks, runs: Example, atoms: int, key: PRNGKey) -> Scalar:
        """How well each run's theta is told from those of others in the batch."""
        n, flow = len(runs.u), networks.posterior
        log_prior = jax.vmap(self._log_prior)(runs.u)

        def choose(i, key):
            others = jax.random.permutation(key, n - 1)[: atoms - 1]
            return jnp.concatenate([i[None], (i + 1 + others) % n])

        index = jax.vmap(choose)(jnp.arange(n), jax.random.split(key, n))
        contexts = self._posterior(networks).contexts(runs.x)
        log_q = flow.log_prob(runs.u[index], contexts)
        return -jnp.mean(jax.nn.log_softmax(log_q - log_prior[index], axis=1)[:, 0])

    def _log_prior(self, u: Flat) -> Scalar:
        theta, log_det = self.parameters.from_vector_with_log_det(u)
        return self.model.prior.log_prob(theta) - log_det

    def _consistency(
        self, networks: Networks, spots: Spots, known: Known, key: PRNGKey, weight: Scalar
    ):
        """The mean loss, how far it is to be trusted, and counts of what was left out."""
        settings = self.settings
        assert settings is not None
        limit = settings.limit

        def ask(networks: Networks, known: Known):
            loss, usable, valid = consistency(
                settings,
                self._posterior(networks),
                self._joint(networks),
                self.model.prior,
                spots,
                known,
                key,
                networks.multipliers,
            )
            trust = jnp.ones_like(loss)
            if limit is not None:
                trust = limit / (limit + jnp.maximum(loss, 0.0))
            # Of made-up data, the likelihood may know nothing; that is no mistake.
            invalid = jnp.zeros(()) if settings.augmentation else jnp.sum(1.0 - valid)
            return jnp.mean(loss * trust), (jnp.mean(trust), jnp.mean(1.0 - usable), invalid)

        nothing = (jnp.ones(()), jnp.zeros(()), jnp.zeros(()))
        loss, (trust, dropped, invalid) = _only_if(weight > 0, ask, (networks, known), nothing)
        return loss, trust, {"dropped": dropped, "invalid": invalid}

    def _posterior(self, networks: Networks) -> Posterior:
        return Posterior(networks.summary, networks.posterior, self.parameters, self.data)

    def _joint(self, networks: Networks) -> Joint:
        prior, flow = networks.prior, networks.likelihood
        return make_joint(
            self.model,
            None if prior is None else LearnedPrior(prior, self.parameters),
            None if flow is None else Likelihood(flow, self.parameters, self.data, self.validity),
            exact=self.exact,
        )


def take(tree, index):
    """Some of the entries along the leading axis."""
    return jax.tree.map(lambda a: a[index], tree)


def _only_if(active, loss, arguments: tuple, otherwise):
    """`loss(*arguments)` and what comes with it, or zero and `otherwise`, at no cost.

    The derivative is taken inside the branch: from outside, all that it needs would have to
    leave the branch.
    """
    arrays, static = eqx.partition(arguments, eqx.is_inexact_array)
    frozen = jax.lax.stop_gradient(arrays)

    def run():
        aside = lambda arrays: loss(*eqx.combine(arrays, static))  # noqa: E731
        return jax.value_and_grad(aside, has_aux=True)(frozen)

    def skip():
        return (jnp.zeros(()), otherwise), jax.tree.map(jnp.zeros_like, frozen)

    (value, more), slope = jax.lax.cond(active, run, skip)
    return _with_slope(arrays, value, slope), more


@jax.custom_vjp
def _with_slope(arrays, value: Scalar, slope) -> Scalar:
    """A value, and what its derivative in the arrays is."""
    return value


_with_slope.defvjp(
    lambda arrays, value, slope: (value, slope),
    lambda slope, grad: (jax.tree.map(lambda s: grad * s, slope), None, None),
)
