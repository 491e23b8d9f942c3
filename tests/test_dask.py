"""Campaigns on a Dask cluster: workers die, nothing is lost, and little is run again."""

import itertools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import dask
import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from distributed import Client, LocalCluster, Status
from distributed.cfexecutor import ClientExecutor
from distributed.utils import get_mp_context

import consilience as cs
from consilience.model.priors import as_prior
from tests import simulators

KEY = jax.random.key(5)
PRIOR = as_prior({"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)})
N, CHUNK, IN_FLIGHT = 120, 2, 4
PATIENCE = 120.0
"""Seconds after which a campaign that hangs is broken off."""


@pytest.fixture(scope="module")
def cluster():
    """Two worker processes, each with a nanny that starts it anew."""
    options = {
        "distributed.worker.multiprocessing-method": "forkserver",
        "distributed.worker.daemon": False,
    }
    with dask.config.set(options):
        get_mp_context()
        # Workers are started often here: imports are made once for all of them.
        preload = ["distributed", "consilience.model.run"]
        multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
        with LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster:
            yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=PATIENCE)
        yield client


def simulate(function, n=N, **settings):
    model = cs.Model(PRIOR, cs.external(function))
    return cs.simulate(model, n, key=KEY, progress=False, **settings)


@pytest.fixture(scope="module")
def plain():
    return simulate(simulators.noisy)


class Watched(ClientExecutor):
    """Knows which runs the scheduler holds: those alone may be run again."""

    def __init__(self, client, scheduler):
        super().__init__(client)
        self.scheduler, self.numbers, self.names = scheduler, {}, itertools.count()

    def submit(self, fn, task, numbers, theta):
        name = f"chunk-{next(self.names)}"
        self.numbers[name] = set(numbers.tolist())
        return super().submit(fn, task, numbers, theta, key=name)

    def held(self):
        return set().union(*(self.numbers[name] for name in list(self.scheduler.tasks)))


class Killer(threading.Thread):
    """Kills workers at random moments, while they are at work."""

    def __init__(self, cluster, executor, log, kills, seed):
        super().__init__()
        self.cluster, self.executor, self.log, self.kills = cluster, executor, log, kills
        self.rng = np.random.default_rng(seed)
        self.at_risk, self.killed = set(), 0

    def run(self):
        end, size = time.monotonic() + PATIENCE, 0
        while self.killed < self.kills and time.monotonic() < end:
            due = size + self.rng.integers(100, 300)
            while os.path.getsize(self.log) < due and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(self.rng.uniform(0.0, 0.05))
            working = [nanny for nanny in self.cluster.workers.values() if self.is_up(nanny)]
            if working:
                victim = working[self.rng.integers(len(working))]
                self.at_risk |= self.executor.held()
                os.kill(victim.pid, signal.SIGKILL)
                self.killed += 1
            size = os.path.getsize(self.log)

    def is_up(self, nanny):
        # A nanny gives up on a worker that dies while it starts.
        known = nanny.worker_address in self.cluster.scheduler.workers
        return known and nanny.status == nanny.process.status == Status.running


@pytest.mark.parametrize(("kills", "allowed"), [(3, 3), (2, 0)])
def test_workers_that_are_killed_cost_only_what_was_in_flight(
    cluster, client, plain, tmp_path, monkeypatch, kills, allowed
):
    """With `allowed` deaths Dask itself sends a chunk again; after them it reports the loss."""
    log = tmp_path / "log"
    log.touch()

    def logged(rng, mu, sigma):
        handle = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.write(handle, f"{mu!r}\n".encode())
        os.close(handle)
        time.sleep(0.05)
        return mu + sigma * rng.normal(size=3)

    monkeypatch.setattr(cluster.scheduler, "allowed_failures", allowed)
    executor = Watched(client, cluster.scheduler)
    killer = Killer(cluster, executor, log, kills, seed=kills)
    guard = threading.Timer(PATIENCE, client.close)
    killer.start()
    guard.start()
    store = tmp_path / "x.zarr"
    simulate(logged, store=store, executor=executor, chunk=CHUNK, in_flight=IN_FLIGHT)
    guard.cancel()
    killer.join()
    assert killer.killed == kills
    kept = cs.Simulations.open(store)
    assert not len(kept.failures)
    np.testing.assert_array_equal(kept.x, plain.x)
    np.testing.assert_array_equal(kept.theta["sigma"], plain.theta["sigma"])
    numbers = {repr(mu): i for i, mu in enumerate(plain.theta["mu"].tolist())}
    ran = Counter(numbers[line] for line in log.read_text().split())
    assert set(ran) == set(range(N))
    assert {number for number, times in ran.items() if times > 1} <= killer.at_risk
    assert ran.total() - N <= kills * IN_FLIGHT * CHUNK


def test_retries_are_run_though_dask_remembers_results(client, plain, tmp_path):
    log = tmp_path / "log"
    log.touch()

    def flaky(rng, mu, sigma):
        with open(log, "a") as file:
            file.write(f"{mu!r}\n")
        if sigma < 1.0 and log.read_text().split().count(repr(mu)) < 3:
            raise OSError("no licence")
        return mu + sigma * rng.normal(size=3)

    sims = simulate(flaky, 20, executor=client.get_executor(), retry=2, chunk=1)
    np.testing.assert_array_equal(sims.x, plain.x[:20])


def test_a_time_limit_holds_on_dask_workers(cluster, client, plain):
    n = 5
    # One worker: the first child of each imports the package.
    executor = client.get_executor(workers=list(cluster.scheduler.workers)[:1])
    sims = simulate(simulators.hangs, n, executor=executor, timeout=0.2)
    np.testing.assert_array_equal(sims.failures.mask, plain.theta["sigma"][:n] > 1.0)
    assert set(sims.failures.reasons) == {"timed out"}
    np.testing.assert_array_equal(sims.drop_invalid().x, plain.x[:n][~sims.failures.mask])


def test_a_client_that_is_closed_says_how_to_go_on(cluster, plain, tmp_path):
    store = tmp_path / "x.zarr"
    with Client(cluster) as client:
        simulate(simulators.noisy, 20, executor=client.get_executor(), store=store)
        executor = client.get_executor()
    with pytest.raises(RuntimeError, match=r"20 of 120 runs are stored.*Make a new executor"):
        simulate(simulators.noisy, executor=executor, store=store)
    with ThreadPoolExecutor(1) as threads:
        sims = simulate(simulators.noisy, executor=threads, store=store)
    np.testing.assert_array_equal(sims.x, plain.x)
