"""Sequential rounds: all simulations spent on one observation.

Each round draws parameters from a proposal, simulates, and trains on all runs so far. The
first proposal is the prior, later ones look where the current posterior has its mass. An
amortized fit serves every observation; a sequential one serves the one that it was made
for, from fewer simulations.
"""

import contextlib
import dataclasses
import logging
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from consilience.core.arrays import as_count
from consilience.core.types import Data, PRNGKey, Theta
from consilience.identity.consistency import SelfConsistency
from consilience.model.model import Model
from consilience.networks.density import ConditionalDensity
from consilience.networks.summary import Summary
from consilience.posterior.fit import Fit
from consilience.simulation.simulate import find_layout, simulate, simulate_at, with_spec
from consilience.simulation.simulations import Simulations, join_attempts
from consilience.training.folder import Kept, about, held_spec
from consilience.training.train import fit

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Atomic:
    """Draws of the current posterior, corrected for in the loss.

    Automatic posterior transformation with `atoms` parameters told apart (Greenberg et al.
    2019, arXiv:1905.07488). Needs the prior's density. The default.
    """

    atoms: int = 10

    def draw(self, model: Model, current: Fit, x: Data, n: int, key: PRNGKey) -> Theta:
        draws = current.sample(x, n, key=key)
        return {str(name): part.values[0] for name, part in draws.data_vars.items()}


@dataclasses.dataclass(frozen=True)
class Truncated:
    """Draws of the prior where the current posterior is not negligible.

    Truncated proposals (Deistler et al. 2022, arXiv:2210.04815): theta whose density is below
    that of all but a `share` of posterior draws are not simulated. Nothing needs correcting,
    so the loss stays maximum likelihood; use it where the atomic loss is unstable.
    """

    share: float = 1e-3
    atoms: None = None

    def draw(self, model: Model, current: Fit, x: Data, n: int, key: PRNGKey) -> Theta:
        k_level, key = jax.random.split(key)
        draws = current.sample(x, LEVEL_DRAWS, key=k_level)
        level = np.quantile(current.log_prob(draws, x), self.share)
        kept: list[Theta] = []
        found = tried = 0
        while found < n:
            key, k_prior = jax.random.split(key)
            theta = jax.vmap(model.prior.draw)(jax.random.split(k_prior, PRIOR_DRAWS))
            theta = {name: np.asarray(values) for name, values in theta.items()}
            inside = current.log_prob(theta, x) >= level
            kept.append({name: values[inside] for name, values in theta.items()})
            found, tried = found + int(inside.sum()), tried + PRIOR_DRAWS
            if tried >= MAX_TRIED and found < n * tried / (100 * MAX_TRIED):
                raise ValueError(
                    f"Only {found} of {tried} prior draws lie where the posterior has its mass: "
                    "it is too narrow for truncated proposals. Use cs.Atomic()."
                )
        return {name: np.concatenate([part[name] for part in kept])[:n] for name in kept[0]}


LEVEL_DRAWS, PRIOR_DRAWS, MAX_TRIED = 8192, 65536, 2**22


@dataclasses.dataclass(frozen=True)
class Round:
    """One round: its runs, where their parameters came from, and the fit after it.

    `proposal`: the fit whose posterior proposed the parameters, None for the prior.
    """

    simulations: Simulations
    proposal: Fit | None
    fit: Fit


def sequential(
    model: Model,
    x: Data,
    *,
    rounds: int = 5,
    simulations: int = 200,
    key: PRNGKey,
    proposal: Atomic | Truncated | None = None,
    self_consistency: SelfConsistency | bool | None = None,
    posterior: ConditionalDensity | None = None,
    likelihood: ConditionalDensity | bool | None = None,
    summary: Summary | eqx.Module | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    directory: str | Path | None = None,
    progress: bool = True,
) -> list[Round]:
    """Learn the posterior of one observation in rounds; the last round's `fit` is the result.

    `simulations`: the runs of each round.
    `proposal`: where parameters come from after the first round: `Atomic()` or `Truncated()`.
    `self_consistency`: as for `fit`; the loss is evaluated at the observation too.
    `directory`: keep every round there. Called again, or with more rounds, finished rounds are
    read, not run; runs made before an interruption in training are not made again. A folder is of
    one model, observation, key and settings, and one call at a time writes to it.

    >>> import consilience as cs, numpyro.distributions as dist
    >>> model = cs.Model(dist.Normal(0, 1), lambda key, t: t + jax.random.normal(key, (2,)))
    >>> done = sequential(
    ...     model, np.array([1.0, 1.5]), rounds=1, simulations=64, key=jax.random.key(0),
    ...     posterior=cs.Coupling(layers=1, width=16), self_consistency=False, epochs=2,
    ... )
    >>> len(done[-1].simulations)
    64
    """
    rounds = as_count(rounds, "rounds, the number of rounds,")
    simulations = as_count(simulations, "simulations, the number of runs of each round,")
    for name, number in (("rounds", rounds), ("simulations", simulations)):
        if number < 1:
            raise ValueError(f"The number of {name} must be at least one, got {number}.")
    proposal = Atomic() if proposal is None else proposal
    if isinstance(proposal, Atomic) and model.prior.density is None:
        raise ValueError(
            "Atomic proposals need the prior's density, and this prior can only be sampled: "
            "pass proposal=cs.Truncated()."
        )
    model = _with_layout(model, x, directory)
    settings = {
        "simulations": simulations,
        "proposal": proposal,
        "self_consistency": self_consistency,
        "posterior": posterior,
        "likelihood": likelihood,
        "summary": summary,
        "epochs": epochs,
        "batch_size": batch_size,
    }
    kept = None
    if directory is not None:
        parts = (posterior, likelihood, summary)
        kept = Kept(directory, model, x, about(model, key, settings), parts)
    done: list[Round] = []
    with kept or contextlib.nullcontext():
        for number in range(rounds):
            k_theta, k_run, k_fit = jax.random.split(jax.random.fold_in(key, number), 3)
            current = done[-1].fit if done else None
            runs = kept.simulations(number) if kept else None
            if runs is None:
                if current is None:
                    runs = simulate(model, simulations, key=k_run, progress=progress)
                else:
                    theta = proposal.draw(model, current, x, simulations, k_theta)
                    runs = simulate_at(model, theta, key=k_run, progress=progress)
                if kept:
                    kept.keep_simulations(number, runs)
            result = kept.fit(number) if kept else None
            if result is None:
                networks = (posterior, likelihood, summary) if current is None else (None,) * 3
                result = fit(
                    model,
                    _together([*(each.simulations for each in done), runs]),
                    key=k_fit,
                    self_consistency=self_consistency,
                    unlabeled=None if self_consistency is False else x,
                    start=current,
                    atoms=None if current is None else proposal.atoms,
                    posterior=networks[0],
                    likelihood=networks[1],
                    summary=networks[2],
                    epochs=epochs,
                    batch_size=batch_size,
                    validation=0.0,
                    progress=progress,
                )
                if kept:
                    kept.keep_fit(number, result)
            done.append(Round(runs, current, result))
    return done


def _with_layout(model: Model, x: Data, directory: str | Path | None) -> Model:
    """The model with the layout of its data, once the observation is seen to be one dataset."""
    if model.external is not None and model.spec is None:
        held = None if directory is None else held_spec(directory, model, x)
        model = with_spec(model) if held is None else model.with_spec(held)
    _, batched = find_layout(model).check(x)
    if batched:
        raise ValueError("Sequential rounds serve one observation, got a batch: pass one of them.")
    return model


def _together(parts: list[Simulations]) -> Simulations:
    """The valid runs of all rounds."""
    valid = [part.drop_invalid() for part in parts]
    theta, x = jax.tree.map(lambda *a: np.concatenate(a), *[(part.theta, part.x) for part in valid])
    runs, total = Simulations(theta, x, attempts=join_attempts(parts)), sum(map(len, parts))
    if len(runs) < total:
        bad = total - len(runs)
        logger.warning("%d of %d runs failed, or are not finite: left out.", bad, total)
    return runs
