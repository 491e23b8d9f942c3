"""Every built-in part and one of a user's, of each kind, through the same laws.

A dictionary for each kind holds the objects; an object added to it runs through all laws of its
kind.
"""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import consilience as cs
from consilience.model.data import make_layout
from consilience.networks.density import build_density
from consilience.networks.ensemble import Ensemble, EnsembleSummary, Stacked, StackedSummary
from tests.conftest import TINY, quick
from tests.own_parts import Extremes, Mixture, Sinh, Sums
from tests.test_flows import bend

pytestmark = pytest.mark.usefixtures("quick_compilation")

TRANSFORMS = {"spline": cs.Spline(4), "affine": cs.Affine(), "own": Sinh()}

DENSITIES = {
    "spline": cs.Coupling(cs.Spline(4), layers=1, width=8, depth=1, df=50.0),
    "affine": cs.Coupling(cs.Affine(), layers=1, width=8, depth=1, dropout=0.1),
    "own-transform": cs.Coupling(Sinh(), layers=1, width=8, depth=1),
    "own": Mixture(),
    "ensemble": Ensemble(
        cs.Coupling(cs.Affine(), layers=1, width=8, depth=1), members=2, shared=True
    ),
    "stacked": Stacked(
        (cs.Coupling(cs.Affine(), layers=1, width=8, depth=1), Mixture()), (), shared=True
    ),
}

SUMMARIES = {
    "identity": cs.Identity(),
    "dense": cs.Dense(width=8),
    "convolutions": cs.Convolutions(width=8),
    "deep-set": cs.DeepSet(width=8, blocks=1),
    "set-transformer": cs.SetTransformer(width=8, heads=2, inducing=2, blocks=1),
    "ensemble": EnsembleSummary(cs.DeepSet(width=8, blocks=1), members=2),
    "stacked": StackedSummary((cs.Identity(), cs.Dense(width=8))),
    "own-module": Extremes(jnp.ones(3)),
    "own-description": Sums(),
}
MASKED = ("deep-set", "set-transformer", "own-description")
"""Summaries that leave out the padding of sets."""

KEY = jax.random.key(0)


def each_of(kind):
    return pytest.mark.parametrize("name", kind)


def jitted(function):
    """With NumPy arrays out, so that what tests compute of them compiles nothing."""
    run = eqx.filter_jit(function)
    return lambda *args: jax.device_get(run(*args))


def saved_and_loaded(fit, path):
    """A fit after a round trip through a file, for which its parts are passed."""
    recipe = fit.recipe
    parts = [recipe.posterior, recipe.likelihood, recipe.prior, recipe.summary]
    return cs.load(fit.save(path), fit.model, parts=parts)


def numbers_of(fit, x):
    draws = fit.sample(x, 20, key=KEY)
    return [*(part.values for part in draws.data_vars.values()), fit.log_prob(draws, x)]


def assert_same(fit, other, x):
    for one, two in zip(numbers_of(fit, x), numbers_of(other, x), strict=True):
        assert np.all(np.isfinite(one))
        np.testing.assert_array_equal(one, two)


# Transforms.


@jitted
def transform_and_slope(transform, value, raw, inverse):
    one = lambda v, r: transform(v, r, inverse=inverse)[0]  # noqa: E731
    slopes = jax.vmap(jax.grad(one), in_axes=(0, 1))(value, raw)
    return *transform(value, raw, inverse=inverse), slopes


@each_of(TRANSFORMS)
def test_a_transform_inverts_and_knows_its_derivative(name):
    transform = TRANSFORMS[name]
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        value = jnp.asarray(np.sort(4 * rng.standard_normal(200)))
        raw = jnp.asarray(rng.standard_normal((transform.n_raw, 1)) * np.ones((1, 200)))
        there, log_slope, slope = transform_and_slope(transform, value, raw, False)
        back, log_slope_back, slope_back = transform_and_slope(transform, there, raw, True)
        np.testing.assert_allclose(back, value, atol=1e-9)
        np.testing.assert_allclose(log_slope_back, -log_slope, atol=1e-9)
        np.testing.assert_allclose(log_slope, np.log(slope), atol=1e-9)
        np.testing.assert_allclose(log_slope_back, np.log(slope_back), atol=1e-9)
        assert np.all(np.diff(there) > 0) and np.mean(np.abs(there - value)) > 0.05


# Densities.


class Density(NamedTuple):
    """A bent density, the probabilities of the cells of a grid, and draws."""

    network: cs.BatchedDensity
    condition: np.ndarray
    edges: np.ndarray
    mass: np.ndarray
    log_q: np.ndarray
    draws: np.ndarray
    log_q_of_draws: np.ndarray


@jitted
def log_probs(network, values, condition):
    return network.log_prob(values, network.prepare(condition))


@jitted
def draws_of(network, key, condition):
    return network.sample(key, network.prepare(condition), (4096,))


@functools.cache
def density(name, dim) -> Density:
    built = build_density(DENSITIES[name], np.random.default_rng(0), dim=dim, condition=3)
    network, condition = bend(built), np.array([0.5, -1.0, 1.0])
    edges = np.linspace(-4, 4, 1 + (2048 if dim == 1 else 256))
    u = (edges[1:] + edges[:-1]) / 2
    points = np.stack(np.meshgrid(*[3 * np.sinh(u)] * dim, indexing="ij"), axis=-1)
    log_q = log_probs(network, jnp.asarray(points, float), condition).astype(float)
    sizes = 3 * np.cosh(u) * (edges[1] - edges[0])
    volume = functools.reduce(np.multiply.outer, [sizes] * dim)
    return Density(
        *(network, condition, edges, np.exp(log_q) * volume, log_q),
        *draws_of(network, jax.random.key(3), condition),
    )


@pytest.mark.parametrize("dim", [1, 2])
@each_of(DENSITIES)
def test_a_density_integrates_to_one(name, dim):
    assert abs(density(name, dim).mass.sum() - 1) < 2e-3


@pytest.mark.parametrize("dim", [1, 2])
@each_of(DENSITIES)
def test_draws_match_the_density(name, dim):
    known = density(name, dim)
    for i in range(dim):
        marginal = known.mass.sum(axis=tuple(j for j in range(dim) if j != i))
        cdf = np.concatenate([[0.0], np.cumsum(marginal)])
        u = np.arcsinh(known.draws[:, i] / 3)
        test = stats.kstest(u, lambda u, cdf=cdf: np.interp(u, known.edges, cdf))
        assert test.pvalue > 1e-3
    mean = np.sum(known.mass * np.where(known.mass > 0, known.log_q, 0.0))
    error = known.log_q_of_draws.std() / 64
    assert abs(known.log_q_of_draws.mean() - mean) < 4 * error
    again = log_probs(known.network, known.draws, known.condition)
    np.testing.assert_allclose(known.log_q_of_draws, again, rtol=1e-4, atol=1e-4)


@each_of(DENSITIES)
def test_many_values_under_many_conditions_are_those_one_by_one(name):
    rng = np.random.default_rng(5)
    conditions = jnp.asarray(rng.standard_normal((2, 3)), float)
    values = jnp.asarray(rng.standard_normal((2, 4, 2)), float)

    @jitted
    def run(network):
        contexts = jax.vmap(network.prepare)(conditions)
        one = network.log_prob(values[1, 2], network.prepare(conditions[1]))
        return network.log_prob(values, contexts), network.sample(KEY, contexts, (5,)), one

    every, (drawn, log_q), one = run(density(name, 2).network)
    assert every.shape == (2, 4) and (drawn.shape, log_q.shape) == ((2, 5, 2), (2, 5))
    np.testing.assert_allclose(every[1, 2], one, rtol=1e-5)


@each_of(DENSITIES)
def test_the_derivative_at_a_draw_is_that_at_a_fixed_value(name):
    network = density(name, 2).network
    arrays, static = eqx.partition(network, eqx.is_inexact_array)
    conditions = jnp.asarray(np.random.default_rng(6).standard_normal((3, 3)), float)

    def loss(arrays, drawn: bool):
        network = eqx.combine(arrays, static)
        contexts = jax.vmap(network.prepare)(conditions)
        noise = network.noise(KEY, (3, 4))
        if drawn:
            log_q = network.draw(noise, contexts)[1]
        else:
            values = jax.lax.stop_gradient(network.values(noise, contexts))
            log_q = network.log_prob(values, contexts)
        return jnp.mean(log_q) + network.penalty()

    run = eqx.filter_jit(lambda arrays: [jax.grad(loss)(arrays, which) for which in (True, False)])
    at_draw, fixed = map(jax.tree.leaves, run(arrays))
    assert any(np.any(part != 0) for part in fixed)
    for one, two in zip(at_draw, fixed, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)


@functools.cache
def sampled_model():
    """A prior and a simulator that can only be sampled: all three densities are learned."""
    prior = cs.ImplicitPrior(lambda key: {"mu": jax.random.normal(key, (2,))})
    return cs.Model(prior, lambda key, t: t["mu"] + 0.5 * jax.random.normal(key, (2,)))


@functools.cache
def runs():
    return cs.simulate(sampled_model(), 64, key=KEY, progress=False)


GRADIENT = {name: "posterior" if name == "own" else "both" for name in DENSITIES}
"""Both ways of training a learned likelihood by self-consistency."""


@functools.cache
def jointly_fitted(name):
    spec = DENSITIES[name]
    return quick(
        *(sampled_model(), runs()),
        posterior=spec,
        likelihood=spec,
        prior=spec,
        summary=cs.Identity(),
        self_consistency=cs.SelfConsistency(
            samples=3, weight=cs.Constant(), gradient=GRADIENT[name]
        ),
        batch_size=32,
    )


@jitted
def draw_of_likelihood(likelihood, theta):
    drawn = likelihood.sample(KEY, theta)
    return drawn, likelihood.log_prob(theta, drawn)


@each_of(DENSITIES)
def test_a_density_is_posterior_likelihood_and_prior(name, tmp_path):
    fit, x = jointly_fitted(name), runs().x[:2]
    assert fit.history.terms["skipped"].sum() == 0
    assert fit.history.terms["consistency"][-1] > 0
    # As many draws as the corrected ones come from: compiled once.
    evidence = fit.log_evidence(x, 1000, key=KEY)
    assert np.all(np.isfinite(evidence["log_evidence"]))
    corrected = fit.sample(x, 10, key=KEY, method="corrected")
    assert corrected["mu"].shape == (2, 1, 10, 2)
    drawn, log_p = draw_of_likelihood(fit.likelihood, {"mu": jnp.zeros(2)})
    assert drawn.shape == (2,) and np.isfinite(log_p)
    assert_same(fit, saved_and_loaded(fit, tmp_path / "fit"), x)


def test_chains_of_a_density_without_a_base_run_among_parameters():
    fit = jointly_fitted("own")
    with pytest.warns(UserWarning, match="have not converged"):
        chains = fit.sample(runs().x[0], 16, key=KEY, method="nuts")
    assert chains["mu"].shape == (4, 4, 2) and np.all(np.isfinite(chains["mu"]))


# Summaries.


@functools.cache
def rows_model():
    prior = {"mu": dist.Normal(0.0, 1.0)}
    return cs.Model(prior, lambda key, t: t["mu"] + jax.random.normal(key, (10, 1)), data=cs.Set())


@functools.cache
def rows():
    return cs.simulate(rows_model(), 64, key=KEY, progress=False)


@each_of(SUMMARIES)
def test_a_summary_returns_a_vector_and_is_saved_and_loaded(name, tmp_path):
    fit = quick(rows_model(), rows(), summary=SUMMARIES[name], batch_size=32, validation=0.0)
    summarise = jitted(lambda fit, x: fit.summary(fit.data.standardise(x)))
    vector = summarise(fit.posterior, rows().x[0])
    assert vector.ndim == 1 and np.all(np.isfinite(vector))
    assert fit.recipe.posterior == TINY
    assert_same(fit, saved_and_loaded(fit, tmp_path / "fit"), rows().x[:2])


@each_of(MASKED)
def test_a_summary_leaves_out_padding(name):
    layout = make_layout({"y": (5, 2), "there": (5,)}, cs.Set(mask="there"), bare=False)
    network = SUMMARIES[name].build(np.random.default_rng(0), layout, 2)
    rng, there = np.random.default_rng(1), np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    y = rng.standard_normal((5, 2))
    other = np.where(there[:, None] > 0, y, rng.standard_normal((5, 2)))
    moved = y + there[:, None]
    run = jitted(lambda y: network({"y": y, "there": jnp.asarray(there)}))
    np.testing.assert_allclose(run(other), run(y), rtol=1e-5, atol=1e-6)
    assert np.max(np.abs(run(moved) - run(y))) > 1e-3
