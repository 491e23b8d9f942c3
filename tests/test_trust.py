"""The verdict at one observation, on posteriors known to be right and wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.diagnostics.check import AS_IS, CORRECTED, MCMC, MODEL
from tests.conftest import ROWS, conjugate_model, quick
from tests.gaussian import DIM, exact_mean, exact_sd, gaussian_fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def model():
    return conjugate_model(DIM)


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, 500, key=jax.random.key(0))


@pytest.fixture(scope="module")
def exact(model, sims):
    return gaussian_fit(model, sims)


@pytest.fixture(scope="module")
def held_out(model):
    return cs.simulate(model, 40, key=jax.random.key(1))


def verdicts(fit, x, **options) -> np.ndarray:
    return fit.check(x, key=KEY, **options).verdict


def test_an_exact_posterior_is_used_as_it_is(exact, held_out, sims):
    found = exact.check(held_out.x, key=KEY, simulations=sims)
    assert np.mean(found.verdict == AS_IS) >= 0.95
    assert float(found.table["spread"].max()) < 1e-3
    assert np.all(found.table["ess"] > 999)
    p = found.table["typical"].values
    assert 0.2 < np.quantile(p, 0.5) < 0.8


@pytest.mark.parametrize(
    "change", [{"widen": 0.7}, {"widen": 1.3}, {"shift": 0.5 * exact_sd()}], ids=str
)
def test_a_wrong_posterior_is_caught(model, sims, held_out, change):
    found = verdicts(
        gaussian_fit(model, sims, **change), held_out.x, simulations=sims, predictive=0
    )
    assert np.all(found != AS_IS)
    assert np.mean(found == CORRECTED) >= 0.5


def test_a_hopeless_posterior_wants_mcmc(model, sims, held_out):
    fit = gaussian_fit(model, sims, shift=8 * exact_sd())
    found = fit.check(held_out.x[0], key=KEY, simulations=sims, predictive=0)
    assert found.verdict == MCMC
    assert "importance weights fail" in found.table["reason"].item()


def test_observations_from_far_away_are_unlike_the_simulations(exact, sims, held_out):
    found = exact.check(held_out.x + 8.0, key=KEY, simulations=sims, predictive=0)
    assert np.all(found.table["typical"] < 0.01)
    # The posterior is exact there too, and the identity knows.
    assert np.all(found.verdict == CORRECTED)
    assert "unlike the simulations" in found.table["reason"].values[0]


def test_noise_that_the_model_does_not_have_is_seen_in_its_predictions(exact, sims, held_out):
    rng = np.random.default_rng(0)
    loud = held_out.x + 3.0 * rng.normal(size=held_out.x.shape).astype(np.float32)
    found = exact.check(loud, key=KEY, simulations=sims)
    assert np.mean(found.verdict == MODEL) >= 0.9
    named = " ".join(found.table["statistic"].values)
    assert "standard deviation of data[0]" in named or "maximum of data" in named


def test_one_observation_gives_one_verdict_a_reason_and_a_figure(exact, sims, held_out):
    found = exact.check(held_out.x[0], key=KEY, simulations=sims, predictive=100)
    assert found.verdict == AS_IS
    text = repr(found)
    for part in ("Check: use as is", "typical of the simulations", "Pareto k", "predictions: p ="):
        assert part in text
    assert found.predictions.shape == (100, ROWS, DIM)
    assert len(np.ravel(found.plot())) >= 1
    draws = exact.sample(held_out.x[0], 50, key=KEY)
    tree = cs.to_arviz(draws, observed=found.x, predictions=found.predictions)
    assert tree["posterior_predictive"]["x"].sizes["draw"] == 100
    np.testing.assert_array_equal(tree["observed_data"]["x"].values, held_out.x[0])
    many = exact.check(held_out.x[:3], key=KEY, simulations=sims, predictive=0)
    assert "3 observations" in repr(many)
    with pytest.raises(ValueError, match="check one observation"):
        many.plot()


def test_predictions_are_those_of_the_posterior(exact, sims, held_out):
    """Rows given x are N(mean, 1 + 1 / 11)."""
    found = exact.check(held_out.x[0], key=KEY, simulations=sims, predictive=2000)
    rows = found.predictions.reshape(-1, DIM)
    np.testing.assert_allclose(rows.mean(axis=0), exact_mean(held_out.x[0]), atol=0.05)
    np.testing.assert_allclose(rows.var(axis=0), 1 + 1 / (ROWS + 1), rtol=0.05)


def test_statistics_of_the_user_are_asked(exact, sims, held_out):
    """Row 0 is far off, which no statistic but the one of row 0 was told of."""
    x = held_out.x[0].copy()
    found = exact.check(
        x, key=KEY, simulations=sims, statistics={"order": lambda x: x[0, 0] - x[-1, 0]}
    )
    assert found.table["statistic"].item() == "order"
    x[0, 0] += 20
    x[1:, 0] -= 20 / (ROWS - 1)
    found = exact.check(
        x, key=KEY, simulations=sims, statistics={"order": lambda x: x[0, 0] - x[-1, 0]}
    )
    assert found.table["predictive"].item() < 0.01


@pytest.mark.parametrize(
    "statistics, said",
    [
        ({}, "statistics names no statistic"),
        ({"mean": lambda x: x.mean(axis=0)}, r"'mean' must return one number.*the shape \(2,\)"),
        (
            {"text": lambda x: "high"},
            "The statistic 'text' must be real numbers, but it holds text",
        ),
    ],
)
def test_statistics_that_are_not_one_number_are_refused(exact, sims, held_out, statistics, said):
    with pytest.raises((TypeError, ValueError), match=said):
        exact.check(held_out.x[0], key=KEY, simulations=sims, statistics=statistics)


def test_statistics_may_be_arrays_of_one_number(exact, sims, held_out):
    statistics = {"mean": lambda x: x.mean(keepdims=True), "first": lambda x: np.float32(x[0, 0])}
    found = exact.check(held_out.x[0], key=KEY, simulations=sims, statistics=statistics)
    assert found.table["statistic"].item() in statistics


def test_statistics_that_are_no_numbers_by_name_are_refused(exact, sims, held_out, unchecked):
    ask = lambda statistics: exact.check(  # noqa: E731
        held_out.x[0], key=KEY, simulations=sims, statistics=statistics, predictive=20
    )
    with pytest.raises(ValueError, match="statistics names no statistic"):
        ask({})
    with pytest.raises(ValueError, match=r"'mean' must return one number .* shape \(2,\): pass a"):
        ask({"mean": lambda x: x.mean(axis=0)})
    with pytest.raises(TypeError, match="statistic 'text' must be real numbers, but it holds text"):
        ask({"text": lambda x: "two"})
    with pytest.raises(TypeError, match="statistics must be functions by name, got function"):
        ask(lambda x: x.mean())
    with pytest.raises(TypeError, match="statistic 'mean' must be a function of one dataset"):
        ask({"mean": 3.0})


def test_without_a_likelihood_the_observation_itself_is_judged(sims, held_out):
    model = cs.Model(
        dist.Normal(0.0, 1.0).expand([DIM]).to_event(1),
        lambda key, theta: theta + jax.random.normal(key, (ROWS, DIM)),
        data=cs.Set(),
    )
    fit = gaussian_fit(model, sims)
    near = fit.check(held_out.x[0], key=KEY, simulations=sims)
    assert near.verdict == AS_IS
    assert "no likelihood" in near.table["reason"].item()
    assert np.isnan(near.table["pareto_k"].item())
    far = fit.check(held_out.x[0] + 8.0, key=KEY, simulations=sims)
    assert far.verdict == MCMC


@pytest.mark.parametrize(
    ("kind", "shape"), [(cs.Vector(), (3,)), (cs.Series(), (6, 2))], ids=["vector", "series"]
)
def test_every_kind_of_data_can_be_checked(kind, shape):
    model = cs.Model(
        dist.Normal(0.0, 1.0),
        lambda key, theta: theta + jax.random.normal(key, shape),
        lambda theta, x: jnp.sum(dist.Normal(theta, 1.0).log_prob(x)),
        data=kind,
    )
    sims = cs.simulate(model, 300, key=jax.random.key(0))
    fit = quick(model, sims)
    found = fit.check(sims.x[:2], key=KEY, n=200, predictive=50)
    assert set(found.verdict) <= {AS_IS, CORRECTED, MCMC, MODEL}
    assert np.all(found.table["predictive"] > 0)


def test_too_few_simulations_are_refused(exact, sims, held_out):
    with pytest.raises(ValueError, match=r"200 held-out simulations or more .* got 50"):
        exact.check(held_out.x, key=KEY, simulations=sims[:50])
