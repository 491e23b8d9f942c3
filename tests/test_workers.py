"""Processes that run simulators: none answers for another, and none outlives its campaign."""

import os
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import numpy as np
import numpyro.distributions as dist
import psutil
import pytest

import consilience as cs
from consilience.core.guardian import Guardian
from consilience.core.processes import marked
from consilience.model.priors import as_prior
from consilience.model.run import Task
from tests import simulators
from tests.families import NAME, assert_end, assert_none_left, family, with_argument

KEY = jax.random.key(5)
PRIOR = as_prior({"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)})
N = 50
ROOT = Path(__file__).parents[1]


def simulate(function, n=N, **settings):
    model = cs.Model(PRIOR, cs.external(function))
    return cs.simulate(model, n, key=KEY, progress=False, **settings)


@pytest.fixture(scope="module")
def plain():
    return simulate(simulators.noisy)


@pytest.mark.parametrize("forks", [simulators.forks, simulators.forks_in_c])
def test_a_child_that_a_simulator_forks_gives_no_data(plain, forks):
    """Neither of its own, nor in place of later runs."""
    np.testing.assert_array_equal(simulate(forks, chunk=5).x, plain.x)


def test_a_forked_child_gives_no_data_in_a_process_pool(plain):
    with ProcessPoolExecutor(2, get_context("forkserver")) as pool:
        sims = simulate(simulators.forks, executor=pool, chunk=5)
    np.testing.assert_array_equal(sims.x, plain.x)


def test_a_forked_child_gives_no_data_in_a_thread():
    theta = {"mu": np.zeros(4), "sigma": np.full(4, 0.5)}
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        task = Task(cs.external(simulators.forks), (0,))
        done = pool.submit(simulators.in_a_thread, task, np.arange(4), theta).result()
    assert len(done) == 4 and max(np.abs(outcome.x).max() for outcome in done) < 100


def test_a_forked_child_that_holds_the_pipe_hides_no_death_of_a_worker(plain):
    start = time.monotonic()
    sims = simulate(simulators.dies_with_a_child, 3)
    assert time.monotonic() - start < 8.0
    assert sims.failures.positions.tolist() == [1]
    assert sims.failures.reasons == {"worker died": 1}
    np.testing.assert_array_equal(sims.x[2], plain.x[2])


def test_answers_that_were_not_asked_for_are_dropped(plain):
    np.testing.assert_array_equal(simulate(simulators.forges, chunk=5).x, plain.x)


def test_an_executor_that_mixes_up_its_answers_is_asked_again(plain):
    class Mixed(ThreadPoolExecutor):
        """Gives the third chunk the answer to the second, and the fifth in reverse."""

        def __init__(self):
            super().__init__(1)
            self.answers = []

        def submit(self, fn, *args):
            self.answers.append(fn(*args))
            answer = self.answers[-1]
            if len(self.answers) == 3:
                answer = self.answers[1]
            if len(self.answers) == 5:
                answer = answer[::-1]
            future = Future()
            future.set_result(answer)
            return future

    with Mixed() as executor:
        sims = simulate(simulators.noisy, executor=executor, chunk=5)
    np.testing.assert_array_equal(sims.x, plain.x)
    assert not len(sims.failures)


def test_a_worker_that_dies_before_each_run_is_not_started_without_end(monkeypatch):
    monkeypatch.setattr("consilience.simulation.workers._serve", simulators.serves_nothing)
    with pytest.raises(ValueError, match="3 processes in a row ended before they gave an outcome"):
        simulate(simulators.noisy, 1)


SCRIPT = """
if __name__ == "__main__":
    import sys, threading
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    from multiprocessing import get_context
    import jax, numpyro.distributions as dist
    import consilience as cs
    from consilience.model.priors import as_prior
    from tests import simulators

    def campaign(simulator, executor):
        model = cs.Model(prior, simulator)
        cs.simulate(model, 2, key=jax.random.key(5), executor=executor, progress=False)

    prior = as_prior({"mu": dist.Normal(0, 1), "sigma": dist.Uniform(0, 2)})
    sleepers = "sleep 301 & (setsid sleep 302 &) ; sleep 303"
    command = cs.command(f"sh -c 'echo >> {sys.argv[1]}; {sleepers}' {{mu}} {{sigma}}")
    inside = lambda rng, mu, sigma: simulators.holds_on(rng, mu, sigma)
    server = get_context("forkserver")
    server.set_forkserver_preload(["tests.simulators"])
    for simulator, executor in [
        (command, None),
        (command, ThreadPoolExecutor(1)),
        (command, ProcessPoolExecutor(1, server)),
        (cs.external(simulators.holds_on), None),
        (cs.external(simulators.holds_on), ProcessPoolExecutor(1, server)),
        (cs.external(inside), None),
    ]:
        threading.Thread(target=campaign, args=(simulator, executor)).start()
    threading.Event().wait()
"""


def test_no_process_outlives_a_campaign_that_is_killed(tmp_path):
    """Commands, with children in sessions of their own; functions that never come back."""
    script, log, name = tmp_path / "script.py", tmp_path / "log", uuid.uuid4().hex
    script.write_text(SCRIPT)
    log.touch()
    environment = {**os.environ, NAME: name, "TEST_LOG": str(log)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT, *sys.path]))
    process = subprocess.Popen([sys.executable, script, log], env=environment)
    try:
        deadline = time.monotonic() + 120
        while len(log.read_text()) < 6:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        assert len(family(name)) > 12
    finally:
        process.kill()
        assert_none_left(name)
        process.wait()


def test_a_command_ends_with_a_worker_that_is_killed():
    """As by a system that runs out of memory: the campaign goes on."""
    started = []

    def killed_worker():
        deadline = time.monotonic() + 30
        while not started and time.monotonic() < deadline:
            for child in psutil.Process().children(recursive=True):
                if child.is_running() and child.cmdline() == ["sleep", "305"]:
                    started.append(child)
                    child.parent().kill()
            time.sleep(0.05)

    model = cs.Model(PRIOR, cs.command("sh -c 'test {mu} = {sigma} || exec sleep 305'"))
    with ThreadPoolExecutor(1) as threads:
        watching = threads.submit(killed_worker)
        with pytest.raises(ValueError, match="worker died"):
            cs.simulate(model, 1, key=KEY, progress=False)
        watching.result()
    (command,) = started
    assert_end([command])


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are found on Linux alone")
@pytest.mark.parametrize(
    "line", ["setsid -w sleep 306", "setsid sleep 306", "setsid sleep 306 & true"]
)
def test_a_time_limit_of_a_command_holds_though_a_grandchild_has_a_session_of_its_own(line):
    """It holds the pipes of the command open, and its parent may be gone."""
    model = cs.Model(PRIOR, cs.command(f"sh -c '{line}' {{mu}} {{sigma}}"))
    start = time.monotonic()
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(ValueError, match=r"timed out: The run took longer than 0\.3 s"),
    ):
        cs.simulate(model, 1, key=KEY, executor=threads, timeout=0.3, progress=False)
    assert time.monotonic() - start < 20.0
    assert_end(with_argument("306"))


def test_a_guardian_that_was_killed_is_replaced():
    mine = Guardian()
    child = subprocess.Popen(["sleep", "307"])
    mine.keep(child.pid)
    (guard,) = with_argument(mine._mark)
    guard.kill()
    assert_end([guard])
    mine.keep(child.pid)
    mine.forget()  # as at the end of the process
    assert child.wait(5.0) == -signal.SIGKILL


def test_processes_that_may_go_on_are_left_alone():
    mine = Guardian()
    mark = mine.mark()
    child = subprocess.Popen(["sleep", "308"], env={"CONSILIENCE_RUN": "of another"})
    mine.keep(child.pid)
    mine.release(child.pid)
    mine.forget()
    assert not marked(mark)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(1.0)
    child.kill()
    child.wait()
