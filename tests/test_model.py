"""Models, from functions and from NumPyro; simulations."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density
from scipy import stats

import consilience as cs


def hierarchical(y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("schools", 8):
        effect = numpyro.sample("effect", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


def iid(y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", 12):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def regression(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


@functools.cache
def from_numpyro(function):
    return cs.Model.from_numpyro(function, observed="y")


def test_plate_of_iid_rows_is_a_set():
    model = from_numpyro(iid)
    assert model.data == cs.Set()
    assert model.layout.shapes == {"data": (12,)}


def test_regressors_and_local_parameters_make_a_vector():
    xs = jnp.linspace(-1, 1, 5)
    assert cs.Model.from_numpyro(regression, args=(xs,), observed="y").data == cs.Vector()
    assert from_numpyro(hierarchical).data == cs.Vector()


@pytest.mark.parametrize("function", [hierarchical, iid])
def test_prior_and_likelihood_add_up_to_numpyros_joint(function):
    model = from_numpyro(function)

    @jax.jit
    def run(key):
        theta, x = model.simulate_one(key)
        ours = model.prior.log_prob(theta) + model.log_likelihood(theta, x)
        return ours, log_density(function, (), {"y": x}, dict(theta))[0]

    ours, theirs = run(jax.random.key(0))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_observed_sites_are_found_in_a_conditioned_model():
    y = jnp.ones(8)
    model = cs.Model.from_numpyro(hierarchical, kwargs={"y": y})
    assert model.prior.names == ("mu", "tau", "effect")
    draws = cs.simulate(model, 3, key=jax.random.key(0)).x
    assert draws.shape == (3, 8)
    assert not np.allclose(draws, 1.0), "the observed values must not leak into simulations"


def test_numpyro_errors_say_what_to_do():
    with pytest.raises(ValueError, match=r"observes nothing.*one of \['mu', 'y'\]"):
        cs.Model.from_numpyro(iid)
    with pytest.raises(ValueError, match=r"must name sample sites.*\['mu', 'y'\]"):
        cs.Model.from_numpyro(iid, observed="z")

    def moving():
        a = numpyro.sample("a", dist.Uniform(0.0, 1.0))
        b = numpyro.sample("b", dist.Uniform(0.0, a))
        numpyro.sample("y", dist.Normal(b, 1.0))

    with pytest.raises(ValueError, match="support of 'b' depends on other parameters"):
        cs.Model.from_numpyro(moving, observed="y")

    def discrete():
        n = numpyro.sample("n", dist.Poisson(2.0))
        numpyro.sample("y", dist.Normal(n, 1.0))

    with pytest.raises(ValueError, match=r"'n' has the support.*discrete"):
        cs.Model.from_numpyro(discrete, observed="y")


def test_a_prior_without_names_gives_arrays_and_one_with_names_dictionaries():
    bare = cs.Model(dist.Normal(0, 1), lambda key, theta: theta * jnp.ones(2))
    named = cs.Model({"a": dist.Normal(0, 1)}, lambda key, t: t["a"] * jnp.ones(2))
    assert cs.simulate(bare, 4, key=jax.random.key(0)).theta["theta"].shape == (4,)
    assert cs.simulate(named, 4, key=jax.random.key(0)).theta["a"].shape == (4,)


def test_per_row_likelihood_sums_rows_and_heeds_the_mask():
    def simulator(key, theta):
        mask = jnp.arange(5) < 3
        return {"y": theta + jax.random.normal(key, (5,)), "here": mask}

    model = cs.Model(
        dist.Normal(0.0, 1.0),
        simulator,
        cs.PerRow(lambda theta, row: dist.Normal(theta, 1.0).log_prob(row["y"])),
        data=cs.Set(mask="here"),
    )
    theta, x = jax.device_get(eqx.filter_jit(model.simulate_one)(jax.random.key(0)))
    expected = stats.norm.logpdf(x["y"][:3], theta["theta"], 1.0).sum()
    np.testing.assert_allclose(eqx.filter_jit(model.log_likelihood)(theta, x), expected, rtol=1e-6)


def test_side_information_reaches_each_row():
    points = jnp.linspace(0.0, 1.0, 6)
    model = cs.Model(
        dist.Normal(0.0, 1.0),
        lambda key, theta: {"y": theta * points, "at": points},
        cs.PerRow(lambda theta, row: -((row["y"] - theta * row["at"]) ** 2)),
        data=cs.Set(side=("at",)),
    )
    theta, x = model.simulate_one(jax.random.key(0))
    np.testing.assert_allclose(model.log_likelihood(theta, x), 0.0, atol=1e-6)


def test_runs_depend_on_the_key_and_their_number_alone(named_model):
    short, other = (cs.simulate(named_model, 300, key=jax.random.key(i)) for i in (0, 4))
    long = cs.simulate(named_model, 5000, key=jax.random.key(0))
    np.testing.assert_array_equal(short.x, long.x[:300])
    assert not np.array_equal(short.x, other.x)


def test_bad_simulators_are_refused():
    prior = {"a": dist.Normal(0, 1)}
    with pytest.raises(ValueError, match=r"asked theta for 'b'.*names \['a'\]"):
        cs.Model(prior, lambda key, t: t["b"])
    with pytest.raises(TypeError, match="one fixed shape"):
        cs.Model(prior, lambda key, t: jnp.zeros(int(t["a"]) + 3))
    with pytest.raises(TypeError, match="pure JAX function"):
        cs.Model(prior, lambda key, t: np.sin(np.asarray(t["a"])))
    with pytest.raises(TypeError, match="an array or a dictionary of arrays"):
        cs.Model(prior, lambda key, t: (t["a"], t["a"]))
    with pytest.raises(ValueError, match=r"names \['points'\] beside the data"):
        cs.Model(prior, lambda key, t: t["a"] * jnp.ones(3), data=cs.Set(side=("points",)))
    with pytest.raises(ValueError, match="A Set has one array of data with a leading axis"):
        cs.Model(prior, lambda key, t: t["a"], data=cs.Set())


UNFIT = {
    "nothing": None,
    "no entries": jnp.ones(0),
    "complex numbers": 1j * jnp.ones(3),
    "a key": jax.random.key(0),
    "names of two types": {1: jnp.ones(2), "1": jnp.ones(2)},
}


@pytest.mark.parametrize("x", UNFIT.values(), ids=UNFIT)
def test_simulators_that_return_no_real_numbers_are_refused(x):
    with pytest.raises(TypeError, match="The simulator must return"):
        cs.Model(dist.Normal(0, 1), lambda key, theta: x)


RETURNED = {
    "an empty dictionary": ({}, "got an empty dictionary: name at least one array"),
    "None": (None, r"got None: end the function with `return x`"),
    "None by name": ({"y": None}, r"got None as x\['y'\]"),
    "complex numbers": ({"y": 1j * jnp.ones(3)}, r"got complex numbers as x\['y'\].*imaginary"),
    "one complex number": (1j, "got complex numbers: return their real and imaginary parts"),
    "a random key": (jax.random.key(0), "got a random key: return what is drawn with it"),
    "an empty array": (jnp.zeros((0, 3)), r"got an array of shape \(0, 3\): .*at least one number"),
    "1 and '1'": (
        {1: 2.0, "1": 2.0},
        r"got a dictionary with the names \[1, '1'\]: make each name a text",
    ),
    "a number as a name": (
        {1: 2.0, 2: 3.0},
        r"got a dictionary with the names \[1, 2\]: make each name a text",
    ),
    "a list": ([1.0, 2.0], r"got a list: make it one array \(jnp.stack\)"),
    "nested dictionaries": ({"y": {"a": 1.0}}, r"got a dict as x\['y'\]: make it one array"),
    "an array of objects": (np.array([None]), "got an array of object: return real numbers"),
    "an object": (object(), r"got object\. .*cs\.external\("),
}


@pytest.mark.parametrize(("x", "message"), RETURNED.values(), ids=RETURNED)
def test_what_a_simulator_in_jax_returned_is_named_with_what_to_do(x, message):
    with pytest.raises(TypeError, match=f"must return an array or a dictionary.*, {message}"):
        cs.Model(dist.Normal(0, 1), lambda key, theta: x)


def test_a_simulator_that_reads_theta_as_an_attribute_is_shown_how_to_read_it():
    with pytest.raises(TypeError, match=r"names \['a'\], as in theta\['a'\],.*no attribute 'a'"):
        cs.Model({"a": dist.Normal(0, 1)}, lambda key, theta: theta.a)
    with pytest.raises(TypeError, match=r"where theta is an array of shape \(\),.*string indexing"):
        cs.Model(dist.Normal(0, 1), lambda key, theta: theta["theta"])


UNLIKELY = {
    "SciPy": (lambda t, x: stats.norm.logpdf(np.asarray(x), t["a"]).sum(), r"cs.OnHost\(function"),
    "a branch": (lambda t, x: 0.0 if t["a"] > 0 else 1.0, "no shape or branch that depends"),
    "swapped": (lambda x, t: t["a"] - x, r"is called as log_likelihood\(theta, x\)"),
    "one argument": (lambda t: t["a"], r"is called as log_likelihood\(theta, x\)"),
    "a number": (3.0, r"is a function \(theta, x\) -> number, got float"),
    "a distribution": (dist.Normal(0, 1), r"is a function \(theta, x\) -> number, got Normal"),
}


@pytest.mark.parametrize("function, message", UNLIKELY.values(), ids=UNLIKELY)
def test_what_is_no_likelihood_in_jax_is_refused(function, message, unchecked):
    simulator = lambda key, t: t["a"] + jax.random.normal(key, (4,))  # noqa: E731
    with pytest.raises(TypeError, match=message):
        cs.Model({"a": dist.Normal(0, 1)}, simulator, function)


def test_a_likelihood_that_reads_theta_wrong_is_shown_how_to_read_it():
    simulator = lambda key, t: t["a"] + jax.random.normal(key, (4,))  # noqa: E731
    for function in (lambda t, x: t.a, lambda t, x: t["b"]):
        with pytest.raises(TypeError, match=r"theta is a dictionary with the names \['a'\]"):
            cs.Model({"a": dist.Normal(0, 1)}, simulator, function)


@pytest.mark.parametrize("value", [1j, jax.random.key(0)], ids=["complex", "a random key"])
def test_a_likelihood_that_is_no_real_number_is_refused(value, unchecked):
    simulator = lambda key, t: t + jax.random.normal(key, (4,))  # noqa: E731
    with pytest.raises(ValueError, match="must return a real number, got one of type"):
        cs.Model(dist.Normal(0, 1), simulator, lambda t, x: value)


def test_a_likelihood_of_the_wrong_shape_is_refused():
    simulator = lambda key, t: t + jax.random.normal(key, (4,))  # noqa: E731
    with pytest.raises(ValueError, match=r"must return one number, got \(4,\).*cs.PerRow"):
        cs.Model(dist.Normal(0, 1), simulator, lambda t, x: dist.Normal(t, 1).log_prob(x))


def test_bad_requests_for_simulations_are_refused(named_model):
    with pytest.raises(ValueError, match="at least one, got 0"):
        cs.simulate(named_model, 0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="has no simulator"):
        cs.simulate(cs.Model(dist.Normal(0, 1)), 3, key=jax.random.key(0))


def test_runs_made_elsewhere_are_checked():
    with pytest.raises(ValueError, match="vary from run to run"):
        cs.Simulations({"a": [1.0, 2.0]}, [np.zeros(2), np.zeros(3)])
    with pytest.raises(ValueError, match=r"leading axes are \[2, 3\]"):
        cs.Simulations({"a": np.zeros(2)}, np.zeros((3, 1)))
    with pytest.raises(ValueError, match="leading axis of runs, got one number"):
        cs.Simulations({"a": 1.0}, np.zeros((3, 1)))


def test_simulations_are_cut_and_shown(named_sims):
    part = named_sims[10:20]
    assert len(part) == 10
    np.testing.assert_array_equal(part.x, named_sims.x[10:20])
    assert len(named_sims[3]) == 1
    assert repr(named_sims) == "Simulations: 256 runs, theta: mu (), sigma (); x: (10, 1)"


def test_models_of_what_is_no_function_or_kind_of_data_are_refused(unchecked):
    prior, draw = dist.Normal(0.0, 1.0), lambda key, theta: theta * jnp.ones(3)
    with pytest.raises(TypeError, match=r"simulator is a function \(key, theta\) -> x, got list"):
        cs.Model(prior, [1.0, 2.0])
    with pytest.raises(TypeError, match=r"data must be cs.Vector\(\), .* got str"):
        cs.Model(prior, draw, data="set")
    with pytest.raises(TypeError, match=r"must return one number: .* not a valid JAX type"):
        cs.Model(prior, draw, lambda theta, x: "likely")
