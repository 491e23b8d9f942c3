"""Fits in which recipes compete: cross-fitting, stacking, and the mixture that comes out."""

import dataclasses
import signal
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import optimize
from scipy.special import logsumexp

import consilience as cs
from consilience.identity.learned import Posterior
from consilience.networks.ensemble import EnsembleDensity, Stacked, stack
from consilience.networks.flow import Coupling
from consilience.training.candidates import CANDIDATES, EFFORTS, Work, candidates_for
from consilience.training.folds import make_folds
from consilience.training.portfolio import race
from consilience.training.ridge import ridge, start_at_ridge
from consilience.training.stacking import stacking_weights
from tests.conftest import TINY

N, MEMBERS = 150, 3


def simulator(key, theta):
    return jnp.concatenate([theta, theta[:1] - theta[1:]]) + 0.3 * jax.random.normal(key, (3,))


@pytest.fixture(scope="module", autouse=True)
def short():
    """Few steps: these problems are simple."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EFFORTS, "quick", Work(members=3, steps=1000, candidates=3))
        yield


@pytest.fixture(scope="module")
def model():
    return cs.Model(dist.Normal(0.0, 1.0).expand([2]).to_event(1), simulator)


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, N, key=jax.random.key(0))


@pytest.fixture(scope="module")
def fit(model, sims):
    return competing(model, sims)


def competing(model, sims, **settings):
    given = {"posterior": TINY, "likelihood": TINY, "effort": "quick", "members": MEMBERS}
    return cs.fit(model, sims, key=jax.random.key(1), progress=False, **given | settings)


def exact_log_posterior(theta, x):
    """Of the linear Gaussian model above, in closed form."""
    design = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    precision = np.eye(2) + design.T @ design / 0.09
    covariance = np.linalg.inv(precision)
    mean = x @ design @ covariance.T / 0.09
    away = theta - mean
    squares = np.einsum("ni,ij,nj->n", away, precision, away)
    return -0.5 * squares + 0.5 * np.linalg.slogdet(precision)[1] - np.log(2 * np.pi)


# The mixture densities


def test_an_ensemble_is_the_mean_of_its_members():
    members = [TINY.build(jax.random.key(i), dim=2, condition=3) for i in range(3)]
    conditions = jax.random.normal(jax.random.key(8), (5, 9))
    joined = EnsembleDensity(stacked=stack(members), dim=2, members=3)
    values = jax.random.normal(jax.random.key(9), (5, 4, 2))
    each = [
        member.log_prob(values, jax.vmap(member.prepare)(conditions[:, 3 * i : 3 * i + 3]))
        for i, member in enumerate(members)
    ]
    expected = logsumexp(np.stack(each), axis=0) - np.log(3)
    found = joined.log_prob(values, jax.vmap(joined.prepare)(conditions))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def apart(shared):
    """Members whose draws tell which of them made them: around 0, 100 and 200."""
    members = []
    for i in range(3):
        flow = TINY.build(jax.random.key(i), dim=1, condition=2)
        bias = jnp.array([100.0 * i, 0.0])
        members.append(eqx.tree_at(lambda f: f.frame.bias, flow, bias))
    return EnsembleDensity(stacked=stack(members), dim=1, members=3, shared=shared)


@pytest.mark.parametrize("n", [1, 2, 30, 31])
def test_draws_are_divided_evenly_among_the_members(n):
    density = apart(shared=True)
    draw = eqx.filter_jit(lambda key: density.sample(key, jnp.ones((4, 2)), (n,))[0])
    counts = np.zeros(3)
    for i in range(200):
        which = np.rint(np.asarray(draw(jax.random.key(i)))[..., 0] / 100).astype(int)
        each = np.stack([(which == m).sum(axis=1) for m in range(3)])
        assert each.max() - each.min() <= 1, "no member has two draws more than another"
        counts += each.sum(axis=1)
    share = counts / counts.sum()
    # Of 800 picks and more: five standard errors.
    assert np.abs(share - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 800)


def test_a_draw_depends_on_its_own_condition_alone():
    density = apart(shared=False)
    noise = density.noise(jax.random.key(0), (4, 7))
    contexts = jax.random.normal(jax.random.key(1), (4, 6))
    whole = density.values(noise, contexts)
    some = density.values(jax.tree.map(lambda a: a[2:3], noise), contexts[2:3])
    np.testing.assert_allclose(whole[2:3], some, rtol=1e-6)


def test_parts_of_a_stack_are_drawn_by_their_weights():
    density = Stacked((TINY, TINY), (), shared=True).build(
        np.random.default_rng(0), dim=1, condition=2
    )
    far = eqx.tree_at(lambda d: d.parts[1].frame.bias, density, jnp.array([100.0, 0.0]))
    far = eqx.tree_at(lambda d: d.log_weights, far, jnp.log(jnp.array([0.8, 0.2])))
    values, log_q = far.sample(jax.random.key(0), far.prepare(jnp.ones(2)), (4000,))
    assert abs(np.mean(np.asarray(values) > 50) - 0.2) < 5 * np.sqrt(0.16 / 4000)
    again = far.log_prob(values, far.prepare(jnp.ones(2)))
    np.testing.assert_allclose(log_q, again, rtol=1e-5, atol=1e-4)


def test_members_that_differ_beside_their_arrays_are_refused():
    flows = [
        Coupling(layers=n, width=4).build(jax.random.key(0), dim=2, condition=1) for n in (1, 2)
    ]
    with pytest.raises(ValueError, match="members=1"):
        stack(flows)


# Ridge regression, folds, stacking, the race


def test_ridge_predicts_as_leave_one_out_says():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 4)) + 3.0
    y = x @ rng.standard_normal((4, 2)) + [1.0, -2.0] + 0.5 * rng.standard_normal((60, 2))
    weight, bias, spread = ridge(x, y)
    full = np.column_stack([x, np.ones(60)])
    least_squares = np.linalg.lstsq(full, y, rcond=None)[0]
    np.testing.assert_allclose(weight, least_squares[:-1].T, atol=0.1)
    np.testing.assert_allclose(bias, least_squares[-1], atol=0.5)
    left_out = []
    for i in range(60):
        rest = np.arange(60) != i
        found = np.linalg.lstsq(full[rest], y[rest], rcond=None)[0]
        left_out.append(y[i] - full[i] @ found)
    np.testing.assert_allclose(spread, np.sqrt(np.mean(np.square(left_out), axis=0)), rtol=0.03)


def test_ridge_of_noise_predicts_the_mean():
    rng = np.random.default_rng(1)
    weight, bias, spread = ridge(rng.standard_normal((50, 40)), rng.standard_normal((50, 1)) + 5.0)
    assert np.abs(weight).max() < 0.1 and abs(bias[0] - 5.0) < 0.5 and 0.7 < spread[0] < 1.3


def test_a_flow_starts_at_the_linear_gaussian_model():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((500, 3))
    y = x @ rng.standard_normal((3, 2)) + 0.2 * rng.standard_normal((500, 2))
    flow = TINY.build(jax.random.key(0), dim=2, condition=3)
    started = start_at_ridge(flow, x, y)
    context = jax.vmap(started.prepare)(jnp.asarray(x))
    weight, bias, spread = ridge(x, y)
    np.testing.assert_allclose(context.shift, x @ weight.T + bias, atol=1e-4)
    np.testing.assert_allclose(np.exp(context.log_scale[0]), spread, rtol=1e-4)


@pytest.mark.parametrize(("n", "members"), [(10, 2), (11, 5), (103, 5), (12, 1)])
def test_folds_hold_out_every_run_once(n, members):
    folds = make_folds(n, members, np.random.default_rng(0))
    assert len(folds) == members
    for fold in folds:
        assert not set(fold.train) & set(fold.held_out)
        assert len(fold.train) == len(folds[0].train)
    if members > 1:
        held = np.concatenate([fold.held_out for fold in folds])
        assert sorted(held) == list(range(n))


def test_stacking_finds_the_best_weights():
    rng = np.random.default_rng(0)
    log_density = rng.standard_normal((400, 3)) * [1.0, 1.2, 1.5] - [0.0, 0.3, 0.4]
    found = stacking_weights(log_density)

    def loss(free):
        return -np.mean(logsumexp(log_density + free - logsumexp(free), axis=1))

    best = optimize.minimize(loss, np.zeros(3), method="BFGS", tol=1e-10)
    assert -np.mean(logsumexp(log_density + np.log(found), axis=1)) < best.fun + 1e-5


def test_the_race_drops_what_is_clearly_worse():
    rng = np.random.default_rng(0)
    best = rng.standard_normal(100)
    close, far = best - 0.05 + 0.5 * rng.standard_normal(100), best - 1.0
    dropped = race([close, best, far, None])
    assert set(dropped) == {2, 3}
    assert "1.00 nats" in dropped[2]


def test_candidates_are_narrowed_by_what_is_given():
    names = lambda **given: [c.name for c in candidates_for("standard", **given)]  # noqa: E731
    assert len(names(emulate=True)) == EFFORTS["standard"].candidates
    assert names(emulate=False) == ["NPE", "linear NPE"]
    assert names(emulate=False, posterior=TINY) == ["NPE"]
    thorough = candidates_for("thorough", emulate=True)
    assert len(thorough) == len(CANDIDATES) and thorough[-1].jointly
    every = candidates_for("standard", emulate=True, posterior=TINY, likelihood=TINY)
    assert [c.name for c in every] == ["NPE", "emulator: mean and noise"]
    assert all(c.posterior == TINY for c in every) and every[1].likelihood == TINY
    together = names(emulate=True, rows_open=True)
    assert "emulator: splines, rows together" in together
    assert CANDIDATES[0].name == "NPE", "plain NPE is always among them"


# Whole fits


def test_the_fit_is_near_the_exact_posterior(model, sims, fit):
    tests = cs.simulate(model, 1000, key=jax.random.key(99))
    found = fit.log_prob(tests.theta, tests.x)
    exact = exact_log_posterior(tests.theta["theta"], np.asarray(tests.x))
    assert np.mean(exact - found) < 0.1


def test_the_history_says_what_was_tried(fit):
    tried = fit.history.tried
    assert [one.name for one in tried] == ["NPE", "emulator: mean and noise"]
    assert sum(one.weight for one in tried) == pytest.approx(1.0)
    assert all(np.isfinite(one.score) and one.decision for one in tried)
    assert tried[0].name in repr(fit.history) and "decision" in fit.history.table()


def test_densities_out_of_fold_are_those_of_members_that_have_not_seen_the_run(sims, fit):
    judged = fit.out_of_fold
    np.testing.assert_array_equal(judged.run, np.arange(N))
    assert np.bincount(judged.member).tolist() == [50, 50, 50]
    space, posterior = fit.posterior.parameters, fit.posterior
    u = jax.vmap(lambda t: space.to_vector(t)[0])(sims.theta)
    np.testing.assert_allclose(judged.u, u, atol=1e-6)
    heaviest = max(fit.history.tried, key=lambda one: one.weight)
    if heaviest.weight < 1:
        pytest.fail("this fit has one recipe, so that its members can be compared")
    flow = posterior.flow
    parts, static = eqx.partition(flow.stacked, eqx.is_array)
    for m in range(MEMBERS):
        member = eqx.combine(jax.tree.map(lambda a, m=m: a[m], parts), static)
        mine = np.asarray(judged.member) == m
        alone = Posterior(posterior.summary, member, space, posterior.data)
        log_q = alone.log_probs(
            jax.tree.map(lambda a, mine=mine: a[mine][:, None], sims.theta), sims.x[mine]
        )[:, 0]
        np.testing.assert_allclose(judged.log_prob[mine], log_q, atol=1e-3)
    assert judged.draws.shape == (N, 100, 2)
    # Parameters rank evenly among the draws, if these are of the right posterior.
    ranks = np.mean(judged.draws < judged.u[:, None], axis=1)
    assert np.abs(ranks.mean(axis=0) - 0.5).max() < 5 * np.sqrt(1 / 12 / N)


def test_draws_out_of_fold_do_not_share_their_noise(fit):
    """Of the first runs of two folds, which are drawn for in like places."""
    judged = fit.out_of_fold
    first, second = (np.flatnonzero(np.asarray(judged.member) == m)[0] for m in (0, 1))
    for k in range(2):
        pair = np.asarray(judged.draws)[[first, second], :, k]
        # Of 100 draws: five standard errors.
        assert abs(np.corrcoef(pair)[0, 1]) < 0.5


def test_an_ensemble_serves_all_that_a_fit_does(model, sims, fit, tmp_path):
    x = sims.x[:2]
    draws = fit.sample(x, 60, key=jax.random.key(2))
    assert np.isfinite(fit.log_prob(draws.isel(chain=0), x)).all()
    evidence = fit.log_evidence(x, 200, key=jax.random.key(3))
    assert np.isfinite(evidence["log_evidence"]).all()
    corrected = fit.sample(x, 50, key=jax.random.key(4), method="corrected")
    assert (corrected["ess"] > 20).all()
    loaded = cs.load(fit.save(tmp_path / "fit.safetensors"), model)
    again = loaded.sample(x, 60, key=jax.random.key(2))
    np.testing.assert_array_equal(draws["theta"], again["theta"])
    np.testing.assert_array_equal(loaded.out_of_fold.draws, fit.out_of_fold.draws)
    assert loaded.history.tried == fit.history.tried
    assert loaded.recipe == fit.recipe


def test_the_same_key_gives_the_same_fit_and_threads_do_not_matter(model, sims, fit, monkeypatch):
    monkeypatch.setattr("consilience.training.portfolio.cores", lambda: 1)
    again = competing(model, sims)
    for first, second in zip(
        jax.tree.leaves(fit.networks), jax.tree.leaves(again.networks), strict=True
    ):
        np.testing.assert_array_equal(first, second)


@dataclasses.dataclass(frozen=True)
class Blind:
    """A likelihood that ignores the parameters, and is far too certain."""

    def build(self, rng, *, dim, condition):
        return _Blind(jnp.zeros(1))


class _Blind(eqx.Module):
    unused: jax.Array

    def log_prob(self, value, condition):
        return jnp.sum(jax.scipy.stats.norm.logpdf(value, 0.0, 0.1)) + 0.0 * self.unused[0]

    def sample(self, key, condition):
        return 0.1 * jax.random.normal(key, (3,))


def test_a_bad_likelihood_does_not_drag_the_posterior(model, sims):
    """The network cannot learn, and what it emulates is no data of this model."""
    fit = competing(model, sims, likelihood=Blind())
    alone = competing(model, sims, likelihood=None, self_consistency=False)
    tests = cs.simulate(model, 500, key=jax.random.key(99))
    score = lambda fit: np.mean(fit.log_prob(tests.theta, tests.x))  # noqa: E731
    assert score(fit) > score(alone) - 0.05


def test_ctrl_c_returns_what_is_trained(model, sims, monkeypatch):
    started = threading.Event()
    from consilience.training import portfolio

    whole = portfolio.train_fold

    def watched(*args):
        result = whole(*args)
        started.set()
        return result

    monkeypatch.setattr(portfolio, "train_fold", watched)

    def interrupt():
        started.wait(60)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    fit = competing(model, sims)
    assert fit.history.stopped == "interrupted"
    assert np.isfinite(fit.sample(sims.x[0], 10, key=jax.random.key(0))["theta"]).all()


def test_training_settings_and_competing_recipes_exclude_each_other(model, sims):
    with pytest.raises(ValueError, match="epochs given"):
        cs.fit(model, sims, key=jax.random.key(0), epochs=2, effort="quick")
    with pytest.raises(ValueError, match="quick, standard, thorough"):
        cs.fit(model, sims, key=jax.random.key(0), effort="fast")
    with pytest.raises(ValueError, match="half of the 150 runs"):
        cs.fit(model, sims, key=jax.random.key(0), members=100)


# Every kind of model and of data


def padded(key, theta):
    """Counts of varying number, with an exposure for each that is known."""
    k_n, k_t, k_x = jax.random.split(key, 3)
    exposure = jax.random.uniform(k_t, (6, 1), minval=0.5, maxval=2.0)
    there = jnp.arange(6) < jax.random.randint(k_n, (), 2, 7)
    counts = jax.random.poisson(k_x, theta["rate"] * exposure)
    return {"y": counts * there[:, None], "t": exposure, "there": there.astype(float)}


PADDED = cs.Set(side=("t",), mask="there", counts=True)


@pytest.mark.slow
def test_sets_of_counts_with_side_information_and_a_mask():
    model = cs.Model({"rate": dist.Gamma(2.0, 0.5)}, padded, data=PADDED)
    sims = cs.simulate(model, N, key=jax.random.key(0))
    fit = competing(model, sims, summary=cs.DeepSet(width=8, blocks=1))
    assert fit.history.tried[1].members == MEMBERS or fit.history.tried[1].decision
    draws = fit.sample(jax.tree.map(lambda a: a[0], sims.x), 50, key=jax.random.key(2))
    assert (draws["rate"] > 0).all()
    assert np.isfinite(fit.out_of_fold.log_prob).all()


def test_a_prior_without_density_gets_a_learned_one():
    prior = cs.ImplicitPrior(lambda key: {"mu": jax.random.normal(key)})
    model = cs.Model(prior, lambda key, t: t["mu"] + jax.random.normal(key, (3,)))
    sims = cs.simulate(model, N, key=jax.random.key(0))
    fit = competing(model, sims, prior=TINY)
    evidence = fit.log_evidence(sims.x[0], 100, key=jax.random.key(1))
    assert fit.prior is not None and np.isfinite(evidence["log_evidence"]).all()


def test_runs_that_failed_are_a_factor_of_the_likelihood():
    def simulator(key, theta):
        x = theta + jax.random.normal(key, (2,))
        return jnp.where(theta > 1.0, jnp.nan, x)

    model = cs.Model(dist.Normal(0.0, 1.0), simulator)
    sims = cs.simulate(model, 2 * N, key=jax.random.key(0)).drop_invalid()
    fit = competing(model, sims)
    assert fit.likelihood is not None and fit.likelihood.validity is not None
    draws = fit.sample(np.array([2.0, 2.0]), 500, key=jax.random.key(1))["theta"]
    # Without the factor it is N(4/3, 1/3), and 0.59 of it lies there.
    assert np.mean(draws > 1.2) < 0.25


def test_runs_are_streamed_from_a_store(model, tmp_path):
    sims = cs.simulate(model, N, key=jax.random.key(0), store=tmp_path / "runs.zarr")
    memory = sims.nbytes
    fit = competing(
        model, cs.Simulations.open(tmp_path / "runs.zarr"), memory=2 * memory // 3, batch_size=8
    )
    assert len(fit.out_of_fold.run) == N
    tests = cs.simulate(model, 500, key=jax.random.key(99))
    exact = exact_log_posterior(tests.theta["theta"], np.asarray(tests.x))
    assert np.mean(exact - fit.log_prob(tests.theta, tests.x)) < 0.3


def test_data_found_to_be_a_set_have_likelihoods_of_rows_and_of_all(caplog):
    model = cs.Model(dist.Normal(0.0, 1.0), lambda key, t: t + jax.random.normal(key, (4, 1)))
    sims = cs.simulate(model, N, key=jax.random.key(0))
    fit = competing(model, sims, summary=cs.DeepSet(width=8, blocks=1))
    names = [one.name for one in fit.history.tried]
    assert "emulator: mean and noise, rows together" in names
    heaviest = max(fit.history.tried[1:], key=lambda one: one.weight)
    kept = fit.posterior.data.layout.kind
    if heaviest.weight > 0:
        assert kept.independent == ("rows together" not in heaviest.name)


def test_a_report_and_a_figure_show_an_ensemble(fit, sims, tmp_path):
    path = fit.report(
        tmp_path / "report.html",
        sims.x[0],
        key=jax.random.key(0),
        n=100,
        predictive=50,
        progress=False,
    )
    assert "emulator: mean and noise" in path.read_text()
    assert cs.plots.losses(fit.history) is not None


# What a review of this code has found


@pytest.mark.parametrize(("n", "p"), [(16, 20), (50, 100), (50, 49), (200, 5)])
def test_ridge_of_noise_has_the_spread_of_new_noise(n, p):
    """With more conditions than runs, a fit that passes through all runs is not the best."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((n, p)), rng.standard_normal((n, 2))
    weight, bias, spread = ridge(x, y)
    new_x, new_y = rng.standard_normal((2000, p)), rng.standard_normal((2000, 2))
    errors = np.sqrt(np.mean((new_y - new_x @ weight.T - bias) ** 2, axis=0))
    assert (errors < 1.5).all() and (np.abs(np.log(spread / errors)) < 0.4).all()


def test_a_member_that_diverges_is_left_out(model, sims, monkeypatch):
    from consilience.training import portfolio

    whole = portfolio.train_fold

    calls = []

    def diverging(setup, candidate, fold, rng, stop):
        """The last of all members."""
        result = whole(setup, candidate, fold, rng, stop)
        calls.append(candidate.name)
        bad = len(calls) == 2 * MEMBERS
        return result._replace(log_q=result.log_q * np.nan) if bad else result

    monkeypatch.setattr(portfolio, "train_fold", diverging)
    fit = competing(model, sims)
    assert len(calls) == 2 * MEMBERS
    assert len(np.unique(fit.out_of_fold.member)) == MEMBERS - 1
    assert np.isfinite(fit.out_of_fold.log_prob).all()


def test_a_module_as_summary_is_loaded_either_way(model, sims, tmp_path):
    net = Halves(jnp.ones(3))
    fit = competing(model, sims, summary=net)
    path = fit.save(tmp_path / "fit.safetensors")
    first = cs.load(path, model, parts=[net])
    second = cs.load(path, model, summary=net)
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, two)


class Halves(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x["data"] * self.weight


def test_few_runs_have_fewer_members(model):
    sims = cs.simulate(model, 12, key=jax.random.key(0))
    fit = cs.fit(
        model,
        sims,
        key=jax.random.key(1),
        posterior=TINY,
        likelihood=False,
        effort="thorough",
        progress=False,
    )
    assert fit.origin.settings["members"] == 6


@pytest.mark.slow
def test_an_emulator_is_followed_by_self_consistency(model, sims, monkeypatch):
    """Both networks are trained to agree, and the better of the two posteriors is kept."""
    monkeypatch.setitem(EFFORTS, "thorough", Work(members=2, steps=300, candidates=7))
    fit = competing(model, sims, effort="thorough", members=2)
    tried = {one.name: one for one in fit.history.tried}
    assert np.isfinite(tried["emulator, then self-consistency"].score)
    assert tried["emulator, then self-consistency"].score > tried["NPE"].score - 1.0
