"""Locations and scales of parameters and data: the answer is the same in any unit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import AffineTransform, ExpTransform, SigmoidTransform
from scipy import stats

import consilience as cs
from consilience.model.priors import Prior, as_prior
from consilience.model.spaces import ParameterSpace, free_range
from tests.conftest import TINY

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(0)
NOISE = 0.5
"""Of the data, in units of the free parameter: x = z + NOISE * normal."""

FAR = [(0.0, 1e30), (1e-30, 1e-31), (-1e10, 1e8)]
SCALES = [
    *[(300.0, 20.0), (0.0, 1e-30), (1e30, 1e29)],
    *(pytest.param(*scales, marks=pytest.mark.slow) for scales in FAR),
]


def affine(loc, scale, domain):
    return AffineTransform(loc, scale, domain=domain)


SUPPORTS = {
    "real": lambda loc, scale: [affine(loc, scale, constraints.real)],
    "positive": lambda loc, scale: [ExpTransform(), affine(0.0, scale, constraints.positive)],
    "greater than": lambda loc, scale: [ExpTransform(), affine(loc, scale, constraints.positive)],
    "less than": lambda loc, scale: [ExpTransform(), affine(loc, -scale, constraints.positive)],
    "interval": lambda loc, scale: [
        SigmoidTransform(),
        affine(loc, scale, constraints.unit_interval),
    ],
}
"""Transforms of a standard normal variable z to each support, at a location and a scale."""


def conjugate_model(support: str, loc: float = 0.0, scale: float = 1.0):
    """A model whose posterior of z, of which theta is a function, is normal; and z of theta."""
    prior = dist.TransformedDistribution(dist.Normal(0.0, 1.0), SUPPORTS[support](loc, scale))

    def free(theta):
        for transform in reversed(prior.transforms):
            theta = transform.inv(theta)
        return theta

    def simulator(key, theta):
        return loc + scale * (free(theta) + NOISE * jax.random.normal(key, (1,)))

    return cs.Model(prior, simulator), free


def standard_draws(support: str, loc: float, scale: float, *, epochs: int):
    """Posterior draws of z, in units of its posterior standard deviation about its mean."""
    model, free = conjugate_model(support, loc, scale)
    sims = cs.simulate(model, 512, key=KEY)
    fit = cs.fit(
        model,
        sims,
        key=KEY,
        self_consistency=False,
        posterior=TINY,
        epochs=epochs,
        validation=0.0,
        progress=False,
    )
    x = np.array([loc + 0.7 * scale])
    draws = fit.sample(x, 2000, key=KEY)["theta"].values.ravel()
    assert np.isfinite(fit.log_prob(draws, x)).all()
    variance = NOISE**2 / (1 + NOISE**2)
    return (np.asarray(free(draws)) - 0.7 / (1 + NOISE**2)) / variance**0.5


@functools.cache
def unit_draws(support: str):
    return standard_draws(support, 0.0, 1.0, epochs=3)


SOME = [
    *("real", "greater than", "interval"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("positive", "less than")),
]


@pytest.mark.parametrize(("loc", "scale"), SCALES)
@pytest.mark.parametrize("support", SOME)
def test_fit_is_the_same_when_parameters_and_data_are_rescaled_and_shifted(support, loc, scale):
    draws = standard_draws(support, loc, scale, epochs=3)
    np.testing.assert_allclose(draws, unit_draws(support), atol=5e-3)


@pytest.mark.parametrize(("loc", "scale"), SCALES[:1] + SCALES[3:])
@pytest.mark.parametrize("support", SOME)
def test_posterior_of_a_conjugate_model_in_any_unit(support, loc, scale):
    draws = standard_draws(support, loc, scale, epochs=40)
    assert abs(draws.mean()) < 0.25
    assert abs(draws.std() - 1) < 0.15


def test_normal_prior_at_300_is_not_clipped():
    sd, noise = 20.0, 10.0
    model = cs.Model(
        dist.Normal(300.0, sd),
        lambda key, theta: theta + noise * jax.random.normal(key, (1,)),
        log_likelihood=lambda theta, x: dist.Normal(theta, noise).log_prob(x).sum(),
    )
    fit = cs.fit(
        model,
        cs.simulate(model, 256, key=KEY),
        key=KEY,
        posterior=TINY,
        epochs=80,
        progress=False,
    )
    x = np.array([270.7], np.float32)
    precision = 1 / sd**2 + 1 / noise**2
    mean, spread = (300 / sd**2 + 270.7 / noise**2) / precision, precision**-0.5
    for method in ("amortized", "nuts"):
        draws = fit.sample(x, 1000, key=KEY, method=method)["theta"].values.ravel()
        assert abs(draws.mean() - mean) < 0.25 * spread, method
        assert abs(draws.std() / spread - 1) < 0.2, method
    evidence = fit.log_evidence(x, key=KEY).sel(estimator="bridge").log_evidence
    exact = stats.norm(300, np.hypot(sd, noise)).logpdf(270.7)
    assert abs(float(evidence) - exact) < 0.05


ALL = {
    "real": (constraints.real, ()),
    "positive": (constraints.positive, ()),
    "greater than 300": (constraints.greater_than(300.0), ()),
    "less than -300": (constraints.less_than(-300.0), ()),
    "interval": (constraints.interval(300.0, 301.0), ()),
    "unit interval": (constraints.unit_interval, ()),
    "circular": (constraints.circular, ()),
    "simplex": (constraints.simplex, (4,)),
    "ordered": (constraints.ordered_vector, (3,)),
    "positive ordered": (constraints.positive_ordered_vector, (3,)),
    "lower Cholesky": (constraints.lower_cholesky, (3, 3)),
    "softplus lower Cholesky": (constraints.softplus_lower_cholesky, (3, 3)),
    "scaled unit lower Cholesky": (constraints.scaled_unit_lower_cholesky, (3, 3)),
    "correlation Cholesky": (constraints.corr_cholesky, (3, 3)),
    "correlation matrix": (constraints.corr_matrix, (3, 3)),
    "positive definite": (constraints.positive_definite, (3, 3)),
    "softplus positive": (constraints.softplus_positive, ()),
    "unit ball": (constraints.l1_ball, (3,)),
    "zero sum": (constraints.zero_sum(1), (3,)),
}


SINGULAR = ("correlation matrix", "positive definite", "positive ordered")
"""Where far values meet in one number, and nothing leads back."""


def space_of(support, shape) -> ParameterSpace:
    prior = Prior(
        lambda key: {"theta": jnp.zeros(shape)},
        None,
        supports={"theta": support},
        shapes={"theta": shape},
        texts={"theta": "a test"},
    )
    return ParameterSpace(prior)


@pytest.mark.parametrize("name", ALL)
def test_far_free_values_give_finite_parameters_and_come_back(name):
    space = space_of(*ALL[name])
    for size in (1.0, 50.0, 1e3, 1e12):
        for signs in (1.0, -1.0, (-1.0) ** np.arange(space.dim)):
            u = jnp.full(space.dim, size) * signs
            theta, log_det = space.from_vector_with_log_det(u)
            assert np.isfinite(np.asarray(theta["theta"])).all(), (size, signs)
            assert np.isfinite(log_det), (size, signs)
            if name not in SINGULAR:
                back, log_det = space.to_vector(theta)
                assert np.isfinite(np.asarray(back)).all(), (size, signs)


@pytest.mark.parametrize("size", [80.0, 300.0, 1e6, 1e30])
@pytest.mark.parametrize("name", ["real", "zero sum"])
def test_parameters_without_bounds_are_never_clipped(name, size):
    space = space_of(*ALL[name])
    u = size * jnp.linspace(1.0, 2.0, space.dim)
    theta = space.from_vector(u)
    np.testing.assert_allclose(space.to_vector(theta)[0], u, rtol=1e-5)


def test_free_range_of_every_support_is_wide():
    for name, (support, shape) in ALL.items():
        transform = biject_to(support)
        low, high = free_range(transform, transform.inverse_shape(shape))
        # The logarithm of a value that is itself exponential reaches less far.
        least = np.log(80) if name == "positive ordered" else 40
        assert (high >= least).all(), name
        assert (low <= -40).all(), name


def test_parameters_that_float32_cannot_resolve_warn():
    model = cs.Model(
        dist.Normal(1e7, 1.0), lambda key, theta: theta - 1e7 + jax.random.normal(key, (1,))
    )
    sims = cs.simulate(model, 64, key=KEY)
    with pytest.warns(UserWarning, match=r"parameter 'theta' is about 1e\+07 and varies by"):
        cs.fit(model, sims, key=KEY, posterior=TINY, self_consistency=False, epochs=1)


def test_parameter_that_is_the_same_in_all_runs_warns():
    model = cs.Model(dist.Normal(1e9, 1.0), lambda key, theta: jax.random.normal(key, (1,)))
    sims = cs.simulate(model, 64, key=KEY)
    with pytest.warns(UserWarning, match=r"parameter 'theta' is 1e\+09 in all 64 runs"):
        cs.fit(model, sims, key=KEY, posterior=TINY, self_consistency=False, epochs=1)


def test_data_that_are_the_same_in_all_runs_warn():
    model = cs.Model(
        dist.Normal(0.0, 1.0), lambda key, theta: 1e8 + theta + jax.random.normal(key, (3,))
    )
    sims = cs.simulate(model, 64, key=KEY)
    with pytest.warns(UserWarning, match="The data are the same in all 64 runs"):
        cs.fit(model, sims, key=KEY, posterior=TINY, self_consistency=False, epochs=1)


def test_singular_matrices_are_refused():
    model = cs.Model({"a": dist.LKJ(3)}, lambda key, theta: jax.random.normal(key, (1,)))
    sims = cs.Simulations({"a": np.ones((64, 3, 3))}, np.zeros((64, 1)))
    with pytest.raises(ValueError, match="64 of 64 simulations"):
        cs.fit(model, sims, key=KEY, posterior=TINY, self_consistency=False, epochs=1)


def test_data_that_float32_cannot_resolve_warn():
    rng = np.random.default_rng(0)
    theta = rng.normal(size=64)
    days = 2_459_000.5 + 0.01 * (theta + rng.normal(size=64))
    model = cs.Model(dist.Normal(0.0, 1.0))
    sims = cs.Simulations({"theta": theta}, days[:, None])
    with pytest.warns(UserWarning, match=r"The data\[0\] is about 2\.459e\+06 and varies by 0\.01"):
        cs.fit(model, sims, key=KEY, posterior=TINY, self_consistency=False, epochs=1)


def test_space_of_a_prior_of_vectors_far_from_zero():
    prior = as_prior({"a": dist.Normal(jnp.array([1e4, -1e20]), jnp.array([1e2, 1e18]))})
    space = ParameterSpace(prior, np.array([1e4, -1e20]), np.array([1e2, 1e18]))
    theta = space.from_vector(jnp.array([1.0, -1.0]))
    np.testing.assert_allclose(theta["a"], [1.01e4, -1.01e20], rtol=1e-6)
    np.testing.assert_allclose(space.to_vector(theta)[0], [1.0, -1.0], atol=1e-4)
