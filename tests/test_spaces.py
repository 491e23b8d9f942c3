"""Named, constrained parameters to one free vector and back."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

import consilience as cs
from consilience.priors import as_prior
from consilience.spaces import ParameterSpace, parameter_space

PRIORS = {
    "real": dist.Normal(1.0, 2.0),
    "bounded": dist.Uniform(-2.0, 3.0),
    "positive": dist.Gamma(2.0, 1.0),
    "simplex": dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])),
    "vector": dist.Normal(0.0, 1.0).expand([3]),
    "matrix": dist.LKJCholesky(3),
}


@pytest.fixture(scope="module")
def space():
    prior = as_prior(PRIORS)
    theta = jax.vmap(prior.draw)(jax.random.split(jax.random.key(0), 500))
    return prior, parameter_space(prior, theta)


def test_round_trip_keeps_every_parameter(space):
    prior, space = space
    theta = jax.vmap(prior.draw)(jax.random.split(jax.random.key(1), 50))
    u, _ = jax.vmap(space.to_vector)(theta)
    assert u.shape == (50, 1 + 1 + 1 + 2 + 3 + 3)
    back = jax.vmap(space.from_vector)(u)
    for name in PRIORS:
        np.testing.assert_allclose(back[name], theta[name], atol=2e-4, err_msg=name)


def test_vectors_are_standardised(space):
    prior, space = space
    theta = jax.vmap(prior.draw)(jax.random.split(jax.random.key(2), 4000))
    u, _ = jax.vmap(space.to_vector)(theta)
    assert np.all(np.abs(np.median(u, axis=0)) < 0.2)
    assert np.all((np.std(u, axis=0) > 0.6) & (np.std(u, axis=0) < 1.7))


@pytest.mark.parametrize("name", ["real", "bounded", "positive", "vector"])
def test_log_det_matches_autodiff(name):
    prior = as_prior({name: PRIORS[name]})
    raw = ParameterSpace(
        prior, jnp.full(prior.n_real(name), 0.3), jnp.full(prior.n_real(name), 2.0)
    )
    theta = prior.draw(jax.random.key(3))
    _, log_det = raw.to_vector(theta)
    jacobian = jax.jacobian(lambda v: raw.to_vector({name: v})[0])(theta[name])
    matrix = jacobian.reshape(prior.n_real(name), -1)
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix)[1], rtol=1e-4)


def test_far_vectors_stay_inside_the_support(space):
    _, space = space
    theta = jax.vmap(space.from_vector)(
        60 * jax.random.normal(jax.random.key(4), (2000, space.dim))
    )
    for name in ("bounded", "positive", "simplex"):
        assert bool(jnp.all(PRIORS[name].support(theta[name]))), name
    assert bool(jnp.all(jnp.isfinite(theta["positive"])))


def test_contains_tells_the_support(space):
    prior, space = space
    theta = dict(prior.draw(jax.random.key(5)))
    assert bool(space.contains(theta))
    assert not bool(space.contains({**theta, "positive": jnp.array(-1.0)}))
    assert not bool(space.contains({**theta, "bounded": jnp.array(3.5)}))


def test_heavy_tails_do_not_set_the_scale():
    prior = as_prior({"c": dist.Cauchy(5.0, 2.0)})
    theta = jax.vmap(prior.draw)(jax.random.split(jax.random.key(0), 2000))
    space = parameter_space(prior, theta)
    assert abs(float(space.loc[0]) - 5.0) < 0.5
    assert 2.0 < float(space.scale[0]) < 4.0


def test_unknown_and_missing_names_are_told(space):
    _, space = space
    with pytest.raises(ValueError, match=r"missing: \['bounded'.*unknown: \['sigma'\]"):
        space.check({"real": 1.0, "sigma": 2.0})


def test_wrong_shapes_are_told(space):
    prior, space = space
    theta = dict(prior.draw(jax.random.key(6)))
    with pytest.raises(ValueError, match=r"'vector'\] must have the shape \(\.\.\., 3\)"):
        space.check({**theta, "vector": jnp.zeros(4)})
    with pytest.raises(ValueError, match="agree in their leading axes"):
        space.check({**theta, "real": jnp.zeros(7)})


def test_a_dictionary_is_asked_for(space):
    with pytest.raises(TypeError, match="must be a dictionary of the parameters"):
        space[1].check(jnp.zeros(3))


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
