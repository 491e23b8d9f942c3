"""Scores of exact and wrong posteriors on held-out runs, against closed forms."""

import jax
import numpy as np
import pytest
from scipy import stats

import consilience as cs
from tests.conftest import conjugate_model
from tests.gaussian import DIM, exact_log_evidence, exact_mean, exact_sd, gaussian_fit

KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def sims():
    return cs.simulate(conjugate_model(DIM), 60, key=jax.random.key(0))


def test_scores_of_an_exact_posterior(sims):
    fit = gaussian_fit(conjugate_model(DIM), sims)
    found = cs.score(fit, sims, key=KEY, log_evidence=exact_log_evidence(sims.x))
    exact = stats.norm.logpdf(sims.theta["theta"], exact_mean(sims.x), exact_sd()).sum(axis=1)
    np.testing.assert_allclose(found["log_posterior"], exact, atol=2e-3)
    assert float(found["sharpness"].max()) < 1e-3
    assert float(abs(found["evidence_error"]).max()) < 1e-3
    assert "log_likelihood" not in found


def test_scores_of_a_narrow_posterior_are_worse(sims):
    fit = gaussian_fit(conjugate_model(DIM), sims, widen=0.7)
    found = cs.score(fit, sims, key=KEY)
    # 0.255 times a chi-squared variable of two degrees of freedom.
    width = 0.255 * np.diff(stats.chi2.ppf([0.025, 0.975], DIM))[0]
    np.testing.assert_allclose(found["sharpness"].mean(), width, rtol=0.1)
    exact = cs.score(gaussian_fit(conjugate_model(DIM), sims), sims, key=KEY)
    assert float(found["log_posterior"].mean()) < float(exact["log_posterior"].mean())


def test_a_learned_likelihood_is_scored(named_fit, named_sims):
    found = cs.score(named_fit, named_sims[:20], key=KEY, n=100)
    theta = {name: values[3] for name, values in named_sims.theta.items()}
    one = named_fit.likelihood.log_prob(theta, named_sims.x[3])
    np.testing.assert_allclose(found["log_likelihood"][3], one, rtol=1e-4)
    assert found["sharpness"].shape == (20,)


def test_a_true_evidence_that_cannot_be_used_is_refused(sims, moments_fit, named_sims):
    fit = gaussian_fit(conjugate_model(DIM), sims)
    with pytest.raises(ValueError, match=r"each of the 60 simulations, got the shape \(3,\)"):
        cs.score(fit, sims, key=KEY, log_evidence=np.zeros(3))
    with pytest.raises(ValueError, match="needs prior and likelihood"):
        cs.score(moments_fit, named_sims[:3], key=KEY, log_evidence=np.zeros(3))
