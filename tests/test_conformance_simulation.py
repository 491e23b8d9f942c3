"""What every simulator outside JAX and every executor must do, built in or a user's own."""

import contextlib
import multiprocessing
import resource
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor

import jax
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.model.external import External, is_external
from consilience.model.priors import as_prior
from consilience.model.run import Task, run_chunk
from consilience.simulation.programs import program_of
from consilience.simulation.settings import Executor
from consilience.simulation.simulate import find_layout, with_spec
from consilience.simulation.starting import importable
from consilience.simulation.workers import Workers, run_limited
from tests import simulators
from tests.conftest import TINY, quick

KEY = jax.random.key(7)
# Shared by all models: its draws are compiled once.
PRIOR = as_prior({"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)})
N = 12

SIMULATORS = {
    "external": lambda: cs.external(simulators.noisy),
    "command": lambda: cs.command("echo {mu} {sigma} {seed}"),
    "own": lambda: simulators.Own(),
}
LATE = {
    "external": lambda: cs.external(simulators.waits),
    "command": lambda: cs.command("sh -c 'sleep 60; echo {mu} {sigma}'"),
    "own": lambda: simulators.Own(seconds=60.0),
    "own, which keeps time": lambda: simulators.Patient(),
}


class Here:
    """A user's executor, which inherits from nothing: it runs every chunk at once."""

    size = 1

    def submit(self, fn, /, *args):
        future = Future()
        try:
            future.set_result(fn(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def processes():
    return ProcessPoolExecutor(2, multiprocessing.get_context("forkserver"))


EXECUTORS = {
    "default": lambda: contextlib.nullcontext(None),
    "threads": lambda: ThreadPoolExecutor(2),
    "processes": processes,
    "own": lambda: contextlib.nullcontext(Here()),
}


@pytest.fixture(params=SIMULATORS)
def simulator(request):
    return SIMULATORS[request.param]()


@pytest.fixture(params=EXECUTORS)
def executor(request):
    with EXECUTORS[request.param]() as made:
        yield made


def simulate(simulator, n=N, **settings):
    model = cs.Model(PRIOR, simulator)
    return cs.simulate(model, n, key=KEY, **({"progress": False} | settings))


def state(model):
    return model.layout, repr(model), dict(vars(model)), dict(vars(model.simulator))


def test_a_simulator_has_the_interface(simulator):
    assert isinstance(simulator, External)
    model = cs.Model(PRIOR, simulator)
    assert model.external is simulator
    assert model.simulator_name == simulator.name
    assert isinstance(simulator.name, str) and isinstance(simulator.keeps_time, bool)
    assert importable(simulator)


def test_an_executor_gives_a_future_of_the_outcomes_of_a_chunk(executor):
    task = Task(SIMULATORS["own"](), (0,), mark="one chunk")
    numbers, theta = np.array([3, 1]), {"mu": np.arange(2.0), "sigma": np.ones(2)}
    expected = run_chunk(task, numbers, theta)
    with Workers(task, 1) if executor is None else contextlib.nullcontext(executor) as made:
        assert isinstance(made, Executor)
        outcomes = made.submit(run_limited, task, numbers, theta).result(30.0)
    assert [outcome.number for outcome in outcomes] == [3, 1]
    for outcome, other in zip(outcomes, expected, strict=True):
        assert (outcome.failure, outcome.mark) == (None, "one chunk") and outcome.x.shape == (3,)
        np.testing.assert_array_equal(outcome.x, other.x)


def executor_of(submit):
    """An object with a `submit`, or none where `submit` is None."""
    return type("Half", (), {} if submit is None else {"size": 1, "submit": submit})()


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        (Here, r"not its class: pass Here\(\), not Here\."),
        (ThreadPoolExecutor, r"pass ThreadPoolExecutor\(\), not ThreadPoolExecutor\."),
        (executor_of(None), r"executor must have submit\(fn, \*args\).*but Half has none"),
        (executor_of("soon"), r"executor must have submit\(fn, \*args\).*but Half has none"),
        (executor_of(lambda self, fn, *args: None), r"must return a concurrent.futures.Future"),
    ],
)
def test_what_is_no_executor_is_refused(executor, message, unchecked):
    with pytest.raises(TypeError, match=message):
        simulate(SIMULATORS["own"](), executor=executor)


def test_runs_are_the_same_on_every_executor(simulator, executor):
    expected = simulate(simulator, executor=Here())
    sims = simulate(simulator, executor=executor, chunk=5)
    assert sims.x.shape == (N, 3) and len(np.unique(sims.x)) == 3 * N
    np.testing.assert_array_equal(sims.x, expected.x)
    np.testing.assert_array_equal(sims.theta["mu"], expected.theta["mu"])


def test_a_model_is_the_same_after_its_runs(simulator, executor, tmp_path):
    model = cs.Model(PRIOR, simulator)
    before = state(model)
    assert model.layout is None and "shape known after its first run" in repr(model)
    settings = {"key": KEY, "executor": executor, "progress": False}
    cs.simulate(model, N, **settings)
    cs.simulate(model, 2, store=tmp_path / "runs", **settings)
    cs.simulate_at(model, {"mu": np.zeros(2), "sigma": np.ones(2)}, **settings)
    assert find_layout(model).shapes == {"data": (3,)}
    assert state(model) == before


def test_a_store_is_gone_on_with_and_knows_its_program(simulator, executor, tmp_path, caplog):
    simulate(simulator, 5, executor=executor, store=tmp_path / "runs")
    sims = simulate(simulator, executor=executor, store=tmp_path / "runs")
    np.testing.assert_array_equal(sims.x, simulate(simulator, executor=Here()).x)
    assert "made again" not in caplog.text
    status = cs.Simulations.open(tmp_path / "runs")
    assert len(status) == N


def test_programs_are_told_apart():
    made = [make() for make in SIMULATORS.values()]
    programs = [program_of(cs.Model(PRIOR, one)) for one in [*made, simulators.Own(seconds=1.0)]]
    assert len(set(programs)) == 4
    assert programs[:3] == [program_of(cs.Model(PRIOR, make())) for make in SIMULATORS.values()]


def test_other_parameters_are_refused(simulator):
    with pytest.raises(ValueError, match="nu"):
        cs.Model({"mu": dist.Normal(0.0, 1.0), "nu": dist.Normal(0.0, 1.0)}, simulator)


@pytest.mark.parametrize("name", ["default", "processes", "own"])
@pytest.mark.parametrize("late", LATE)
def test_runs_that_take_too_long_are_stopped(late, name):
    start = time.monotonic()
    with (
        EXECUTORS[name]() as executor,
        pytest.raises(ValueError, match=r"timed out: The run took longer than 0\.3 s"),
    ):
        simulate(LATE[late](), 1, executor=executor, timeout=0.3)
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize("late", LATE)
def test_in_threads_those_that_keep_time_are_stopped_and_others_refused(late):
    simulator = LATE[late]()
    message = "timed out" if simulator.keeps_time else "cannot be stopped in a thread"
    with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match=message):
        simulate(simulator, 1, executor=threads, timeout=0.3)


@pytest.mark.parametrize("cls", [simulators.Own, simulators.Runs, simulators.Compiled])
def test_a_class_of_simulators_is_refused(cls):
    message = rf"A simulator is an object, not its class: pass {cls.__name__}\(\)"
    with pytest.raises(TypeError, match=message):
        cs.Model(PRIOR, cls)


def test_the_interface_is_looked_at_once(unchecked):
    """Its properties are the user's: `program` may read a binary."""
    seen = []

    class Slow(simulators.Own):
        @property
        def program(self):
            seen.append("program")
            return ("slow",)

    model = cs.Model(PRIOR, Slow())
    before = len(seen)
    assert before <= 1
    assert all(model.external is model.simulator for _ in range(5))
    assert model.simulator_name == "own"
    with pytest.raises(TypeError, match="cannot be compiled"):
        model.simulate_at(KEY, {})
    known = with_spec(model)
    assert known.external is model.simulator
    assert len(seen) == before


def test_half_of_the_interface_is_refused():
    class Half:
        name, keeps_time = "half", False

        def run(self, rng, theta, timeout):
            return np.zeros(1)

    with pytest.raises(TypeError, match=r"Half has no function and no program and no check"):
        is_external(Half())


def test_a_simulator_that_cannot_be_hashed_is_refused():
    class Equal(simulators.Own):
        __hash__ = None

        def __eq__(self, other):
            return True

    with pytest.raises(TypeError, match="unhashable type"):
        cs.Model(PRIOR, Equal())


def test_a_fit_knows_the_layout_that_its_model_does_not(simulator, tmp_path):
    model = cs.Model(PRIOR, simulator)
    sims = cs.simulate(model, 64, key=KEY, executor=Here(), progress=False)
    fit = quick(model, sims, posterior=TINY, self_consistency=None)
    assert model.layout is None
    assert fit.model.layout.shapes == {"data": (3,)}
    # So it needs no run that succeeds to record those that fail.
    far = {"mu": np.array([np.inf]), "sigma": np.ones(1)}
    failed = cs.simulate_at(fit.model, far, key=KEY, executor=Here(), progress=False)
    assert failed.failures.reasons == {"not finite": 1} and failed.x.shape == (1, 3)
    fit.save(tmp_path / "fit")
    assert cs.load(tmp_path / "fit", model).model.layout == fit.model.layout
    assert model.layout is None


def test_failed_runs_alone_are_recorded_where_the_layout_is_known():
    model = cs.Model(PRIOR, cs.external(simulators.fragile))
    sure = {"mu": np.zeros(2), "sigma": np.full(2, 1.8)}
    with pytest.raises(ValueError, match="No run has shown the shape of the data"):
        cs.simulate_at(model, sure, key=KEY, progress=False)
    known = with_spec(model)
    sims = cs.simulate_at(known, sure, key=KEY, progress=False)
    assert sims.failures.reasons == {"raised": 2} and sims.x.shape == (2, 3)
    assert model.layout is None


# The default executor runs what it is given.


@pytest.fixture
def workers():
    task = Task(cs.external(simulators.noisy), (0,))
    with Workers(task, 1) as made:
        yield made


THETA = {"mu": np.arange(4.0), "sigma": np.ones(4)}


def test_workers_run_the_function_that_is_submitted(workers):
    given = workers.submit(simulators.runs_nothing, workers.task, np.arange(4), THETA).result()
    assert [outcome.x.tolist() for outcome in given] == [[0.0], [1.0], [2.0], [3.0]]
    made = workers.submit(run_chunk, workers.task, np.arange(4), THETA).result()
    expected = run_chunk(workers.task, np.arange(4), THETA)
    for outcome, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(outcome.x, other.x)


def test_workers_raise_what_the_function_raises_and_go_on(workers):
    with pytest.raises(KeyError, match="by the function itself"):
        workers.submit(simulators.raises, workers.task, np.arange(4), THETA).result()
    assert len(workers.submit(run_chunk, workers.task, np.arange(4), THETA).result()) == 4


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (simulators.raises_locked, "LookupError: it holds a lock"),
        (simulators.raises_two, "NeedsTwoError: this and that"),
    ],
)
def test_workers_raise_the_text_of_what_cannot_be_pickled(workers, function, text):
    with pytest.raises(RuntimeError, match=text):
        workers.submit(function, workers.task, np.arange(4), THETA).result()
    assert len(workers.submit(run_chunk, workers.task, np.arange(4), THETA).result()) == 4


def test_workers_refuse_other_arguments(workers):
    chunk = workers.task, np.arange(4), THETA
    for args, kwargs, given in [
        (chunk[:1], {}, r"submit\(fn, Task\)"),
        ((*chunk, 1), {}, r"submit\(fn, Task, ndarray, dict, int\)"),
        ((1, 2, 3), {}, r"submit\(fn, int, int, int\)"),
        (chunk, {"timeout": 1.0}, r"submit\(fn, Task, ndarray, dict, timeout=\)"),
    ]:
        with pytest.raises(TypeError, match=rf"submit\(fn, task, numbers, theta\), not {given}"):
            workers.submit(run_chunk, *args, **kwargs)


def test_workers_refuse_outcomes_of_other_runs(workers):
    with pytest.raises(ValueError, match="outcome of another run than 0"):
        workers.submit(simulators.mixes_up, workers.task, np.arange(4), THETA).result()


def test_workers_refuse_another_task(workers):
    other = Task(cs.external(simulators.noisy), (1,))
    with pytest.raises(ValueError, match="started for another task"):
        workers.submit(run_chunk, other, np.arange(4), THETA)


# What needs no JAX does not import it.


@pytest.mark.parametrize("name", ["default", "processes"])
def test_worker_processes_do_not_import_jax(name):
    with EXECUTORS[name]() as executor:
        sims = simulate(cs.external(simulators.has_jax), 4, executor=executor, chunk=1)
    assert not sims.x.any()
    assert "jax" in sys.modules


def child(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["simulate", "--help"]])
def test_help_and_version_do_not_import_jax(words):
    script = (
        "import sys\nfrom consilience.cli.main import main\n"
        f"try:\n    main({words})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print('jax' in sys.modules)"
    )
    assert child("-c", script).stdout.splitlines()[-1] == "False"


def test_help_takes_less_than_half_a_second_of_cpu():
    spent = lambda used: used.ru_utime + used.ru_stime  # noqa: E731
    before = spent(resource.getrusage(resource.RUSAGE_CHILDREN))
    assert "usage: consilience" in child("-m", "consilience.cli", "--help").stdout
    assert spent(resource.getrusage(resource.RUSAGE_CHILDREN)) - before < 0.5


def test_modules_of_worker_processes_do_not_import_jax():
    names = ["model.command", "model.external", "model.run", "simulation.workers"]
    modules = ", ".join(f"consilience.{name}" for name in names)
    assert child("-c", f"import sys, {modules}; print('jax' in sys.modules)").stdout == "False\n"
