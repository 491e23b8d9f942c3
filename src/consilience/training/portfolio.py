"""The default fit without a likelihood: recipes compete by runs that they have not seen.

Every candidate of `candidates.py` is trained without the first fold of the runs, and those that
explain this fold much worse than the best are dropped. The others are trained on all folds. Their
held-out log densities, one for every run, give the weights of the mixture that is the posterior.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from numpy.random import Generator
from scipy import stats
from tqdm.auto import tqdm

from consilience.core.arrays import as_count
from consilience.core.devices import check_devices
from consilience.core.provenance import Origin, key_name, versions
from consilience.core.types import PRNGKey
from consilience.identity.learned import Networks
from consilience.model.data import DataSpace, Set
from consilience.model.model import Model
from consilience.model.spaces import ParameterSpace
from consilience.networks.density import ConditionalDensity
from consilience.networks.flow import Coupling
from consilience.networks.layers import generator
from consilience.networks.recipe import Recipe
from consilience.networks.summary import Summary
from consilience.posterior.fit import Fit, assemble
from consilience.posterior.history import History, Tried
from consilience.posterior.out_of_fold import OutOfFold
from consilience.simulation.simulations import Simulations
from consilience.training.candidates import EFFORTS, Candidate, Effort, candidates_for
from consilience.training.crossfit import Setup, Trained, train_fold
from consilience.training.defaults import check_batch, default_batch
from consilience.training.epochs import TrainingError
from consilience.training.folds import Fold, make_folds
from consilience.training.joining import join, out_of_fold
from consilience.training.prepare import find_validity, to_examples
from consilience.training.stacking import stacking_weights

logger = logging.getLogger(__name__)

CLEARLY = 0.977
"""How sure it must be that a candidate is behind the best, by a t-test of held-out densities."""
SLACK = 0.1
"""How many nats it may be behind besides: stacking gains from different candidates."""
NOT_FINITE = (
    "The loss was not finite for any recipe: look for extreme values in the simulations, or train "
    "one of your own with cs.fit(posterior=..., epochs=..., learning_rate=...)."
)


class Outcome(NamedTuple):
    """What a fit is made of.

    `data`: the space of the data as the likelihood takes them.
    """

    networks: Networks
    recipe: Recipe
    data: DataSpace
    history: History
    out_of_fold: OutOfFold


def fit_portfolio(
    model: Model,
    simulations: Simulations,
    parameters: ParameterSpace,
    data: DataSpace,
    some: Simulations,
    *,
    key: PRNGKey,
    room: int | None,
    mesh: Mesh | None,
    emulate: bool,
    posterior: ConditionalDensity | None,
    likelihood: ConditionalDensity | bool | None,
    prior: ConditionalDensity | None,
    summary: Summary | eqx.Module | None,
    batch_size: int | None,
    effort: Effort | None,
    members: int | None,
    progress: bool,
) -> Fit:
    """The fit in which recipes compete."""
    effort = "standard" if effort is None else effort
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, got {effort!r}.")
    work, n = EFFORTS[effort], len(simulations)
    if members is None:
        members = min(work.members, n // 2)
    members = as_count(members, "members, the number of networks in each ensemble,")
    work = work._replace(members=members)
    if not 1 <= work.members <= n // 2:
        raise ValueError(f"members must be between 1 and half of the {n} runs, got {work.members}.")
    for_folds, for_training, for_validity = generator(key).spawn(3)
    folds = make_folds(n, work.members, for_folds)
    train = len(folds[0].train)
    batch_size = default_batch(train) if batch_size is None else batch_size
    check_batch(batch_size, train, n - train)
    check_devices(batch_size, mesh)
    if emulate and prior is None and model.prior.density is None:
        prior = Coupling(layers=2)
    spec = likelihood if not isinstance(likelihood, bool) else None
    setup = Setup(
        model=model,
        parameters=parameters,
        data=data,
        simulations=simulations,
        examples=to_examples(parameters, simulations) if room is None else None,
        # Each thread reads parts of its own.
        room=None if room is None else max(1, room // _workers(mesh)),
        batch_size=batch_size,
        prior=prior,
        validity=find_validity(parameters, simulations.attempts, None, for_validity)
        if emulate
        else None,
        mesh=mesh,
        work=work,
        key=key,
    )
    candidates = candidates_for(
        effort,
        emulate=emulate,
        rows_open=model.data is None and isinstance(data.layout.kind, Set),
        posterior=posterior,
        likelihood=spec,
        summary=summary,
    )
    found = compete(setup, candidates, folds, for_training, progress=progress)
    record = {
        "effort": effort,
        "members": work.members,
        "batch_size": batch_size,
        "exact": False,
        "unlabeled": 0,
    }
    attempts = simulations.attempts
    tried = n if attempts is None else len(attempts.valid)
    origin = Origin(key_name(key), simulations.key, tried, record, versions())
    return assemble(
        model,
        parameters,
        found.data,
        found.networks,
        found.recipe,
        found.history,
        setup.validity,
        origin,
        found.out_of_fold,
    )


def compete(
    setup: Setup,
    candidates: Sequence[Candidate],
    folds: Sequence[Fold],
    rng: Generator,
    *,
    progress: bool,
) -> Outcome:
    """Train the candidates and return the mixture that is best for runs that it has not seen."""
    start = time.perf_counter()
    # Numbers drawn beforehand, so that the result does not depend on which thread is first.
    seeds = {(c, f): rng.spawn(1)[0] for c in range(len(candidates)) for f in range(len(folds))}
    stop = threading.Event()
    results: dict[tuple[int, int], Trained] = {}
    bar = tqdm(
        total=len(candidates) * len(folds),
        desc="fit",
        unit="network",
        disable=None if progress else True,
    )

    def train(c: int, f: int) -> Callable[[], Trained]:
        mine = setup.of(candidates[c])
        return lambda: train_fold(mine, candidates[c], folds[f], seeds[c, f], stop)

    def run(jobs: list[tuple[int, int]]):
        _in_threads({job: train(*job) for job in jobs}, results, setup.mesh, stop, bar)

    try:
        run([(c, 0) for c in range(len(candidates))])
        first = [results.get((c, 0)) for c in range(len(candidates))]
        dropped = race([None if one is None else one.log_q for one in first])
        left = [c for c in range(len(candidates)) if c not in dropped]
        bar.total -= len(dropped) * (len(folds) - 1)
        if not stop.is_set():
            run([(c, f) for f in range(1, len(folds)) for c in left])
    finally:
        bar.close()
    if not left:
        if stop.is_set():
            raise KeyboardInterrupt
        raise TrainingError(NOT_FINITE)
    # Fewer than there are folds where training was interrupted, or a member diverged.
    members = [f for f in range(len(folds)) if all((c, f) in results for c in left)]
    log_q = {c: np.concatenate([results[c, f].log_q for f in members]) for c in left}
    weights = dict(zip(left, stacking_weights(np.stack(list(log_q.values()), 1)), strict=True))
    chosen = {c: weight for c, weight in weights.items() if weight > 0}
    networks, recipe, data = join(setup, candidates, results, chosen, members)
    heaviest = max(chosen, key=lambda c: chosen[c])
    shown = results[heaviest, 0]
    history = History(
        terms={n: np.array([row.get(n, np.nan) for row in shown.record]) for n in shown.record[0]},
        best_epochs=shown.best_epochs,
        stopped="interrupted" if stop.is_set() else "early",
        seconds=time.perf_counter() - start,
        simulations=len(setup.simulations),
        tried=_table(candidates, results, log_q, weights, dropped),
    )
    judged = out_of_fold(setup, {f: folds[f] for f in members}, results, chosen, rng)
    return Outcome(networks, recipe, data, history, judged)


def race(log_q: Sequence[np.ndarray | None]) -> dict[int, str]:
    """Which candidates to drop, with the reason, by their log densities of the same runs."""
    means = [-np.inf if part is None else part.mean() for part in log_q]
    best = int(np.argmax(means))
    dropped = {}
    for c, part in enumerate(log_q):
        if part is None or log_q[best] is None:
            dropped[c] = "not trained"
            continue
        behind = log_q[best] - part
        error = behind.std(ddof=1) / np.sqrt(len(behind)) if len(behind) > 1 else np.inf
        # With few runs a normal limit would drop what is behind by chance.
        if behind.mean() > SLACK + stats.t.ppf(CLEARLY, max(1, len(behind) - 1)) * error:
            dropped[c] = f"{behind.mean():.2f} nats behind on the first fold"
    return dropped


def _table(
    candidates: Sequence[Candidate],
    results: dict[tuple[int, int], Trained],
    log_q: dict[int, np.ndarray],
    weights: dict[int, float],
    dropped: dict[int, str],
) -> tuple[Tried, ...]:
    """What was tried, its score, and why it was kept or dropped."""
    rows = []
    for c, candidate in enumerate(candidates):
        mine = [one for (number, _), one in results.items() if number == c]
        scores = log_q.get(c, mine[0].log_q if mine else np.array([np.nan]))
        weight = weights.get(c, 0.0)
        rows.append(
            Tried(
                name=candidate.name,
                score=float(scores.mean()),
                runs=len(scores),
                members=len(mine),
                weight=float(weight),
                seconds=round(float(sum(one.seconds for one in mine)), 2),
                decision=dropped.get(c) or ("kept" if weight > 0 else "adds nothing to the others"),
            )
        )
    return tuple(rows)


def _in_threads(
    jobs: dict[tuple[int, int], Callable[[], Trained]],
    results: dict[tuple[int, int], Trained],
    mesh: Mesh | None,
    stop: threading.Event,
    bar: tqdm,
):
    """Run jobs, one on each core at a time, and add what they return to the results.

    What diverged is left out. Ctrl-C ends the jobs; networks whose training it cut short are left
    out too, unless there are no others.
    """
    # Settings of JAX may hold for a thread alone.
    config: Any = jax.config
    wide, device = bool(config.jax_enable_x64), config.jax_default_device

    def run(job: Callable[[], Trained]) -> Trained:
        with jax.enable_x64(wide), jax.default_device(device):
            return job()

    with ThreadPoolExecutor(_workers(mesh)) as pool:
        waiting: dict[Future, tuple[int, int]] = {
            pool.submit(run, job): name for name, job in jobs.items()
        }

        def collect(timeout: float | None):
            finished, _ = wait(waiting, timeout, FIRST_COMPLETED)
            for future in finished:
                name = waiting.pop(future)
                if not future.cancelled():
                    result = future.result()
                    bar.update()
                    if np.isfinite(result.log_q).all() and (result.finished or not results):
                        results[name] = result
                        bar.set_postfix({"held-out log density": f"{result.log_q.mean():.3f}"})

        try:
            while waiting:
                collect(0.5)
        except KeyboardInterrupt:
            logger.warning("Interrupted: keeping the networks that are trained so far.")
            stop.set()
            for future in waiting:
                future.cancel()
            while waiting:
                collect(None)
        except BaseException:
            stop.set()
            for future in waiting:
                future.cancel()
            raise


def _workers(mesh: Mesh | None) -> int:
    """How many members train at once: on a CPU, one on each core."""
    # Devices that share a batch wait for each other, which two threads would prevent.
    return 1 if mesh is not None or jax.default_backend() != "cpu" else cores()


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
