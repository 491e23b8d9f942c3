"""The self-consistency loss: the spread of the identity over K values of theta.

Schmitt et al. 2024 (arXiv:2310.04395), equation 9 and algorithm 1. `SelfConsistency` is what
a user chooses; `consistency` is the loss of one dataset.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from consilience.approximators import Posterior
from consilience.augmentation import Augmentation, Bootstrap
from consilience.criteria import Bounded, Criterion, RelativeConstraint
from consilience.evidence import Joint, terms_at
from consilience.priors import Prior
from consilience.proposals import CurrentPosterior, Proposal
from consilience.schedules import Schedule, Step, check_weight
from consilience.types import Data, Flat, PRNGKey, Scalar

FLOOR = 10.0
"""How far below the least likely possible theta an impossible one counts, in nats."""


@dataclasses.dataclass(frozen=True)
class SelfConsistency:
    """How self-consistency is asked for in training.

    The defaults are the best recipe known. The paper's own is `SelfConsistency(
    maximum_likelihood=Constant(), criterion=Variance(), augmentation=None, limit=None)`.

    `samples`: K, the values of theta for each dataset; the training theta is one of them.
    `weight`: lambda over training; zero at first, since a new posterior proposes nonsense.
    `maximum_likelihood`: the weight of the posterior's maximum-likelihood term over training.
    Turned down to a tenth after the warm-up, it keeps the posterior on all modes and no
    longer overfits the few labels.
    `limit`: datasets whose loss comes near it, in squared nats, count less, and maximum
    likelihood counts more in their place: where a likelihood is so sharp that the values of
    the identity are far apart, labels are the better guide. None for no limit.
    `proposal`: where theta come from.
    `criterion`: the measure of spread.
    `augmentation`: data to ask at beside the simulated ones; None for none.
    `exact`: take the model's own log-likelihood (True) or the learned one (False); by
    default the model's own if it has one.
    `gradient`: "both" trains a learned likelihood by the loss too, "posterior" does not.
    `unlabeled_weight`: the weight of unlabelled data beside simulated ones.
    `unlabeled_batch`: how many unlabelled datasets a step takes; by default as many as
    simulated ones, or all there are.
    """

    samples: int = 10
    weight: Schedule = Step(0.15)
    maximum_likelihood: Schedule = Step(0.15, before=1.0, after=0.1)
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
        check_weight(self.weight, "self-consistency")
        check_weight(self.maximum_likelihood, "maximum likelihood")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive, or None, got {self.limit}.")
        if not self.unlabeled_weight >= 0:
            raise ValueError(f"unlabeled_weight must not be negative, got {self.unlabeled_weight}.")
        if self.unlabeled_batch is not None and self.unlabeled_batch < 1:
            raise ValueError(f"unlabeled_batch must be at least 1, got {self.unlabeled_batch}.")

    @property
    def n_multipliers(self) -> int:
        return self.samples - 1 if isinstance(self.criterion, RelativeConstraint) else 0


class Spot(NamedTuple):
    """A dataset to ask at, its training theta if it has one, and draws made beforehand."""

    x: Data
    u: Flat | None
    draws: Float[Array, "k d"] | None


def propose(
    settings: SelfConsistency, posterior: Posterior, prior: Prior, spot: Spot, key: PRNGKey
) -> Float[Array, "k d"]:
    """New theta for a dataset: K, or K - 1 beside its training theta."""
    n = settings.samples - (spot.u is not None)
    frozen = jax.lax.stop_gradient(posterior)
    u = settings.proposal(key, n, frozen, frozen.context(spot.x), prior)
    return jax.lax.stop_gradient(u)


def consistency(
    settings: SelfConsistency,
    posterior: Posterior,
    joint: Joint,
    prior: Prior,
    spot: Spot,
    key: PRNGKey,
    multipliers: Flat | None = None,
) -> tuple[Scalar, Bool[Array, ""], Bool[Array, ""]]:
    """The loss of one dataset, whether it counts, and whether its likelihood is valid.

    Where the model holds a theta impossible, it counts as `FLOOR` nats below the least likely
    possible one: enough to drive the posterior away, too little to drown the rest.
    """
    u = spot.draws
    if u is None:
        u = propose(settings, posterior, prior, spot, key)
    if spot.u is not None:
        u = jnp.concatenate([spot.u[None], u])
    if settings.gradient == "posterior":
        joint = jax.lax.stop_gradient(joint)
    terms = terms_at(joint, posterior, u, spot.x, posterior.context(spot.x))
    possible = terms.log_joint != -jnp.inf
    lowest = jnp.min(jnp.where(possible, jax.lax.stop_gradient(terms.log_joint), jnp.inf))
    values = terms._replace(
        log_joint=jnp.where(possible, terms.log_joint, lowest - FLOOR)
    ).log_evidence
    # A dataset that no theta explains, or where the likelihood fails, says nothing.
    usable = jnp.all(jnp.isfinite(values))
    loss = settings.criterion(jnp.where(usable, values, 0.0), multipliers)
    valid = jnp.all(terms.log_joint < jnp.inf)
    return jnp.where(usable, loss, 0.0), usable, valid
