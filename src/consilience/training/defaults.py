"""The default recipe: every setting of `fit` that the user did not give, chosen in one place."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import optax

from consilience.identity.consistency import SelfConsistency
from consilience.identity.schedules import Schedule
from consilience.identity.setting import Setting
from consilience.model.data import Layout, Series, Set
from consilience.model.model import Model
from consilience.networks.density import ConditionalDensity
from consilience.networks.flow import Coupling
from consilience.networks.recipe import Recipe
from consilience.networks.summary import Summary, default_summary
from consilience.networks.transforms import Affine

WIDE_DATA = 20
"""Data with more than this many values count as wide."""

MOST_DROPPED = 32
"""Data with more values than this may determine the parameters sharply; dropout would blur that."""

RATE = 1e-3
"""Adam's learning rate."""


class Length(NamedTuple):
    """Training time: `epochs`, within `fewest` and `most` steps, and at least `least` epochs."""

    epochs: int
    fewest: int
    most: int
    least: int = 15

    def in_epochs(self, steps: int) -> int:
        """The number of epochs, given the steps of an epoch."""
        wanted = min(self.most, max(self.fewest, self.epochs * steps))
        return max(self.least, round(wanted / max(1, steps)))


@dataclasses.dataclass(frozen=True)
class Plan:
    """All choices of a fit. `exact`: self-consistency uses the model's log-likelihood."""

    recipe: Recipe
    self_consistency: SelfConsistency | None
    exact: bool
    epochs: int
    batch_size: int
    validation: float


def default_plan(
    model: Model,
    layout: Layout,
    dim: int,
    n: int,
    *,
    self_consistency: SelfConsistency | bool | None = None,
    posterior: ConditionalDensity | None = None,
    likelihood: ConditionalDensity | bool | None = None,
    prior: ConditionalDensity | None = None,
    summary: Summary | eqx.Module | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    validation: float | None = None,
    atomic: bool = False,
) -> Plan:
    """The settings of a fit of `n` runs: those that are given, and defaults for the others.

    `atomic`: theta were drawn from a proposal, and the posterior is learned with atoms.

    - **Self-consistency** is on, unless it is refused. It uses the model's likelihood, or
      learns one jointly; a prior that can only be sampled gets a learned density.
    - **Its settings** are those of `SelfConsistency()`: K = 10; lambda = 1 after 15 % of
      training, when the weight of maximum likelihood falls to 0.1; query datasets are
      bootstrapped or jittered. Draws are weighted by the evidence at them if the likelihood is
      exact and data are not a set, except in atomic rounds. With a learned likelihood of data of
      more than 20 values, lambda is 0.1 from half of training on, and the weight of maximum
      likelihood stays 1.
    - **Networks**: self-consistency does not overfit simulated pairs, so its networks are
      deeper and almost free of regularisation. Maximum likelihood alone has smaller ones with
      L2, and with a dropout of 0.2 if data have at least twice as many values as there are
      parameters, and at most 32; if data have fewer, dropout is small and in inverse proportion
      to the number of runs.
      A posterior and a likelihood that are learned jointly have six layers each, since either
      can only be as sharp as the other. The likelihood sees only simulated pairs, so its L2 is in
      inverse proportion to their number. Data of more than 20 values are modelled as a mean
      network plus noise: a network for mean and spread, and two affine layers. So are data,
      other than sets, with at least twice as many values as there are parameters, but with one
      affine layer, more L2 and a Student-t base: so few values say less about the mean, and
      where it is wrong the likelihood must not be certain.
    - **Steps**: maximum likelihood alone takes about 2,000 steps; for a series 100 epochs, within
      2,000 and 6,000 steps; with a dropout of 0.2, 35 epochs within 500 and 4,500; and 20,000
      steps if data have fewer than twice as many values as there are parameters and runs are
      held out. Self-consistency takes 100 epochs within 2,000 and 6,000 steps. Networks that are
      learned jointly take 12,000 steps and at least 150 epochs; with a likelihood of affine
      layers, 200 epochs within 2,000 and 12,000 steps; for data of more than 20 values or rows
      of a set, 60 epochs. Every fit takes at least 15 epochs. A batch has 32 runs, 64 from 4,096
      runs on, or half of the runs if there are fewer than 64.
    - **Validation**: a tenth of the runs is held out to pick the best epoch for maximum
      likelihood alone with little or no dropout. Other fits use every run and keep the last epoch.
    """
    consistent = self_consistency is not False
    settings = self_consistency if isinstance(self_consistency, SelfConsistency) else None
    if consistent and settings is None:
        settings = SelfConsistency()
    exact = model.likelihood is not None
    if settings is not None and settings.exact is not None:
        exact = settings.exact
    jointly = consistent and not exact
    if likelihood is False and jointly:
        raise ValueError(
            "Self-consistency needs a likelihood, and likelihood=False refuses to learn one: leave "
            "it out, or pass self_consistency=False."
        )
    if likelihood is True or (jointly and not likelihood):
        likelihood = _likelihood(n, layout, dim)
    likelihood = likelihood or None
    smooth = isinstance(likelihood, Coupling) and isinstance(likelihood.transform, Affine)
    wide = jointly and layout.unit_sizes[0] > WIDE_DATA
    if settings is not None:
        settings = settings.resolved(Setting(layout.kind, exact, wide, atomic))
    if consistent and prior is None and model.prior.density is None:
        prior = Coupling(layers=2)
    numbers = layout.n_features * layout.rows
    few = not consistent and numbers < 2 * dim
    dropped = not consistent and 2 * dim <= numbers <= MOST_DROPPED and posterior is None
    if validation is None:
        validation = 0.0 if consistent or dropped else 0.1
    if posterior is None:
        rate = 0.2 if dropped else min(0.05, 25 / n) if few and validation else 0.0
        posterior = _posterior(consistent, jointly, rate)
    train = n - round(validation * n)
    batch_size = default_batch(train) if batch_size is None else batch_size
    if epochs is None:
        length = _length(
            consistent=consistent,
            jointly=jointly,
            smooth=smooth,
            many=wide or isinstance(layout.kind, Set),
            unguarded=not consistent and _drops(posterior) and not validation,
            patient=few and validation > 0,
            slow=isinstance(layout.kind, Series),
        )
        epochs = length.in_epochs(train // max(1, batch_size))
    return Plan(
        recipe=Recipe(
            posterior=posterior,
            likelihood=likelihood,
            prior=prior,
            summary=summary or default_summary(layout, large=consistent),
        ),
        self_consistency=settings,
        exact=exact,
        epochs=epochs,
        batch_size=batch_size,
        validation=validation,
    )


def check_plan(
    plan: Plan, train: int, held_out: int, patience: int | None, atoms: int | None = None
):
    """Refuse settings that contradict one another."""
    check_batch(plan.batch_size, train, held_out)
    if plan.epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {plan.epochs}.")
    if patience is not None and patience < 1:
        raise ValueError(f"patience must be at least 1 epoch, got {patience}.")
    if patience is not None and not held_out:
        raise ValueError("patience needs held-out simulations: pass validation > 0 with it.")
    if atoms is not None and not 2 <= atoms <= plan.batch_size:
        raise ValueError(
            f"atoms must be between 2 and the batch size of {plan.batch_size}, got {atoms}."
        )


def check_batch(batch_size: int, train: int, held_out: int):
    """Refuse a batch larger than the runs that it is taken from."""
    if not 1 <= batch_size <= train:
        raise ValueError(
            f"batch_size must be between 1 and the {train} training simulations "
            f"({held_out} more are held out for validation), got {batch_size}."
        )


def check_optimizer(
    optimizer: optax.GradientTransformation | None, learning_rate: float, schedule: Schedule | None
):
    """Refuse settings of Adam that are given together with another optimizer."""
    if optimizer is not None and (schedule is not None or learning_rate != RATE):
        raise ValueError(
            "learning_rate and schedule are those of Adam, and an optimizer has its own: set them "
            "there, as in optax.sgd(1e-2), or leave optimizer out."
        )


def default_batch(n: int) -> int:
    return max(1, min(32 if n < 4096 else 64, n // 2))


def _length(
    *,
    consistent: bool,
    jointly: bool,
    smooth: bool,
    many: bool,
    unguarded: bool,
    patient: bool,
    slow: bool,
) -> Length:
    """How long training must be, and no longer: longer training overfits simulated pairs.

    Self-consistency can use more steps, and two networks that must agree with each other take
    the most, fewer if the likelihood is a `smooth` one, of affine layers.
    `many`: a run has many values, or rows, for a likelihood to learn from.
    `unguarded`: maximum likelihood alone, with dropout, and no held-out runs to stop it.
    `patient`: maximum likelihood alone, with data of few values and held-out runs.
    `slow`: data are a series, whose summary network takes long to learn.
    """
    if jointly and many:
        return Length(60, 2000, 12_000)
    if jointly:
        return Length(200, 2000, 12_000, 150) if smooth else Length(0, 12_000, 12_000, 150)
    if patient:
        return Length(0, 20_000, 20_000)
    if unguarded:
        return Length(35, 500, 4500)
    return Length(100, 2000, 6000) if consistent or slow else Length(0, 2000, 2000)


def _drops(posterior: ConditionalDensity) -> bool:
    """Whether dropout guards a posterior against overfitting."""
    return isinstance(posterior, Coupling) and posterior.dropout > 0


def _posterior(consistent: bool, jointly: bool, dropout: float) -> Coupling:
    if consistent:
        return Coupling(layers=6 if jointly else 4, depth=3, l2=1e-5)
    return Coupling(dropout=dropout)


def _likelihood(n: int, layout: Layout, dim: int) -> Coupling:
    numbers, weak = layout.unit_sizes[0], min(1e-2, 1.5 / n)
    if numbers > WIDE_DATA:
        return Coupling(Affine(), layers=2, frame=3, l2=weak)
    if numbers >= 2 * dim and not isinstance(layout.kind, Set):
        return Coupling(Affine(), layers=1, frame=3, df=5.0, l2=min(1e-2, 5 / n))
    return Coupling(layers=6, depth=3, l2=weak)
