"""The training loop: `fit` prepares, one compiled scan runs each epoch, `Fit` comes out."""

import dataclasses
import logging
from collections.abc import Sequence

import equinox as eqx
import jax
import optax

from consilience.core.devices import (
    Devices,
    check_devices,
    make_mesh,
)
from consilience.core.keys import keyed
from consilience.core.provenance import Origin, in_words, key_name, versions
from consilience.core.types import Data, PRNGKey
from consilience.identity.consistency import SelfConsistency
from consilience.identity.criteria import trained
from consilience.identity.learned import (
    build_networks,
)
from consilience.identity.schedules import Cosine, Schedule
from consilience.identity.terms import LossTerm, check_terms
from consilience.model.data import data_space
from consilience.model.host import failures_as_raised
from consilience.model.model import Model
from consilience.model.spaces import parameter_space
from consilience.networks.density import ConditionalDensity
from consilience.networks.layers import generator
from consilience.networks.summary import Summary
from consilience.posterior.fit import Fit, assemble
from consilience.simulation.check import check_simulations
from consilience.simulation.simulations import Simulations
from consilience.training.batches import Streamed, Whole, part_size
from consilience.training.candidates import Effort
from consilience.training.defaults import (
    RATE,
    check_optimizer,
    check_plan,
    default_plan,
)
from consilience.training.folds import FEWEST_RUNS
from consilience.training.kinds import find_kind
from consilience.training.loop import train
from consilience.training.portfolio import fit_portfolio
from consilience.training.prepare import build_objective, find_validity, split, to_examples

logger = logging.getLogger(__name__)


@keyed("cs.fit(model, simulations, key=key)")
@failures_as_raised()
def fit(
    model: Model,
    simulations: Simulations,
    *,
    key: PRNGKey,
    self_consistency: SelfConsistency | bool | None = None,
    unlabeled: Data | None = None,
    start: Fit | None = None,
    atoms: int | None = None,
    posterior: ConditionalDensity | None = None,
    likelihood: ConditionalDensity | bool | None = None,
    prior: ConditionalDensity | None = None,
    summary: Summary | eqx.Module | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    learning_rate: float = RATE,
    schedule: Schedule | None = None,
    optimizer: optax.GradientTransformation | None = None,
    validation: float | None = None,
    patience: int | None = None,
    devices: Devices | None = None,
    memory: int | None = None,
    terms: Sequence[LossTerm] = (),
    effort: Effort | None = None,
    members: int | None = None,
    progress: bool = True,
) -> Fit:
    """Learn the posterior of a model from its simulations.

    If the model has no log-likelihood, several recipes compete (`consilience.training.candidates`),
    NPE among them. Each is an ensemble whose members leave out their own part of the runs, and the
    posterior is the mixture that gives these runs the highest density: `fit.history` shows what
    was tried. If it has one, or if the course of training is given (`epochs`, `validation`, a
    `SelfConsistency`, and the like), one recipe is trained: `default_plan` chooses what is open.

    `self_consistency`: a `SelfConsistency`, or False for maximum likelihood alone (NPE). It
    uses the model's log-likelihood or, if the model has none, learns one jointly.
    `unlabeled`: observed data, one dataset or a batch. The self-consistency loss is evaluated
    at them too.
    `start`: a fit of the same model. Training continues with its networks and its scales.
    `atoms`: for theta drawn from a proposal instead of the prior. The posterior learns to pick
    the theta of a run out of this many candidates (see `consilience.training.rounds`).
    `posterior`: the density of the posterior: `cs.Coupling`, or any `cs.ConditionalDensity`.
    `likelihood`: True, or a density of your own, to learn the likelihood jointly (NPLE).
    `prior`: a density with which to learn the prior's; by default a prior is learned only if
    its density is unknown.
    `summary`: a `cs.Summary` or an Equinox module; by default one for the shape of the data.
    `learning_rate`, `schedule`: Adam's initial learning rate, and how it changes over training.
    `optimizer`: any Optax optimizer, with its own learning rate, in place of Adam.
    `validation`: the share of simulations to hold out; their loss picks the best epoch. With 0,
    the fit keeps the last epoch.
    `patience`: stop after this many epochs without a better validation loss.
    `devices`: JAX devices that share each batch, as in `devices=jax.devices()`. The fit is the
    same as on one device, up to rounding.
    `memory`: bytes of data to hold at once, by default a quarter of the machine's memory. A
    store with more data is read in parts during training.
    `terms`: terms to add to the loss: objects of the protocol `cs.LossTerm`.
    `effort`: "quick", "standard" (the default) or "thorough": how many recipes compete, how many
    members each has, and for how long they may train.
    `members`: the number of networks in each ensemble; by default as `effort` says.

    Ctrl-C ends training and returns the best fit so far. The same key gives the same fit.

    >>> import consilience as cs, numpyro.distributions as dist
    >>> model = cs.Model(dist.Normal(0, 1), lambda key, t: t + jax.random.normal(key, (3,)))
    >>> sims = cs.simulate(model, 128, key=jax.random.key(0))
    >>> small = cs.Coupling(layers=1, width=16)
    >>> result = cs.fit(
    ...     model, sims, key=jax.random.key(1), posterior=small, self_consistency=False, epochs=2
    ... )
    >>> result.history.stopped
    'finished'
    """
    check_simulations(model, simulations)
    check_terms(terms)
    check_optimizer(optimizer, learning_rate, schedule)
    room = part_size(simulations, memory)
    # Runs are alike: where not all can be held, scales and checks come from the first.
    some = simulations if room is None else simulations[:room]
    mesh = make_mesh(devices)
    course = {
        "start": start,
        "atoms": atoms,
        "unlabeled": unlabeled,
        "epochs": epochs,
        "schedule": schedule,
        "optimizer": optimizer,
        "validation": validation,
        "patience": patience,
        "terms": terms or None,
        "learning_rate": None if learning_rate == RATE else learning_rate,
        "self_consistency": self_consistency
        if isinstance(self_consistency, SelfConsistency)
        else None,
    }
    given = [name for name, value in course.items() if value is not None]
    exact = model.likelihood is not None and self_consistency is not False
    alone = self_consistency is False and (likelihood or prior) is not None
    few = len(simulations) < FEWEST_RUNS
    competes = not (given or exact or alone or few)
    if start is None:
        parameters = parameter_space(model.prior, simulations.theta)
        data = data_space(some.x, find_kind(model, some, rows_open=competes))
    else:
        parameters, data = start.posterior.parameters, start.posterior.data
        if any(spec is not None for spec in (posterior, likelihood or None, prior, summary)):
            raise ValueError("A fit to start from has its networks: pass start, or networks.")
        posterior, likelihood = start.recipe.posterior, start.recipe.likelihood
        prior, summary = start.recipe.prior, start.recipe.summary
    if competes:
        return fit_portfolio(
            model,
            simulations,
            parameters,
            data,
            some,
            key=key,
            room=room,
            mesh=mesh,
            emulate=self_consistency is not False and likelihood is not False,
            posterior=posterior,
            likelihood=likelihood,
            prior=prior,
            summary=summary,
            batch_size=batch_size,
            effort=effort,
            members=members,
            progress=progress,
        )
    if effort is not None or members is not None:
        why = (
            f"{', '.join(given)} given"
            if given
            else "the log-likelihood is known"
            if exact
            else "of likelihood= or prior= with self_consistency=False"
            if alone
            else f"there are only {len(simulations)} runs"
        )
        raise ValueError(
            "effort and members are for fits in which recipes compete. Here one is trained, "
            f"because {why}: leave them out."
        )
    plan = default_plan(
        model,
        data.layout,
        parameters.dim,
        len(simulations),
        self_consistency=self_consistency,
        posterior=posterior,
        likelihood=likelihood,
        prior=prior,
        summary=summary,
        epochs=epochs,
        batch_size=batch_size,
        validation=validation,
        atomic=atoms is not None,
    )
    for_split, for_networks, for_order, for_validity = generator(key).spawn(4)
    training, held_out = split(len(simulations), plan.validation, for_split, room)
    check_plan(plan, len(training), len(held_out), patience, atoms)
    check_devices(plan.batch_size, mesh)
    validity = None
    if plan.recipe.likelihood is not None:
        validity = find_validity(parameters, simulations.attempts, start, for_validity)
    objective = build_objective(
        model, parameters, data, plan, some, unlabeled, atoms, validity, tuple(terms)
    )
    source = (
        Whole(to_examples(parameters, simulations, training), plan.batch_size, mesh)
        if room is None
        else Streamed(parameters, simulations, training, plan.batch_size, room, mesh)
    )
    settings = plan.self_consistency
    criterion = None if settings is None else trained(settings.criterion, settings.samples)
    networks, history = train(
        build_networks(plan.recipe, parameters, data, for_networks, criterion)
        if start is None
        else dataclasses.replace(start.networks, criterion=criterion),
        objective,
        source,
        to_examples(parameters, simulations, held_out) if len(held_out) else None,
        key=key,
        rng=for_order,
        epochs=plan.epochs,
        learning_rate=learning_rate,
        schedule=schedule or Cosine(),
        optimizer=optimizer,
        patience=patience,
        mesh=mesh,
        progress=progress,
    )
    record = {
        "epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "validation": plan.validation,
        "patience": patience,
        "learning_rate": learning_rate if optimizer is None else None,
        "schedule": repr(schedule or Cosine()) if optimizer is None else None,
        "optimizer": "Adam" if optimizer is None else "the user's own",
        "self_consistency": in_words(plan.self_consistency),
        "exact": plan.exact,
        "unlabeled": 0 if unlabeled is None else len(jax.tree.leaves(objective.unlabeled)[0]),
        "atoms": atoms,
        "started_from_a_fit": start is not None,
        **({"terms": [term.name for term in terms]} if terms else {}),
    }
    attempts = simulations.attempts
    tried = len(simulations) if attempts is None else len(attempts.valid)
    origin = Origin(key_name(key), simulations.key, tried, record, versions())
    return assemble(model, parameters, data, networks, plan.recipe, history, validity, origin)
