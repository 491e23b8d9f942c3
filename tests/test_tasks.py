"""The problems with known answers: their densities and exact draws against one another."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.integrate import solve_ivp

import consilience as cs
from consilience.metrics import c2st
from consilience.tasks import hes1, sir, source, two_moons
from consilience.tasks.grid import grid_sample


def test_two_moons_likelihood_integrates_to_one():
    theta = jnp.array([0.3, -0.8])
    centre = two_moons._moved(theta) + jnp.array([0.25, 0.0])
    along = jnp.linspace(-0.2, 0.2, 1601)
    grid = jnp.stack(jnp.meshgrid(along, along, indexing="ij"), axis=-1).reshape(-1, 2) + centre
    density = jnp.exp(jax.vmap(two_moons.log_likelihood, in_axes=(None, 0))(theta, grid))
    total = float(jnp.sum(density) * (along[1] - along[0]) ** 2)
    assert abs(total - 1) < 2e-3


def test_two_moons_likelihood_at_the_truth_is_the_stated_limit():
    model = two_moons.model()
    sims = cs.simulate(model, 20_000, key=jax.random.key(0))
    mean = float(jnp.mean(jax.vmap(model.log_likelihood)(sims.theta, sims.x)))
    radius = 0.1 + 0.01 * np.random.default_rng(0).normal(size=10**6)
    limit = -stats.norm(0, 0.01).entropy() - np.log(np.pi) - np.log(radius).mean()
    assert abs(limit - 4.35) < 0.01
    assert abs(mean - limit) < 0.02


@pytest.mark.parametrize("x", [(0.0, 0.0), (-2.4, 0.3)])
def test_two_moons_exact_draws_follow_the_likelihood(x):
    """Against importance resampling of the flat prior; the second posterior is cut by it."""
    model = two_moons.model()
    x = jnp.array(x)
    draws = two_moons.exact_sample(x, jax.random.key(0), n=2000)
    assert bool(jnp.all(jnp.abs(draws) <= 2))
    rng = np.random.default_rng(0)
    cloud = jnp.asarray(rng.uniform(-2, 2, size=(2_000_000, 2)), float)
    log_w = jax.lax.map(lambda t: model.log_likelihood({"theta": t}, x), cloud, batch_size=10**5)
    weights = np.exp(np.asarray(log_w, np.float64) - float(log_w.max()))
    picked = np.asarray(cloud)[rng.choice(len(cloud), 2000, p=weights / weights.sum())]
    assert c2st(draws, jnp.asarray(picked), key=jax.random.key(1)) < 0.56


@pytest.mark.parametrize("away", [(0.0, 0.0), (3.0, 0.0), (-2.0, 2.0), (2.5, -2.0)])
def test_the_epidemic_follows_its_equations(away):
    """Against SciPy's integrator, up to three deviations out."""
    theta = np.log([0.4, 1 / 8]) + np.array([0.5, 0.2]) * away
    beta, gamma = np.exp(theta)
    exact = solve_ivp(
        lambda _, y: [-beta * y[0] * y[1], beta * y[0] * y[1] - gamma * y[1]],
        (0, sir.DAYS),
        [1 - 1e-6, 1e-6],
        t_eval=np.arange(1, sir.DAYS + 1),
        rtol=1e-10,
        atol=1e-14,
    ).y[1]
    np.testing.assert_allclose(sir.infected(jnp.asarray(theta)), exact, atol=1e-4)


def test_the_epidemic_counts_are_binomial():
    model = sir.model()
    theta = jnp.log(jnp.array([0.4, 1 / 8]))
    x = jax.vmap(lambda k: sir.simulator(k, theta))(jax.random.split(jax.random.key(0), 500))
    share = np.asarray(sir.infected(theta))
    error = np.asarray(x).mean(axis=0) / sir.ASKED - share
    assert np.all(np.abs(error) < 4 * np.sqrt(share * (1 - share) / sir.ASKED / 500) + 1e-6)
    expected = stats.binom(sir.ASKED, np.clip(share, 1e-8, None)).logpmf(x[0]).sum()
    np.testing.assert_allclose(model.log_likelihood({"theta": theta}, x[0]), expected, rtol=1e-3)


def apart(draws, other) -> tuple[float, float]:
    """How far means are from one another, in deviations, and by what share deviations differ."""
    means = np.abs(draws.mean(0) - other.mean(0)) / other.std(0)
    return float(means.max()), float(np.abs(draws.std(0) / other.std(0) - 1).max())


def test_a_grid_finds_a_density_a_thousandth_as_wide():
    """A correlated Gaussian, narrow enough that no centre of the coarse grid is near it."""
    centre, cov = np.array([1.2345, -0.777]), 1e-6 * np.array([[4.0, 3.6], [3.6, 4.0]])
    precision = jnp.asarray(np.linalg.inv(cov))
    log_density = lambda t: -0.5 * (t - centre) @ precision @ (t - centre)  # noqa: E731
    draws = np.asarray(
        grid_sample(log_density, 4000, jax.random.key(0), low=-6.0, high=6.0, zooms=4), float
    )
    exact = np.random.default_rng(0).multivariate_normal(centre, cov, 4000)
    mean, sd = apart(draws, exact)
    assert mean < 0.08
    assert sd < 0.06
    assert abs(np.corrcoef(draws.T)[0, 1] - 0.9) < 0.02


def nuts(model, x, start, n=2000):
    def density():
        theta = numpyro.sample("theta", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.factor("data", model.log_likelihood({"theta": theta}, x))

    kernel = numpyro.infer.NUTS(
        density, init_strategy=numpyro.infer.init_to_value(values={"theta": jnp.asarray(start)})
    )
    mcmc = numpyro.infer.MCMC(kernel, num_warmup=500, num_samples=n, progress_bar=False)
    mcmc.run(jax.random.key(0))
    return np.asarray(mcmc.get_samples()["theta"])


def test_the_sources_exact_draws_agree_with_nuts():
    model = source.model()
    sims = cs.simulate(model, 2, key=jax.random.key(4))
    draws = np.asarray(source.exact_sample(sims.x, jax.random.key(1), n=2000))
    chain = nuts(model, jnp.asarray(sims.x[1]), sims.theta["theta"][1])
    mean, sd = apart(draws[1], chain)
    assert mean < 0.15
    assert sd < 0.12


@pytest.mark.parametrize("signal", ["log", "raw"])
def test_the_source_is_the_same_as_a_vector_and_as_a_set(signal):
    vector, rows = (source.model(signal=signal, as_set=way) for way in (False, True))
    flat, measured = (cs.simulate(model, 5, key=jax.random.key(4)) for model in (vector, rows))
    np.testing.assert_allclose(flat.x, measured.x["signal"])
    theta = {"theta": jnp.array([0.3, -0.2])}
    each = [
        float(model.log_likelihood(theta, jax.tree.map(lambda part: jnp.asarray(part[0]), sims.x)))
        for model, sims in ((vector, flat), (rows, measured))
    ]
    assert each[0] == pytest.approx(each[1], rel=1e-5)


@pytest.mark.parametrize("signal", ["log", "raw"])
def test_the_truth_is_a_draw_of_the_sources_posterior(signal):
    """Over datasets, the rank of the truth among exact draws is uniform."""
    sims = cs.simulate(source.model(signal=signal), 100, key=jax.random.key(1))
    draws = source.exact_sample(sims.x, jax.random.key(1), n=199, signal=signal)
    ranks = (np.asarray(draws) < sims.theta["theta"][:, None]).mean(axis=1)
    for rank in ranks.T:
        assert stats.kstest(rank, "uniform").pvalue > 0.01


def test_measurement_points_fill_a_disk():
    radius = np.linalg.norm(source.WHERE, axis=1)
    assert source.WHERE.shape == (30, 2)
    assert 1.6 < radius.max() < 1.7
    gaps = np.linalg.norm(source.WHERE[:, None] - source.WHERE, axis=-1) + 9 * np.eye(30)
    assert gaps.min() > 0.3


def test_the_epidemics_exact_draws_agree_with_importance_sampling():
    model = sir.model()
    sims = cs.simulate(model, 2, key=jax.random.key(3))
    draws = np.asarray(sir.exact_sample(sims.x, jax.random.key(1), n=4000), float)
    for x, drawn in zip(jnp.asarray(sims.x), draws, strict=True):
        cover = stats.multivariate_t(drawn.mean(0), 1.5 * np.cov(drawn.T), df=5, seed=0)
        points = cover.rvs(4000)
        inside = stats.norm(sir.LOC, sir.SCALE).logpdf(points).sum(axis=1)
        fits = jax.vmap(lambda t, x=x: sir.log_likelihood(t, x))(jnp.asarray(points, float))
        log_w = np.asarray(fits, float) + inside - cover.logpdf(points)
        weights = np.exp(log_w - log_w.max())
        weights /= weights.sum()
        assert 1 / np.sum(weights**2) > 1000
        mean = weights @ points
        sd = np.sqrt(weights @ (points - mean) ** 2)
        np.testing.assert_array_less(np.abs(drawn.mean(0) - mean) / sd, 0.1)
        np.testing.assert_array_less(np.abs(drawn.std(0) / sd - 1), 0.08)


def test_messenger_rna_follows_its_equations():
    """Against SciPy's integrator, for draws of the prior."""
    sims = cs.simulate(hes1.model(), 20, key=jax.random.key(0))
    found = np.asarray(jax.vmap(hes1.messenger)(sims.theta))
    for i, row in enumerate(found):
        p0, h, k1, nu = (float(sims.theta[name][i]) for name in hes1.NAMES)

        def slope(_, y, p0=p0, h=h, k1=k1, nu=nu):
            m, a, b = y
            return [
                -0.03 * m + 1 / (1 + (b / p0) ** h),
                -0.03 * a + nu * m - k1 * a,
                -0.03 * b + k1 * a,
            ]

        exact = solve_ivp(
            slope, (0, 240), [2, 5, 3], t_eval=np.arange(30, 241, 30), rtol=1e-9, atol=1e-9
        )
        np.testing.assert_allclose(row, exact.y[0], atol=2e-3)


@pytest.mark.slow
def test_reference_chains_of_hes1_agree_with_importance_sampling():
    """Against draws of the prior, weighted by the likelihood of the measured data."""
    model = hes1.model(likelihood=True)
    found = hes1.reference_sample(
        jnp.asarray(hes1.OBSERVED)[None], jax.random.key(0), n=1000, length=200, warmup=200
    )
    many = cs.simulate(model, 100_000, key=jax.random.key(1)).theta
    x = jnp.asarray(hes1.OBSERVED)
    each = lambda theta: hes1.log_likelihood(theta, x)  # noqa: E731
    log_w = np.asarray(jax.lax.map(each, jax.tree.map(jnp.asarray, many), batch_size=5000), float)
    weights = np.exp(log_w - log_w.max())
    weights /= weights.sum()
    logs = np.log(np.stack([many[name] for name in hes1.NAMES], axis=1))
    mean = weights @ logs
    sd = np.sqrt(weights @ (logs - mean) ** 2)
    assert 1 / np.sum(weights**2) > 50
    drawn = np.asarray(found.draws[0])
    np.testing.assert_array_less(np.abs(drawn.mean(0) - mean) / sd, 0.5)
    np.testing.assert_array_less(np.abs(np.log(drawn.std(0) / sd)), 0.5)
    assert float(found.r_hat.max()) < 1.05
