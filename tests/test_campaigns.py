"""Campaigns: the same numbers anywhere, nothing lost, failures kept as data."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import types
import uuid
import weakref
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import jax
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.model.priors import as_prior
from consilience.model.run import Task, run_chunk
from consilience.simulation.starting import StartError, importable
from consilience.simulation.workers import Workers
from tests import simulators
from tests.conftest import quick
from tests.families import NAME, assert_none_left, family

KEY = jax.random.key(5)
PRIOR = as_prior({"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)})
N = 50


class Here(Executor):
    """Runs chunks at once, or when told to; notes their sizes, and fails as told."""

    def __init__(self, fail=None):
        self.sizes, self.fail = [], fail

    def submit(self, fn, task, numbers, theta):
        self.sizes.append(len(numbers))
        future = Future()
        try:
            if self.fail is not None:
                self.fail(numbers)
            future.set_result(fn(task, numbers, theta))
        except Exception as error:
            future.set_exception(error)
        return future


def simulate(function, n=N, **settings):
    model = cs.Model(PRIOR, cs.external(function))
    settings = {"executor": Here(), "progress": False} | settings
    return cs.simulate(model, n, key=KEY, **settings)


@pytest.fixture(scope="module")
def plain():
    """What every way to run must give."""
    sims = simulate(simulators.noisy)
    assert len(np.unique(sims.x)) == 3 * N
    return sims


@pytest.mark.parametrize("settings", [{"chunk": 1}, {"chunk": 7}, {"chunk": 64, "in_flight": 1}])
def test_chunks_change_nothing(plain, settings):
    sims = simulate(simulators.noisy, **settings)
    np.testing.assert_array_equal(sims.x, plain.x)
    np.testing.assert_array_equal(sims.theta["mu"], plain.theta["mu"])


def test_executors_change_nothing(plain, tmp_path):
    context = multiprocessing.get_context("forkserver")
    with ThreadPoolExecutor(3) as threads, ProcessPoolExecutor(2, context) as processes:
        for i, executor in enumerate([None, threads, processes]):
            store = tmp_path / f"{i}.zarr"
            sims = simulate(simulators.noisy, executor=executor, store=store, chunk=8)
            np.testing.assert_array_equal(sims.x, plain.x)
        # A store may change hands in between.
        simulate(simulators.noisy, 20, executor=threads, store=tmp_path / "x.zarr")
        sims = simulate(simulators.noisy, executor=processes, store=tmp_path / "x.zarr")
        np.testing.assert_array_equal(sims.x, plain.x)
        assert threads.submit(int).result() == 0, "the user's executor stays open"


def test_small_runs_are_sent_together():
    executor = Here()
    # Few at a time: a first run that was slow by chance must not set the size of all others.
    simulate(simulators.noisy, 5_000, executor=executor, in_flight=4)
    assert sum(executor.sizes) == 5_000
    assert len(executor.sizes) < 200


def test_long_runs_are_sent_one_by_one():
    def slow(rng, mu, sigma):
        time.sleep(0.3)
        return np.zeros(1)

    with ThreadPoolExecutor(8) as executor:
        sent = []
        submit = executor.submit
        executor.submit = lambda *args: sent.append(len(args[2])) or submit(*args)
        simulate(slow, 12, executor=executor)
    assert sent == [1] * 12


def test_runs_that_fail_at_once_do_not_send_the_others_out_together():
    executor, numbers = Here(), iter(range(10))

    def slow(rng, mu, sigma):
        if next(numbers) == 2:
            raise ValueError("at once")
        time.sleep(0.2)
        return np.zeros(1)

    simulate(slow, 10, executor=executor, in_flight=1)
    assert max(executor.sizes) <= 2


def test_chunks_in_flight_are_bounded():
    lock, flying, most = threading.Lock(), 0, 0

    class Watching(ThreadPoolExecutor):
        def submit(self, *args):
            nonlocal flying, most
            with lock:
                flying += 1
                most = max(most, flying)
            future = super().submit(*args)
            future.add_done_callback(lambda _: landed())
            return future

    def landed():
        nonlocal flying
        with lock:
            flying -= 1

    with Watching(2) as executor:
        simulate(simulators.noisy, 200, executor=executor, chunk=2, in_flight=3)
    assert most == 3


def test_large_runs_make_small_chunks():
    executor = Here()
    simulate(lambda rng, mu, sigma: np.zeros(400_000), 20, executor=executor)
    assert max(executor.sizes) <= 2


def test_failures_are_recorded_with_reason_message_and_place(plain):
    sims = simulate(simulators.fragile, executor=None)
    sigma = plain.theta["sigma"]
    between = lambda low, high: int(np.sum((sigma > low) & (sigma <= high)))  # noqa: E731
    assert sims.failures.reasons == {
        "worker died": between(1.9, 2.0),
        "raised": between(1.7, 1.9),
        "not finite": between(1.5, 1.7),
        "wrong shape": between(1.3, 1.5),
    }
    np.testing.assert_array_equal(sims.failures.mask, sigma > 1.3)
    np.testing.assert_array_equal(sims.x[sigma <= 1.3], plain.x[sigma <= 1.3])
    assert np.isnan(sims.x[sigma > 1.3]).all()
    summary = sims.failures.summary()
    assert f"{(sigma > 1.3).sum()} of {N} runs failed" in summary
    assert "ValueError: sigma is too large" in summary
    assert "x must have the shape (3,), got (4,)" in summary
    # Sigma, which tells the failed runs apart, comes first.
    place = summary.index("  sigma: failed runs in 1.3")
    assert place < summary.index("  mu: failed runs in")


def test_failed_runs_are_left_out_only_on_the_users_word(plain):
    def moody(rng, mu, sigma):
        return np.full(3, np.nan) if mu > 1 else rng.normal(size=3)

    model = cs.Model(PRIOR, cs.external(moody))
    sims = cs.simulate(model, N, key=KEY, executor=Here(), progress=False)
    bad = int(np.sum(plain.theta["mu"] > 1))
    message = rf"(?s){bad} of 50 simulations failed.*{bad} not finite.*drop_invalid\(\)"
    with pytest.raises(ValueError, match=message):
        quick(model, sims)
    rest = sims.drop_invalid()
    assert len(rest) == N - bad and not len(rest.failures)
    assert sims[10:].failures.mask.tolist() == sims.failures.mask[10:].tolist()


def test_runs_that_hang_are_stopped_even_where_they_hear_no_signal(plain):
    # Few runs: each that hears no signal costs a second of grace.
    n = 8
    sims = simulate(simulators.hangs, n, executor=None, timeout=0.2)
    np.testing.assert_array_equal(sims.failures.mask, plain.theta["sigma"][:n] > 1.0)
    assert (plain.theta["sigma"][:n] > 1.6).any()
    assert set(sims.failures.reasons) == {"timed out"}
    np.testing.assert_array_equal(sims.drop_invalid().x, plain.x[:n][~sims.failures.mask])


class Threads(Here):
    """Threads, without saying so."""

    def submit(self, *args):
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(*args)


def test_a_time_limit_holds_on_executors_that_run_functions_in_threads(plain):
    n = 8
    sims = simulate(simulators.hangs, n, executor=Threads(), timeout=0.2)
    np.testing.assert_array_equal(sims.failures.mask, plain.theta["sigma"][:n] > 1.0)
    np.testing.assert_array_equal(sims.drop_invalid().x, plain.x[:n][~sims.failures.mask])


def test_a_time_limit_that_cannot_be_kept_is_refused(monkeypatch):
    with ThreadPoolExecutor(1) as executor, pytest.raises(ValueError, match="in a thread"):
        simulate(simulators.noisy, executor=executor, timeout=1.0)
    with pytest.raises(ValueError, match="Define the function in a module"):
        simulate(lambda rng, mu, sigma: np.zeros(1), executor=Threads(), timeout=1.0)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(ValueError, match=r"distributed\.worker\.daemon to False"):
        simulate(simulators.noisy, executor=Threads(), timeout=1.0)


def test_failures_that_pass_are_mended_by_retries(plain, tmp_path):
    attempts = {}

    def flaky(rng, mu, sigma):
        attempts[mu] = attempts.get(mu, 0) + 1
        if sigma > 1 and attempts[mu] < 3:
            raise OSError("no licence")
        return simulators.noisy(rng, mu, sigma)

    store, bad = tmp_path / "x.zarr", plain.theta["sigma"] > 1
    sims = simulate(flaky, store=store)
    np.testing.assert_array_equal(sims.failures.mask, bad)
    assert set(attempts.values()) == {1}
    sims = simulate(flaky, store=store, retry=1)
    np.testing.assert_array_equal(sims.failures.mask, bad)
    assert {attempts[mu] for mu in plain.theta["mu"][bad].tolist()} == {2}
    assert simulate(flaky, store=store, retry=1).failures.mask.sum() == bad.sum()
    assert max(attempts.values()) == 2, "two attempts were made, no more were asked for"
    sims = simulate(flaky, store=store, retry=2)
    np.testing.assert_array_equal(sims.x, plain.x)
    attempts.clear()
    np.testing.assert_array_equal(simulate(flaky, retry=2).x, plain.x)


def test_a_simulator_that_never_works_is_reported():
    def never(rng, mu, sigma):
        raise RuntimeError("not installed")

    executor = Here()
    with pytest.raises(ValueError, match=r"(?s)16 of 16 runs failed.*RuntimeError: not installed"):
        simulate(never, executor=executor)
    assert executor.sizes == [1] * 16


def test_first_runs_that_fail_do_not_hide_the_shape(plain):
    first = plain.theta["mu"][:2].tolist()

    def late(rng, mu, sigma):
        if mu in first:
            raise ValueError("unlucky")
        return simulators.noisy(rng, mu, sigma)

    sims = simulate(late)
    assert sims.failures.positions.tolist() == [0, 1]
    np.testing.assert_array_equal(sims.x[2:], plain.x[2:])


def test_a_lost_worker_costs_the_run_that_loses_it(plain):
    def lose(numbers):
        if 17 in numbers:
            raise OSError("the node is gone")

    sims = simulate(simulators.noisy, executor=Here(lose), chunk=10)
    assert sims.failures.positions.tolist() == [17]
    assert sims.failures[17] == ("worker died", "OSError: the node is gone")
    np.testing.assert_array_equal(sims.drop_invalid().x, np.delete(plain.x, 17, axis=0))


def test_a_first_run_that_loses_its_worker_is_tried_twice(plain):
    losses = iter([0, 0, 0])

    def lose(numbers):
        if next(losses, None) == numbers[0]:
            raise OSError("the node is gone")

    sims = simulate(simulators.noisy, executor=Here(lose))
    assert sims.failures[0] == ("worker died", "OSError: the node is gone")
    np.testing.assert_array_equal(sims.x[1:], plain.x[1:])
    losses = iter([0])
    np.testing.assert_array_equal(simulate(simulators.noisy, executor=Here(lose)).x, plain.x)


def test_executors_that_remember_what_they_were_sent_run_it_again(plain):
    """Dask takes equal calls for one."""
    calls, futures = [], {}

    class Remembering(Here):
        def submit(self, fn, task, numbers, theta):
            key = (task, *numbers.tolist())
            if key not in futures:
                futures[key] = super().submit(fn, task, numbers, theta)
            return futures[key]

    def flaky(rng, mu, sigma):
        calls.append(mu)
        if mu != calls[0] and calls.count(mu) < 3:
            raise OSError("no licence")
        return simulators.noisy(rng, mu, sigma)

    sims = simulate(flaky, 5, executor=Remembering(), retry=2, chunk=1)
    np.testing.assert_array_equal(sims.x, plain.x[:5])


def test_no_future_is_held_once_its_runs_are_stored():
    """A worker of Dask keeps, and would run again, what a future is held for."""
    landed, seen = [], []

    def watch(rng, mu, sigma):
        deadline = time.monotonic() + 10.0
        while len(seen) == 2 and landed[1]() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(mu)
        return np.zeros(1)

    with ThreadPoolExecutor(1) as executor:
        submit = executor.submit

        def noted(*args):
            future = submit(*args)
            landed.append(weakref.ref(future))
            return future

        executor.submit = noted
        start = time.monotonic()
        simulate(watch, 3, executor=executor, chunk=1, in_flight=2)
    assert time.monotonic() - start < 10.0


def test_workers_that_cannot_import_the_simulator_fail_no_run(plain, tmp_path):
    def lost(numbers):
        if 30 in numbers:
            raise ModuleNotFoundError("No module named 'epidemic'")

    store = tmp_path / "x.zarr"
    with pytest.raises(TypeError, match=r"No module named 'epidemic'. Define it in a module"):
        simulate(simulators.noisy, executor=Here(lost), store=store, chunk=5, in_flight=1)
    assert not len(cs.Simulations.open(store).failures)
    np.testing.assert_array_equal(simulate(simulators.noisy, store=store).x, plain.x)


def test_a_campaign_that_ends_early_calls_back_what_has_not_begun(tmp_path):
    ran = []

    def full(rng, mu, sigma):
        ran.append(mu)
        if len(ran) == 3:
            tmp_path.joinpath("x.zarr", "journal.jsonl").unlink()
            tmp_path.joinpath("x.zarr", "journal.jsonl").mkdir()
        time.sleep(0.05)
        return np.zeros(1)

    with (
        ThreadPoolExecutor(1) as executor,
        pytest.raises(cs.StoreError, match="cannot be written"),
    ):
        simulate(full, executor=executor, store=tmp_path / "x.zarr", chunk=1, in_flight=20)
    assert len(ran) < 20


def test_a_broken_executor_says_how_to_go_on(plain, tmp_path):
    def broken(numbers):
        if 20 in numbers:
            raise BrokenProcessPool("a process died")

    store = tmp_path / "x.zarr"
    with pytest.raises(RuntimeError, match=r"1[0-9] of 50 runs are stored.*Make a new executor"):
        simulate(simulators.noisy, executor=Here(broken), store=store, chunk=5, in_flight=1)
    sims = simulate(simulators.noisy, store=store)
    np.testing.assert_array_equal(sims.x, plain.x)


@pytest.fixture
def interruptible():
    """Ctrl-C is heard, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_keeps_what_has_arrived_and_says_how_to_go_on(plain, tmp_path, interruptible):
    calls = []

    def interrupted(rng, mu, sigma):
        calls.append(mu)
        if len(calls) == 20:
            signal.raise_signal(signal.SIGINT)
        return simulators.noisy(rng, mu, sigma)

    store = tmp_path / "x.zarr"
    with (
        ThreadPoolExecutor(1) as executor,
        pytest.raises(KeyboardInterrupt, match=r"of 50 runs are stored in .*The same call goes on"),
    ):
        simulate(interrupted, executor=executor, store=store, chunk=1)
    kept = len(cs.Simulations.open(store))
    assert 15 <= kept < N
    sims = simulate(interrupted, store=store, executor=Here())
    np.testing.assert_array_equal(sims.x, plain.x)
    assert len(calls) - N <= 20 - kept + 4, "only what was in flight is run again"
    with ThreadPoolExecutor(1) as executor, pytest.raises(KeyboardInterrupt, match="pass store="):
        calls.clear()
        simulate(interrupted, executor=executor)


def test_simulators_that_cannot_be_imported_are_inherited(plain):
    shift = 10.0
    inside = lambda rng, mu, sigma: shift + simulators.noisy(rng, mu, sigma)  # noqa: E731
    assert importable(cs.external(simulators.noisy)) and not importable(cs.external(inside))
    np.testing.assert_allclose(simulate(inside, executor=None).x, plain.x + 10.0)


def test_notebooks_and_standard_input_have_no_script_to_import(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert importable(cs.external(simulators.noisy))
    monkeypatch.setattr(simulators.noisy, "__module__", "__main__")
    main.noisy = simulators.noisy
    assert not importable(cs.external(simulators.noisy))
    main.__file__ = __file__
    assert importable(cs.external(simulators.noisy))
    main.__file__ = "<stdin>"
    assert not importable(cs.external(simulators.noisy))


def test_workers_import_a_script_only_for_its_own_functions(monkeypatch, tmp_path, plain):
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setitem(sys.modules, "__main__", main)
    np.testing.assert_array_equal(simulate(simulators.noisy, executor=None).x, plain.x)
    model = cs.Model(PRIOR, cs.command("echo {mu} {sigma}"))
    assert not len(cs.simulate(model, 4, key=KEY, progress=False).failures)
    assert sys.modules["__main__"] is main
    main.noisy = simulators.noisy
    monkeypatch.setattr(simulators.noisy, "__module__", "__main__")
    with pytest.raises(StartError, match="since every worker imports the script"):
        simulate(simulators.noisy, executor=None)


def test_workers_that_cannot_start_say_why(monkeypatch):
    monkeypatch.setattr("consilience.simulation.workers._serve", simulators.hangs)
    with pytest.raises(StartError, match="if __name__ == '__main__'"):
        simulate(simulators.noisy, executor=None)


def test_workers_leave_no_process_behind():
    before = set(multiprocessing.active_children())
    task = Task(cs.external(simulators.noisy), (0,))
    workers = Workers(task, 2)
    theta = {"mu": np.zeros(4), "sigma": np.ones(4)}
    assert len(workers.submit(run_chunk, task, np.arange(4), theta).result()) == 4
    workers.shutdown()
    assert set(multiprocessing.active_children()) <= before


def test_bad_settings_are_refused():
    for settings, message in [
        ({"timeout": 0.0}, "seconds above zero, got 0"),
        ({"retry": -1}, "further attempts, got -1"),
        ({"chunk": 0}, "chunk must be at least one, got 0"),
        ({"in_flight": 0}, "in_flight must be at least one, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulate(simulators.noisy, **settings)


SCRIPT = """
import os, sys, time
import jax, numpy as np, numpyro.distributions as dist
import consilience as cs
from consilience.simulation import campaign as campaigns
from consilience.simulation import workers

def campaign(store, log, runs):
    def noisy(rng, mu, sigma):
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, f"{mu!r}\\n".encode())
        os.close(handle)
        time.sleep(0.02)
        return mu + sigma * rng.normal(size=3)

    workers.cores = lambda: 2
    model = cs.Model(
        {"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)}, cs.external(noisy)
    )
    cs.simulate(model, int(runs), key=jax.random.key(5), store=store, chunk=2, progress=False)

campaign(*sys.argv[1:])
"""
CHUNK, WINDOW = 2, 4


@pytest.mark.parametrize(
    ("runs", "times"), [(100, 2), pytest.param(2000, 20, marks=pytest.mark.slow)]
)
def test_a_campaign_killed_again_and_again_ends_like_one_left_alone(runs, times, tmp_path):
    """On two processes, each kill by SIGKILL at a random moment."""
    store, log, script = tmp_path / "x.zarr", tmp_path / "log", tmp_path / "script.py"
    script.write_text(SCRIPT)
    log.write_text("")
    kills, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        name = uuid.uuid4().hex
        environment = {**os.environ, NAME: name}
        process = subprocess.Popen([sys.executable, script, store, log, str(runs)], env=environment)
        if kills < times:
            wait_for_more(log, process)
            time.sleep(np.random.default_rng().uniform(0.0, 0.4))
            assert len(family(name)) > 2
            process.kill()
            kills += 1
            assert_none_left(name)
        code = process.wait()
    assert code == 0
    assert kills == times
    alone = tmp_path / "alone.zarr"
    subprocess.run([sys.executable, script, alone, tmp_path / "other", str(runs)], check=True)
    expected, kept = cs.Simulations.open(alone), cs.Simulations.open(store)
    assert len(expected) == runs
    np.testing.assert_array_equal(kept.x, expected.x)
    np.testing.assert_array_equal(kept.theta["sigma"], expected.theta["sigma"])
    ran = log.read_text().split()
    assert set(ran) == {repr(mu) for mu in expected.theta["mu"].tolist()}
    # A process finishes the run that it is at, after the kill.
    assert len(ran) - runs <= times * WINDOW * CHUNK


def wait_for_more(log, process):
    size = os.path.getsize(log)
    while os.path.getsize(log) == size and process.poll() is None:
        time.sleep(0.02)
