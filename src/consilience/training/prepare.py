"""From a model and its runs to what the training loop takes: checked, split, standardised."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.random import Generator

from consilience.core.arrays import within_range
from consilience.core.compiling import compiled, on_device
from consilience.core.types import Data
from consilience.identity.augmentation import Spread
from consilience.identity.batches import Example
from consilience.identity.objective import Objective
from consilience.identity.terms import LossTerm
from consilience.model.data import DataSpace
from consilience.model.model import Model
from consilience.model.spaces import ParameterSpace, to_vectors
from consilience.networks.validity import Validity, learn_validity
from consilience.posterior.fit import Fit
from consilience.simulation.failures import Attempts
from consilience.simulation.simulations import Simulations
from consilience.training.defaults import Plan


def split(
    n: int, share: float, rng: Generator, most: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Runs to train on and runs to hold out, at random; at most `most` of the latter."""
    if not 0 <= share < 1:
        raise ValueError(f"validation must be a share in [0, 1), got {share}.")
    order = rng.permutation(n)
    held = 0 if share == 0 else max(1, min(round(share * n), n if most is None else most))
    if held >= n:
        raise ValueError(f"{n} simulations leave none to train on: pass validation=0.")
    return order[held:], order[:held]


def to_examples(
    parameters: ParameterSpace, simulations: Simulations, index: np.ndarray | None = None
) -> Example:
    """All runs, or some, as training takes them."""
    u: Any = np.asarray(to_vectors(parameters, parameters.check(simulations.theta)))
    if index is not None:
        # Picked on the host, where nothing is compiled.
        u, simulations = u[index], simulations[index]
    return jax.device_put(Example(u, jax.tree.map(within_range, simulations.x)))


def build_objective(
    model: Model,
    parameters: ParameterSpace,
    data: DataSpace,
    plan: Plan,
    simulations: Simulations,
    unlabeled: Data | None,
    atoms: int | None = None,
    validity: Validity | None = None,
    terms: tuple[LossTerm, ...] = (),
) -> Objective:
    """What training minimises, once the likelihood and the unlabelled data are seen to fit."""
    settings, layout = plan.self_consistency, data.layout
    observed = None
    if unlabeled is not None:
        if settings is None:
            raise ValueError(
                "Unlabelled data have no theta to learn from by maximum likelihood: they need "
                "self-consistency. Leave self_consistency as it is, or pass cs.SelfConsistency()."
            )
        arrays, _ = layout.check(unlabeled, "unlabeled")
        observed = layout.unnamed({name: jnp.asarray(a) for name, a in arrays.items()})
    if settings is None and not terms:
        # Leave the model out, so that redefining it does not trigger recompilation.
        return Objective(model if atoms else None, parameters, data, atoms=atoms)
    if settings is None:
        exact = plan.exact
        return Objective(
            model, parameters, data, None, exact, atoms=atoms, validity=validity, more=terms
        )
    if plan.exact:
        check_likelihood(model, simulations)
    spread = data_spread(data, simulations.x, observed)
    return Objective(
        model, parameters, data, settings, plan.exact, spread, observed, atoms, validity, terms
    )


def find_validity(
    parameters: ParameterSpace,
    attempts: Attempts | None,
    start: Fit | None,
    rng: Generator,
) -> Validity | None:
    """The probability of giving data, learned where runs were dropped, or that of a first fit."""
    if attempts is None:
        return None if start is None or start.likelihood is None else start.likelihood.validity
    u = to_vectors(parameters, parameters.check(attempts.theta))
    return learn_validity(np.asarray(u), attempts.valid, rng)


def data_spread(data: DataSpace, *sources: Data | None) -> Spread:
    """The scale of the data, and the range of every entry over all sources."""
    named = [data.layout.named(x) for x in sources if x is not None]
    low, high = {}, {}
    for name in data.layout.data_names:
        arrays = np.concatenate([np.asarray(x[name]) for x in named])
        # Rows of a set share their range, as they share their scale.
        axes = (0, 1) if data.scale[name].ndim < arrays.ndim - 1 else 0
        low[name] = on_device(arrays.min(axis=axes))
        high[name] = on_device(arrays.max(axis=axes))
    return Spread({name: data.spread(name) for name in low}, low, high)


def check_likelihood(model: Model, simulations: Simulations, n: int = 64):
    """Refuse a log-likelihood that fails on the runs, at their theta or at one another's."""
    few = simulations[: min(n, len(simulations))]
    for what, shift in (("its own theta", 0), ("the theta of another run", 1)):
        at = {name: np.roll(array, shift, axis=0) for name, array in few.theta.items()}
        values = np.asarray(_likelihoods(model, at, few.x))
        if values.shape != (len(few),):
            raise ValueError(
                "log_likelihood(theta, x) must return one number, got the shape "
                f"{values.shape[1:]}. For a function of one row, pass cs.PerRow(function)."
            )
        bad = np.flatnonzero(np.isnan(values) | (values == np.inf))
        if len(bad):
            i = int(bad[0])
            shown = {name: array[i].tolist() for name, array in at.items()}
            raise ValueError(
                f"log_likelihood(theta, x) is {values[i]} for run {i} at {what}, {shown}, and "
                f"not valid for {len(bad)} of {len(few)} runs. It must be finite, or minus "
                "infinity where theta is impossible."
            )
        if shift == 0 and np.all(values == -np.inf):
            raise ValueError(
                "log_likelihood(theta, x) is minus infinity for every run at its own theta: "
                "it calls impossible what the simulator does."
            )


@compiled
def _likelihoods(model: Model, theta, x):
    return jax.vmap(model.log_likelihood)(theta, x)
