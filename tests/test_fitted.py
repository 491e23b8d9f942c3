"""Using a fit: draws, densities, their shapes and their blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from scipy import integrate

import consilience as cs
from consilience.posterior import blocks
from consilience.posterior import fit as fitted
from tests.conftest import quick

pytestmark = pytest.mark.usefixtures("quick_compilation")

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


def test_blocks_change_no_density_and_repeat_no_draw(named_fit, named_sims, monkeypatch):
    x = named_sims.x[:7]
    theta = named_fit.sample(x, 30, key=KEY)
    whole = named_fit.log_prob(theta, x)
    monkeypatch.setattr(blocks, "DRAWS_AT_ONCE", 16)
    np.testing.assert_allclose(named_fit.log_prob(theta, x), whole, rtol=1e-4, atol=1e-4)
    draws = named_fit.sample(x, 30, key=KEY)["mu"].values
    assert np.isfinite(draws).all()
    assert len(np.unique(draws)) == draws.size


def test_blocks_of_few_shapes_cover_every_request(named_fit, named_sims, monkeypatch):
    shapes = set()

    def numbered(posterior, joint, key, x, numbers, start, n, mesh):
        """In place of draws, what dataset they are of and which draw they are."""
        shapes.add((len(numbers), n))
        dataset, draw = np.meshgrid(numbers, start + np.arange(n), indexing="ij")
        return {"mu": dataset, "sigma": draw}, None

    monkeypatch.setattr(fitted, "_draw", numbered)
    for n in (600, 700, 800, 1000):
        for m in (1, 10 + n % 7):
            draws = named_fit.sample(named_sims.x[:m], n, key=KEY).isel(chain=0)
            assert np.all(draws["mu"] == np.arange(m)[:, None])
            assert np.all(draws["sigma"] == np.arange(n))
    assert shapes == {(1, 1024), (4, 1024)}


def test_log_prob_takes_draws_as_they_are(named_fit, named_sims):
    x = named_sims.x[:7]
    draws = named_fit.sample(x, 30, key=KEY)
    batch = named_fit.log_prob(draws, x)
    assert batch.shape == (7, 1, 30)
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


def test_swapped_arguments_of_sample_show_how_to_call_it(named_fit, named_sims, unchecked):
    x, call = named_sims.x[0], r"fit\.sample\(x, n, key=key\)"
    with pytest.raises(TypeError, match=rf"{call}, must be a whole number, got an array"):
        named_fit.sample(100, x, key=KEY)
    with pytest.raises(TypeError, match=rf"{call}, must be a whole number, got Array"):
        named_fit.sample(x, KEY, key=KEY)
    with pytest.raises(TypeError, match=rf"no random key: it is passed by its name, in {call}"):
        named_fit.sample(x, KEY)
    for wrong, got in ((3, "int"), (None, "NoneType"), (jax.random.split(KEY), r"shape \(2,\)")):
        with pytest.raises(TypeError, match=rf"one random key, .* in {call}; got .*{got}"):
            named_fit.sample(x, 10, key=wrong)


def test_a_key_of_the_old_kind_gives_the_draws_of_the_new(named_fit, named_sims, unchecked):
    x = named_sims.x[0]
    old = named_fit.sample(x, 5, key=jax.random.PRNGKey(3))
    xr.testing.assert_equal(old, named_fit.sample(x, 5, key=jax.random.key(3)))


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array])
def test_numpy_counts_are_counts(named_fit, named_sims, unchecked, kind):
    assert named_fit.sample(named_sims.x[0], kind(3), key=KEY).sizes["draw"] == 3


def test_whole_numbers_beyond_32_bits_do_not_wrap_around(named_fit, named_sims):
    for large in (2**31, -(2**40), 2**63 - 1):
        x = np.full((10, 1), large)
        same = x.astype(float)
        xr.testing.assert_equal(named_fit.sample(x, 3, key=KEY), named_fit.sample(same, 3, key=KEY))
    one = named_sims.x[0]
    theta = {"mu": np.array([2**32]), "sigma": np.array([1])}
    same = {"mu": np.array([2.0**32]), "sigma": np.array([1.0])}
    np.testing.assert_array_equal(named_fit.log_prob(theta, one), named_fit.log_prob(same, one))


def test_observations_beyond_float32_are_refused(named_fit):
    x = np.full((10, 1), 1e39)
    with pytest.raises(ValueError, match=r"values beyond 3.4e\+38, .* rescale the data"):
        named_fit.sample(x, key=KEY)
    with pytest.raises(ValueError, match=r"values beyond 3.4e\+38, .* at \[1\] of the batch"):
        named_fit.sample(np.stack([np.zeros((10, 1)), x]), key=KEY)


def test_the_likelihood_is_in_the_users_data(named_fit, named_sims):
    theta = {name: values[0] for name, values in named_sims.theta.items()}
    likelihood, row = named_fit.likelihood, np.linspace(-40, 40, 4001)

    @jax.jit
    def run(row):
        """Log densities with the last row set to each value, and with all rows zero; a draw."""
        x = jnp.asarray(named_sims.x[0])
        each = jax.vmap(lambda value: likelihood.log_prob(theta, x.at[9, 0].set(value)))(row)
        zeros = likelihood.log_prob(theta, jnp.zeros((10, 1)))
        return each, zeros, likelihood.sample(KEY, theta)

    each, zeros, x = jax.device_get(run(row))
    # Nine rows fixed: what is left integrates to the density of those nine. Rows are
    # independent, so a tenth of ten zero rows is what one adds.
    total = integrate.trapezoid(np.exp(each.astype(float)), row)
    np.testing.assert_allclose(np.log(total), each[2000] - zeros / 10, atol=5e-3)
    assert x.shape == (10, 1)


def test_a_density_of_a_positive_parameter_integrates_to_one(named_fit, named_sims):
    mu, log_sigma = np.linspace(-12, 12, 400), np.linspace(-10, 10, 400)
    a, b = np.meshgrid(mu, log_sigma, indexing="ij")
    log_q = named_fit.log_prob({"mu": a, "sigma": np.exp(b)}, named_sims.x[0]).astype(float)
    inner = integrate.trapezoid(np.exp(log_q + b), log_sigma)
    np.testing.assert_allclose(integrate.trapezoid(inner, mu), 1.0, atol=5e-3)
    draws = named_fit.sample(named_sims.x[0], 100_000, key=KEY)
    assert draws["sigma"].shape == (1, 100_000)
    assert bool((draws["sigma"] > 0).all())


def test_a_density_on_an_interval_and_a_simplex_integrates_to_one_and_draws_stay_there():
    prior = {"a": dist.Uniform(-1.0, 2.0), "p": dist.Dirichlet(jnp.array([2.0, 3.0, 4.0]))}

    def simulator(key, t):
        return jnp.append(t["p"], t["a"]) + 0.2 * jax.random.normal(key, (4,))

    model = cs.Model(prior, simulator)
    sims = cs.simulate(model, 256, key=jax.random.key(0))
    fit = quick(model, sims, epochs=3)
    # Gauss-Legendre in three numbers between zero and one; p breaks a stick at two of them.
    nodes, weights = np.polynomial.legendre.leggauss(60)
    r, s, t = np.meshgrid(*[(nodes + 1) / 2] * 3, indexing="ij")
    p = np.stack([s, (1 - s) * t, (1 - s) * (1 - t)], axis=-1)
    log_q = fit.log_prob({"a": 3 * r - 1, "p": p}, sims.x[0]).astype(float)
    total = np.einsum("ijk,i,j,k", np.exp(log_q) * 3 * (1 - s), *[weights / 2] * 3)
    np.testing.assert_allclose(total, 1.0, atol=5e-3)

    draws = fit.sample(sims.x[0], 100_000, key=KEY)
    assert np.all((draws["a"] >= -1) & (draws["a"] <= 2))
    assert draws["p"].shape == (1, 100_000, 3)
    assert np.all(draws["p"] >= 0)
    np.testing.assert_allclose(draws["p"].values.sum(axis=-1), 1.0, atol=1e-5)


def test_more_draws_than_memory_holds_are_refused(named_fit, named_sims):
    with pytest.raises(MemoryError, match=r"1000000000000 draws take at least 8 TB of memory"):
        named_fit.sample(named_sims.x[0], 10**12, key=KEY)


def test_more_steps_of_chains_than_memory_holds_are_refused():
    model = cs.Model(
        {"mu": dist.Normal(0.0, 1.0)},
        lambda key, t: t["mu"] + jax.random.normal(key, (2,)),
        lambda t, x: dist.Normal(t["mu"], 1.0).log_prob(x).sum(),
    )
    fit = quick(model, cs.simulate(model, 64, key=KEY), epochs=1)
    with pytest.raises(MemoryError, match=r"1000000000000 draws take at least 4 TB of memory"):
        fit.sample(np.zeros(2), 10**12, key=KEY, method="nuts")


def test_arviz_takes_the_draws(named_fit, named_sims):
    import arviz

    tree = cs.to_arviz(named_fit.sample(named_sims.x[:7], 30, key=KEY))
    summary = arviz.summary(tree, kind="stats")
    assert len(summary) == 14
    assert tree["posterior"]["mu"].dims[:2] == ("chain", "draw")


def test_draws_survive_netcdf(named_fit, named_sims, tmp_path):
    draws = named_fit.sample(named_sims.x[0], 50, key=KEY)
    draws.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    xr.testing.assert_identical(draws, xr.load_dataset(tmp_path / "draws.nc", engine="h5netcdf"))


def test_a_fit_is_shown(named_fit):
    assert repr(named_fit).startswith(
        "Fit: posterior and likelihood of mu, sigma\n  256 simulations"
    )
