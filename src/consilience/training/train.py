"""The training loop: `fit` prepares, one compiled scan runs each epoch, `Fit` comes out."""

import dataclasses
import logging
import time
from collections.abc import Sequence

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh
from tqdm.auto import tqdm

from consilience.core.compiling import on_device
from consilience.core.devices import Devices, make_mesh, replicate, to_one_device
from consilience.core.keys import keyed
from consilience.core.provenance import Origin, in_words, key_name, versions
from consilience.core.types import Data, PRNGKey
from consilience.identity.batches import Example
from consilience.identity.consistency import SelfConsistency
from consilience.identity.criteria import trained
from consilience.identity.learned import (
    Networks,
    build_networks,
)
from consilience.identity.schedules import Cosine, Schedule
from consilience.identity.terms import LossTerm, check_terms
from consilience.model.data import data_space
from consilience.model.host import failures_as_raised
from consilience.model.model import Model
from consilience.model.spaces import parameter_space
from consilience.networks.density import ConditionalDensity
from consilience.networks.layers import generator, random_key
from consilience.networks.summary import Summary
from consilience.posterior.fit import Fit, assemble
from consilience.posterior.history import History, Stopped
from consilience.simulation.check import check_simulations
from consilience.simulation.simulations import Simulations
from consilience.training.batches import Streamed, Whole, part_size
from consilience.training.defaults import RATE, check_optimizer, check_plan, default_plan
from consilience.training.epochs import ADAM, State, long_epoch, short_epoch, validate
from consilience.training.prepare import build_objective, find_validity, split, to_examples

logger = logging.getLogger(__name__)

SHORT = 500
"""A fit of at most this many steps ends before faster steps make up for longer compilation."""


class TrainingError(RuntimeError):
    """Training cannot continue: in too many steps the loss or its gradient was not finite."""


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
    progress: bool = True,
) -> Fit:
    """Learn the posterior of a model from its simulations.

    `default_plan` chooses every setting that is not given, from the number of simulations and
    the shape of the problem.

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
    if start is None:
        parameters = parameter_space(model.prior, simulations.theta)
        data = data_space(some.x, model.data)
    else:
        parameters, data = start.posterior.parameters, start.posterior.data
        if any(spec is not None for spec in (posterior, likelihood or None, prior, summary)):
            raise ValueError("A fit to start from has its networks: pass start, or networks.")
        posterior, likelihood = start.recipe.posterior, start.recipe.likelihood
        prior, summary = start.recipe.prior, start.recipe.summary
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
    train, held_out = split(len(simulations), plan.validation, for_split, room)
    check_plan(plan, len(train), len(held_out), patience, atoms)
    mesh = make_mesh(devices)
    if mesh is not None and plan.batch_size % mesh.size:
        raise ValueError(
            f"A batch of {plan.batch_size} runs cannot be split evenly among {mesh.size} devices: "
            "pass a batch_size that can, or fewer devices."
        )
    validity = None
    if plan.recipe.likelihood is not None:
        validity = find_validity(parameters, simulations.attempts, start, for_validity)
    objective = build_objective(
        model, parameters, data, plan, some, unlabeled, atoms, validity, tuple(terms)
    )
    source = (
        Whole(to_examples(parameters, simulations, train), plan.batch_size, mesh)
        if room is None
        else Streamed(parameters, simulations, train, plan.batch_size, room, mesh)
    )
    settings = plan.self_consistency
    criterion = None if settings is None else trained(settings.criterion, settings.samples)
    networks, history = _train(
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


def _train(
    networks: Networks,
    loss,
    source: Whole | Streamed,
    held_out: Example | None,
    *,
    key: PRNGKey,
    rng: np.random.Generator,
    epochs: int,
    learning_rate: float,
    schedule: Schedule,
    optimizer: optax.GradientTransformation | None,
    patience: int | None,
    mesh: Mesh | None,
    progress: bool,
) -> tuple[Networks, History]:
    arrays = eqx.filter(networks, eqx.is_inexact_array)
    size = sum(leaf.size for leaf in jax.tree.leaves(arrays))
    flat = on_device(np.zeros(size))
    opt_state = ADAM.init(flat) if optimizer is None else optimizer.init(arrays)
    state = State(networks, opt_state, np.zeros((), np.int32))
    # Arrays, so that another value does not trigger recompilation.
    total, rate = on_device(source.steps * epochs), on_device(learning_rate)
    state, held_out, loss = replicate((state, held_out, loss), mesh)
    run_epoch = short_epoch if source.steps * epochs <= SHORT else long_epoch
    settings = {"loss": loss, "optimizer": optimizer, "schedule": schedule, "mesh": mesh}
    record: list[dict[str, float]] = []
    best = _Best(networks, loss.groups)
    stopped: Stopped = "finished"
    start = time.perf_counter()
    bar = tqdm(total=epochs, desc="fit", unit="epoch", disable=None if progress else True)
    try:
        for epoch in range(1, epochs + 1):
            parts = []
            for examples, order in source.epoch(rng):
                key = random_key(rng, key)
                state, info = run_epoch(state, examples, order, key, total, rate, **settings)
                parts.append(jax.device_get(info))
            info = jax.tree.map(lambda *values: np.concatenate(values), *parts)
            row = _summarise(info, epoch, source.steps)
            judged = None
            if held_out is not None:
                scores = validate(state.networks, held_out, loss)
                judged = {name: float(score) for name, score in scores.items()}
                row["validation"] = sum(judged.values())
            record.append(row)
            best.update(state.networks, judged, epoch)
            bar.update()
            bar.set_postfix({name: f"{value:.3f}" for name, value in row.items() if value})
            if patience is not None and epoch - max(best.epochs.values()) >= patience:
                stopped = "early"
                break
    except KeyboardInterrupt:
        if not record:
            raise
        stopped = "interrupted"
        logger.warning("Interrupted after %d of %d epochs: keeping the best.", len(record), epochs)
    finally:
        bar.close()
    history = History(
        terms={name: np.array([row.get(name, np.nan) for row in record]) for name in record[0]},
        best_epochs=best.epochs,
        stopped=stopped,
        seconds=time.perf_counter() - start,
        simulations=len(source) + (0 if held_out is None else len(held_out.u)),
    )
    return to_one_device(best.networks, mesh), history


class _Best:
    """The best networks so far: each group by its own held-out loss, or simply the last."""

    def __init__(self, networks: Networks, groups: tuple[tuple[str, ...], ...]):
        self.networks = networks
        there = [tuple(name for name in group if getattr(networks, name)) for group in groups]
        self.groups = [group for group in there if group]
        self.scores = dict.fromkeys(self.groups, np.inf)
        self.epochs = {name: 0 for group in self.groups for name in group}

    def update(self, networks: Networks, scores: dict[str, float] | None, epoch: int):
        for group in self.groups:
            score = -np.inf if scores is None else sum(scores[name] for name in group)
            if score < self.scores[group] or scores is None:
                fields = (*group, *(["summary"] if "posterior" in group else []))
                pick = lambda tree, fields=fields: [getattr(tree, f) for f in fields]  # noqa: E731
                self.networks = eqx.tree_at(pick, self.networks, pick(networks))
                self.scores[group] = score
                self.epochs.update(dict.fromkeys(group, epoch))


def _summarise(info: dict[str, np.ndarray], epoch: int, steps: int) -> dict[str, float]:
    """Mean losses over the finite steps of an epoch; an error where most were not."""
    ok = info.pop("ok")
    bad = np.flatnonzero(~ok)
    if len(bad) > 0.2 * steps:
        first = (epoch - 1) * steps + int(bad[0]) + 1
        raise TrainingError(
            f"The loss or its gradient was not finite in {len(bad)} of the {steps} steps of epoch "
            f"{epoch}, first at step {first}. Such steps are skipped, but these are too many: "
            "look for extreme values in the simulations, or lower the learning rate."
        )
    invalid = info.pop("invalid", np.zeros(1)).sum()
    if invalid:
        raise TrainingError(
            f"log_likelihood(theta, x) was NaN or plus infinity for {invalid:.0f} datasets of "
            f"epoch {epoch}. It must be finite, or minus infinity where theta is impossible: look "
            "for logarithms and roots of negative numbers, and for 0 / 0."
        )
    means = {name: float(values[ok].mean()) for name, values in info.items()}
    return {**means, "skipped": float(len(bad))}
