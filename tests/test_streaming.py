"""Training from a store that is larger than memory."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.model.spaces import parameter_space
from consilience.simulation import store as stores
from consilience.training.batches import Streamed, part_size
from tests.conftest import quick

N, BATCH = 1000, 32
# Data that say which run they are of: the noise is small, and the first entry is theta.
MODEL = cs.Model(
    dist.Normal(0.0, 1.0), lambda key, t: t + 1e-3 * jnp.arange(50) * jax.random.normal(key, (50,))
)
BYTES = N * 50 * 4


@pytest.fixture(scope="module")
def sims(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "CHUNK_RUNS", 40)
        path = tmp_path_factory.mktemp("streaming") / "runs.zarr"
        return cs.simulate(MODEL, N, key=jax.random.key(0), store=path, progress=False)


def streamed(sims, index, room):
    parameters = parameter_space(MODEL.prior, sims.theta)
    return parameters, Streamed(parameters, sims, index, BATCH, room, None)


def test_an_epoch_has_every_run_once_in_a_new_order(sims):
    index = np.random.default_rng(0).permutation(N)[:900]
    parameters, source = streamed(sims, index, 250)
    assert (source.parts, source.size, source.steps, len(source)) == (4, 224, 28, 900)
    rng = np.random.default_rng(1)
    orders = []
    for _ in range(2):
        seen = []
        for examples, order in source.epoch(rng):
            assert order.shape == (7, BATCH)
            theta = jax.vmap(parameters.from_vector)(examples.u)["theta"]
            np.testing.assert_allclose(theta, examples.x[:, 0], rtol=1e-4, atol=1e-5)
            seen.append(np.asarray(theta)[order.ravel()])
        orders.append(np.concatenate(seen))
        assert len(np.unique(orders[-1])) == 896
        assert np.isin(np.round(orders[-1], 3), np.round(sims.theta["theta"][index], 3)).all()
    assert (orders[0] != orders[1]).mean() > 0.9
    assert sims.unread


def test_runs_that_were_dropped_are_not_streamed(sims):
    kept = sims[np.arange(N) % 3 > 0]
    _, source = streamed(kept, np.arange(len(kept)), 250)
    (examples, _), *_ = source.epoch(np.random.default_rng(0))
    assert np.isin(np.asarray(examples.x[:, 0]), kept.theta["theta"]).all()


def test_a_streamed_fit_learns_what_one_in_memory_learns(sims):
    whole = quick(MODEL, cs.Simulations(sims.theta, np.array(sims[:].x)), epochs=8)
    parts = quick(MODEL, sims, epochs=8, memory=BYTES // 2)
    assert sims.unread
    assert parts.history.simulations == whole.history.simulations == N
    best = [fit.history.terms["validation"].min() for fit in (whole, parts)]
    assert best[0] < whole.history.terms["validation"][0] - 0.3
    assert abs(best[0] - best[1]) < 0.15


def test_only_what_does_not_fit_is_streamed(sims):
    assert sims.nbytes == BYTES
    assert part_size(sims, BYTES) is None
    assert part_size(sims, BYTES - 1) == N // 4 - 1
    assert part_size(sims, None) is None
    assert part_size(cs.Simulations(sims.theta, np.zeros((N, 50))), 1000) is None


def test_too_little_memory_is_refused(sims):
    with pytest.raises(ValueError, match="room for 1 runs at a time, fewer than a batch"):
        quick(MODEL, sims, memory=100)
    with pytest.raises(ValueError, match="memory must be a number of bytes, got -1"):
        quick(MODEL, sims, memory=-1)


def test_damage_seen_in_training_is_reported(sims, tmp_path):
    runs = cs.simulate(MODEL, 200, key=jax.random.key(0), store=tmp_path / "s", progress=False)
    part = next(path for path in (tmp_path / "s" / "x" / "c").rglob("*") if path.is_file())
    raw = bytearray(part.read_bytes())
    raw[100] ^= 1
    part.write_bytes(raw)
    with pytest.raises(cs.StoreError, match="damaged"):
        quick(MODEL, runs, memory=200 * 50 * 4 // 2, batch_size=16)


def test_runs_of_a_store_are_refused_by_a_model_with_another_prior(sims):
    other = cs.Model(dist.Normal(0.0, 2.0), MODEL.simulator)
    for runs in (sims, sims[:500]):
        with pytest.raises(ValueError, match=r"drawn from the prior .*scale=1.*scale=2"):
            quick(other, runs)
