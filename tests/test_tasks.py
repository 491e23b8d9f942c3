"""The problems with known answers: their densities and exact draws against one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.integrate import solve_ivp

import consilience as cs
from consilience.metrics import c2st
from consilience.tasks import sir, two_moons


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
