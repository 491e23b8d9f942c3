"""Named, constrained parameters to one free vector and back."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

import consilience as cs
from consilience.model.priors import as_prior
from consilience.model.spaces import ParameterSpace, parameter_space, to_vectors

PRIORS = {
    "real": dist.Normal(1.0, 2.0),
    "bounded": dist.Uniform(-2.0, 3.0),
    "positive": dist.Gamma(2.0, 1.0),
    "simplex": dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])),
    "vector": dist.Normal(0.0, 1.0).expand([3]),
    "matrix": dist.LKJCholesky(3),
}


N = 2000
"""Draws go through the spaces so many at a time: one shape, so one compilation."""


@eqx.filter_jit
def draw(prior, key, n):
    return jax.vmap(prior.draw)(jax.random.split(key, n))


@eqx.filter_jit
def from_vectors(space, u):
    return jax.vmap(space.from_vector)(u)


@pytest.fixture(scope="module")
def theta():
    """Parameters that make a space, and as many others to test it with."""
    drawn = jax.device_get(draw(as_prior(PRIORS), jax.random.key(0), 2 * N))
    return [{name: a[half] for name, a in drawn.items()} for half in (slice(N), slice(N, None))]


@pytest.fixture(scope="module")
def space(theta):
    return parameter_space(as_prior(PRIORS), theta[0])


@pytest.fixture
def one(theta):
    return {name: array[0] for name, array in theta[1].items()}


def test_round_trip_keeps_every_parameter(space, theta):
    u = to_vectors(space, theta[1])
    assert u.shape == (N, 1 + 1 + 1 + 2 + 3 + 3)
    back = from_vectors(space, u)
    for name in PRIORS:
        np.testing.assert_allclose(back[name], theta[1][name], atol=2e-4, err_msg=name)


def test_vectors_are_standardised(space, theta):
    u = np.asarray(to_vectors(space, theta[1]))
    assert np.all(np.abs(np.median(u, axis=0)) < 0.2)
    assert np.all((np.std(u, axis=0) > 0.6) & (np.std(u, axis=0) < 1.7))


@pytest.mark.parametrize("name", ["real", "bounded", "positive", "vector"])
def test_log_det_matches_autodiff(name, one):
    prior = as_prior({name: PRIORS[name]})
    n = prior.n_real(name)
    space = ParameterSpace(prior, np.full(n, 0.3), np.full(n, 2.0))

    @jax.jit
    def run(value):
        vector = lambda v: space.to_vector({name: v})  # noqa: E731
        return jax.jacobian(lambda v: vector(v)[0])(value), vector(value)[1]

    jacobian, log_det = run(one[name])
    expected = np.linalg.slogdet(np.reshape(jacobian, (n, n)))[1]
    np.testing.assert_allclose(log_det, expected, rtol=1e-4)


def test_far_vectors_stay_inside_the_support(space):
    u = 60 * np.random.default_rng(4).standard_normal((N, space.dim)).astype(np.float32)
    theta = from_vectors(space, u)
    for name in ("bounded", "positive", "simplex"):
        assert bool(jnp.all(PRIORS[name].support(theta[name]))), name
    assert bool(jnp.all(jnp.isfinite(theta["positive"])))


def test_contains_tells_the_support(space, one):
    contains = eqx.filter_jit(space.contains)
    assert contains(one)
    assert not contains({**one, "positive": np.float32(-1.0)})
    assert not contains({**one, "bounded": np.float32(3.5)})


def test_heavy_tails_do_not_set_the_scale():
    prior = as_prior({"c": dist.Cauchy(5.0, 2.0)})
    space = parameter_space(prior, draw(prior, jax.random.key(0), N))
    assert abs(float(space.loc[0]) - 5.0) < 0.5
    assert 2.0 < float(space.scale[0]) < 4.0


def test_unknown_and_missing_names_are_told(space):
    with pytest.raises(ValueError, match=r"missing: \['bounded'.*unknown: \['sigma'\]"):
        space.check({"real": 1.0, "sigma": 2.0})


def test_wrong_shapes_are_told(space, one):
    with pytest.raises(ValueError, match=r"'vector'\] must have the shape \(\.\.\., 3\)"):
        space.check({**one, "vector": np.zeros(4)})
    with pytest.raises(ValueError, match="agree in their leading axes"):
        space.check({**one, "real": np.zeros(7)})


def test_a_dictionary_is_asked_for(space):
    with pytest.raises(TypeError, match="must be a dictionary of the parameters"):
        space.check(np.zeros(3))


def test_prior_density_matches_numpyro_and_is_minus_infinity_outside():
    prior = as_prior({"a": dist.Normal(0.0, 1.0), "b": dist.Uniform(0.0, 2.0)})
    expected = dist.Normal(0.0, 1.0).log_prob(0.5) + dist.Uniform(0.0, 2.0).log_prob(1.5)
    np.testing.assert_allclose(
        prior.log_prob({"a": jnp.array(0.5), "b": jnp.array(1.5)}), expected, rtol=1e-6
    )
    assert prior.log_prob({"a": jnp.array(0.5), "b": jnp.array(2.5)}) == -jnp.inf


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ({"n": dist.Poisson(3.0)}, "'n' has the support.*discrete"),
        ({"a": 3.0}, "prior of 'a' must be a NumPyro distribution, got float 3.0"),
        ({}, "A prior is a NumPyro distribution"),
        (3, "A prior is a NumPyro distribution"),
        (
            cs.ImplicitPrior(lambda key: {"a": jnp.zeros(())}, support={"b": constraints.positive}),
            r"names \['b'\].*draws \['a'\]",
        ),
        (cs.ImplicitPrior(lambda key: jnp.zeros(2)), "must return a dictionary"),
    ],
)
def test_bad_priors_are_refused(prior, message):
    with pytest.raises((TypeError, ValueError), match=message):
        as_prior(prior)


def test_a_support_without_bijection_is_refused():
    class Odd(dist.Normal):
        support = constraints.dependent

    with pytest.raises(ValueError, match=r"'odd' has the support.*no map from real numbers"):
        as_prior({"odd": Odd(0.0, 1.0)})


def test_an_implicit_prior_has_no_density():
    prior = as_prior(cs.ImplicitPrior(lambda key: {"a": jax.random.normal(key)}))
    with pytest.raises(ValueError, match="can only be sampled"):
        prior.log_prob({"a": jnp.zeros(())})


@pytest.mark.parametrize("corner", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
def test_the_log_det_at_a_corner_of_a_simplex_is_finite(corner):
    """Dirichlet draws with a small concentration are zero in floating point."""
    simplex = ParameterSpace(as_prior(dist.Dirichlet(jnp.full(3, 0.01))))
    u, log_det = simplex.to_vector({"theta": jnp.array(corner)})
    assert np.isfinite(u).all() and np.isfinite(log_det)
    back, log_det = simplex.from_vector_with_log_det(u)
    np.testing.assert_allclose(back["theta"], corner, atol=1e-6)
    assert np.isfinite(log_det)


@pytest.mark.parametrize("name", ["", "a\x00", "two\nlines", "\ud800", "joint density"])
def test_names_that_no_file_or_figure_takes_are_refused(name):
    with pytest.raises(ValueError, match="A parameter cannot be called"):
        as_prior({name: dist.Normal(0.0, 1.0)})


def test_a_parameter_with_the_name_of_anothers_component_is_refused():
    with pytest.raises(ValueError, match=r"cannot be called 'a\[0\]': the draws of 'a' use that"):
        as_prior({"a": dist.Normal(0.0, 1.0).expand([2]), "a[0]": dist.Normal(0.0, 1.0)})
