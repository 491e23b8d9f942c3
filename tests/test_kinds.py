"""What is found out about data that were not declared: the kind of two axes, and heavy tails."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import integrate, stats

import consilience as cs
from consilience.model.data import data_space
from consilience.model.tails import find_tails
from consilience.training.kinds import find_kind
from tests.conftest import TINY, quick

PRIOR = {"mu": dist.Normal(0.0, 1.0), "rho": dist.Uniform(0.3, 0.9)}


def rows(key, theta):
    return theta["mu"] + jax.random.normal(key, (8, 2))


def walk(key, theta):
    """A stationary autoregression: each row alone has the same distribution."""
    noise = jax.random.normal(key, (8, 2)) * jnp.sqrt(1 - theta["rho"] ** 2)

    def step(value, e):
        value = theta["rho"] * value + e
        return value, value

    start = jax.random.normal(jax.random.fold_in(key, 1), (2,))
    return theta["mu"] + jax.lax.scan(step, start, noise)[1]


def trend(key, theta):
    return theta["mu"] * jnp.linspace(-1, 1, 8)[:, None] + jax.random.normal(key, (8, 2))


def of_rows(theta, x):
    return dist.Normal(theta["mu"], 1.0).log_prob(x).sum()


def of_mean(theta, x):
    """Exchangeable, and not a sum over rows."""
    return dist.Normal(theta["mu"], 1.0).log_prob(x.mean()) - jnp.var(x)


def of_steps(theta, x):
    return dist.Normal(theta["rho"] * x[:-1], 1.0).log_prob(x[1:]).sum()


@pytest.mark.parametrize(
    ("simulator", "log_likelihood", "kind"),
    [
        (rows, of_rows, cs.Set()),
        (rows, of_mean, cs.Set(independent=False)),
        (rows, of_steps, cs.Series()),
        (rows, None, cs.Set()),
        (walk, None, cs.Series()),
        (trend, None, cs.Series()),
    ],
)
def test_the_kind_is_found(simulator, log_likelihood, kind, caplog):
    model = cs.Model(PRIOR, simulator, log_likelihood)
    sims = cs.simulate(model, 300, key=jax.random.key(0))
    assert find_kind(model, sims) == kind
    assert len(caplog.records) == 1 and f"data=cs.{type(kind).__name__}(" in caplog.text


@pytest.mark.parametrize("simulator", [walk, trend])
def test_ordered_rows_are_not_taken_for_a_set(simulator):
    model = cs.Model(PRIOR, simulator)
    for seed in range(4):
        sims = cs.simulate(model, 300, key=jax.random.key(seed))
        assert find_kind(model, sims) == cs.Series()


def test_exchangeable_rows_are_rarely_taken_for_a_series():
    model = cs.Model(PRIOR, rows)
    kinds = [
        find_kind(model, cs.simulate(model, 300, key=jax.random.key(seed))) for seed in range(10)
    ]
    # One in a hundred is expected to look ordered.
    assert kinds.count(cs.Set()) >= 9


def wave(key, theta):
    """A frequency that only the order of rows shows, and neighbours alike or not by it."""
    k_phase, k_noise = jax.random.split(key)
    phase = jax.random.uniform(k_phase, maxval=2 * jnp.pi)
    time = jnp.arange(20.0)
    return jnp.sin(4 * theta["rho"] * time + phase)[:, None] + 0.1 * jax.random.normal(
        k_noise, (20, 1)
    )


def swinging(key, theta):
    """An autoregression with coefficients of both signs."""
    noise = jax.random.normal(key, (20, 1))

    def step(value, e):
        value = 0.6 * jnp.tanh(theta["mu"]) * value + e
        return value, value

    return jax.lax.scan(step, jnp.zeros(1), noise)[1]


@pytest.mark.parametrize("simulator", [wave, swinging])
def test_neighbours_that_are_alike_in_some_runs_make_a_series(simulator):
    model = cs.Model(PRIOR, simulator)
    for seed in range(2):
        sims = cs.simulate(model, 300, key=jax.random.key(seed))
        assert find_kind(model, sims) == cs.Series()


def test_a_likelihood_of_ordered_rows_is_that_of_a_series():
    def ordered(key, theta):
        return jnp.sort(jax.random.normal(key, (8, 1)), axis=0)

    def log_likelihood(theta, x):
        inside = jnp.all(x[1:] >= x[:-1])
        return jnp.where(inside, dist.Normal(0.0, 1.0).log_prob(x).sum(), -jnp.inf)

    model = cs.Model(PRIOR, ordered, log_likelihood)
    assert find_kind(model, cs.simulate(model, 50, key=jax.random.key(0))) == cs.Series()


def test_whole_numbers_stay_whole_for_the_likelihood():
    def classes(key, theta):
        return jax.random.categorical(key, jnp.stack([theta["mu"], 0.0]), shape=(8, 1))

    def log_likelihood(theta, x):
        return jax.nn.log_softmax(jnp.stack([theta["mu"], 0.0]))[x].sum()

    model = cs.Model(PRIOR, classes, log_likelihood)
    assert find_kind(model, cs.simulate(model, 50, key=jax.random.key(0))) == cs.Set()


def test_one_recipe_takes_rows_that_were_tested_together():
    model = cs.Model(PRIOR, rows)
    sims = cs.simulate(model, 100, key=jax.random.key(0))
    found = quick(model, sims).posterior.data.layout.kind
    assert found == cs.Set(independent=False)


def test_what_is_declared_stays(caplog):
    model = cs.Model(PRIOR, rows, data=cs.Series())
    assert find_kind(model, cs.simulate(model, 50, key=jax.random.key(0))) == cs.Series()
    assert not caplog.records


def test_too_few_runs_are_a_series():
    model = cs.Model(PRIOR, rows)
    assert find_kind(model, cs.simulate(model, 10, key=jax.random.key(0))) == cs.Series()


def test_a_fit_takes_what_was_found():
    model = cs.Model(PRIOR, rows, of_rows)
    sims = cs.simulate(model, 64, key=jax.random.key(0))
    assert quick(model, sims).posterior.data.layout.kind == cs.Set()


# Heavy tails


RNG = np.random.default_rng(0)
SHAPES = {
    "log-normal": np.exp(3.0 * RNG.standard_normal(2000)),
    "cauchy": 5.0 + RNG.standard_cauchy(2000),
    "one far value": np.append(RNG.standard_normal(1999), 1e12),
    "wild counts": np.floor(np.exp(2.0 + 2.0 * RNG.standard_normal(2000))),
}


@pytest.mark.parametrize("name", SHAPES)
def test_heavy_tails_are_found_and_map_back(name):
    y = SHAPES[name][:, None]
    tails = find_tails(y)
    assert tails is not None
    z = np.asarray(tails.forward(jnp.asarray(y, float)))
    assert stats.kurtosis(z)[0] < 0.1 * stats.kurtosis(y)[0]
    np.testing.assert_allclose(tails.back(jnp.asarray(z)), y, rtol=2e-4, atol=1e-3)
    slope = jax.vmap(jax.grad(lambda v: tails.forward(v)[0]))(jnp.asarray(y[:50, 0], float))
    np.testing.assert_allclose(
        tails.log_slope(jnp.asarray(y[:50])), jnp.log(slope)[:, None], rtol=1e-4
    )


@pytest.mark.parametrize(
    "y",
    [
        RNG.standard_normal(2000),
        RNG.uniform(size=2000),
        RNG.poisson(20.0, 2000).astype(float),
        np.append(RNG.normal(-5, 1, 1000), RNG.normal(5, 1, 1000)),
        RNG.integers(0, 2, 2000).astype(float),
        np.zeros(2000),
        np.maximum(RNG.standard_normal(2000), 0.0),
        np.where(RNG.uniform(size=2000) < 0.6, 0.0, RNG.normal(5.0, 0.1, 2000)),
    ],
)
def test_other_values_stay_as_they_are(y):
    assert find_tails(y[:, None]) is None


def test_a_learned_likelihood_of_heavy_tails_integrates_to_one():
    def simulator(key, theta):
        return jnp.exp(theta + 2.0 * jax.random.normal(key, (1,)))

    model = cs.Model(dist.Normal(0.0, 1.0), simulator)
    sims = cs.simulate(model, 500, key=jax.random.key(0))
    assert data_space(sims.x, None).tails
    fit = quick(model, sims, likelihood=TINY)
    log_t = np.linspace(-20, 20, 4001)
    x = np.sign(log_t) * np.expm1(np.abs(log_t))
    density = jax.vmap(lambda v: fit.likelihood.log_prob({"theta": jnp.zeros(())}, v[None]))(
        jnp.asarray(x, float)
    )
    total = integrate.trapezoid(np.exp(np.asarray(density, float)), x)
    assert abs(total - 1) < 0.01
    draws = jax.vmap(lambda k: fit.likelihood.sample(k, {"theta": jnp.zeros(())}))(
        jax.random.split(jax.random.key(1), 2000)
    )
    below = np.mean(np.asarray(draws) < 1.0)
    inside = np.where(x < 1.0, np.exp(np.asarray(density, float)), 0.0)
    assert abs(below - integrate.trapezoid(inside, x)) < 5 * np.sqrt(0.25 / 2000) + 0.01


def test_a_fit_with_heavy_tails_is_saved_and_loaded(tmp_path):
    model = cs.Model(
        dist.Normal(0.0, 1.0), lambda key, t: jnp.exp(3 * t + jax.random.normal(key, (2,)))
    )
    sims = cs.simulate(model, 200, key=jax.random.key(0))
    fit = quick(model, sims)
    assert fit.posterior.data.tails
    loaded = cs.load(fit.save(tmp_path / "fit.safetensors"), model)
    np.testing.assert_array_equal(
        fit.sample(sims.x[0], 20, key=jax.random.key(0))["theta"],
        loaded.sample(sims.x[0], 20, key=jax.random.key(0))["theta"],
    )
