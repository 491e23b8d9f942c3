"""The self-consistency loss: the spread of the identity over K values of theta.

Schmitt et al. 2024 (arXiv:2310.04395), equation 9 and algorithm 1. `SelfConsistency` is what
a user chooses; `consistency` gives the losses of several datasets.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from consilience.core.types import Data, PRNGKey, Scalar
from consilience.identity.augmentation import Augmentation, Bootstrap
from consilience.identity.criteria import Bounded, Criterion, Values
from consilience.identity.evidence import Joint, Terms, terms_at
from consilience.identity.learned import Posterior
from consilience.identity.proposals import CurrentPosterior, Proposal, Proposed
from consilience.identity.schedules import Constant, Schedule, Step, check_weight
from consilience.identity.setting import Setting, resolved
from consilience.model.priors import Prior
from consilience.networks.density import Context, freeze

FLOOR = 10.0
"""How far below the least likely possible theta an impossible one counts, in nats."""


# Only type checkers refuse other words by the annotation: at run time an error says what to pass.
if TYPE_CHECKING:
    Gradient = Literal["both", "posterior"]
else:
    Gradient = str


@dataclasses.dataclass(frozen=True)
class SelfConsistency:
    """Settings of the self-consistency loss.

    The defaults are the best recipe known. The paper's own is `SelfConsistency(
    maximum_likelihood=Constant(), criterion=Variance(), augmentation=None, limit=None)`.

    `samples`: K, the values of theta for each dataset; the training theta is one of them.
    `weight`: lambda over training. It starts at zero, since an untrained posterior proposes
    useless theta. By default it is 1 after the first 15 % of training; with a learned likelihood
    of data of more than 20 values, it is 0 in the first half of training and 0.1 in the second.
    `maximum_likelihood`: the weight of the posterior's maximum-likelihood term over training.
    By default it falls to 0.1 after the warm-up: enough to keep the posterior on all modes
    without overfitting few simulated pairs. With a learned likelihood of data of more than 20
    values it stays 1: simulated pairs then determine the parameters better than that likelihood.
    `limit`: a bound on the loss of a dataset, in squared nats. Datasets near it count less, and
    the maximum-likelihood term counts more in their place: if a likelihood is so sharp that the
    identity's values are far apart, simulated pairs are the better guide. None for no limit.
    `proposal`: the distribution that theta are drawn from.
    `criterion`: the measure of spread. By default draws are weighted by the evidence at them if
    the likelihood is exact and the data are not a set, except in atomic rounds.
    `augmentation`: makes the query datasets from simulated ones; with None, the simulated
    datasets are the query datasets.
    `exact`: use the model's own log-likelihood (True) or the learned one (False); by default
    the model's own if it has one.
    `gradient`: "both" trains a learned likelihood by this loss too, "posterior" does not.
    `unlabeled_weight`: the weight of unlabelled datasets relative to simulated ones.
    `unlabeled_batch`: the number of unlabelled datasets in a step; by default the number of
    simulated ones, or all if there are fewer.
    """

    samples: int = 10
    weight: Schedule | None = None
    maximum_likelihood: Schedule | None = None
    limit: float | None = 10.0
    proposal: Proposal = CurrentPosterior()
    criterion: Criterion = Bounded()
    augmentation: Augmentation | None = Bootstrap()
    exact: bool | None = None
    gradient: Gradient = "both"
    unlabeled_weight: float = 1.0
    unlabeled_batch: int | None = None

    def __post_init__(self):
        if not isinstance(self.samples, int) or self.samples < 2:
            raise ValueError(
                "Self-consistency compares values of theta with one another: samples must be "
                f"a whole number, 2 or more, got {self.samples}."
            )
        if self.gradient not in ("both", "posterior"):
            raise ValueError(f'gradient must be "both" or "posterior", got {self.gradient!r}.')
        for name in EXAMPLES:
            _check_part(name, getattr(self, name))
        weight, labels = self.schedules
        check_weight(weight, "self-consistency")
        check_weight(labels, "maximum likelihood")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive, or None, got {self.limit}.")
        if not self.unlabeled_weight >= 0:
            raise ValueError(f"unlabeled_weight must not be negative, got {self.unlabeled_weight}.")
        if self.unlabeled_batch is not None and self.unlabeled_batch < 1:
            raise ValueError(f"unlabeled_batch must be at least 1, got {self.unlabeled_batch}.")

    @property
    def schedules(self) -> tuple[Schedule, Schedule]:
        """Lambda and the weight of maximum likelihood, over training."""
        return self.weight or Step(0.15), self.maximum_likelihood or Step(0.15, 1.0, 0.1)

    def resolved(self, setting: Setting) -> "SelfConsistency":
        """With what was left open chosen for a problem."""
        weight, labels = self.schedules
        if setting.wide:
            weight = self.weight or Step(0.5, after=0.1)
            labels = self.maximum_likelihood or Constant()
        return dataclasses.replace(
            self,
            augmentation=resolved(self.augmentation, setting),
            criterion=resolved(self.criterion, setting),
            weight=weight,
            maximum_likelihood=labels,
        )


class Queries(NamedTuple):
    """Query datasets: where the identity is evaluated.

    `u`: their training theta, if they have one. `draws`: theta to evaluate it at, where they
    were drawn before.
    """

    x: Data
    u: Float[Array, "*n d"] | None = None
    draws: Float[Array, "*n k d"] | None = None


class Cached(NamedTuple):
    """What the posterior has computed of query datasets already, each to be differentiated.

    `contexts`: what its density needs of them; `own`: the log density of their training theta.
    """

    contexts: Context
    own: Float[Array, " n"] | None = None


def _check_part(name: str, part: object):
    if part is None and name not in ("proposal", "criterion"):
        return
    if not callable(part) or isinstance(part, type):
        raise TypeError(
            f"The {name} of SelfConsistency must be a callable object, such as "
            f"{EXAMPLES[name]}, got {part!r}."
        )
    check_hashable(f"The {name} of SelfConsistency", part)


def check_hashable(what: str, part: object):
    """Refuse a part that would trigger recompilation in every fit."""
    try:
        hash(part)
    except TypeError as error:
        raise TypeError(
            f"{what} must be hashable, so that an equal one does not trigger recompilation: make "
            f"{type(part).__name__} a frozen dataclass ({error})."
        ) from None


EXAMPLES = {
    "weight": "cs.Step(0.5)",
    "maximum_likelihood": "cs.Constant(0.1)",
    "proposal": "cs.CurrentPosterior()",
    "criterion": "cs.Bounded()",
    "augmentation": "cs.Jitter()",
}
"""The parts that a user may replace, each with one to pass."""


def propose(
    settings: SelfConsistency,
    posterior: Posterior,
    contexts: Context,
    prior: Prior,
    key: PRNGKey,
    *,
    beside: bool,
) -> Proposed:
    """New theta for each dataset: K, or K - 1 `beside` its training theta."""
    n = settings.samples - beside
    u, log_q = settings.proposal(key, n, posterior, contexts, prior)
    return jax.lax.stop_gradient(u), log_q


class Losses(NamedTuple):
    """The loss of each dataset, whether it counts, and whether its likelihood is valid."""

    loss: Float[Array, " n"]
    usable: Bool[Array, " n"]
    valid: Bool[Array, " n"]


def consistency(
    settings: SelfConsistency,
    posterior: Posterior,
    joint: Joint,
    prior: Prior,
    queries: Queries,
    cached: Cached,
    key: PRNGKey,
    criterion: Callable[[Values], Scalar] | None = None,
) -> Losses:
    """The losses of several datasets, by the criterion of the settings unless one is given.

    Where the model holds a theta impossible, it counts as `FLOOR` nats below the least likely
    possible one: enough to drive the posterior away, too little to drown the rest.
    """
    if queries.draws is None:
        beside = queries.u is not None
        u, log_q = propose(settings, posterior, cached.contexts, prior, key, beside=beside)
    else:
        u, log_q = queries.draws, posterior.flow.log_prob(queries.draws, cached.contexts)
    if queries.u is not None and cached.own is not None:
        u = jnp.concatenate([queries.u[:, None], u], axis=1)
        log_q = jnp.concatenate([cached.own[:, None], log_q], axis=1)
    if settings.gradient == "posterior":
        joint = freeze(joint)
    terms = terms_at(joint, posterior, u, log_q, queries.x)
    criterion = settings.criterion if criterion is None else criterion
    return jax.vmap(lambda terms: _loss(criterion, terms))(terms)


def _loss(criterion: Callable[[Values], Scalar], terms: Terms) -> Losses:
    possible = terms.log_joint != -jnp.inf
    lowest = jnp.min(jnp.where(possible, jax.lax.stop_gradient(terms.log_joint), jnp.inf))
    values = terms._replace(
        log_joint=jnp.where(possible, terms.log_joint, lowest - FLOOR)
    ).log_evidence
    # A dataset that no theta explains, or where the likelihood fails, says nothing.
    usable = jnp.all(jnp.isfinite(values))
    loss = criterion(jnp.where(usable, values, 0.0))
    valid = jnp.all(terms.log_joint < jnp.inf)
    return Losses(jnp.where(usable, loss, 0.0), usable, valid)
