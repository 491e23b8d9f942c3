"""Using a fit: draws, densities, their shapes and their blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from scipy import integrate

import consilience as cs
from consilience import fitted
from tests.conftest import SMALL

KEY = jax.random.key(11)


def test_draws_of_one_dataset(named_fit, named_sims):
    draws = named_fit.sample(named_sims.x[0], 50, key=KEY)
    assert isinstance(draws, xr.Dataset)
    assert set(draws.data_vars) == {"mu", "sigma"}
    assert draws["mu"].dims == ("chain", "draw")
    assert draws["mu"].shape == (1, 50)
    assert bool((draws["sigma"] > 0).all())


def test_draws_of_a_batch(named_fit, named_sims):
    draws = named_fit.sample(named_sims.x[:7], 30, key=KEY)
    assert draws["mu"].dims == ("observation", "chain", "draw")
    assert draws["mu"].shape == (7, 1, 30)
    assert not np.array_equal(draws["mu"][0], draws["mu"][1])


def test_blocks_cover_a_large_request_once(named_fit, named_sims, monkeypatch):
    monkeypatch.setattr(fitted, "BLOCK", 64)
    draws = named_fit.sample(named_sims.x[:5], 150, key=KEY)["mu"].values
    assert np.isfinite(draws).all()
    assert len(np.unique(draws)) == draws.size
    theta = {"mu": draws[:, 0], "sigma": np.ones((5, 150), np.float32)}
    blocked = named_fit.log_prob(theta, named_sims.x[:5])
    monkeypatch.setattr(fitted, "BLOCK", 4096)
    np.testing.assert_allclose(
        blocked, named_fit.log_prob(theta, named_sims.x[:5]), rtol=1e-4, atol=1e-4
    )


def test_few_shapes_are_compiled(named_fit, named_sims, monkeypatch):
    shapes = set()
    original = fitted._draw

    def watched(posterior, key, x, numbers, start, n):
        shapes.add((len(numbers), n))
        return original(posterior, key, x, numbers, start, n)

    monkeypatch.setattr(fitted, "_draw", watched)
    for n in (600, 700, 800, 1000):
        named_fit.sample(named_sims.x[0], n, key=KEY)
        named_fit.sample(named_sims.x[: 10 + n % 7], n, key=KEY)
    assert shapes == {(1, 1024), (4, 1024)}


def test_log_prob_takes_draws_as_they_are(named_fit, named_sims):
    x = named_sims.x[:4]
    draws = named_fit.sample(x, 20, key=KEY)
    batch = named_fit.log_prob(draws, x)
    assert batch.shape == (4, 1, 20)
    single = named_fit.log_prob(draws.isel(observation=2), x[2])
    np.testing.assert_allclose(single, batch[2], rtol=1e-4, atol=1e-4)
    one = named_fit.log_prob(
        {"mu": draws["mu"].values[2, 0, 5], "sigma": draws["sigma"].values[2, 0, 5]}, x[2]
    )
    assert one.shape == ()
    np.testing.assert_allclose(one, batch[2, 0, 5], rtol=1e-4, atol=1e-4)


def test_log_prob_is_minus_infinity_outside_the_support(named_fit, named_sims):
    assert named_fit.log_prob({"mu": 0.0, "sigma": -1.0}, named_sims.x[0]) == -np.inf


def test_bad_requests_are_refused(named_fit, named_sims):
    x = named_sims.x
    with pytest.raises(ValueError, match="draws must be at least one, got 0"):
        named_fit.sample(x[0], 0, key=KEY)
    with pytest.raises(ValueError, match=r"must have the shape \(10, 1\)"):
        named_fit.sample(np.zeros(3), key=KEY)
    with pytest.raises(ValueError, match="NaN or infinite"):
        named_fit.sample(np.full((10, 1), np.nan), key=KEY)
    with pytest.raises(ValueError, match=r"missing: \['sigma'\], unknown: \['s'\]"):
        named_fit.log_prob({"mu": 0.0, "s": 1.0}, x[0])
    with pytest.raises(ValueError, match="batch of 4 datasets"):
        named_fit.log_prob({"mu": np.zeros(3), "sigma": np.ones(3)}, x[:4])


def test_the_likelihood_is_in_the_users_data(named_fit, named_sims):
    theta = {name: values[0] for name, values in named_sims.theta.items()}
    row = jnp.linspace(-40, 40, 4001)
    space = named_fit.likelihood

    def density(value):
        # Nine rows fixed: what is left integrates to the density of those nine.
        x = jnp.asarray(named_sims.x[0]).at[9, 0].set(value)
        return space.log_prob(theta, x)

    total = integrate.trapezoid(np.exp(np.asarray(jax.vmap(density)(row), float)), row)
    nine = density(0.0) - _one_row(space, theta, 0.0)
    np.testing.assert_allclose(np.log(total), nine, atol=5e-3)
    x = space.sample(KEY, theta)
    assert x.shape == (10, 1)


def _one_row(likelihood, theta, value):
    """The log density of one row: rows are independent, so the difference that one makes."""
    both = jnp.full((10, 1), value)
    return likelihood.log_prob(theta, both) / 10


CONSTRAINED = {
    "bounded": (dist.Uniform(-1.0, 2.0), lambda n: np.linspace(-1, 2, n + 2)[1:-1, None]),
    "positive": (dist.Gamma(2.0, 1.0), lambda n: np.geomspace(1e-7, 1e3, n)[:, None]),
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_densities_integrate_to_one_in_the_users_space(name):
    prior, grid = CONSTRAINED[name]
    model = cs.Model({name: prior}, lambda key, t: t[name] + 0.5 * jax.random.normal(key, (2,)))
    sims = cs.simulate(model, 256, key=jax.random.key(0))
    fit = cs.fit(model, sims, key=jax.random.key(1), posterior=SMALL, epochs=3, progress=False)
    points = grid(8001)[:, 0]
    density = np.exp(fit.log_prob({name: points}, sims.x[0]).astype(float))
    np.testing.assert_allclose(integrate.trapezoid(density, points), 1.0, atol=5e-3)
    draws = fit.sample(sims.x[0], 100_000, key=KEY)[name].values
    assert draws.shape == (1, 100_000)
    assert bool(jnp.all(prior.support(draws)))


def test_a_simplex_density_integrates_to_one_and_draws_stay_on_it():
    prior = dist.Dirichlet(jnp.array([2.0, 3.0, 4.0]))
    model = cs.Model({"p": prior}, lambda key, t: t["p"] + 0.2 * jax.random.normal(key, (3,)))
    sims = cs.simulate(model, 256, key=jax.random.key(0))
    fit = cs.fit(model, sims, key=jax.random.key(1), posterior=SMALL, epochs=3, progress=False)
    n = 400
    side = (np.arange(n) + 0.5) / n
    a, b = (part.ravel() for part in np.meshgrid(side, side, indexing="ij"))
    inside = a + b < 1
    p = np.stack([a, b, 1 - a - b], axis=-1)[inside].astype(np.float32)
    density = np.exp(fit.log_prob({"p": p}, sims.x[0]).astype(float))
    np.testing.assert_allclose(density.sum() / n**2, 1.0, atol=0.02)
    draws = fit.sample(sims.x[0], 100_000, key=KEY)["p"].values[0]
    assert np.all(draws >= 0)
    np.testing.assert_allclose(draws.sum(axis=-1), 1.0, atol=1e-5)


def test_arviz_takes_the_draws(named_fit, named_sims):
    import arviz

    tree = cs.to_arviz(named_fit.sample(named_sims.x[:3], 100, key=KEY))
    summary = arviz.summary(tree, kind="stats")
    assert len(summary) == 6
    assert tree["posterior"]["mu"].dims[:2] == ("chain", "draw")


def test_draws_survive_netcdf(named_fit, named_sims, tmp_path):
    draws = named_fit.sample(named_sims.x[0], 100, key=KEY)
    draws.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    xr.testing.assert_identical(draws, xr.load_dataset(tmp_path / "draws.nc", engine="h5netcdf"))


def test_a_fit_is_shown(named_fit):
    assert repr(named_fit).startswith(
        "Fit: posterior and likelihood of mu, sigma\n  256 simulations"
    )
