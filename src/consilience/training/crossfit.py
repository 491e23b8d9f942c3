"""One candidate without one fold of the runs: its training, and what it says of that fold."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from numpy.random import Generator

from consilience.core.compiling import compiled
from consilience.core.types import PRNGKey
from consilience.identity.batches import Example, Pairs
from consilience.identity.consistency import SelfConsistency
from consilience.identity.emulation import Emulator, LikelihoodLoss
from consilience.identity.learned import Networks, Posterior, build_networks
from consilience.identity.objective import Objective
from consilience.identity.schedules import Constant
from consilience.identity.setting import Setting
from consilience.model.data import DataSpace, Set
from consilience.model.model import Model
from consilience.model.spaces import ParameterSpace
from consilience.networks.density import ConditionalDensity, build_density
from consilience.networks.layers import random_key
from consilience.networks.recipe import Recipe
from consilience.networks.validity import Validity
from consilience.simulation.simulations import Simulations
from consilience.training.batches import Streamed, Whole
from consilience.training.candidates import Candidate, Work
from consilience.training.folds import Fold
from consilience.training.member import Limits, Member, train_member
from consilience.training.prepare import data_spread, to_examples
from consilience.training.ridge import start_at_ridge

FEWEST_STEPS = 20
"""The least steps between two looks at the held-out loss."""
RIDGE_RUNS = 10_000
"""The most runs that ridge regression takes."""
PAIRS = Pairs(times=4, runs=0.3)
"""Emulated pairs for each run, and the weight of the runs beside them."""
AGREEING_RATE = 5e-4
"""The initial learning rate where two trained networks are to agree."""
BLOCK = 256


class Setup(NamedTuple):
    """What all members share.

    `room`: how many runs can be held at once, or None for all. `prior`: the density with which to
    learn a prior that can only be sampled.
    """

    model: Model
    parameters: ParameterSpace
    data: DataSpace
    simulations: Simulations
    examples: Example | None
    room: int | None
    batch_size: int
    prior: ConditionalDensity | None
    validity: Validity | None
    mesh: Mesh | None
    work: Work
    key: PRNGKey

    def of(self, candidate: Candidate) -> "Setup":
        """With the data as a candidate takes them."""
        layout = self.data.layout
        if candidate.independent is None or not isinstance(layout.kind, Set):
            return self
        kind = dataclasses.replace(layout.kind, independent=candidate.independent)
        layout = dataclasses.replace(layout, kind=kind)
        return self._replace(data=dataclasses.replace(self.data, layout=layout))

    def source(self, index: np.ndarray) -> Whole | Streamed:
        if self.examples is not None:
            return Whole(self.examples, self.batch_size, self.mesh, index, FEWEST_STEPS)
        assert self.room is not None
        return Streamed(
            self.parameters, self.simulations, index, self.batch_size, self.room, self.mesh
        )

    def some(self, index: np.ndarray, most: int | None = None) -> Example:
        """The runs at `index`, or the first `most` of them, in memory."""
        limits = [limit for limit in (most, self.room) if limit is not None]
        index = index[: min(limits)] if limits else index
        if self.examples is not None:
            return jax.tree.map(lambda a: a[index], self.examples)
        return to_examples(self.parameters, self.simulations[index])


class Trained(NamedTuple):
    """One candidate without one fold: its networks, and the held-out log densities of the fold."""

    networks: Networks
    log_q: np.ndarray
    likelihood_loss: float
    record: list[dict[str, float]]
    best_epochs: dict[str, int]
    seconds: float
    finished: bool = True


def train_fold(
    setup: Setup, candidate: Candidate, fold: Fold, rng: Generator, stop: threading.Event
) -> Trained:
    """Train one candidate without one fold: the likelihood first, where it has one."""
    begun = time.perf_counter()
    for_networks, for_likelihood, for_posterior = rng.spawn(3)
    key = random_key(for_networks, setup.key)
    parameters, data = setup.parameters, setup.data
    recipe = Recipe(candidate.posterior, None, None, candidate.summary_for(data.layout))
    networks = build_networks(recipe, parameters, data, for_networks)
    source, held = setup.source(fold.train), setup.some(fold.held_out)
    some = setup.some(fold.train, RIDGE_RUNS)
    emulator, likelihood_loss, best_epochs = None, np.inf, {}
    limits = Limits(candidate.rate, setup.work.steps, ("posterior",))
    shared: dict[str, Any] = {"key": key, "mesh": setup.mesh, "stop": stop}
    objective = Objective(None, parameters, data)
    if candidate.likelihood is not None:
        found = _train_likelihood(
            setup, candidate, source, held, some, for_networks, for_likelihood, shared
        )
        emulator, likelihood_loss = found.networks, found.loss
        best_epochs["likelihood"] = found.best_epoch
        if emulator.prior is not None:
            best_epochs["prior"] = found.best_epoch
        objective = _emulating(setup, emulator)
    if candidate.ridge:
        summaries = _summaries(networks, data, some.x)
        posterior = start_at_ridge(networks.posterior, np.asarray(summaries), np.asarray(some.u))
        networks = eqx.tree_at(lambda tree: tree.posterior, networks, posterior)
    member = train_member(networks, objective, source, held, limits, rng=for_posterior, **shared)
    networks = member.networks
    if emulator is not None:
        networks = Networks(
            networks.summary, networks.posterior, emulator.likelihood, emulator.prior
        )
    if candidate.jointly:
        together = train_member(
            networks,
            _agreeing(setup, some),
            source,
            held,
            limits._replace(rate=AGREEING_RATE),
            rng=for_posterior,
            **shared,
        )
        if together.loss < member.loss:
            networks, member = together.networks, together
    log_q = held_out_density(setup, networks, fold.held_out)
    return Trained(
        networks,
        log_q,
        likelihood_loss,
        member.record,
        {"posterior": member.best_epoch, **best_epochs},
        time.perf_counter() - begun,
        member.finished,
    )


def _train_likelihood(
    setup: Setup,
    candidate: Candidate,
    source: Whole | Streamed,
    held: Example,
    some: Example,
    for_networks: Generator,
    rng: Generator,
    shared: dict[str, Any],
) -> Member:
    dim, layout = setup.parameters.dim, setup.data.layout
    n_values, n_side = layout.unit_sizes
    assert candidate.likelihood is not None
    flow = build_density(candidate.likelihood, for_networks, dim=n_values, condition=dim + n_side)
    prior = None
    if setup.prior is not None:
        prior = build_density(setup.prior, for_networks, dim=dim, condition=0)
    values, conditions = _units(setup.data, some)
    emulator = Emulator(start_at_ridge(flow, conditions, values), prior)
    judged = ("likelihood",) if prior is None else ("likelihood", "prior")
    limits = Limits(candidate.likelihood_rate, setup.work.steps, judged)
    loss = LikelihoodLoss(setup.parameters, setup.data)
    return train_member(emulator, loss, source, held, limits, rng=rng, **shared)


def _emulating(setup: Setup, emulator: Emulator) -> Objective:
    """Maximum likelihood over emulated pairs, and with less weight over the runs."""
    return Objective(
        setup.model,
        setup.parameters,
        setup.data,
        validity=setup.validity,
        emulator=emulator.likelihood,
        pairs=PAIRS,
    )


def _agreeing(setup: Setup, some: Example) -> Objective:
    """Posterior and likelihood trained together by self-consistency, from the first step on."""
    settings = SelfConsistency(
        weight=Constant(), maximum_likelihood=Constant(PAIRS.runs), limit=None, exact=False
    ).resolved(Setting(setup.data.layout.kind, False))
    spread = data_spread(setup.data, some.x)
    return Objective(
        setup.model,
        setup.parameters,
        setup.data,
        settings,
        spread=spread,
        validity=setup.validity,
    )


def _units(data: DataSpace, runs: Example) -> tuple[np.ndarray, np.ndarray]:
    """The values and the conditions of all factors of a likelihood, without padding."""
    units = jax.vmap(lambda x: data.layout.units(data.dequantise(x, None)))(runs.x)
    values, side, mask = (np.asarray(part) for part in units)
    u = np.broadcast_to(np.asarray(runs.u)[:, None], (*values.shape[:2], runs.u.shape[1]))
    there = mask > 0
    return values[there], np.concatenate([u, side], axis=2)[there]


@compiled
def _summaries(networks: Networks, data: DataSpace, x):
    return jax.lax.map(lambda x: networks.summary(data.standardise(x)), x, batch_size=BLOCK)


def held_out_density(setup: Setup, networks: Networks, index: np.ndarray) -> np.ndarray:
    """The log densities of the parameters of runs, in the units of the user."""
    posterior = Posterior(networks.summary, networks.posterior, setup.parameters, setup.data)
    return in_blocks(setup, index, lambda block: _log_q(posterior, block))


def in_blocks(setup: Setup, index: np.ndarray, function: Callable) -> np.ndarray:
    """A function of runs in blocks of one size; the last is filled up."""
    size = min(BLOCK, len(setup.simulations), setup.room or BLOCK)
    starts = range(0, len(index), size)
    padded = np.resize(index, len(starts) * size)
    parts = [np.asarray(function(setup.some(padded[i : i + size]))) for i in starts]
    return np.concatenate(parts)[: len(index)]


@compiled
def _log_q(posterior: Posterior, runs: Example):
    each = jax.vmap(posterior.parameters.from_vector_with_log_det)
    return posterior.flow.log_prob(runs.u, posterior.contexts(runs.x)) + each(runs.u)[1]
