r"""The terms of the loss, each a number for one batch.

Neural posterior estimation (NPE) and joint posterior and likelihood estimation (NPLE) are
maximum likelihood over the joint model of parameters and data (Schmitt et al. 2024,
arXiv:2310.04395, equations 2 and 3):
$$\mathcal{L}_\mathrm{NPE}(\phi) = \mathbb{E}_{p(\theta, x)}[-\log q_\phi(\theta \mid x)], \qquad
  \mathcal{L}_\mathrm{NPLE}(\phi, \eta) = \mathbb{E}_{p(\theta, x)}
  [-\log q_\phi(\theta \mid x) - \log q_\eta(x \mid \theta)].$$

Where theta were drawn from a proposal and not from the prior, the posterior learns to tell a
run's theta from those of other runs (automatic posterior transformation with atomic proposals,
Greenberg et al. 2019, arXiv:1905.07488):
$$\mathcal{L}_\mathrm{APT} = -\log \frac{q_\phi(\theta_1 \mid x) / p(\theta_1)}
  {\sum_{m=1}^M q_\phi(\theta_m \mid x) / p(\theta_m)}.$$

The self-consistency term is the spread of the identity at query datasets (`consistency.py`).
"""

import zlib
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from consilience.core.gradients import only_if
from consilience.core.types import Flat, PRNGKey, Scalar
from consilience.identity.batches import Batch, take
from consilience.identity.consistency import Cached, SelfConsistency, check_hashable, consistency
from consilience.identity.evidence import Joint, make_joint
from consilience.identity.learned import (
    LearnedPrior,
    Likelihood,
    Networks,
    Posterior,
    likelihood_standard,
)
from consilience.model.data import DataSpace
from consilience.model.model import Model
from consilience.model.priors import Prior
from consilience.model.spaces import ParameterSpace
from consilience.networks.base import Numbers
from consilience.networks.density import BatchedDensity, Dropout
from consilience.networks.validity import Validity


class Evaluated(NamedTuple):
    """What the posterior says of a batch, computed once for all terms.

    `log_q`: the log density of each run's theta, with dropout. `queries`, `unlabeled`: what is
    cached of the query datasets, without dropout.
    """

    log_q: Float[Array, " n"]
    queries: Cached | None = None
    unlabeled: Cached | None = None


def evaluate(
    posterior: Posterior, batch: Batch, key: PRNGKey | None = None, *, augmented: bool = True
) -> Evaluated:
    """The log density of each run, and what the loss caches of the query datasets.

    All datasets pass the summary network together, and all training theta the flow: one large
    product is faster, and compiles faster, than several small ones.

    `key`: of dropout; without one nothing is dropped. `augmented`: whether the query datasets
    made from the runs differ from the data of the runs. If not, they share contexts.
    """
    runs, queries, unlabeled = batch
    n, augmented = len(runs.u), augmented and queries is not None
    parts = [runs.x]
    if queries is not None and augmented:
        parts.append(queries.x)
    if unlabeled is not None:
        parts.append(unlabeled.x)
    contexts = posterior.contexts(jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts))
    of_runs = take(contexts, slice(n))
    end = n + (len(jax.tree.leaves(queries.x)[0]) if queries is not None and augmented else 0)
    of_queries = take(contexts, slice(n, end)) if augmented else of_runs
    of_unlabeled = None
    if unlabeled is not None:
        of_unlabeled = Cached(take(contexts, slice(end, None)))
    flow = posterior.flow
    dropout = None if key is None else Dropout(key)
    if queries is None:
        return Evaluated(flow.log_prob(runs.u, of_runs, dropout), None, of_unlabeled)
    if not augmented and flow.dropout == 0:
        log_q = own = flow.log_prob(runs.u, of_runs)
    else:
        both = jax.tree.map(lambda *parts: jnp.concatenate(parts), of_runs, of_queries)
        # Nothing is dropped at query datasets.
        dropout = None if key is None else Dropout(key, first=n)
        own = runs.u if queries.u is None else queries.u
        log_q = flow.log_prob(jnp.concatenate([runs.u, own]), both, dropout)
        log_q, own = log_q[:n], log_q[n:]
    return Evaluated(log_q, Cached(of_queries, None if queries.u is None else own), of_unlabeled)


class Problem(eqx.Module):
    """The model, and the spaces of parameters and data that turn networks into densities.

    `exact`: the identity takes the model's own log-likelihood, not the learned one.
    `validity`: the factor of the learned likelihood for runs that failed and were dropped.
    `emulator`: a likelihood that was learned before and is not trained further.
    """

    model: Model | None
    parameters: ParameterSpace
    data: DataSpace
    exact: bool = eqx.field(static=True, default=False)
    validity: Validity | None = None
    emulator: BatchedDensity | None = None

    def posterior(self, networks: Networks) -> Posterior:
        return Posterior(networks.summary, networks.posterior, self.parameters, self.data)

    def joint(self, networks: Networks) -> Joint:
        if self.model is None:
            raise ValueError("Maximum likelihood alone is trained without the model's densities.")
        prior = networks.prior
        return make_joint(
            self.model,
            None if prior is None else LearnedPrior(prior, self.parameters),
            self.likelihood(networks),
            exact=self.exact,
        )

    def likelihood(self, networks: Networks) -> Likelihood | None:
        """The learned likelihood: trained with the posterior, or before it."""
        flow = self.emulator if networks.likelihood is None else networks.likelihood
        return None if flow is None else Likelihood(flow, self.parameters, self.data, self.validity)

    def valid_share(self, u: Float[Array, "n d"]) -> Float[Array, " n"]:
        """The shares of parameters of the prior among those whose runs do not fail."""
        if self.validity is None:
            return jnp.full(len(u), 1.0 / len(u))
        return jax.nn.softmax(jax.vmap(self.validity.log_prob)(u))


class View(NamedTuple):
    """One step of training, as a loss term sees it.

    `problem`: the model, and the spaces of parameters and data.
    `networks`: all that is trained.
    `batch`: the runs and the query datasets.
    `evaluated`: what the posterior says of them.
    `progress`: how far training has come, from 0 to 1.
    """

    problem: Problem
    networks: Networks
    batch: Batch
    evaluated: Evaluated
    progress: Scalar

    @property
    def posterior(self) -> Posterior:
        """The learned posterior as it is at this step."""
        return self.problem.posterior(self.networks)

    @property
    def joint(self) -> Joint:
        """Prior and likelihood, exact or learned, where self-consistency is trained."""
        return self.problem.joint(self.networks)


@runtime_checkable
class LossTerm(Protocol):
    """A term of the loss: `cs.fit(..., terms=[term])` adds it to the built-in ones.

    How to write your own: a frozen dataclass, or an Equinox module, with a `name` and a
    `__call__` that gives one number for a batch, to be minimised. It sees the step as a `View`;
    `key` is a random key of its own. The name is that of its column in `fit.history.terms`. The
    held-out loss, by which epochs are picked, is that of maximum likelihood without this term.

    A term that keeps posterior draws away from a wall:

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Wall:
    ...     name: str = "wall"
    ...     weight: float = 0.1
    ...     def __call__(self, view, key):
    ...         contexts = view.posterior.contexts(view.batch.runs.x)
    ...         u, _ = view.posterior.flow.sample(key, contexts, (4,))
    ...         return self.weight * jnp.mean(jnp.maximum(u - 3.0, 0.0) ** 2)
    >>> isinstance(Wall(), LossTerm)
    True
    """

    @property
    def name(self) -> str: ...

    def __call__(self, view: View, key: PRNGKey) -> Scalar: ...


TAKEN = (
    *("posterior", "likelihood", "prior", "consistency", "unlabeled"),
    *("loss", "ok", "dropped", "invalid", "skipped", "validation"),
)
"""Names of the columns of a history that terms of the user's own cannot have."""


def check_terms(terms: Sequence[LossTerm]):
    """Refuse what is no loss term, and names that are taken."""
    names: list[str] = []
    for term in terms:
        if isinstance(term, type) or not isinstance(term, LossTerm):
            raise TypeError(
                "Each of terms must be an object with a name that is called with a view of the "
                f"step and a key (see cs.LossTerm), got {term!r}."
            )
        if not isinstance(term.name, str) or term.name in (*TAKEN, *names):
            raise ValueError(
                f"A loss term needs a name of its own, which is not {term.name!r}: that is one of "
                f"{list(TAKEN)}, or of another term, or no text."
            )
        names.append(term.name)
        if not isinstance(term, eqx.Module):
            check_hashable(f"The loss term {term.name!r}", term)


def own_key(key: PRNGKey, name: str) -> PRNGKey:
    """The random key of a user's term: by its name, and no key of the library's own."""
    return jax.random.fold_in(jax.random.fold_in(key, 2**31), zlib.crc32(name.encode()))


class PosteriorTerm(eqx.Module):
    """The NPE loss: the mean negative log posterior density of the runs."""

    name = "posterior"

    def each(self, view: View, key: PRNGKey | None) -> Numbers:
        return -view.evaluated.log_q

    def __call__(self, view: View, key: PRNGKey) -> Scalar:
        return jnp.mean(self.each(view, key))


class LikelihoodTerm(eqx.Module):
    """The NPLE loss of the learned likelihood; with a key, data are dequantised, dropout is on."""

    name = "likelihood"

    def each(self, view: View, key: PRNGKey | None) -> Numbers:
        runs, data, flow = view.batch.runs, view.problem.data, view.networks.likelihood
        assert flow is not None
        if key is None:
            x = jax.vmap(lambda x: data.dequantise(x, None))(runs.x)
            values = likelihood_standard(flow, data.layout, runs.u[:, None], x)
        else:
            keys = _JointKeys(*jax.random.split(key, 3))
            x = jax.vmap(data.dequantise)(runs.x, jax.random.split(keys.noise, len(runs.u)))
            values = likelihood_standard(
                flow, data.layout, runs.u[:, None], x, Dropout(keys.likelihood)
            )
        return -values[:, 0]

    def __call__(self, view: View, key: PRNGKey) -> Scalar:
        return jnp.mean(self.each(view, key))


class PriorTerm(eqx.Module):
    """The mean negative log density of the runs' theta under the learned prior."""

    name = "prior"

    def each(self, view: View, key: PRNGKey | None) -> Numbers:
        flow = view.networks.prior
        assert flow is not None
        dropout = None if key is None else Dropout(_JointKeys(*jax.random.split(key, 3)).prior)
        return -flow.log_prob(view.batch.runs.u, flow.prepare(jnp.zeros(0)), dropout)

    def __call__(self, view: View, key: PRNGKey) -> Scalar:
        return jnp.mean(self.each(view, key))


class _JointKeys(NamedTuple):
    """The random keys of the learned likelihood and prior, from the one that they share."""

    noise: PRNGKey
    likelihood: PRNGKey
    prior: PRNGKey


class AtomicTerm(eqx.Module):
    """How well each run's theta is told from those of `atoms` - 1 others of the batch."""

    prior: Prior
    atoms: int = eqx.field(static=True)
    name = "posterior"

    def __call__(self, view: View, key: PRNGKey) -> Scalar:
        runs, flow = view.batch.runs, view.posterior.flow
        n = len(runs.u)
        parameters = view.posterior.parameters

        def log_prior(u: Flat) -> Scalar:
            theta, log_det = parameters.from_vector_with_log_det(u)
            return self.prior.log_prob(theta) - log_det

        def choose(i, key):
            others = jax.random.permutation(key, n - 1)[: self.atoms - 1]
            return jnp.concatenate([i[None], (i + 1 + others) % n])

        log_p = jax.vmap(log_prior)(runs.u)
        index = jax.vmap(choose)(jnp.arange(n), jax.random.split(key, n))
        log_q = flow.log_prob(runs.u[index], view.posterior.contexts(runs.x))
        return -jnp.mean(jax.nn.log_softmax(log_q - log_p[index], axis=1)[:, 0])


class Judged(NamedTuple):
    """The self-consistency loss of a batch.

    `trust`: the mean share of the loss that datasets keep under `SelfConsistency.limit`.
    `counts`: `dropped`, the share of datasets that no theta explains, and `invalid`, the number
    at which the likelihood is not a number.
    """

    loss: Scalar
    trust: Scalar
    counts: dict[str, Scalar]


class ConsistencyTerm(eqx.Module):
    """The mean self-consistency loss at query datasets, simulated or unlabelled ones.

    While its weight is zero nothing is drawn or evaluated.
    """

    settings: SelfConsistency = eqx.field(static=True)
    prior: Prior
    at: Literal["queries", "unlabeled"] = eqx.field(static=True, default="queries")

    @property
    def name(self) -> str:
        return "consistency" if self.at == "queries" else "unlabeled"

    def __call__(self, view: View, key: PRNGKey) -> Scalar:
        return self.judge(view, key).loss

    def judge(self, view: View, key: PRNGKey) -> Judged:
        """The loss, how far it is to be trusted, and what it left out."""
        settings = self.settings
        queries, cached = getattr(view.batch, self.at), getattr(view.evaluated, self.at)

        def loss(networks: Networks, cached: Cached):
            problem = view.problem
            losses, usable, valid = consistency(
                settings,
                problem.posterior(networks),
                problem.joint(networks),
                self.prior,
                queries,
                cached,
                key,
                networks.criterion,
            )
            trust = jnp.ones_like(losses)
            if settings.limit is not None:
                trust = settings.limit / (settings.limit + jnp.maximum(losses, 0.0))
            # The likelihood may be undefined on augmented data; that is expected.
            invalid = jnp.zeros(()) if settings.augmentation else jnp.sum(1.0 - valid)
            beside = jnp.mean(trust), jnp.mean(1.0 - usable), invalid
            return jnp.mean(losses * trust), beside

        active = settings.schedules[0](view.progress) > 0
        otherwise = (jnp.ones(()), jnp.zeros(()), jnp.zeros(()))
        value, (trust, dropped, invalid) = only_if(active, loss, (view.networks, cached), otherwise)
        return Judged(value, trust, {"dropped": dropped, "invalid": invalid})
