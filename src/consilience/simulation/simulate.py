"""Running a model's simulator: `simulate`, into memory or into a store."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np

from consilience.core.arrays import as_count, computed_in
from consilience.core.compiling import compiled
from consilience.core.keys import keyed
from consilience.core.provenance import KeyName, key_name, key_words
from consilience.core.types import PRNGKey, Theta
from consilience.model.data import Layout
from consilience.model.model import Model
from consilience.model.run import NOT_FINITE, Failure, Spec, Task, at, run_one
from consilience.model.spaces import ParameterSpace
from consilience.simulation.arrays import check_names
from consilience.simulation.campaign import TRIES, run_again, run_campaign
from consilience.simulation.limits import check_disk, check_memory
from consilience.simulation.memory import Memory
from consilience.simulation.metadata import check_type, describe_campaign
from consilience.simulation.parameters import Draws
from consilience.simulation.programs import program_of
from consilience.simulation.resume import check_program, check_theta
from consilience.simulation.settings import Executor, Settings
from consilience.simulation.simulations import Simulations, Unread
from consilience.simulation.store import ROOT, Store

RUNS_AT_ONCE = 4096
"""Runs compiled and made at once: bounds memory, and small budgets compile once."""

COMPILED = (
    "are for simulators outside JAX: one in JAX is compiled, and makes many runs at once in this "
    "process."
)

STORED = 256
"""Runs made at once for a store; at most this many are thrown away at its end."""


@keyed("cs.simulate(model, n, key=key)")
def simulate(
    model: Model,
    n: SupportsIndex,
    *,
    key: PRNGKey,
    store: str | Path | None = None,
    executor: Executor | None = None,
    timeout: float | None = None,
    retry: int = 0,
    chunk: int | None = None,
    in_flight: int | None = None,
    progress: bool = True,
) -> Simulations:
    """Draw `n` parameters from the prior and run the simulator on each.

    A run depends on the key and its own number alone: the first runs of a longer call are
    the runs of a shorter one, on any executor.

    `store`: a folder to keep runs in as they arrive, a Zarr store. Called again, after a crash
    or with a larger `n`, only what is missing is run. `Simulations.open` reads it.

    For simulators outside JAX (`cs.external`, `cs.command`, or one of your own):

    `executor`: any `concurrent.futures.Executor`, or an object of your own with its `submit`; by
    default a process for each core.
    `timeout`: seconds after which a run counts as failed.
    `retry`: further attempts at runs that failed, with the same parameters and random numbers:
    for failures that pass, not for parameters that the simulator cannot take.
    `chunk`: runs sent to a worker together; by default a quarter of a second of work.
    `in_flight`: chunks sent out at a time; by default two for each worker.

    >>> import numpyro.distributions as dist
    >>> model = Model(dist.Normal(0, 1), lambda key, theta: theta + jax.random.normal(key, (2,)))
    >>> simulate(model, 100, key=jax.random.key(0))
    Simulations: 100 runs, theta: theta (); x: (2,)
    """
    number = as_count(n, "n, the number of simulations,")
    if number < 1:
        raise ValueError(f"The number of simulations must be at least one, got {n}.")
    settings = Settings(executor, timeout, retry, chunk, in_flight, progress)
    if model.external is None and settings != Settings(progress=progress):
        raise ValueError(f"executor, timeout, retry, chunk and in_flight {COMPILED}")
    _check_room(model, number, store)
    if store is not None:
        return _simulate_stored(model, number, key, store, settings)
    if model.external is None:
        sims = _simulate_compiled(model, number, key)
    else:
        sims = _in_memory(model, number, Draws(model.prior, key), key, settings, key_name(key))
    sims.prior, sims.fingerprint = model.prior.texts, model.prior.fingerprint
    return sims


def _check_room(model: Model, n: int, store: str | Path | None):
    """Refuse more runs than there is room for, and names that a store cannot have."""
    drawn = jax.eval_shape(model.prior.draw, jax.random.key(0))
    theta = sum(math.prod(a.shape) * a.dtype.itemsize for a in drawn.values())
    # That of a simulator outside JAX is known in the model of a fit alone.
    layout = model.layout
    numbers = 0 if layout is None else sum(map(math.prod, layout.shapes.values()))
    x = numbers * computed_in().itemsize
    if store is None:
        check_memory(n, theta + x, "ask for fewer, or pass store= to keep them on disk")
        return
    check_memory(n, theta, "ask for fewer")
    if not (Path(store) / ROOT).exists():
        check_names([*drawn, *(() if layout is None or layout.bare else layout.names)])
        check_disk(Path(store).absolute(), str(store), n, theta + x)


def _simulate_compiled(model: Model, n: int, key: PRNGKey) -> Simulations:
    size = min(n, RUNS_AT_ONCE)
    blocks = []
    for start in range(0, math.ceil(n / size) * size, size):
        numbers = np.arange(start, start + size, dtype=np.uint32)
        blocks.append(jax.device_get(_simulate_block(model, key, numbers)))
    theta, x = jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *blocks)
    return Simulations(theta, x, key=key_name(key))


def _in_memory(
    model: Model,
    n: int,
    draw: Callable[[np.ndarray], Theta],
    key: PRNGKey,
    settings: Settings,
    name: KeyName | None = None,
) -> Simulations:
    """Runs at the parameters that `draw` gives; `name`: of the key, if it alone made those too."""
    runs, external = Memory(n), model.external
    assert external is not None
    run_campaign(external, runs, n, draw, key_words(key), settings, model.spec)
    assert runs.spec is not None
    numbers = np.arange(n)
    x, failed = runs.spec.unnamed(runs.x), runs.failures(numbers)
    return Simulations(draw(numbers), x, failed, key=name)


def _simulate_stored(
    model: Model, n: int, key: PRNGKey, path: str | Path, settings: Settings
) -> Simulations:
    """Runs put into a store, once it is seen that what it holds is of this model and key."""
    external, draw, program = model.external, Draws(model.prior, key), program_of(model)
    about = describe_campaign(model.prior, model.simulator_name, program, key)
    with Store(path, about, prior=model.prior) as runs:
        check_theta(runs, draw)
        if external is None:
            check_program(runs, program, n, lambda i: _compiled_run(model, key, i))
            _store_compiled(model, n, key, runs)
        else:
            again = lambda i: run_again(external, runs, i, draw, key_words(key), settings)  # noqa: E731
            check_program(runs, program, n, again)
            run_campaign(external, runs, n, draw, key_words(key), settings, model.spec)
    return _stored(runs, n)


def _store_compiled(model: Model, n: int, key: PRNGKey, runs: Store):
    """Runs of a simulator in JAX, put into a store chunk by chunk."""
    theta, x = jax.eval_shape(model.simulate_one, key)
    spec = _spec(model, x)
    example = {name: np.zeros((1, *a.shape), a.dtype) for name, a in theta.items()}
    runs.begin(spec, example)
    assert runs.spec is not None
    held = {name: np.dtype(dtype) for name, _, dtype in runs.spec.arrays}
    for part, _, dtype in spec.arrays:
        check_type(str(runs), "x" if spec.bare else f"x[{part!r}]", held[part], np.dtype(dtype))
    runs.grow(n)
    missing = runs.missing(n)
    for chunk in np.unique(missing // runs.rows):
        here = missing[missing // runs.rows == chunk]
        runs.put(here, *_compiled_runs(model, key, here))
        runs.touch()


def _compiled_run(model: Model, key: PRNGKey, number: int) -> dict[str, np.ndarray] | Failure:
    _, x, failed = _compiled_runs(model, key, np.array([number]))
    return failed[0] if failed else {name: array[0] for name, array in x.items()}


def _compiled_runs(model: Model, key: PRNGKey, numbers: np.ndarray):
    """Parameters, named data and failures; made in blocks that begin at fixed numbers."""
    blocks = []
    for block in np.unique(numbers // STORED):
        all_of_it = np.arange(block * STORED, (block + 1) * STORED, dtype=np.uint32)
        made = Simulations(*jax.device_get(_simulate_block(model, key, all_of_it)))
        blocks.append(made[numbers[numbers // STORED == block] - all_of_it[0]])
    theta, x = jax.tree.map(
        lambda *parts: np.concatenate(parts), *[(block.theta, block.x) for block in blocks]
    )
    bad = np.flatnonzero(np.concatenate([block.invalid for block in blocks]))
    failed = {int(i): Failure(NOT_FINITE, "x has NaN or infinite values.") for i in bad}
    assert model.layout is not None
    return theta, model.layout.named(x), failed


def _spec(model: Model, x: Any) -> Spec:
    assert model.layout is not None
    parts = model.layout.named(x).items()
    arrays = tuple((name, a.shape, np.dtype(a.dtype).str) for name, a in parts)
    return Spec(arrays, model.layout.bare)


def _stored(runs: Store, n: int) -> Simulations:
    numbers = np.arange(n)
    return Simulations(runs.theta(numbers), Unread(runs, numbers), runs.failures(numbers))


def find_layout(model: Model) -> Layout:
    """The layout of a model's data. Where the model does not know it, the simulator is run once."""
    layout = (model if model.external is None else with_spec(model)).layout
    if layout is None:
        raise ValueError("This model has no simulator: pass one to cs.Model.")
    return layout


def with_spec(model: Model) -> Model:
    """A model of a simulator outside JAX with the arrays of its data, for which it is run once."""
    if model.spec is not None:
        return model
    assert model.external is not None
    task = Task(model.external, (0, 0))
    theta = Draws(model.prior, jax.random.key(0))(np.arange(TRIES))
    tried = (run_one(task, i, at(theta, i)) for i in range(TRIES))
    good = next((outcome for outcome in tried if outcome.failure is None), None)
    if good is None:
        raise ValueError(
            f"The simulator failed {TRIES} times, at parameters drawn from the prior: look at "
            "cs.simulate(model, ...).failures."
        )
    return model.with_spec(Spec.of(good.x))


@compiled
def _simulate_block(model: Model, key: PRNGKey, numbers):
    return jax.vmap(lambda i: model.simulate_one(jax.random.fold_in(key, i)))(numbers)


@keyed("cs.simulate_at(model, theta, key=key)")
def simulate_at(
    model: Model,
    theta: Theta,
    *,
    key: PRNGKey,
    executor: Executor | None = None,
    timeout: float | None = None,
    progress: bool = True,
) -> Simulations:
    """Run the simulator on parameters of the user's own choice, with a leading axis of runs.

    `executor`, `timeout`: as for `simulate`, for simulators outside JAX.

    >>> import numpyro.distributions as dist
    >>> model = Model(dist.Normal(0, 1), lambda key, theta: theta + jax.random.normal(key, (2,)))
    >>> simulate_at(model, {"theta": np.zeros(5)}, key=jax.random.key(0))
    Simulations: 5 runs, theta: theta (); x: (2,)
    """
    arrays = ParameterSpace(model.prior).check(theta)
    n = len(next(iter(arrays.values())))
    if model.external is not None:
        given = lambda numbers: {name: a[numbers] for name, a in arrays.items()}  # noqa: E731
        settings = Settings(executor, timeout, progress=progress)
        return _in_memory(model, n, given, key, settings)
    if executor is not None or timeout is not None:
        raise ValueError(f"executor and timeout {COMPILED}")
    size = min(n, RUNS_AT_ONCE)
    blocks = []
    for start in range(0, n, size):
        numbers = np.arange(start, start + size, dtype=np.uint32)
        part = {name: array[np.minimum(numbers, n - 1)] for name, array in arrays.items()}
        blocks.append(jax.device_get(_run_block(model, key, numbers, part)))
    return Simulations(arrays, jax.tree.map(lambda *parts: np.concatenate(parts)[:n], *blocks))


@compiled
def _run_block(model: Model, key: PRNGKey, numbers, theta):
    run = lambda i, t: model.simulate_at(jax.random.fold_in(key, i), t)  # noqa: E731
    return jax.vmap(run)(numbers, theta)
