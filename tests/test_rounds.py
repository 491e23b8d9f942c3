"""Sequential rounds: proposals, the atomic loss, and rounds kept on disk."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import consilience as cs
from consilience.losses import Example, Objective
from tests.conftest import SMALL

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
    objective = Objective(model, fit.posterior.parameters, fit.posterior.data, atoms=6)
    runs = done[1].simulations[:6]
    u = jax.vmap(lambda t: fit.posterior.parameters.to_vector({"theta": t})[0])(runs.theta["theta"])
    # With as many atoms as runs, every run is an atom and chance plays no part.
    got = objective._atomic(fit.networks, Example(u, jnp.asarray(runs.x)), 6, jax.random.key(0))
    theta = runs.theta["theta"].astype(np.float64)
    plain = 0.0
    for i in range(6):
        ratio = fit.log_prob(theta, runs.x[i]) - stats.norm.logpdf(theta)
        plain -= (ratio[i] - np.logaddexp.reduce(ratio)) / 6
    np.testing.assert_allclose(float(got), plain, rtol=1e-4)


def test_kept_rounds_are_read_not_run_again(kept, model):
    done, folder = kept
    broken = cs.Model(dist.Normal(0.0, 1.0), lambda key, t: jnp.full(2, jnp.nan) * t)
    again = run(broken, 3, 5, folder)
    for old, new in zip(done, again, strict=True):
        np.testing.assert_array_equal(old.simulations.x, new.simulations.x)
        np.testing.assert_allclose(
            old.fit.log_prob(np.zeros(3), X), new.fit.log_prob(np.zeros(3), X), rtol=1e-6
        )


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
