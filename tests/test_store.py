"""The store: what it holds outlives crashes and damage, and belongs to one campaign."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray

import consilience as cs
from consilience.model.priors import as_prior
from consilience.simulation import lock as locks
from consilience.simulation import store
from consilience.simulation.simulations import Unread

KEY = jax.random.key(5)
PRIOR = as_prior({"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)})
N = 30


class Counting:
    """A simulator that notes its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, rng, mu, sigma):
        self.calls.append(mu)
        return mu + sigma * rng.normal(size=3)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Ten runs a chunk, so that a few runs make several."""
    monkeypatch.setattr(store, "CHUNK_RUNS", 10)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "x.zarr"


@pytest.fixture
def simulator():
    return Counting()


def simulate(simulator, path, n=N, prior=PRIOR, key=KEY, **settings):
    model = cs.Model(prior, cs.external(simulator))
    with ThreadPoolExecutor(2) as executor:
        settings = {"executor": executor, "chunk": 4, "progress": False} | settings
        return cs.simulate(model, n, key=key, store=path, **settings)


def again(simulator, path, n=N, **settings):
    """The same campaign once more: its runs, and the parameters of those that were run."""
    simulator.calls.clear()
    sims = simulate(simulator, path, n, **settings)
    return sims, sorted(simulator.calls)


def mu_of(sims, numbers):
    return sorted(sims.theta["mu"][numbers].tolist())


def flip(file, byte=5):
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)


def test_a_finished_campaign_runs_nothing_and_gives_the_same(simulator, path):
    first = simulate(simulator, path)
    assert len(simulator.calls) == N
    second, ran = again(simulator, path)
    assert ran == []
    np.testing.assert_array_equal(first.x, second.x)
    np.testing.assert_array_equal(first.theta["mu"], second.theta["mu"])


def test_a_longer_campaign_keeps_the_shorter_and_a_shorter_one_reads(simulator, path):
    short = simulate(simulator, path, 13)
    long, ran = again(simulator, path, 47)
    np.testing.assert_array_equal(long.x[:13], short.x)
    assert ran == mu_of(long, np.arange(13, 47))
    part, ran = again(simulator, path, 20)
    assert ran == [] and len(part) == 20
    assert len(cs.Simulations.open(path)) == 47


def test_xarray_opens_it_as_it_is(simulator, path):
    sims = simulate(simulator, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = xarray.open_zarr(path, chunks=None).load()
    assert dict(data.sizes) == {"run": N, "x_0": 3}
    np.testing.assert_array_equal(data.x, sims.x)
    np.testing.assert_array_equal(data.sigma, sims.theta["sigma"])
    assert set(data.status.values) == {1}
    assert data.attrs["version"] == cs.__version__
    assert data.attrs["key"] == ["threefry2x32", 0, 5]
    assert data.attrs["prior"] == {
        "mu": "Normal(loc=0, scale=1)",
        "sigma": "Uniform(low=0, high=2)",
    }


def test_names_that_meet_stay_apart(path):
    prior = {"x": dist.Normal(0.0, 1.0), "status": dist.Normal(0.0, 1.0)}

    def simulate_one(rng, x, status):
        return np.array([x, status, rng.normal()])

    sims = simulate(simulate_one, path, prior=prior)
    read = cs.Simulations.open(path)
    np.testing.assert_array_equal(read.x[:, 0], read.theta["x"])
    np.testing.assert_array_equal(read.x[:, 1], read.theta["status"])
    data = xarray.open_zarr(path, chunks=None)
    np.testing.assert_array_equal(data.x, sims.theta["x"])
    np.testing.assert_array_equal(data.x_, sims.x)


def test_data_stay_on_disk_until_asked_for(simulator, path):
    sims = simulate(simulator, path)
    assert repr(sims) == f"Simulations: {N} runs, theta: mu (), sigma (); x: (3,)"
    part = sims[5:8].drop_invalid()
    assert isinstance(sims._x, Unread) and isinstance(part._x, Unread)
    np.testing.assert_array_equal(part.x, sims.x[5:8])


def test_a_flipped_byte_costs_one_run(simulator, path, caplog):
    whole, late = simulate(simulator, path), cs.Simulations.open(path)
    assert whole.x.shape == (N, 3)
    # Rows of three doubles: byte 5 of the second chunk belongs to run 10.
    flip(path / "x" / "c" / "1" / "0")
    rest = cs.Simulations.open(path)
    assert "1 runs are damaged, the first of them run 10" in caplog.text
    np.testing.assert_array_equal(rest.x, np.delete(whole.x, 10, axis=0))
    with pytest.raises(cs.StoreError, match=r"1 runs of .* run 10, were damaged or changed"):
        late.x  # noqa: B018
    mended, ran = again(simulator, path)
    assert ran == mu_of(whole, [10])
    np.testing.assert_array_equal(mended.x, whole.x)


@pytest.mark.parametrize("array", ["x", "mu", "status"])
def test_a_truncated_or_lost_chunk_costs_its_own_runs(simulator, path, array):
    whole = simulate(simulator, path)
    assert whole.x.shape == (N, 3)
    file = path / array / "c" / "2"
    file = file / "0" if array == "x" else file
    os.truncate(file, file.stat().st_size - 1)
    mended, ran = again(simulator, path)
    assert ran == mu_of(whole, np.arange(20, 30))
    np.testing.assert_array_equal(mended.x, whole.x)
    file.unlink()
    mended, ran = again(simulator, path)
    assert ran == mu_of(whole, np.arange(20, 30))
    np.testing.assert_array_equal(mended.theta["mu"], whole.theta["mu"])


def test_a_line_of_the_journal_cut_short_or_damaged_costs_its_own_runs(simulator, path, caplog):
    whole = simulate(simulator, path, chunk=5)
    journal = path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    os.truncate(journal, journal.stat().st_size - 7)
    mended, ran = again(simulator, path)
    assert ran == mu_of(whole, json.loads(lines[-1].split(b" ", 1)[1])["runs"])
    flip(journal, len(lines[0]) + 20)
    mended, ran = again(simulator, path)
    assert ran == mu_of(whole, json.loads(lines[1].split(b" ", 1)[1])["runs"])
    assert "1 lines are damaged" in caplog.text
    np.testing.assert_array_equal(mended.x, whole.x)
    assert again(simulator, path)[1] == []


def test_data_that_no_line_vouches_for_are_run_again(simulator, path, monkeypatch):
    """A crash between the data and the journal."""
    whole = simulate(simulator, path, 10)
    (path / "journal.jsonl").unlink()
    mended, ran = again(simulator, path, 10)
    assert len(ran) == 10
    np.testing.assert_array_equal(mended.x, whole.x)


def test_a_damaged_description_is_reported(simulator, path):
    simulate(simulator, path)
    os.truncate(path / "zarr.json", 100)
    with pytest.raises(cs.StoreError, match=r"description of .*zarr\.json\) is damaged"):
        simulate(simulator, path)


def test_another_campaign_is_refused(simulator, path):
    simulate(simulator, path)
    with pytest.raises(cs.StoreError, match=r"another campaign. Its key.*0, 5.*0, 6"):
        simulate(simulator, path, key=jax.random.key(6))
    other = {"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 3.0)}
    with pytest.raises(cs.StoreError, match=r"Its prior: .*high=2.*given: .*high=3"):
        simulate(simulator, path, prior=other)
    with pytest.raises(cs.StoreError, match=r"Its simulator: Counting; .*lambda"):
        simulate(lambda rng, mu, sigma: np.zeros(3), path)
    assert again(simulator, path)[1] == []


def test_a_prior_that_only_looks_the_same_is_refused(path):
    def prior(scale):
        return cs.ImplicitPrior(lambda key: {"a": scale * jax.random.normal(key)})

    def simulate_one(rng, a):
        return np.array([a])

    simulate(simulate_one, path, prior=prior(1.0))
    with pytest.raises(cs.StoreError, match="runs at other parameters than this prior draws"):
        simulate(simulate_one, path, prior=prior(2.0))


def test_other_folders_are_left_alone(simulator, path):
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(cs.StoreError, match="is no store of simulations"):
        simulate(simulator, path)
    assert [file.name for file in path.iterdir()] == ["thesis.tex"]
    with pytest.raises(cs.StoreError, match="There is no store of simulations at"):
        cs.Simulations.open(path)


HOLD = """
import fcntl, json, os, socket, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(handle, fcntl.LOCK_EX)
os.write(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_a_dead_one_is_not_in_the_way(simulator, path):
    simulate(simulator, path, 10)
    other = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, path / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        other.stdout.readline()
        with pytest.raises(cs.StoreInUseError, match=rf"in use by process {other.pid} on"):
            simulate(simulator, path, 20)
        assert len(cs.Simulations.open(path)) == 10, "reading needs no lock"
    finally:
        other.kill()
        other.communicate()
    assert len(simulate(simulator, path, 20)) == 20


def test_a_store_is_locked_while_it_is_written_and_free_afterwards(path):
    seen = []

    def look(rng, mu, sigma):
        # As another process would: through a handle of its own.
        code = f"import os, fcntl; fcntl.lockf(os.open({str(path / 'lock')!r}, os.O_RDWR), 6)"
        seen.append(subprocess.run([sys.executable, "-S", "-c", code], capture_output=True))
        with pytest.raises(cs.StoreInUseError, match="another call of this process"):
            locks.Lock(path / "lock")
        return np.zeros(1)

    assert fcntl.LOCK_EX | fcntl.LOCK_NB == 6
    assert not len(simulate(look, path, 1).failures)
    assert b"BlockingIOError" in seen[0].stderr
    locks.Lock(path / "lock").release()


def test_the_lock_of_another_machine_holds_while_it_shows_life(simulator, path):
    simulate(simulator, path, 10)
    lock = path / "lock"
    lock.write_text(json.dumps({"pid": 1, "host": "node-17"}))
    with pytest.raises(cs.StoreInUseError, match=r"process 1 on node-17.*delete .*lock"):
        simulate(simulator, path, 20)
    before = time.time() - locks.STALE - 1
    os.utime(lock, (before, before))
    assert len(simulate(simulator, path, 20)) == 20


def test_a_folder_that_cannot_be_written_is_reported_before_any_run(simulator, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(cs.StoreError, match=r"cannot be written: Not a directory\. 0 runs"):
        simulate(simulator, tmp_path / "file" / "x.zarr")
    assert simulator.calls == []


@pytest.mark.parametrize("after", range(0, 60, 7))
def test_a_full_disk_is_reported_and_leaves_the_rest_usable(simulator, path, monkeypatch, after):
    """Whichever write is the first that finds no room."""
    whole = simulate(simulator, path.with_name("whole.zarr"))
    left, sync = [after], os.fsync

    def full(handle):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(cs.StoreError, match=r"its disk is full. \d+ runs are stored") as error:
            simulate(simulator, path)
    promised = int(str(error.value).split("full. ")[1].split()[0])
    if promised:
        rest = cs.Simulations.open(path)
        assert len(rest) == promised
        assert set(rest.theta["mu"]) <= set(whole.theta["mu"])
    mended, ran = again(simulator, path)
    assert len(ran) == N - promised
    np.testing.assert_array_equal(mended.x, whole.x)
    assert not list(path.rglob("*.part"))


def test_failures_are_stored_with_their_message_and_parameters(path):
    def moody(rng, mu, sigma):
        if mu > 0.5:
            raise ValueError(f"mu is {mu:.3f}")
        return rng.normal(size=2)

    first = simulate(moody, path)
    read = cs.Simulations.open(path)
    bad = np.flatnonzero(first.theta["mu"] > 0.5)
    for sims in (first, read):
        np.testing.assert_array_equal(sims.failures.positions, bad)
        np.testing.assert_array_equal(sims.failures.theta["mu"], first.theta["mu"][bad])
        message = f"ValueError: mu is {first.theta['mu'][bad[0]]:.3f}"
        assert sims.failures[bad[0]] == ("raised", message)
        assert np.isnan(sims.x[bad]).all() and np.isfinite(sims.drop_invalid().x).all()
    data = xarray.open_zarr(path, chunks=None)
    np.testing.assert_array_equal(np.flatnonzero(data.status == 2), bad)


def test_simulators_in_jax_are_stored_too(path):
    def simulator(key, theta):
        x = theta + jax.random.normal(key, (2,))
        return {"y": jnp.where(theta > 1.0, jnp.nan, x), "k": jnp.arange(3)}

    model = cs.Model(dist.Normal(0.0, 1.0), simulator)
    plain = cs.simulate(model, 300, key=KEY)
    short = cs.simulate(model, 7, key=KEY, store=path)
    kept = cs.simulate(model, 300, key=KEY, store=path)
    np.testing.assert_array_equal(kept.x["y"][:7], short.x["y"])
    np.testing.assert_allclose(kept.x["y"], plain.x["y"], rtol=1e-6)
    assert kept.x["k"].dtype == plain.x["k"].dtype
    np.testing.assert_array_equal(kept.failures.mask, plain.invalid)
    assert kept.failures.reasons == {"not finite": int(plain.invalid.sum())}
    with pytest.raises(ValueError, match="for simulators outside JAX"):
        cs.simulate(model, 7, key=KEY, retry=1)
