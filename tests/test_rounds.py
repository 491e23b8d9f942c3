"""Sequential rounds: proposals, the atomic loss, and rounds kept on disk."""

import errno
import functools
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import consilience as cs
from consilience.identity.batches import Batch, Example
from consilience.identity.objective import Objective
from consilience.simulation.lock import Lock
from tests import simulators
from tests.conftest import SMALL, TINY

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = np.array([1.0, 1.4], np.float32)


def run(model: cs.Model, rounds: int, seed: int, folder) -> list[cs.Round]:
    """Rounds of 128 runs by maximum likelihood alone, small and quick, kept in a folder."""
    return cs.sequential(
        model,
        X,
        rounds=rounds,
        simulations=128,
        key=jax.random.key(seed),
        self_consistency=False,
        posterior=SMALL,
        epochs=20,
        batch_size=32,
        directory=folder,
        progress=False,
    )


@pytest.fixture(scope="module")
def model() -> cs.Model:
    """Two numbers N(theta, 0.5^2) under theta ~ N(0, 1)."""
    return cs.Model(dist.Normal(0.0, 1.0), lambda key, t: t + 0.5 * jax.random.normal(key, (2,)))


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    """Three rounds, kept on disk, and their folder."""
    folder = tmp_path_factory.mktemp("rounds")
    done = run(model, 3, 0, folder)
    return done, folder


def test_later_rounds_propose_from_the_posterior_and_still_find_it(kept):
    """A loss that ignored the proposal would end with far too narrow a posterior."""
    done, _ = kept
    assert done[0].proposal is None
    assert done[1].proposal is done[0].fit
    mean, sd = X.sum() / 0.25 / (1 + 2 / 0.25), (1 + 2 / 0.25) ** -0.5
    proposed = done[2].simulations.theta["theta"]
    assert abs(done[0].simulations.theta["theta"].std() - 1) < 0.2, "the first round is the prior"
    assert abs(proposed.mean() - mean) < sd
    draws = done[2].fit.sample(X, 4000, key=jax.random.key(1))["theta"].values[0]
    assert abs(draws.mean() - mean) < 0.25 * sd
    assert 0.75 < draws.std() / sd < 1.3


def test_the_atomic_loss_is_the_cross_entropy_of_ratios(kept, model):
    done, _ = kept
    fit = done[0].fit
    runs = done[1].simulations[:6]
    u = jax.vmap(lambda t: fit.posterior.parameters.to_vector({"theta": t})[0])(runs.theta["theta"])
    # With as many atoms as runs, every run is an atom and chance plays no part.
    objective = Objective(model, fit.posterior.parameters, fit.posterior.data, atoms=6)
    batch, keys = Batch(Example(u, jnp.asarray(runs.x))), jax.random.split(jax.random.key(0), 5)
    got = objective(fit.networks, batch, keys, jnp.asarray(0.5))[0]["posterior"]
    theta = runs.theta["theta"].astype(np.float64)
    plain = 0.0
    for i in range(6):
        ratio = fit.log_prob(theta, runs.x[i]) - stats.norm.logpdf(theta)
        plain -= (ratio[i] - np.logaddexp.reduce(ratio)) / 6
    np.testing.assert_allclose(float(got), plain, rtol=1e-4)


def test_kept_rounds_are_read_not_run_again(kept, model, tmp_path):
    """A folder of the version before, which says nothing of what made it."""
    done, folder = kept
    for file in folder.glob("*[0-9n].[nf]*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert not (tmp_path / "campaign.json").exists()
    broken = cs.Model(dist.Normal(0.0, 1.0), lambda key, t: jnp.full(2, jnp.nan) * t)
    again = run(broken, 3, 5, tmp_path)
    for old, new in zip(done, again, strict=True):
        np.testing.assert_array_equal(old.simulations.x, new.simulations.x)
        np.testing.assert_allclose(
            old.fit.log_prob(np.zeros(3), X), new.fit.log_prob(np.zeros(3), X), rtol=1e-6
        )
    with pytest.raises(cs.StoreError, match="Its key"):
        run(broken, 3, 6, tmp_path)


def test_an_interruption_in_training_loses_no_simulation(model, kept, tmp_path):
    done, folder = kept
    for name in ("observation.npz", "round-0.npz"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    again = run(model, 1, 9, tmp_path)
    np.testing.assert_array_equal(done[0].simulations.x, again[0].simulations.x)
    assert (tmp_path / "round-0.fit").exists()


def test_truncated_proposals_stay_in_the_prior_and_off_the_tails(kept, model):
    done, _ = kept
    fit = done[0].fit
    theta = cs.Truncated(share=1e-2).draw(model, fit, X, 500, jax.random.key(0))["theta"]
    draws = fit.sample(X, 4000, key=jax.random.key(1))["theta"].values[0]
    assert theta.shape == (500,)
    low, high = np.quantile(draws, [0.002, 0.998])
    assert np.mean((theta > low) & (theta < high)) > 0.95
    # Between these ends the density is the prior's, not the posterior's.
    inside = stats.truncnorm(theta.min(), theta.max())
    assert stats.kstest(theta, inside.cdf).pvalue > 1e-3
    assert stats.ks_2samp(theta, draws).pvalue < 1e-3


def test_another_observation_may_not_use_the_folder(kept, model):
    with pytest.raises(ValueError, match="another observation"):
        cs.sequential(model, X + 1, key=jax.random.key(0), directory=kept[1])


def test_bad_requests_are_refused(model):
    with pytest.raises(ValueError, match="at least one, got 0"):
        cs.sequential(model, X, rounds=0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="one observation, got a batch"):
        cs.sequential(model, np.stack([X, X]), key=jax.random.key(0))
    implicit = cs.Model(
        cs.ImplicitPrior(lambda key: {"a": jax.random.normal(key)}),
        lambda key, t: t["a"] + jax.random.normal(key, (2,)),
    )
    with pytest.raises(ValueError, match="Truncated"):
        cs.sequential(implicit, X, key=jax.random.key(0))
    sims = cs.simulate(model, 16, key=jax.random.key(0))
    with pytest.raises(ValueError, match="atoms must be between 2 and the batch size"):
        cs.fit(model, sims, key=jax.random.key(0), atoms=50, self_consistency=False)


# Campaigns on disk.


OBSERVED = np.zeros(2)


def small_run(model, folder, **change):
    """Rounds of 32 runs, at most two epochs each."""
    settings = {
        "rounds": 1,
        "simulations": 32,
        "key": jax.random.key(0),
        "self_consistency": False,
        "posterior": TINY,
        "epochs": 2,
        "batch_size": 16,
        "progress": False,
    }
    return cs.sequential(model, OBSERVED, directory=folder, **settings | change)


@pytest.fixture(scope="module")
def campaign(model, tmp_path_factory):
    """Two small rounds and their folder."""
    folder = tmp_path_factory.mktemp("campaign")
    return small_run(model, folder, rounds=2), folder


@pytest.fixture
def copied(campaign, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(campaign[1], tmp_path / "copy")


def numbers(done):
    return [(each.simulations.x, each.fit.log_prob(np.zeros(1), OBSERVED)) for each in done]


def assert_same(first, second):
    for one, other in zip(numbers(first), numbers(second), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def simulator(key, theta):
    return theta + 0.5 * jax.random.normal(key, (2,))


CHANGES = {
    "key": {"key": jax.random.key(1)},
    "simulations": {"simulations": 48},
    "proposal": {"proposal": cs.Truncated()},
    "epochs": {"epochs": 3},
    "batch_size": {"batch_size": 8},
    "posterior": {"posterior": cs.Coupling(layers=2)},
    "self_consistency": {"self_consistency": None},
}
PRIORS = {
    "Normal": dist.Normal(0.0, 2.0),
    "low=0": dist.TruncatedNormal(0.0, 1.0, low=0.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rounds_of_another_campaign_are_refused(campaign, model, name):
    done, folder = campaign
    with pytest.raises(cs.StoreError, match=f"rounds of another campaign. Its {name}: .*given: "):
        small_run(model, folder, **CHANGES[name])
    assert_same(small_run(model, folder, rounds=2), done)


@pytest.mark.parametrize("prior", PRIORS)
def test_rounds_under_another_prior_are_refused(campaign, prior):
    other = cs.Model(PRIORS[prior], lambda key, t: t + 0.5 * jax.random.normal(key, (2,)))
    with pytest.raises(cs.StoreError, match=f"Its prior: .*given: .*{prior}"):
        small_run(other, campaign[1])


def test_rounds_under_a_prior_that_looks_alike_say_that_it_differs(campaign):
    alike = cs.Model(dist.Normal(0.0, 1.000003), simulator)
    with pytest.raises(cs.StoreError, match="differs in numbers that these lines leave out"):
        small_run(alike, campaign[1])


def test_rounds_of_a_truncated_prior_with_other_numbers_are_refused(tmp_path):
    """Only bounds used to be in the description."""
    wide, narrow = (cs.Model(dist.TruncatedNormal(0.0, s, low=0.0), simulator) for s in (2.0, 1.0))
    small_run(wide, tmp_path)
    with pytest.raises(cs.StoreError, match=r"Its prior: .*scale=2.*given: .*scale=1"):
        small_run(narrow, tmp_path)


def test_rounds_of_a_simulator_with_another_body_are_refused(campaign):
    other = cs.Model(dist.Normal(0.0, 1.0), lambda key, t: t + 0.7 * jax.random.normal(key, (2,)))
    with pytest.raises(cs.StoreError, match="The simulator's body has changed"):
        small_run(other, campaign[1])
    # Written again in other words, it computes the same.
    again = cs.Model(
        dist.Normal(0.0, 1.0), lambda key, theta: theta + 0.5 * jax.random.normal(key, shape=(2,))
    )
    assert_same(small_run(again, campaign[1], rounds=2), campaign[0])


def test_more_rounds_go_on_in_the_same_folder(model, copied, campaign):
    longer = small_run(model, copied, rounds=3)
    assert_same(longer[:2], campaign[0])
    assert_same(small_run(model, copied, rounds=3), longer)
    assert len(longer) == 3


def test_a_folder_takes_one_writer_at_a_time(copied):
    held = Lock(copied / "lock")
    try:
        with pytest.raises(cs.StoreInUseError, match="is in use by another call"):
            small_run(cs.Model(dist.Normal(0.0, 1.0), simulator), copied)
    finally:
        held.release()


def test_a_simulator_outside_jax_is_told_by_its_source(tmp_path, monkeypatch):
    in_threads = functools.partial(cs.simulate, executor=ThreadPoolExecutor(2))
    monkeypatch.setattr("consilience.training.rounds.simulate", in_threads)
    models = [cs.Model(dist.Normal(0.0, 1.0), cs.external(f)) for f in (_calm, _wild)]
    done = small_run(models[0], tmp_path)
    with pytest.raises(cs.StoreError, match="The simulator's body has changed"):
        small_run(models[1], tmp_path)
    (tmp_path / "campaign.json").unlink()
    assert_same(small_run(models[1], tmp_path), done)


def _calm(rng, theta):
    return rng.normal(theta, 0.5, 2)


def _wild(rng, theta):
    return rng.normal(theta, 5.0, 2)


def _flaky(rng, theta):
    """Which way a run falls, or an error where theta is large."""
    if theta > 0.5:
        raise RuntimeError("no convergence")
    return rng.random(2) < 0.5


def test_failed_runs_stay_failed_when_rounds_are_read_again(tmp_path, monkeypatch):
    """Failed boolean runs have no NaN: nothing but a record of them tells that they failed."""
    in_threads = functools.partial(cs.simulate, executor=ThreadPoolExecutor(2))
    monkeypatch.setattr("consilience.training.rounds.simulate", in_threads)
    model = cs.Model(dist.Normal(0.0, 1.0), cs.external(_flaky))
    first = small_run(model, tmp_path)[0].simulations
    again = small_run(model, tmp_path)[0].simulations
    assert 0 < len(first.failures) < 32
    assert again.failures.failed == first.failures.failed
    assert again.failures.reasons == {"raised": len(first.failures)}
    assert "no convergence" in again.failures.summary()
    np.testing.assert_array_equal(again.invalid, first.invalid)
    assert again.key == first.key


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def _replace(path):
    np.savez(path, **{"theta.theta": np.zeros(3), "x.data": np.zeros((4, 2))})


def _rename(path):
    np.savez(path, other=np.zeros(3))


@pytest.mark.parametrize("damage", [_cut, _flip, _replace, _rename, lambda p: p.write_text("x")])
def test_a_damaged_file_of_runs_says_to_delete_it(model, copied, campaign, damage):
    file = copied / "round-1.npz"
    damage(file)
    with pytest.raises(cs.StoreError, match=r"round-1.npz is damaged: .*Delete it, and call again"):
        small_run(model, copied, rounds=2)
    file.unlink()
    assert_same(small_run(model, copied, rounds=2), campaign[0])


@pytest.mark.parametrize("damage", [_cut, _flip, lambda p: p.write_text("x")])
def test_a_damaged_fit_of_a_round_says_to_delete_it(model, copied, campaign, damage):
    file = copied / "round-0.fit"
    damage(file)
    with pytest.raises(cs.LoadError, match=r"round-0.fit is damaged.*Delete .*round-0.fit"):
        small_run(model, copied, rounds=2)
    file.unlink()
    assert_same(small_run(model, copied, rounds=2), campaign[0])


@pytest.mark.parametrize("name", ["campaign.json", "observation.npz"])
@pytest.mark.parametrize("content", [b"", b"[]", b'{"prior": 3}', b"PK\x03\x04"])
def test_damaged_records_of_a_campaign_are_told(model, copied, campaign, name, content):
    file = copied / name
    file.write_bytes(content)
    with pytest.raises(cs.StoreError, match=rf"{name} is damaged.*Delete it if the rounds"):
        small_run(model, copied, rounds=2)
    file.unlink()
    assert_same(small_run(model, copied, rounds=2), campaign[0])


def test_rounds_on_a_full_disk_go_on_in_memory(model, campaign, tmp_path, monkeypatch, caplog):
    real = os.replace

    def full(source, target):
        if "round-" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", full)
        assert_same(small_run(model, tmp_path, rounds=2), campaign[0])
    assert caplog.text.count("cannot be written: its disk is full. The rounds go on in memory") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "campaign.json",
        "lock",
        "observation.npz",
    ]
    assert_same(small_run(model, tmp_path, rounds=2), campaign[0])


def test_a_folder_that_cannot_be_made_is_refused_before_any_run(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(cs.StoreError, match="cannot be used for rounds: "):
        small_run(model, tmp_path / "file")


def test_what_made_the_rounds_can_be_read(campaign):
    about = json.loads((campaign[1] / "campaign.json").read_text())
    assert about["prior"] == {"theta": "Normal(loc=0, scale=1)"}
    assert about["key"] == ["threefry2x32", 0, 0]
    assert about["proposal"] == {"type": "Atomic", "atoms": 10}
    assert about["simulations"] == 32


def test_numbers_that_cannot_be_leave_the_folder_usable(model, tmp_path):
    settings = {"key": jax.random.key(0), "directory": tmp_path / "kept", "progress": False}
    settings |= {"posterior": TINY, "epochs": 1, "self_consistency": False}
    for wrong in ({"simulations": 10**13}, {"simulations": 0}, {"rounds": 1.5}, {"rounds": "2"}):
        with pytest.raises((ValueError, TypeError), match=r"rounds|runs|simulations"):
            cs.sequential(model, X, **({"rounds": 1, "simulations": 64} | settings | wrong))
    done = cs.sequential(model, X, rounds=1, simulations=64, **settings)
    # The same numbers in another precision are the same observation.
    again = cs.sequential(model, X.astype(float), rounds=1, simulations=64, **settings)
    np.testing.assert_array_equal(again[0].simulations.x, done[0].simulations.x)


def test_another_likelihood_of_an_external_simulator_is_another_campaign(tmp_path):
    def rounds(sd):
        model = cs.Model(
            dist.Normal(0.0, 1.0),
            cs.external(simulators.noisy_pair),
            lambda theta, x: dist.Normal(theta, sd).log_prob(x).sum(),
        )
        return cs.sequential(
            model,
            X,
            rounds=1,
            simulations=16,
            key=jax.random.key(0),
            posterior=TINY,
            epochs=1,
            self_consistency=False,
            directory=tmp_path / "kept",
            progress=False,
        )

    rounds(1.0)
    with pytest.raises(cs.StoreError, match="log-likelihood's body has changed"):
        rounds(50.0)
