"""NUTS from amortized draws: closed forms, NumPyro's own NUTS, and a wrong start."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.posterior.mcmc import Chains, warn_of_chains
from tests.conftest import ROWS, conjugate_model, quick
from tests.gaussian import DIM, exact_mean, exact_sd, gaussian_fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def sims():
    return cs.simulate(conjugate_model(DIM), 200, key=jax.random.key(0))


@pytest.mark.parametrize(
    "change",
    [{}, {"widen": 0.5}, {"shift": 3 * exact_sd()}],
    ids=["exact", "narrow", "shifted"],
)
def test_chains_are_right_whatever_they_start_from(sims, change):
    fit = gaussian_fit(conjugate_model(DIM), sims, **change)
    draws = fit.sample(sims.x[:2], 4000, key=KEY, method="nuts")
    assert draws["theta"].dims == ("observation", "chain", "draw", "theta_dim_0")
    assert draws["theta"].shape == (2, 4, 1000, DIM)
    error = exact_sd() / np.sqrt(draws["ess_theta"].values)
    mean = draws["theta"].mean(("chain", "draw")).values
    assert np.all(np.abs(mean - exact_mean(sims.x[:2])) < 4 * error)
    sd = draws["theta"].std(("chain", "draw")).values
    assert np.all(np.abs(sd / exact_sd() - 1) < 4 / np.sqrt(draws["ess_theta"].values))
    assert np.all(draws["r_hat_theta"] < 1.02)
    assert np.all(draws["ess_theta"] > 400)
    assert np.all(draws["divergences"] == 0)


def regression(y=None):
    """A bent posterior of three parameters, two of them positive."""
    rise = numpyro.sample("rise", dist.LogNormal(0.0, 0.5))
    bend = numpyro.sample("bend", dist.Normal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    t = jnp.linspace(0.0, 1.0, ROWS)
    mean = rise * (t + bend * t**2)
    numpyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y)


@pytest.mark.slow
def test_chains_match_a_long_run_of_numpyro_in_a_third_of_its_gradients():
    model = cs.Model.from_numpyro(regression, observed="y")
    sims = cs.simulate(model, 512, key=jax.random.key(0))
    fit = quick(model, sims, posterior=cs.Coupling(layers=2, width=32), epochs=30)
    x = sims.x[0] if not isinstance(sims.x, dict) else {n: a[0] for n, a in sims.x.items()}
    draws = fit.sample(x, 4000, key=KEY, method="nuts")
    observed = x["y"] if isinstance(x, dict) else x
    other = numpyro.infer.MCMC(
        numpyro.infer.NUTS(regression),
        num_warmup=1000,
        num_samples=5000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    other.run(jax.random.key(5), y=jnp.asarray(observed), extra_fields=("num_steps",))
    long = other.get_samples(group_by_chain=True)
    summary = numpyro.diagnostics.summary(long)
    for name in ("rise", "bend", "noise"):
        mine, theirs = draws[name].values, np.asarray(long[name])
        ess, ess_long = draws[f"ess_{name}"].values, summary[name]["n_eff"]
        sd = theirs.std(axis=(0, 1))
        error = sd * np.sqrt(1 / ess + 1 / ess_long)
        assert np.all(np.abs(mine.mean(axis=(0, 1)) - theirs.mean(axis=(0, 1))) < 4 * error)
        assert np.all(np.abs(mine.std(axis=(0, 1)) / sd - 1) < 4 / np.sqrt(ess) + 0.02)
        assert np.all(draws[f"r_hat_{name}"] < 1.02)
    spent = float(np.sum(other.get_extra_fields()["num_steps"]))
    assert float(draws["gradients"]) < spent / 3


@pytest.mark.filterwarnings("ignore:The chains have not converged")
def test_draws_of_chains_go_to_arviz_and_back_into_log_prob(sims):
    fit = gaussian_fit(conjugate_model(DIM), sims)
    draws = fit.sample(sims.x[0], 100, key=KEY, method="nuts")
    assert draws["theta"].dims == ("chain", "draw", "theta_dim_0")
    assert fit.log_prob(draws, sims.x[0]).shape == (4, 25)
    assert cs.to_arviz(draws)["posterior"]["theta"].shape == (4, 25, DIM)


def test_chains_stuck_in_two_modes_warn_with_r_hat_and_what_to_do():
    """Of theta squared, the sign is lost: two modes, forty standard deviations apart."""
    model = cs.Model(
        {"theta": dist.Normal(0.0, 2.0), "other": dist.Normal(0.0, 1.0)},
        lambda key, t: t["theta"] ** 2 + 0.2 * jax.random.normal(key, (1,)) + 0.0 * t["other"],
        lambda t, x: dist.Normal(t["theta"] ** 2, 0.2).log_prob(x).sum(),
    )
    fit = quick(model, cs.simulate(model, 200, key=jax.random.key(0)))
    with pytest.warns(UserWarning, match=r"R-hat of theta is \d.*below 1\.05.* larger n") as caught:
        draws = fit.sample(np.array([4.0], np.float32), 400, key=KEY, method="nuts")
    (warning,) = [w for w in caught if "R-hat" in str(w.message)]
    assert warning.filename == __file__
    assert float(draws["r_hat_theta"]) > 1.5
    assert f"R-hat of theta is {float(draws['r_hat_theta']):.4g}" in str(warning.message)


def chains_of(r_hat, divergences) -> Chains:
    """Chains of 100 steps each, for as many observations as there are numbers."""
    theta = {"mu": np.zeros((len(r_hat), 4, 100)), "nu": np.zeros((len(r_hat), 4, 100, 2))}
    r_hats = {"mu": np.array(r_hat), "nu": np.ones((len(r_hat), 2))}
    return Chains(theta, r_hats, r_hats, np.zeros(len(r_hat)), np.array(divergences))


@pytest.mark.parametrize(
    "r_hat, divergences, said",
    [
        ([2.93], [0], r"converged: R-hat of mu is 2\.93, and should be below 1\.05\. "),
        ([1.0], [40], r"converged: 40 of 400 steps diverged\."),
        ([1.2], [5], r"converged: R-hat of mu is 1\.2,.*; 5 of 400 steps diverged"),
        ([np.nan], [0], "R-hat of mu is not a number"),
        ([1.0, 1.3, 1.0], [0, 0, 9], r"converged for 2 of 3 observations: R-hat of mu is 1\.3,"),
    ],
)
def test_chains_that_have_not_converged_warn_with_their_numbers(r_hat, divergences, said):
    with pytest.warns(UserWarning, match=said):
        warn_of_chains(chains_of(r_hat, divergences))


@pytest.mark.filterwarnings("error")
def test_chains_that_have_converged_say_nothing(sims):
    warn_of_chains(chains_of([1.04, 1.0], [0, 4]))
    draws = gaussian_fit(conjugate_model(DIM), sims).sample(sims.x[0], 4000, key=KEY, method="nuts")
    assert np.all(draws["r_hat_theta"] < 1.02)


@pytest.mark.parametrize("method", ["nuts", "amortized"])
def test_two_ways_of_sampling_at_once_are_refused(sims, method):
    fit = gaussian_fit(conjugate_model(DIM), sims)
    with pytest.raises(ValueError, match=r"corrected=True resamples.* pass one of the two"):
        fit.sample(sims.x[0], 100, key=KEY, method=method, corrected=True)


def test_the_method_alone_chooses_how_to_sample(sims):
    fit, x = gaussian_fit(conjugate_model(DIM), sims), sims.x[0]
    plain, same = (fit.sample(x, 50, key=KEY, **how) for how in ({}, {"method": "amortized"}))
    assert plain.equals(same) and "pareto_k" not in plain.coords
    ways = (
        {"method": "corrected"},
        {"corrected": True},
        {"method": "corrected", "corrected": True},
    )
    first, *others = (fit.sample(x, 50, key=KEY, **how) for how in ways)
    assert all(first.equals(other) for other in others) and "pareto_k" in first.coords
    assert not first.equals(plain)


@pytest.mark.usefixtures("unchecked")
def test_unknown_methods_and_likelihoods_without_gradients_are_refused(sims):
    fit = gaussian_fit(conjugate_model(DIM), sims)
    with pytest.raises(ValueError, match='"amortized", "corrected" or "nuts", got \'mcmc\''):
        fit.sample(sims.x[0], 10, key=KEY, method="mcmc")
    host = cs.Model(
        conjugate_model(DIM).prior,
        conjugate_model(DIM).simulator,
        cs.OnHost(lambda theta, x: 0.0),
        data=cs.Set(),
    )
    with pytest.raises(ValueError, match="NUTS needs the gradient"):
        gaussian_fit(host, sims).sample(sims.x[0], 10, key=KEY, method="nuts")


def test_too_few_draws_for_chains_are_refused(sims):
    fit = gaussian_fit(conjugate_model(DIM), sims)
    with pytest.raises(ValueError, match="ask for 16 draws or more"):
        fit.sample(sims.x[0], 8, key=KEY, method="nuts")
