"""The identity, and what rests on it, where posterior and evidence have a closed form."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import consilience as cs
from consilience.identity.batches import Batch, Example
from consilience.identity.consistency import Queries, consistency, propose
from consilience.identity.evidence import Terms, estimate_all, resample
from consilience.identity.terms import evaluate
from tests.conftest import TINY, conjugate_model
from tests.gaussian import (
    DIM,
    exact_log_evidence,
    exact_mean,
    exact_sd,
    gaussian_fit,
    with_prior_mean,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model():
    return conjugate_model(DIM)


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, 200, key=jax.random.key(0))


@pytest.fixture(scope="module")
def held(model):
    return cs.simulate(model, 100, key=jax.random.key(1))


@pytest.fixture(scope="module")
def exact(model, sims):
    return gaussian_fit(model, sims)


SHIFT, WIDEN = 0.1, 1.5


@pytest.fixture(scope="module")
def wrong(model, sims):
    """A third of a standard deviation off, and half as wide again."""
    return gaussian_fit(model, sims, shift=SHIFT, widen=WIDEN)


def test_the_stand_in_is_the_exact_posterior(exact, sims, held):
    assert not np.allclose(exact.posterior.parameters.scale, 1.0), "standardising must matter"
    x, theta = held.x[:20], held.theta["theta"][:20]
    expected = stats.norm(exact_mean(x), exact_sd()).logpdf(theta).sum(axis=1)
    np.testing.assert_allclose(exact.log_prob(theta, x), expected, atol=1e-4)


PROPOSALS = [cs.CurrentPosterior(), cs.FromPrior(), cs.Mixture(0.5), cs.EpochCopy()]
CRITERIA = [cs.Variance(), cs.Bounded(), cs.RatioVariance()]
BY_PROPOSAL = tuple(cs.SelfConsistency(50, proposal=part) for part in PROPOSALS)
BY_CRITERION = tuple(
    cs.SelfConsistency(samples, criterion=part) for part in CRITERIA for samples in (2, 10, 50)
)


def cached(posterior, x):
    """What training caches of datasets without theta: those of a batch that are unlabelled."""
    runs = Example(jnp.zeros((1, posterior.parameters.dim)), x[:1])
    return evaluate(posterior, Batch(runs, None, Queries(x))).unlabeled


@eqx.filter_jit
def losses(posterior, joint, prior, x, key):
    """Self-consistency losses by dataset and proposal, for each criterion and K."""
    contexts = posterior.contexts(x)

    def draw(settings):
        return propose(settings, posterior, contexts, prior, key, beside=False)[0]

    def loss(settings, u):
        queries = Queries(x, None, u[:, : settings.samples])
        return consistency(settings, posterior, joint, prior, queries, cached(posterior, x), key)[0]

    draws = jnp.stack([draw(settings) for settings in BY_PROPOSAL])
    each = lambda s: jax.vmap(lambda u: loss(s, u), out_axes=1)  # noqa: E731
    return [each(settings)(draws) for settings in BY_CRITERION]


def test_the_loss_of_the_exact_posterior_is_zero_and_of_a_wrong_one_is_not(exact, wrong, held):
    """For every proposal, every measure of spread, and two, ten and fifty theta."""
    arguments = exact.joint, exact.model.prior, held.x[:8], jax.random.key(2)
    found = losses(exact.posterior, *arguments), losses(wrong.posterior, *arguments)
    for settings, zero, positive in zip(BY_CRITERION, *found, strict=True):
        assert zero.shape == (8, len(PROPOSALS))
        assert np.all(zero >= 0), settings
        assert np.all(zero < 1e-7), (settings, zero.max(axis=0))
        assert np.all(np.mean(positive, axis=0) > 0.02), (settings, positive.mean(axis=0))


@pytest.fixture(scope="module")
def exact_evidence(exact, held):
    return exact.log_evidence(held.x, key=jax.random.key(2))


def test_every_estimate_of_the_evidence_is_exact_for_the_exact_posterior(exact_evidence, held):
    found, expected = exact_evidence, exact_log_evidence(held.x)
    assert found.sizes["estimator"] == 3
    for method in ("mean", "importance", "bridge"):
        values = found.sel({"estimator": method})
        np.testing.assert_allclose(values["log_evidence"], expected, atol=1e-3)
        assert np.all(values["upper"] - values["lower"] < 1e-3)
    assert np.all(found["spread"] < 1e-3)
    np.testing.assert_allclose(found["ess"], 1000, rtol=1e-3)


def test_the_exact_posterior_is_one_to_trust(exact_evidence):
    """Ratios that differ by rounding alone have no tail."""
    assert np.all(exact_evidence["pareto_k"] < 0.7)


def test_self_consistency_alone_turns_a_wrong_posterior_into_the_exact_one(model, sims, held):
    """Two hundred steps of Adam on the frame, without one label."""
    fit = gaussian_fit(model, sims, shift=0.5, widen=1.5)
    settings = cs.SelfConsistency(10)
    x, joint = jnp.asarray(sims.x[:64]), fit.joint
    frame = lambda p: (p.flow.frame.weight, p.flow.frame.bias)  # noqa: E731
    adam = optax.adam(optax.cosine_decay_schedule(0.05, 200))

    def loss(params, key):
        posterior = eqx.tree_at(frame, fit.posterior, params)
        known = cached(posterior, x)
        return jnp.mean(
            consistency(settings, posterior, joint, model.prior, Queries(x), known, key).loss
        )

    @jax.jit
    def train(params, key):
        def step(carry, key):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, key)
            updates, state = adam.update(gradient, state)
            return (optax.apply_updates(params, updates), state), value

        start = (params, adam.init(params))
        (params, _), values = jax.lax.scan(step, start, jax.random.split(key, 200))
        return params, values

    params, values = train(frame(fit.posterior), jax.random.key(3))
    assert values[0] > 1.0
    assert values[-1] < 1e-3
    learned = eqx.tree_at(lambda f: frame(f.posterior), fit, params)

    def moments(fit):
        # The flow is Gaussian: its context holds its mean and standard deviation.
        context = jax.vmap(fit.posterior.context)(jnp.asarray(held.x))
        space = fit.posterior.parameters
        return context.shift * space.scale + space.loc, jnp.exp(context.log_scale) * space.scale

    mean, sd = moments(fit)
    np.testing.assert_allclose(mean, exact_mean(held.x) + 0.5, atol=1e-4)
    np.testing.assert_allclose(sd / exact_sd(), 1.5, rtol=1e-4)
    mean, sd = moments(learned)
    print(
        f"recovered: mean off by at most {np.abs(mean - exact_mean(held.x)).max():.4f}, "
        f"sd ratio {(sd / exact_sd()).min():.4f} to {(sd / exact_sd()).max():.4f}"
    )
    np.testing.assert_allclose(mean, exact_mean(held.x), atol=0.02 * exact_sd())
    np.testing.assert_allclose(sd, exact_sd(), rtol=0.02)


@pytest.fixture(scope="module")
def wrong_evidence(wrong, held):
    return wrong.log_evidence(held.x, key=jax.random.key(4))


@pytest.mark.parametrize("method", ["importance", "bridge"])
def test_intervals_of_the_evidence_cover_it_under_a_wrong_posterior(wrong_evidence, held, method):
    found, expected = wrong_evidence.sel({"estimator": method}), exact_log_evidence(held.x)
    inside = (found["lower"].values <= expected) & (expected <= found["upper"].values)
    width = (found["upper"] - found["lower"]).values
    error = found["log_evidence"].values - expected
    print(
        f"{method}: coverage {inside.mean():.2f}, width {width.mean():.3f}, rms {error.std():.4f}"
    )
    assert inside.mean() >= 0.85
    # An interval of any width covers: this one must be about as wide as the errors call for.
    assert 0.6 < width.mean() / (2 * 1.96 * np.sqrt(np.mean(error**2))) < 1.7
    assert abs(error.mean()) < 4 * np.sqrt(np.mean(error**2)) / 10


def test_the_mean_estimate_is_low_by_the_divergence_of_a_wrong_posterior(wrong_evidence, held):
    found = wrong_evidence.sel({"estimator": "mean"})["log_evidence"].values
    divergence = DIM * (-np.log(WIDEN) + (WIDEN**2 + (SHIFT / exact_sd()) ** 2) / 2 - 0.5)
    gap = exact_log_evidence(held.x) - found
    assert divergence > 0.5
    np.testing.assert_allclose(gap.mean(), divergence, atol=0.02)
    np.testing.assert_allclose(gap, divergence, atol=0.3)


def test_corrected_draws_follow_the_exact_posterior_where_plain_ones_do_not(wrong, held):
    x, key = held.x, jax.random.key(5)
    mean, sd = exact_mean(x), exact_sd()

    def errors(draws):
        theta = draws["theta"].values[:, 0]
        return (theta.mean(axis=1) - mean) / sd, theta.std(axis=1) / sd

    shift, ratio = errors(wrong.sample(x, 250, key=key))
    assert np.abs(shift.mean() - SHIFT / sd) < 0.02
    assert np.abs(ratio.mean() - WIDEN) < 0.02
    draws = wrong.sample(x, 250, key=key, corrected=True)
    shift, ratio = errors(draws)
    # About 630 effective draws, and 250 of them taken: a standard error of 0.06 or less.
    assert np.sqrt(np.mean(shift**2)) < 0.08
    assert np.abs(shift.mean()) < 0.02
    assert np.abs(ratio.mean() - 1) < 0.02
    assert np.abs(ratio - 1).max() < 0.25
    for name in ("pareto_k", "ess"):
        assert draws[name].dims == ("observation",)
        assert np.all(np.isfinite(draws[name]))
    np.testing.assert_allclose(draws["ess"].mean(), 1000 / mean_squared_weight(), rtol=0.05)
    assert np.all(draws["pareto_k"] < 0.7)


def mean_squared_weight() -> float:
    """The mean squared weight of the wrong posterior, by quadrature."""
    q = stats.norm(SHIFT / exact_sd(), WIDEN)
    grid = np.linspace(-12, 12, 20001)
    one = np.sum(stats.norm.pdf(grid) ** 2 / q.pdf(grid)) * (grid[1] - grid[0])
    return one**DIM


def test_one_dataset_has_numbers_where_a_batch_has_an_axis(wrong, held):
    x, key = held.x[0], jax.random.key(6)
    draws = wrong.sample(x, 250, key=key, corrected=True)
    assert draws["theta"].dims == ("chain", "draw", "theta_dim_0")
    evidence = wrong.log_evidence(x, key=key)
    assert evidence["log_evidence"].dims == ("estimator",)
    for result in (draws, evidence):
        for name in ("pareto_k", "ess"):
            assert result[name].dims == ()
            assert np.isfinite(result[name])
    error = evidence["log_evidence"].sel({"estimator": "bridge"}) - exact_log_evidence(x)
    assert abs(error) < 0.1
    plain = wrong.sample(x, 250, key=key)
    assert "pareto_k" not in plain.coords


def test_too_few_draws_for_an_estimate_are_refused(wrong, held):
    with pytest.raises(ValueError, match="50 draws or more, got 49"):
        wrong.log_evidence(held.x[0], 49, key=jax.random.key(0))


def terms_of(values) -> Terms:
    return Terms(jnp.asarray(values, float), jnp.zeros(np.shape(values)))


def reference_psis(log_ratios):
    """ArviZ's smoothed log weights and k-hat, in its old form or its new one."""
    import arviz

    if hasattr(arviz, "psislw"):
        return arviz.psislw(log_ratios)
    from arviz_stats.base import array_stats

    # Since ArviZ 1.0 it takes the negative of log ratios.
    return array_stats.psislw(-log_ratios)


def test_weights_and_pareto_k_agree_with_arviz():
    """An exponential of rate 1 / k in the log is a Pareto tail of shape k."""
    tails = np.repeat([0.3, 0.5, 0.8, 1.2], 25)
    log_ratios = tails[:, None] * np.random.default_rng(0).exponential(size=(100, 1000))
    _, _, found = estimate_all(terms_of(log_ratios))
    np.testing.assert_allclose(np.exp(found.log_weights).sum(axis=1), 1.0, rtol=1e-4)
    log_weights, k = map(np.array, zip(*map(reference_psis, log_ratios), strict=True))
    k = k.ravel()
    np.testing.assert_allclose(found.pareto_k, k, atol=0.1)
    means = k.reshape(4, 25).mean(axis=1)
    np.testing.assert_allclose(means, [0.3, 0.5, 0.8, 1.2], atol=0.15)
    # The sum of absolute differences of two distributions is at most two.
    distance = np.abs(np.exp(found.log_weights) - np.exp(log_weights)).sum(axis=1)
    assert distance.max() < 0.1
    np.testing.assert_allclose(found.ess, 1 / np.exp(2 * log_weights).sum(axis=1), rtol=0.15)


def weighed(weights):
    """What is found for the importance weights of a thousand draws, and k-hat without a rule."""
    from blackjax.diagnostics import psis_weights

    log_ratios = np.random.default_rng(0).permutation(np.log(weights))
    found = estimate_all(terms_of(log_ratios[None]))[2]
    raw = np.sum(weights) ** 2 / np.sum(np.square(weights))
    return float(found.pareto_k[0]), float(psis_weights(jnp.asarray(log_ratios))[1]), raw


RANKS = np.arange(1, 1001.0)


@pytest.mark.parametrize("k, size", [(1.9, 2.3), (2.2, 1.2), (1.0, 0.01), (3.0, 0.1)])
def test_nearly_constant_weights_with_a_tiny_heavy_tail_raise_no_alarm(k, size):
    found, without_the_rule, effective = weighed(1 + size * RANKS**-k)
    assert without_the_rule > 0.7
    assert effective > 992
    assert found <= 0


@pytest.mark.parametrize(
    "weights",
    [RANKS**-1.0, RANKS**-1.5, 1 + 8 * RANKS**-1.5, 1 + 100 * RANKS**-2.0],
    ids=["heavy", "heavier", "a tail of one part in fifty", "one draw with a tenth"],
)
def test_heavy_tails_that_matter_keep_their_alarm(weights):
    found, without_the_rule, effective = weighed(weights)
    assert effective < 960
    assert found == pytest.approx(without_the_rule, rel=1e-3)
    assert found > 0.7


def test_a_single_draw_with_half_of_the_weight_keeps_its_alarm():
    """Smoothing takes it for an outlier among weights that are nearly constant."""
    weights = np.exp(0.01 * np.random.default_rng(3).normal(size=1000))
    weights[0] = 1000.0
    found, without_the_rule, effective = weighed(weights)
    assert effective < 5
    assert found == pytest.approx(without_the_rule, rel=1e-3)


@pytest.mark.parametrize("a", [0.88, 0.9, 0.95, 0.99])
def test_even_weights_between_gaussians_have_no_heavy_tail(a):
    """Of normals with precisions 1 and a < 1, k is 1 - a, and the share of draws is known."""
    from consilience.identity.evidence import EVEN

    share = np.sqrt(2 * a - 1) / a
    assert (share > EVEN) == (1 - a < 0.123)


def test_resampling_picks_draws_in_proportion_to_their_weights():
    rng = np.random.default_rng(1)
    weights = rng.dirichlet(np.full(50, 0.5), size=3)
    weights[:, :5] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        picked = resample(np.log(weights), 10_000, rng)
    assert picked.shape == (3, 10_000)
    for row, expected in zip(picked, weights, strict=True):
        counts = np.bincount(row, minlength=50)
        # One comb: within one of n w, not only within the error of n dice.
        np.testing.assert_allclose(counts, 10_000 * expected, atol=1.01)
        assert counts[:5].sum() == 0
        assert not np.all(np.diff(row) >= 0), "in no particular order"


def test_impossible_draws_weigh_nothing_and_spoil_nothing():
    """A third of the draws are impossible, the ratios of the others have the mean exp(-5)."""
    rng = np.random.default_rng(2)
    impossible = rng.uniform(size=(100, 1000)) < 1 / 3
    values = -5.0 + 0.3 * rng.normal(size=(100, 1000)) - 0.3**2 / 2
    estimates, width, weights = estimate_all(terms_of(np.where(impossible, -np.inf, values)))
    w = np.exp(weights.log_weights)
    assert np.all(w[impossible] == 0)
    assert np.all(w[~impossible] > 0)
    np.testing.assert_allclose(w.sum(axis=1), 1.0, rtol=1e-4)
    assert np.all(np.isfinite(weights.pareto_k))
    np.testing.assert_allclose(weights.ess.mean(), 2000 / 3 * np.exp(-(0.3**2)), rtol=0.02)
    for method in ("importance", "bridge"):
        value, stated = estimates[method].log_evidence, estimates[method].error
        error = value - (np.log(2 / 3) - 5)
        assert np.all(np.abs(error) < 0.12)
        np.testing.assert_allclose(stated.mean(), error.std(), rtol=0.3)
    assert np.all(estimates["mean"].log_evidence == -np.inf)
    assert np.all(estimates["mean"].error == 0)
    assert np.all(width == np.inf)


def test_where_every_draw_is_impossible_none_is_effective():
    _, _, found = estimate_all(terms_of(np.full((100, 1000), -np.inf)))
    assert np.all(found.ess == 0)
    assert np.all(found.pareto_k == np.inf)
    assert not np.any(np.isnan(found.log_weights))


@pytest.fixture(scope="module")
def shifted_model():
    return with_prior_mean(1.0)


@pytest.fixture(scope="module")
def observed(model, shifted_model):
    """Fifty datasets of either model, and the log Bayes factors of the second to the first."""
    x = np.concatenate(
        [cs.simulate(m, 50, key=jax.random.key(8)).x for m in (model, shifted_model)]
    )
    return x, exact_log_evidence(x, 1.0) - exact_log_evidence(x)


@pytest.fixture(scope="module")
def exact_fits(exact, shifted_model):
    sims = cs.simulate(shifted_model, 200, key=jax.random.key(9))
    return {"zero": exact, "one": gaussian_fit(shifted_model, sims, prior_mean=1.0)}


def test_models_are_compared_by_exact_posteriors(exact_fits, observed):
    x, expected = observed
    weights = {"zero": 1.0, "one": 3.0}
    for method in ("mean", "bridge"):
        found = cs.compare(exact_fits, x, key=jax.random.key(10), weights=weights, method=method)
        factor = found["log_bayes_factor"]
        np.testing.assert_allclose(factor.sel(model="one", versus="zero"), expected, atol=2e-3)
        np.testing.assert_allclose(factor.sel(model="zero", versus="one"), -expected, atol=2e-3)
        np.testing.assert_allclose(factor.sel(model="one", versus="one"), 0, atol=1e-6)
        probability = found["probability"]
        exact_probability = 1 / (1 + np.exp(-(expected + np.log(3.0))))
        np.testing.assert_allclose(probability.sel(model="one"), exact_probability, atol=1e-3)
        np.testing.assert_allclose(probability.sum("model"), 1.0, rtol=1e-5)


@pytest.fixture(scope="module")
def short_fits(model, shifted_model):
    """Self-consistent fits of 256 simulations and 320 steps, of two models of the same data."""
    options = {
        "posterior": TINY,
        "summary": cs.DeepSet(width=16, blocks=1),
        "epochs": 40,
        "batch_size": 32,
        "learning_rate": 5e-3,
        "progress": False,
    }
    return {
        name: cs.fit(
            m, cs.simulate(m, 256, key=jax.random.key(11)), key=jax.random.key(12), **options
        )
        for name, m in (("zero", model), ("one", shifted_model))
    }


def test_short_fits_compare_models_within_a_tenth_of_a_nat(short_fits, observed):
    x, expected = observed
    found = cs.compare(short_fits, x, key=jax.random.key(13))
    factor = found["log_bayes_factor"].sel(model="one", versus="zero").values
    error = np.abs(factor - expected)
    print(f"100 log Bayes factors: error {error.mean():.4f}, at most {error.max():.4f}")
    assert np.ptp(expected) > 5, "the factors themselves must vary"
    assert np.all(error < 0.1)


def test_one_dataset_is_compared_without_an_axis_of_observations(exact_fits, observed):
    x, expected = observed
    found = cs.compare(exact_fits, x[3], key=jax.random.key(14))
    assert found["probability"].dims == ("model",)
    assert found["log_bayes_factor"].dims == ("model", "versus")
    factor = found["log_bayes_factor"].sel(model="one", versus="zero")
    assert abs(float(factor) - expected[3]) < 2e-3


@pytest.mark.usefixtures("unchecked")
def test_bad_comparisons_are_refused(exact_fits, observed):
    x, key, zero = observed[0], jax.random.key(0), exact_fits["zero"]
    with pytest.raises(ValueError, match="two or more fits"):
        cs.compare({"zero": zero}, x, key=key)
    with pytest.raises(ValueError, match=r"positive number for each of \['zero', 'one'\]"):
        cs.compare(exact_fits, x, key=key, weights={"zero": 1.0})
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="positive number for each"):
            cs.compare(exact_fits, x, key=key, weights={"zero": bad, "one": 1.0})
    with pytest.raises(ValueError, match="positive number for each"):
        cs.compare(exact_fits, x, key=key, weights={"zero": 1.0, "one": 1.0, "odd": 1.0})
    with pytest.raises(ValueError, match=r"method must be one of .*'bridge'.*got 'harmonic'"):
        cs.compare(exact_fits, x, key=key, method="harmonic")
