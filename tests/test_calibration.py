"""Calibration: exact posteriors pass, too narrow, too wide and shifted ones are caught."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import consilience as cs
from consilience.diagnostics.calibration import DENSITY, ecdf_bands, rank_table
from consilience.metrics import c2st
from tests.conftest import conjugate_model
from tests.gaussian import DIM, exact_mean, exact_sd, gaussian_fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

N = 500
WRONG = {
    "narrow": {"widen": 0.7},
    "wide": {"widen": 1.3},
    "shifted": {"shift": 0.5 * exact_sd()},
}


@pytest.fixture(scope="module")
def model():
    return conjugate_model(DIM)


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, 200, key=jax.random.key(0))


@pytest.fixture(scope="module")
def results(model, sims):
    fits = {"exact": gaussian_fit(model, sims)}
    fits |= {name: gaussian_fit(model, sims, **change) for name, change in WRONG.items()}
    key = jax.random.key(1)
    return fits, {name: cs.calibrate(fit, model, N, key=key) for name, fit in fits.items()}


def test_an_exact_posterior_is_calibrated(results):
    found = results[1]["exact"]
    assert found.passed
    assert list(found.table["quantity"].values) == ["theta[0]", "theta[1]", DENSITY]
    assert found.table["ranks"].shape == (3, N)
    assert found.table.attrs == {"draws": 199, "simulations": N}
    assert float(found.table["error"].max()) < 0.03


@pytest.mark.parametrize("name", WRONG)
def test_ranks_catch_a_wrong_posterior(results, name):
    found = results[1][name]
    assert not found.passed
    assert not found.table["inside"].any()
    assert "OUTSIDE" in repr(found)


@pytest.mark.parametrize("name", WRONG)
def test_coverage_catches_a_wrong_posterior(results, name):
    table = results[1][name].table
    assert not bool(table["coverage_inside"].sel(quantity=DENSITY))
    if name != "shifted":
        assert not table["coverage_inside"].any()


def test_coverage_is_that_of_the_normal_distribution(results):
    """Central intervals of q hold the truth with the probability of the true posterior."""
    level = results[1]["exact"].table["level"].values
    edge = stats.norm.ppf(0.5 + level / 2)
    for name, factor in (("narrow", 0.7), ("wide", 1.3)):
        expected = 2 * stats.norm.cdf(factor * edge) - 1
        found = results[1][name].table["coverage"].sel(quantity=["theta[0]", "theta[1]"])
        np.testing.assert_allclose(found.mean("quantity"), expected, atol=0.04)
    # Of highest density, in two dimensions: discs whose squared radius is chi-squared.
    radius = stats.chi2.ppf(level, DIM)
    found = results[1]["narrow"].table["coverage"].sel(quantity=DENSITY)
    np.testing.assert_allclose(found, stats.chi2.cdf(0.49 * radius, DIM), atol=0.05)


@pytest.mark.parametrize("name", ["exact", *WRONG])
def test_c2st_tells_the_exact_from_the_wrong(results, model, name):
    """Four draws for each of the simulations, in units of the exact posterior."""
    x = cs.simulate(model, N, key=jax.random.key(1)).x
    draws = results[0][name].sample(x, 4, key=jax.random.key(2))["theta"].values[:, 0]
    standard = jnp.asarray((draws - exact_mean(x)[:, None]) / exact_sd(), float).reshape(-1, DIM)
    exact = jax.random.normal(jax.random.key(3), standard.shape)
    score = float(c2st(standard, exact, key=jax.random.key(4)))
    # 0.5 +- 0.008 by chance; the best classifier reaches 0.63, 0.60 and 0.64.
    assert (score < 0.53) if name == "exact" else (score > 0.56)


@pytest.mark.parametrize("n", [50, 500])
def test_bands_hold_95_percent_of_uniform_samples(n):
    points = np.arange(1, 100) / 100
    lower, upper = ecdf_bands(n, tuple(points))
    rng = np.random.default_rng(0)
    samples = rng.uniform(size=(2000, n))
    ecdf = np.stack([(samples < point).mean(axis=1) for point in points], axis=1)
    inside = ((ecdf >= lower) & (ecdf <= upper)).all(axis=1).mean()
    assert abs(inside - 0.95) <= 0.02
    # Not merely wide: pointwise bands, at half the width and less, hold far fewer.
    assert np.all(upper - lower < 2.2 * 2 * 1.96 * np.sqrt(points * (1 - points) / n) + 4 / n)


def test_bands_hold_discrete_ranks_too():
    """The table of uniform ranks is inside in 95 % of cases, for ranks and for coverage."""
    rng = np.random.default_rng(1)
    ranks = {DENSITY: rng.integers(0, 200, size=100)}
    ranks |= {str(i): rng.integers(0, 200, size=100) for i in range(1999)}
    table = rank_table(ranks, 199)
    for name in ("inside", "coverage_inside"):
        assert abs(float(table[name].mean()) - 0.95) <= 0.02
    np.testing.assert_allclose(table["coverage"].mean("quantity"), table["level"], atol=0.01)
    np.testing.assert_allclose(table["ecdf"].mean("quantity"), table["point"], atol=0.01)


def test_bands_refuse_points_outside_of_the_interval():
    for points in ((0.0, 0.5), (0.5, 1.0), (0.5, 0.4)):
        with pytest.raises(ValueError, match="rising points"):
            ecdf_bands(10, points)


def test_quantities_of_the_user_are_ranked_and_ties_broken(results, model):
    """A constant is all ties; a coordinate has the ranks of that parameter."""
    fit = results[0]["exact"]
    found = cs.calibrate(
        fit,
        model,
        200,
        key=jax.random.key(5),
        draws=99,
        quantities={
            "first": lambda theta, x: theta[0],
            "constant": lambda theta, x: 0.0 * theta[0],
            "log likelihood": lambda theta, x: model.log_likelihood({"theta": theta}, x),
        },
    )
    ranks = found.table["ranks"]
    np.testing.assert_array_equal(ranks.sel(quantity="first"), ranks.sel(quantity="theta[0]"))
    constant = ranks.sel(quantity="constant").values
    assert stats.kstest((constant + 0.5) / 100, "uniform").pvalue > 0.01
    assert bool(found.table["inside"].sel(quantity="log likelihood"))


def test_simulations_that_are_not_finite_are_counted_and_reported(results, model, caplog):
    sims = cs.simulate(model, 120, key=jax.random.key(6))
    sims.x[:7, 3] = np.nan
    with caplog.at_level(logging.WARNING):
        found = cs.calibrate(results[0]["exact"], key=jax.random.key(7), simulations=sims, draws=99)
    assert found.invalid == 7
    assert found.table.attrs["simulations"] == 113
    assert "113 simulations, 7 more were not finite" in repr(found)
    assert "7 simulations were not finite" in caplog.text


def test_bad_requests_are_refused(results, model):
    fit, key = results[0]["exact"], jax.random.key(0)
    with pytest.raises(ValueError, match=r"one less than a multiple of 20, .* got 100"):
        cs.calibrate(fit, model, 100, key=key, draws=100)
    with pytest.raises(ValueError, match="20 simulations or more"):
        cs.calibrate(fit, model, 5, key=key)
    for quantities, message in (
        ({"theta[0]": lambda theta, x: theta[0]}, "has the name of another"),
        ({"both": lambda theta, x: theta}, r"one number .* got the shape \(2,\)"),
        ({"root": lambda theta, x: jnp.sqrt(theta[0])}, "NaN for some draws"),
    ):
        with pytest.raises(ValueError, match=message):
            cs.calibrate(fit, model, 40, key=key, draws=99, quantities=quantities)


def test_calibration_draws_its_figures(results):
    drawn = results[1]["narrow"].plot()
    assert set(drawn) == {"ecdf", "ranks", "coverage"}
    for axes in drawn.values():
        assert len(np.ravel(axes)) >= 3
