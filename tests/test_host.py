"""Log-likelihoods that JAX cannot see: the same numbers, few calls, honest errors."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import consilience as cs
from consilience.model.host import failures_as_raised
from tests.conftest import ROWS, quick
from tests.gaussian import DIM, Sum

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, K = 6, 5
SETTINGS = cs.SelfConsistency(4, cs.Step(0.5), proposal=cs.FromPrior(), augmentation=None)
OPTIONS = {"self_consistency": SETTINGS, "summary": Sum(), "epochs": 4, "batch_size": 16}


def in_jax(theta, x):
    return jnp.sum(dist.Normal(theta["mu"], jnp.exp(theta["log_sd"])).log_prob(x))


def one(theta, x):
    return stats.norm.logpdf(x, theta["mu"], np.exp(theta["log_sd"])).sum()


class Many:
    """All log-likelihoods at once, in NumPy; counts its calls, and fails when told to."""

    def __init__(self):
        self.calls, self.sizes, self.fail = 0, [], None

    def __call__(self, theta, x):
        self.calls += 1
        self.sizes.append(len(x))
        mu, log_sd = theta["mu"][:, None, :], theta["log_sd"][:, None, None]
        values = stats.norm.logpdf(x, mu, np.exp(log_sd)).sum(axis=(1, 2))
        return values if self.fail is None else self.fail(self.calls, values)


def model_of(log_likelihood) -> cs.Model:
    return cs.Model(
        {
            "mu": dist.Normal(0.0, 1.0).expand([DIM]).to_event(1),
            "log_sd": dist.Normal(0.0, 0.3),
        },
        lambda key, t: t["mu"] + jnp.exp(t["log_sd"]) * jax.random.normal(key, (ROWS, DIM)),
        log_likelihood,
        data=cs.Set(),
    )


@pytest.fixture(scope="module")
def many():
    return Many()


@pytest.fixture(scope="module")
def host_model(many):
    return model_of(cs.OnHost(many, batched=True))


@pytest.fixture(scope="module")
def sims(host_model):
    return cs.simulate(host_model, 64, key=jax.random.key(0))


@pytest.fixture(autouse=True)
def sound(many):
    """Each test begins with a likelihood that works and was not called."""
    many.__init__()


def batch():
    """K theta for each of B datasets."""
    rng = np.random.default_rng(0)
    theta = {"mu": rng.normal(size=(B, K, DIM)), "log_sd": rng.normal(size=(B, K))}
    x = rng.normal(size=(B, ROWS, DIM))
    return jax.tree.map(lambda a: jnp.asarray(a, float), (theta, x))


def nested(log_likelihood):
    """Over datasets, and over several theta for each."""
    return jax.jit(jax.vmap(jax.vmap(log_likelihood, in_axes=(0, None))))


def test_one_at_a_time_equals_jax_under_jit_and_nested_vmap():
    theta, x = batch()
    found, expected = nested(cs.OnHost(one))(theta, x), nested(in_jax)(theta, x)
    assert found.shape == (B, K)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    first = jax.tree.map(lambda a: a[0, 0], theta), x[0]
    np.testing.assert_allclose(cs.OnHost(one)(*first), expected[0, 0], rtol=1e-5)
    np.testing.assert_allclose(jax.jit(cs.OnHost(one))(*first), expected[0, 0], rtol=1e-5)


def test_a_batched_likelihood_gets_all_values_in_one_call(many):
    theta, x = batch()
    run = nested(cs.OnHost(many, batched=True))
    found = np.asarray(run(theta, x))
    assert many.calls == 1
    assert many.sizes == [B * K]
    np.testing.assert_allclose(found, nested(in_jax)(theta, x), rtol=1e-5)
    np.asarray(run(theta, x))
    assert many.calls == 2


def test_one_bare_theta_and_a_dictionary_of_data_go_through():
    def log_likelihood(theta, x):
        assert np.shape(theta) == ()
        assert set(x) == {"y", "n"}
        return stats.binom.logpmf(x["y"], x["n"], 1 / (1 + np.exp(-theta))).sum()

    theta = jnp.linspace(-1.0, 1.0, 4)
    x = {"y": jnp.array([1, 2, 3]), "n": jnp.array([4, 4, 4])}
    found = jax.jit(jax.vmap(cs.OnHost(log_likelihood), in_axes=(0, None)))(theta, x)
    binomial = lambda t: dist.Binomial(x["n"], logits=t).log_prob(x["y"]).sum()  # noqa: E731
    np.testing.assert_allclose(found, jax.vmap(binomial)(theta), rtol=1e-4)


@pytest.fixture(scope="module")
def host_fit(host_model, sims, many):
    many.__init__()
    fit = quick(host_model, sims, **OPTIONS)
    return fit, many.calls, list(many.sizes)


def test_a_fit_on_the_host_equals_a_fit_in_jax(host_fit, sims):
    expected = quick(model_of(in_jax), sims, **OPTIONS)
    fit = host_fit[0]
    for name, values in expected.history.terms.items():
        np.testing.assert_allclose(fit.history.terms[name], values, rtol=1e-2, atol=1e-4)
    assert fit.history.terms["consistency"][-1] > 0
    arrays = lambda f: jax.tree.leaves(eqx.filter(f.posterior.flow, eqx.is_array))  # noqa: E731
    for a, b in zip(arrays(fit), arrays(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    x, key = sims.x[:4], jax.random.key(3)
    draws, other = fit.sample(x, 500, key=key), expected.sample(x, 500, key=key)
    for name in ("mu", "log_sd"):
        np.testing.assert_allclose(draws[name].mean("draw"), other[name].mean("draw"), atol=0.01)
        np.testing.assert_allclose(draws[name].std("draw"), other[name].std("draw"), atol=0.01)


def test_training_makes_one_call_a_step_and_none_before_the_loss_begins(host_fit):
    _, calls, sizes = host_fit
    # Two checks before training; then, of 4 epochs of 4 steps of 16 runs, the second half.
    assert sizes[:2] == [64, 64]
    assert sizes[2:] == [16 * SETTINGS.samples] * 8
    assert calls == 10


def failing_in_training(calls, values):
    if calls > 2:
        raise LookupError("the tables end here")
    return values


def test_an_exception_of_the_user_comes_out_of_fit_as_it_is(host_model, sims, many):
    def at_once(calls, values):
        raise ZeroDivisionError("by zero, at once")

    many.fail = at_once
    with pytest.raises(ZeroDivisionError, match="by zero, at once"):
        quick(host_model, sims, **OPTIONS)
    many.__init__()
    many.fail = failing_in_training
    with pytest.raises(LookupError, match="the tables end here"):
        quick(host_model, sims, **OPTIONS)
    # It leaves nothing behind.
    many.__init__()
    assert quick(host_model, sims, **OPTIONS).history.stopped == "finished"


def test_an_exception_of_the_user_comes_out_of_corrected_draws_and_evidence(host_fit, sims, many):
    def missing(calls, values):
        raise LookupError("the tables end here")

    many.fail = missing
    for use in (
        lambda: host_fit[0].sample(sims.x[0], 10, key=jax.random.key(0), corrected=True),
        lambda: host_fit[0].log_evidence(sims.x[0], 50, key=jax.random.key(0)),
    ):
        with pytest.raises(LookupError, match="the tables end here"):
            use()


def test_a_likelihood_that_turns_nan_in_training_is_an_error_that_says_so(host_model, sims, many):
    many.fail = lambda calls, values: np.where(calls > 2, np.nan, values)
    with pytest.raises(cs.TrainingError, match=r"log_likelihood\(theta, x\) was NaN or plus inf"):
        quick(host_model, sims, **OPTIONS)


@pytest.mark.parametrize(
    ("log_likelihood", "batched", "message"),
    [
        (
            lambda t, x: stats.norm.logpdf(x, t["mu"], 1.0),
            False,
            r"must return one number, got the shape \(10, 2\).*batched=True",
        ),
        (
            lambda t, x: np.zeros((len(x), 1)),
            True,
            r"got 64 values of theta and of x: it must return 64 numbers, .*\(64, 1\)",
        ),
        (
            lambda t, x: stats.norm.logpdf(x, t["mu"][:, None], 1.0).sum(),
            True,
            r"must return 64 numbers, got the shape \(\)",
        ),
    ],
)
def test_wrong_shapes_are_errors_that_say_what_to_do(sims, log_likelihood, batched, message):
    with pytest.raises(ValueError, match=message):
        quick(model_of(cs.OnHost(log_likelihood, batched=batched)), sims, self_consistency=None)


@pytest.mark.parametrize(
    ("value", "message"),
    [(1j, "is complex"), (None, r"got nothing \(None\)"), ("likely", "holds text")],
)
def test_a_likelihood_outside_jax_that_returns_no_real_number_is_named(sims, value, message):
    with pytest.raises(TypeError, match=rf"What log_likelihood\(theta, x\) returns .*{message}"):
        quick(model_of(cs.OnHost(lambda theta, x: value)), sims, **OPTIONS)


def test_a_failure_outside_of_a_fit_does_not_come_out_of_a_later_one(sims):
    def old(theta, x):
        raise KeyError("an old mistake, long mended")

    def new(theta, x):
        raise ArithmeticError("a new mistake")

    with pytest.raises(Exception, match="an old mistake"):
        jax.block_until_ready(nested(cs.OnHost(old))(*batch()))
    with pytest.raises(ArithmeticError, match="a new mistake"):
        quick(model_of(cs.OnHost(new)), sims, self_consistency=None)


def failing_as(name, after=0):
    """A batched likelihood that works `after` times, then fails with its name."""
    many = Many()

    def fail(calls, values):
        if calls > after:
            raise LookupError(f"the tables of {name}\nend here")
        return values

    many.fail = fail
    return cs.OnHost(many, batched=True)


@pytest.mark.parametrize("after", [0, 2])
def test_two_fits_at_once_raise_each_its_own_exception(sims, after):
    together = Barrier(2)

    def trained(name):
        model = model_of(failing_as(name, after))
        together.wait()
        with pytest.raises(LookupError, match=f"the tables of {name}"):
            quick(model, sims, **OPTIONS)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(trained, ["the first", "the second"]))


def test_calls_at_once_raise_each_their_own_exception():
    def called(name):
        compiled = nested(failing_as(name))
        for _ in range(10):
            with pytest.raises(LookupError, match=f"the tables of {name}"), failures_as_raised():
                jax.block_until_ready(compiled(*batch()) + 1.0)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(called, ["a", "b", "c", "d"]))


def test_draws_at_once_raise_each_their_own_exception(host_fit, sims):
    def corrected(name):
        fit = eqx.tree_at(lambda f: f.model, host_fit[0], model_of(failing_as(name)))
        with pytest.raises(LookupError, match=f"the tables of {name}"):
            fit.sample(sims.x[0], 10, key=jax.random.key(0), corrected=True)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(corrected, ["the first", "the second"]))


def test_an_error_of_the_library_is_not_mistaken_for_one_of_the_host():
    """Another call fails on the host while this one raises something of its own."""
    with pytest.raises(ValueError, match="bad input"), failures_as_raised():
        with pytest.raises(Exception, match="the tables of another"):
            jax.block_until_ready(nested(failing_as("another"))(*batch()))
        raise ValueError("bad input")
