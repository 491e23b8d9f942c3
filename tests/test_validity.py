"""Runs that fail with a known probability: the factor p(valid | theta), learned and in place."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import consilience as cs
from consilience.metrics import c2st
from consilience.networks.validity import learn_validity
from consilience.simulation.simulations import join_attempts
from tests.conftest import quick

NOISE = 0.5


def log_odds(theta):
    """A fifth of all runs fails; those at low theta[0] mostly do."""
    return 2.2 + 2.0 * theta[..., 0]


def failing(key, theta):
    k_noise, k_fail = jax.random.split(key)
    x = theta + NOISE * jax.random.normal(k_noise, (2,))
    return jnp.where(jax.random.bernoulli(k_fail, jax.nn.sigmoid(log_odds(theta))), x, jnp.nan)


MODEL = cs.Model(dist.Normal(0.0, 1.0).expand([2]).to_event(1), failing)
X = np.array([[-1.5, 0.5], [-0.5, -1.0]], np.float32)


def exact(x, rng, n=1000):
    """Draws and log evidence: a conjugate posterior, thinned by the probability of success."""
    var = 1 / (1 + NOISE**-2)
    mean, sd = var * x / NOISE**2, np.sqrt(var)
    draws = mean + sd * rng.standard_normal((60 * n, 2))
    success = 1 / (1 + np.exp(-log_odds(draws)))
    kept = draws[rng.random(len(draws)) < success][:n]
    gaussian = stats.norm(0, np.sqrt(1 + NOISE**2)).logpdf(x).sum()
    return kept, gaussian + np.log(success.mean())


def bridged(fit):
    found = fit.log_evidence(X, key=jax.random.key(2)).sel(estimator="bridge")
    return found["log_evidence"].values


def draws(fit, corrected):
    return fit.sample(X, 1000, key=jax.random.key(3), corrected=corrected)["theta"].values[:, 0]


@pytest.mark.slow
def test_posterior_and_evidence_are_exact_where_runs_fail():
    sims = cs.simulate(MODEL, 4000, key=jax.random.key(0))
    assert 0.18 < sims.invalid.mean() < 0.24
    net = cs.Coupling(layers=2, width=64)
    fit = cs.fit(
        MODEL,
        sims.drop_invalid(),
        key=jax.random.key(1),
        posterior=net,
        likelihood=net,
        epochs=30,
        progress=False,
    )
    without = eqx.tree_at(lambda fit: fit.likelihood.validity, fit, None)
    truth, log_evidence = zip(
        *(exact(x, np.random.default_rng(i)) for i, x in enumerate(X)), strict=True
    )
    assert np.abs(bridged(fit) - log_evidence).max() < 0.1
    assert np.abs(bridged(without) - log_evidence).max() > 0.3
    samples = [draws(fit, False), draws(fit, True), draws(without, True)]
    references = np.broadcast_to(truth, (3, *np.shape(truth)))
    found = c2st(jnp.asarray(np.stack(samples)), jnp.asarray(references), key=jax.random.key(4))
    assert (found[:2] < 0.55).all()
    assert found[2].max() > 0.56


@pytest.mark.parametrize("n", [300, 3000])
def test_learned_probabilities_are_close_and_calibrated(n):
    rng = np.random.default_rng(0)
    u = rng.standard_normal((n, 2)).astype(np.float32)
    success = lambda u: 1 / (1 + np.exp(-(2.0 + 1.5 * u[:, 0] - u[:, 1] ** 2)))  # noqa: E731
    validity = learn_validity(u, rng.random(n) < success(u), np.random.default_rng(1))
    fresh = rng.standard_normal((20_000, 2)).astype(np.float32)
    learned = np.exp(jax.vmap(validity.log_prob)(fresh))
    # One probability for all would be 0.25 off on average.
    assert np.abs(learned - success(fresh)).mean() < {300: 0.07, 3000: 0.03}[n]
    for low, high in ((0.0, 0.4), (0.4, 0.8), (0.8, 1.0)):
        inside = (learned >= low) & (learned < high)
        slack = {300: 0.12, 3000: 0.04}[n]
        assert abs(learned[inside].mean() - success(fresh)[inside].mean()) < slack


def test_failures_that_depend_on_nothing_shift_the_evidence_alone():
    rng = np.random.default_rng(0)
    u = rng.standard_normal((500, 3)).astype(np.float32)
    valid = rng.random(500) < 0.7
    validity = learn_validity(u, valid, np.random.default_rng(1))
    learned = np.exp(jax.vmap(validity.log_prob)(u))
    assert abs(learned.mean() - valid.mean()) < 0.02
    assert learned.std() < 0.08


def test_a_fit_keeps_the_factor_when_saved(tmp_path):
    sims = cs.simulate(MODEL, 200, key=jax.random.key(0)).drop_invalid()
    fit = quick(MODEL, sims, likelihood=cs.Coupling(layers=1, width=16))
    again = cs.load(fit.save(tmp_path / "fit"), MODEL)
    u = jnp.array([-1.0, 0.3])
    expected = fit.likelihood.validity.log_prob(u)
    assert again.likelihood.validity.log_prob(u) == expected


def test_a_fit_without_failures_or_without_a_likelihood_has_no_factor():
    sims = cs.simulate(MODEL, 200, key=jax.random.key(0))
    kept = sims.drop_invalid()
    assert quick(MODEL, kept).likelihood is None
    whole = cs.Simulations(kept.theta, kept.x)
    learned = quick(MODEL, whole, likelihood=cs.Coupling(layers=1, width=16))
    assert learned.likelihood.validity is None


def test_what_was_tried_stays_whole_through_picks_and_joins():
    sims = cs.simulate(MODEL, 100, key=jax.random.key(0))
    kept = sims.drop_invalid()
    bad = int(sims.invalid.sum())
    assert (len(kept.attempts.valid), int((~kept.attempts.valid).sum())) == (100, bad)
    assert len(kept[:10].attempts.valid) == 100
    assert repr(kept).endswith(f"{bad} others were dropped")
    joined = join_attempts([sims, kept])
    assert (len(joined.valid), int((~joined.valid).sum())) == (200, 2 * bad)
    assert join_attempts([cs.Simulations(kept.theta, kept.x)]) is None
