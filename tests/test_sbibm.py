"""The tasks of the SBI benchmark: against NumPy and SciPy, written apart, and exact posteriors."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import expit, logsumexp

from consilience.simulation.simulate import simulate
from consilience.tasks.sbibm import (
    bernoulli_glm,
    gaussian_linear,
    gaussian_mixture,
    sir,
    slcp,
    two_moons,
)
from consilience.tasks.sbibm.registry import TASKS, sbibm_data

KEY = jax.random.key(0)


def runs(task, theta, n: int) -> np.ndarray:
    """Data simulated at one parameter, in double precision."""
    keys = jax.random.split(KEY, n)
    made = jax.vmap(task.simulator, in_axes=(0, None))(keys, jnp.asarray(theta, float))
    return np.asarray(made, np.float64)


def near(values: np.ndarray, mean, sd):
    """The mean of independent values is within five standard errors of the expected one."""
    error = np.abs(values.mean(axis=0) - mean) * np.sqrt(len(values)) / sd
    assert np.all(error < 5), error


# Simulators and likelihoods


def test_gaussian_linear_is_scipys_normal():
    theta = np.random.default_rng(0).normal(size=10) * 0.3
    x = runs(gaussian_linear, theta, 5000)
    near(x, theta, np.sqrt(0.1))
    np.testing.assert_allclose(np.cov(x.T), 0.1 * np.eye(10), atol=0.012)
    expected = stats.multivariate_normal(theta, 0.1 * np.eye(10)).logpdf(x[0])
    found = gaussian_linear.log_likelihood(jnp.asarray(theta, float), jnp.asarray(x[0], float))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_gaussian_mixture_is_scipys_and_integrates_to_one():
    theta = np.array([1.5, -7.0])
    x = runs(gaussian_mixture, theta, 20_000)
    near(x, theta, np.sqrt(0.505))
    near((x - theta) ** 2, 0.505, np.sqrt(0.5 * 3 + 0.5 * 3e-4 - 0.505**2))

    def density(y, x):
        parts = [stats.norm(theta, sd).logpdf([x, y]).sum() for sd in (1.0, 0.1)]
        return np.exp(logsumexp(parts) - np.log(2))

    for row in x[:5]:
        found = gaussian_mixture.log_likelihood(jnp.asarray(theta, float), jnp.asarray(row, float))
        np.testing.assert_allclose(np.exp(found), density(row[1], row[0]), rtol=1e-3)
    along = np.linspace(-6, 6, 601)
    grid = jnp.asarray(np.stack(np.meshgrid(along, along), -1).reshape(-1, 2) + theta, float)
    each = jax.vmap(gaussian_mixture.log_likelihood, in_axes=(None, 0))(
        jnp.asarray(theta, float), grid
    )
    assert abs(float(jnp.sum(jnp.exp(each))) * (along[1] - along[0]) ** 2 - 1) < 2e-3


def test_two_moons_is_a_crescent_moved_by_theta():
    theta = np.array([0.4, -0.7])
    x = runs(two_moons, theta, 5000)
    moved = np.array([-abs(theta.sum()), theta[1] - theta[0]]) / np.sqrt(2)
    d = x - moved - [0.25, 0.0]
    radius, angle = np.hypot(*d.T), np.arctan2(d[:, 1], d[:, 0])
    assert stats.kstest(radius, stats.norm(0.1, 0.01).cdf).pvalue > 1e-3
    assert stats.kstest(angle, stats.uniform(-np.pi / 2, np.pi).cdf).pvalue > 1e-3
    # The density of polar coordinates, with their Jacobian.
    expected = stats.norm(0.1, 0.01).logpdf(radius) - np.log(np.pi * radius)
    found = jax.vmap(two_moons.log_likelihood, in_axes=(None, 0))(
        jnp.asarray(theta, float), jnp.asarray(x, float)
    )
    np.testing.assert_allclose(found, expected, atol=2e-3)


def slcp_moments(theta) -> tuple[np.ndarray, np.ndarray]:
    s1, s2, rho = theta[2] ** 2, theta[3] ** 2, np.tanh(theta[4])
    cov = np.array([[s1**2, rho * s1 * s2], [rho * s1 * s2, s2**2]])
    return np.asarray(theta[:2]), cov + 1e-6 * np.eye(2)


@pytest.mark.parametrize(
    "theta",
    [(0.7, -2.9, -1.0, -0.9, 0.6), (1.0, 0.5, 2.9, -0.3, -2.8), (0.0, 0.0, 0.01, 1.5, 1.0)],
)
def test_slcp_is_four_points_of_scipys_normal(theta):
    mean, cov = slcp_moments(theta)
    x = runs(slcp, theta, 5000).reshape(-1, 4, 2)
    sd = np.sqrt(np.diag(cov))
    near(x.reshape(-1, 2), mean, sd)
    scaled = np.cov(((x - mean) / sd).reshape(-1, 2).T)
    np.testing.assert_allclose(scaled, cov / np.outer(sd, sd), atol=0.06)
    law = stats.multivariate_normal(mean, cov)
    expected = [law.logpdf(row).sum() for row in x[:20]]
    found = jax.vmap(slcp.log_likelihood, in_axes=(None, 0))(
        jnp.asarray(theta, float), jnp.asarray(x[:20].reshape(-1, 8), float)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=0.02)


def test_slcps_factor_is_that_of_the_covariance():
    for theta in np.random.default_rng(0).uniform(-3, 3, size=(20, 5)):
        a, b, c = map(float, slcp.spread(jnp.asarray(theta, float)))
        np.testing.assert_allclose([[a, 0], [b, c]], np.linalg.cholesky(slcp_moments(theta)[1]),
                                   rtol=2e-3, atol=1e-6)  # fmt: skip


def glm_design() -> np.ndarray:
    stimulus = np.random.RandomState(42).randn(100).astype(np.float32)
    design = np.ones((100, 10))
    for t in range(100):
        for lag in range(9):
            design[t, 1 + lag] = stimulus[t - lag] if t >= lag else 0.0
    return design


def test_the_glm_has_binary_spikes_and_their_statistics():
    design, theta = glm_design(), np.random.default_rng(1).normal(size=10) * 0.5
    np.testing.assert_allclose(bernoulli_glm.DESIGN, design, atol=1e-6)
    share = expit(design @ theta)
    x = runs(bernoulli_glm, theta, 5000)
    near(x, design.T @ share, np.sqrt((design.T**2) @ (share * (1 - share))))
    expected_cov = design.T @ np.diag(share * (1 - share)) @ design
    np.testing.assert_allclose(np.cov(x.T), expected_cov, atol=0.08 * expected_cov.max())


def test_the_glms_likelihood_differs_from_bernoullis_by_a_constant():
    design, rng = glm_design(), np.random.default_rng(2)
    spikes = rng.random(100) < 0.4
    x = jnp.asarray(design.T @ spikes, float)
    apart = []
    for theta in rng.normal(size=(6, 10)):
        exact = stats.bernoulli(expit(design @ theta)).logpmf(spikes).sum()
        apart.append(float(bernoulli_glm.log_likelihood(jnp.asarray(theta, float), x)) - exact)
    np.testing.assert_allclose(apart, apart[0], atol=2e-3)


@pytest.mark.slow
def test_the_glms_prior_penalises_second_differences():
    d = np.zeros((9, 9))
    for i in range(9):
        d[i, i] = 1.0
        if i:
            d[i, i - 1] = -1.0
    f = d @ d + np.diag((np.arange(9) / 9) ** 0.5)
    precision = np.block([[np.array([[0.5]]), np.zeros((1, 9))], [np.zeros((9, 1)), f.T @ f]])
    law = stats.multivariate_normal(np.zeros(10), np.linalg.inv(precision))
    draws = simulate(bernoulli_glm.TASK.model(), 50, key=KEY).theta["theta"]
    found = jax.vmap(lambda t: bernoulli_glm.TASK.model().prior.density({"theta": t}))(draws)
    np.testing.assert_allclose(found, law.logpdf(draws), atol=5e-3)


def sir_shares(beta: float, gamma: float) -> np.ndarray:
    slope = lambda _, y: [-beta * y[0] * y[1] / 1e6, beta * y[0] * y[1] / 1e6 - gamma * y[1]]  # noqa: E731
    times = np.arange(0, 154, 17)
    solved = integrate.solve_ivp(
        slope, (0, 153), [1e6 - 1, 1.0], t_eval=times, rtol=1e-10, atol=1e-10
    )
    return solved.y[1] / 1e6


RATES = [(0.4, 0.125), (2.0, 0.1), (0.1, 0.2), (0.15, 0.07)]


@pytest.mark.parametrize("rates", RATES)
def test_the_epidemic_follows_its_equations(rates):
    exact = sir_shares(*rates)
    found = np.asarray(sir.infected(jnp.array(rates)))
    np.testing.assert_allclose(found, exact, atol=1e-5, rtol=5e-3)


def test_the_epidemics_counts_are_binomial():
    share = sir_shares(0.4, 0.125)
    x = runs(sir, (0.4, 0.125), 2000)
    near(x, 1000 * share, np.sqrt(1000 * share * (1 - share)) + 1e-3)
    each = stats.binom(1000, share)
    found = jax.vmap(sir.log_likelihood, in_axes=(None, 0))(
        jnp.array([0.4, 0.125]), jnp.asarray(x[:10], float)
    )
    np.testing.assert_allclose(found, [each.logpmf(row).sum() for row in x[:10]], atol=0.03)


def test_the_epidemics_likelihood_has_gradients_over_the_prior():
    sims = simulate(sir.TASK.model(), 50, key=KEY)
    gradients = jax.vmap(jax.grad(sir.log_likelihood))(
        jnp.asarray(sims.theta["theta"]), jnp.asarray(sims.x)
    )
    assert np.isfinite(gradients).all()


# Observations and files


@pytest.mark.parametrize("name", TASKS)
def test_observations_are_the_same_every_time(name):
    once, again = TASKS[name].observations(), TASKS[name].observations()
    assert once.observations.shape[0] == once.parameters.shape[0] == 10
    np.testing.assert_array_equal(once.observations, again.observations)
    assert len(np.unique(once.parameters, axis=0)) == 10


@pytest.mark.parametrize("name", TASKS)
def test_with_and_without_the_likelihood_runs_are_the_same(name):
    with_it, without = (TASKS[name].model(likelihood=given) for given in (True, False))
    assert with_it.likelihood is not None and without.likelihood is None
    np.testing.assert_array_equal(simulate(with_it, 5, key=KEY).x, simulate(without, 5, key=KEY).x)


def write_problem(folder: Path, **changes):
    arrays: dict = {
        "observations": np.zeros((3, 2)),
        "parameters": np.zeros((3, 2)),
        "reference": np.zeros((3, 20, 2)),
    }
    np.savez(
        folder / "two_moons.npz",
        **{k: v for k, v in {**arrays, **changes}.items() if v is not None},
    )


def test_files_are_read_and_refused_with_a_reason(tmp_path):
    with pytest.raises(ValueError, match="no task 'moons', only gaussian_linear"):
        sbibm_data(tmp_path, "moons")
    with pytest.raises(ValueError, match=r"pass the folder that has two_moons\.npz with --data"):
        sbibm_data(tmp_path, "two_moons")
    write_problem(tmp_path, reference=None)
    with pytest.raises(ValueError, match="but reference is missing: it has observations, param"):
        sbibm_data(tmp_path, "two_moons")
    write_problem(tmp_path, observations=np.zeros((3, 8)))
    with pytest.raises(ValueError, match=r"observations in .* of the shape \(3, 2\), got \(3, 8\)"):
        sbibm_data(tmp_path, "two_moons")
    write_problem(tmp_path, parameters=np.full((3, 2), np.nan))
    with pytest.raises(ValueError, match=r"parameters in .* must be finite"):
        sbibm_data(tmp_path, "two_moons")
    write_problem(tmp_path)
    assert sbibm_data(tmp_path, "two_moons").reference.shape == (3, 20, 2)


# Reference posteriors


def log_posterior(task, x, theta):
    """Up to a constant."""
    model = task.model()
    return model.log_likelihood({"theta": theta}, x) + model.prior.density({"theta": theta})


def exact_posterior(task, x, centre, cov, *, half: slice = slice(0), n: int = 40_000):
    """Weighted means and deviations of the posterior, by importance sampling in NumPy.

    `half`: parameters that are positive, where each sign has the same posterior.
    """
    law = stats.multivariate_t(centre, cov, df=5, seed=0)
    points = law.rvs(n)
    log_density = functools.partial(log_posterior, task, x)
    log_p = np.asarray(jax.lax.map(log_density, jnp.asarray(points, float), batch_size=2**14))
    inside = np.isfinite(log_p) & np.all(points[:, half] > 0, axis=1)
    log_w = np.where(inside, log_p, -np.inf) - law.logpdf(points)
    weights = np.exp(log_w - log_w.max())
    weights /= weights.sum()
    assert 1 / np.sum(weights**2) > 2000
    mean = weights @ points
    return mean, np.sqrt(weights @ (points - mean) ** 2)


def test_gaussian_linear_draws_are_the_conjugate_posterior():
    x = jnp.asarray(gaussian_linear.TASK.observations().observations[:2])
    draws = np.asarray(gaussian_linear.reference(x, 4000, key=KEY), np.float64)
    assert draws.shape == (2, 4000, 10)
    # From precisions: 10 of the prior and 10 of the one datum.
    near(draws[1], 10 * np.asarray(x)[1] / 20, np.sqrt(1 / 20))
    np.testing.assert_allclose(np.cov(draws[1].T), np.eye(10) / 20, atol=0.005)


@pytest.mark.parametrize("x", [(0.0, 3.0), (9.8, -10.3)])
def test_gaussian_mixture_draws_follow_the_cut_mixture(x):
    """The second posterior is cut by the prior's square on two sides."""
    draws = np.asarray(gaussian_mixture.reference(jnp.array(x), 5000, key=KEY), np.float64)
    assert np.abs(draws).max() <= 10

    def inside(sd):
        return np.prod([np.diff(stats.norm(at, sd).cdf([-10, 10]))[0] for at in x])

    mass = np.array([inside(1.0), inside(0.1)])
    for i, at in enumerate(x):
        laws = [stats.truncnorm((-10 - at) / sd, (10 - at) / sd, at, sd) for sd in (1.0, 0.1)]

        def cdf(t, laws=laws):
            return sum(m * law.cdf(t) for m, law in zip(mass, laws, strict=True)) / mass.sum()

        assert stats.kstest(draws[:, i], cdf).pvalue > 1e-3


@pytest.mark.slow
def test_two_moons_draws_are_cut_by_the_square_and_follow_the_likelihood():
    x = jnp.array([-1.0, 0.1])
    draws = np.asarray(two_moons.reference(x, 4000, key=KEY))
    assert np.abs(draws).max() <= 1
    along = np.linspace(-1, 1, 1001)
    grid = np.stack(np.meshgrid(along, along), -1).reshape(-1, 2)
    log_p = jax.vmap(two_moons.log_likelihood, in_axes=(0, None))(jnp.asarray(grid, float), x)
    weights = np.exp(np.asarray(log_p, np.float64))
    weights /= weights.sum()
    mean = weights @ grid
    sd = np.sqrt(weights @ (grid - mean) ** 2)
    near(draws, mean, sd)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.05)


@pytest.mark.slow
def test_slcp_draws_agree_with_importance_sampling_in_one_quadrant():
    x = jnp.asarray(slcp.TASK.observations().observations[0])
    draws = np.asarray(slcp.reference(x, 20_000, key=KEY), np.float64)
    assert np.abs(draws).max() <= 3
    for sign in np.sign(draws[:, 2:4]).T:
        assert abs(sign.mean()) < 0.05
    folded = draws.copy()
    folded[:, 2:4] = np.abs(folded[:, 2:4])
    wide = 1.5 * np.cov(folded.T)
    mean, sd = exact_posterior(slcp.TASK, x, folded.mean(0), wide, half=slice(2, 4))
    np.testing.assert_array_less(np.abs(folded.mean(0) - mean) / sd, 0.06)
    np.testing.assert_array_less(np.abs(folded.std(0) / sd - 1), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bernoulli_glm", "sir"])
def test_draws_agree_with_importance_sampling(name):
    task = TASKS[name]
    x = jnp.asarray(task.observations().observations[1])
    draws = np.asarray(task.reference(x, 10_000, key=KEY), np.float64)
    mean, sd = exact_posterior(task, x, draws.mean(0), 1.3 * np.cov(draws.T))
    np.testing.assert_array_less(np.abs(draws.mean(0) - mean) / sd, 0.06)
    np.testing.assert_array_less(np.abs(draws.std(0) / sd - 1), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_truth_is_a_draw_of_the_posterior(name):
    """Over datasets, the rank of the truth among reference draws is uniform."""
    sims = simulate(TASKS[name].model(), 20, key=jax.random.key(7))
    fewer = {"proposals": 2**15} if name in ("slcp", "bernoulli_glm") else {}
    draws = np.asarray(TASKS[name].reference(jnp.asarray(sims.x), 99, key=KEY, **fewer))
    ranks = (draws < sims.theta["theta"][:, None]).mean(axis=1)
    for rank in ranks.T:
        assert stats.kstest(rank, "uniform").pvalue > 1e-3
