"""The self-consistency loss: the spread of the identity over K values of theta.

Schmitt et al. 2024 (arXiv:2310.04395), equation 9 and algorithm 1. `SelfConsistency` is what
a user chooses; `consistency` gives the losses of several datasets.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from consilience.core.types import Data, Flat, PRNGKey
from consilience.identity.augmentation import Augmentation, Bootstrap
from consilience.identity.criteria import Bounded, Criterion, RelativeConstraint
from consilience.identity.evidence import Joint, Terms, terms_at
from consilience.identity.learned import Posterior
from consilience.identity.proposals import CurrentPosterior, Proposal, Proposed
from consilience.identity.schedules import Constant, Schedule, Step, check_weight
from consilience.model.data import Kind
from consilience.model.priors import Prior
from consilience.networks.flow import Context

FLOOR = 10.0
"""How far below the least likely possible theta an impossible one counts, in nats."""


@dataclasses.dataclass(frozen=True)
class SelfConsistency:
    """How self-consistency is asked for in training.

    The defaults are the best recipe known. The paper's own is `SelfConsistency(
    maximum_likelihood=Constant(), criterion=Variance(), augmentation=None, limit=None)`.

    `samples`: K, the values of theta for each dataset; the training theta is one of them.
    `weight`: lambda over training; zero at first, since a new posterior proposes nonsense. By
    default 1 after the first 15 %; where a likelihood of more than 20 numbers is learned, a
    tenth from half of training on.
    `maximum_likelihood`: the weight of the posterior's maximum-likelihood term over training.
    Turned down to a tenth after the warm-up, as by default, it keeps the posterior on all modes
    and no longer overfits the few labels. Beside a learned likelihood of more than 20 numbers it
    stays 1: parameters that so many numbers pin down are told better by the labels.
    `limit`: datasets whose loss comes near it, in squared nats, count less, and maximum
    likelihood counts more in their place: where a likelihood is so sharp that the values of
    the identity are far apart, labels are the better guide. None for no limit.
    `proposal`: where theta come from.
    `criterion`: the measure of spread; draws weighted by the evidence at them where the
    likelihood is exact and data are not a set, but in atomic rounds.
    `augmentation`: data to ask at in place of the simulated ones; None for those themselves.
    `exact`: take the model's own log-likelihood (True) or the learned one (False); by
    default the model's own if it has one.
    `gradient`: "both" trains a learned likelihood by the loss too, "posterior" does not.
    `unlabeled_weight`: the weight of unlabelled data beside simulated ones.
    `unlabeled_batch`: how many unlabelled datasets a step takes; by default as many as
    simulated ones, or all there are.
    """

    samples: int = 10
    weight: Schedule | None = None
    maximum_likelihood: Schedule | None = None
    limit: float | None = 10.0
    proposal: Proposal = CurrentPosterior()
    criterion: Criterion = Bounded()
    augmentation: Augmentation | None = Bootstrap()
    exact: bool | None = None
    gradient: str = "both"
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

    def suited(
        self, kind: Kind, *, exact: bool, wide: bool, atomic: bool = False
    ) -> "SelfConsistency":
        """With what was left open, for data of a kind and a likelihood that is `exact` or not.

        `wide`: the likelihood is learned, and one of many numbers. `atomic`: the posterior is
        learned by telling theta apart.
        """
        augmentation, criterion = self.augmentation, self.criterion
        weight, labels = self.schedules
        if isinstance(augmentation, Bootstrap):
            augmentation = augmentation.suited(kind, exact=exact)
        if isinstance(criterion, Bounded):
            criterion = criterion.suited(kind, exact=exact, atomic=atomic)
        if wide:
            weight = self.weight or Step(0.5, after=0.1)
            labels = self.maximum_likelihood or Constant()
        return dataclasses.replace(
            self,
            augmentation=augmentation,
            criterion=criterion,
            weight=weight,
            maximum_likelihood=labels,
        )

    @property
    def n_multipliers(self) -> int:
        return self.samples - 1 if isinstance(self.criterion, RelativeConstraint) else 0


class Spots(NamedTuple):
    """Datasets to ask at, their training theta if they have one, and draws made beforehand."""

    x: Data
    u: Float[Array, "n d"] | None
    draws: Float[Array, "n k d"] | None


class Known(NamedTuple):
    """What the posterior has said of the datasets already, each to be differentiated.

    `contexts`: what its flow needs of them; `own`: the log density of their training theta.
    """

    contexts: Context
    own: Float[Array, " n"] | None


def know(posterior: Posterior, spots: Spots) -> Known:
    """What the posterior says of the datasets."""
    contexts = posterior.contexts(spots.x)
    own = None if spots.u is None else posterior.flow.log_prob(spots.u, contexts)
    return Known(contexts, own)


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
    spots: Spots,
    known: Known,
    key: PRNGKey,
    multipliers: Flat | None = None,
) -> Losses:
    """The losses of several datasets.

    Where the model holds a theta impossible, it counts as `FLOOR` nats below the least likely
    possible one: enough to drive the posterior away, too little to drown the rest.
    """
    if spots.draws is None:
        beside = spots.u is not None
        u, log_q = propose(settings, posterior, known.contexts, prior, key, beside=beside)
    else:
        u, log_q = spots.draws, posterior.flow.log_prob(spots.draws, known.contexts)
    if spots.u is not None and known.own is not None:
        u = jnp.concatenate([spots.u[:, None], u], axis=1)
        log_q = jnp.concatenate([known.own[:, None], log_q], axis=1)
    if settings.gradient == "posterior":
        joint = jax.lax.stop_gradient(joint)
    terms = terms_at(joint, posterior, u, log_q, spots.x)
    return jax.vmap(lambda terms: _loss(settings, terms, multipliers))(terms)


def _loss(settings: SelfConsistency, terms: Terms, multipliers: Flat | None) -> Losses:
    possible = terms.log_joint != -jnp.inf
    lowest = jnp.min(jnp.where(possible, jax.lax.stop_gradient(terms.log_joint), jnp.inf))
    values = terms._replace(
        log_joint=jnp.where(possible, terms.log_joint, lowest - FLOOR)
    ).log_evidence
    # A dataset that no theta explains, or where the likelihood fails, says nothing.
    usable = jnp.all(jnp.isfinite(values))
    loss = settings.criterion(jnp.where(usable, values, 0.0), multipliers)
    valid = jnp.all(terms.log_joint < jnp.inf)
    return Losses(jnp.where(usable, loss, 0.0), usable, valid)
