"""The self-consistency loss: its value, its gradient, its parts, and training with it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import consilience as cs
from consilience.identity.augmentation import Spread
from consilience.identity.batches import Batch, Example
from consilience.identity.consistency import Queries, consistency, propose
from consilience.identity.criteria import CENTRE_STEPS, Multipliers
from consilience.identity.evidence import Joint, make_joint
from consilience.identity.learned import Likelihood, Posterior
from consilience.identity.objective import Objective
from consilience.identity.terms import evaluate
from consilience.model.data import data_space
from consilience.training.defaults import default_plan
from consilience.training.prepare import data_spread, to_examples
from tests.conftest import ROWS, TINY, conjugate_model, quick
from tests.gaussian import DIM, Sum, gaussian_fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(5)


@pytest.fixture(scope="module")
def model():
    return conjugate_model(DIM)


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, 64, key=jax.random.key(0))


@pytest.fixture(scope="module")
def rough(model, sims):
    """A posterior three times too wide, its layers as they are built."""
    return gaussian_fit(model, sims, widen=3.0, rough=True)


@pytest.fixture(scope="module")
def spot(sims, rough):
    """One dataset and its training theta."""
    u, _ = rough.posterior.parameters.to_vector({"theta": sims.theta["theta"][0]})
    return Queries(jnp.asarray(sims.x[:1]), u[None], None)


@eqx.filter_jit
def loss_and_gradient(settings, posterior, joint, prior, spot, key):
    """The loss of one dataset, and its gradient in the networks of posterior and likelihood."""

    def loss(networks):
        summary, flow, learned = networks
        own = Posterior(summary, flow, posterior.parameters, posterior.data)
        # The batch that training would see, of one run: its theta counts where the spot has one.
        u = jnp.zeros((1, own.parameters.dim)) if spot.u is None else spot.u
        cached = evaluate(own, Batch(Example(u, spot.x), spot)).queries
        (value,), (usable,), (valid,) = consistency(
            settings, own, rebuild(joint, learned), prior, spot, cached, key
        )
        return value, (usable, valid)

    learned = joint.likelihood.flow if isinstance(joint.likelihood, Likelihood) else None
    networks = (posterior.summary, posterior.flow, learned)
    return eqx.filter_value_and_grad(loss, has_aux=True)(networks)


def rebuild(joint, flow):
    return joint if flow is None else eqx.tree_at(lambda j: j.likelihood.flow, joint, flow)


def flatten(tree) -> np.ndarray:
    return np.concatenate([np.ravel(a).astype(float) for a in jax.tree.leaves(tree)])


DEFAULT = cs.SelfConsistency(5)


@pytest.fixture(scope="module")
def default_loss(rough, model, spot):
    return loss_and_gradient(DEFAULT, rough.posterior, rough.joint, model.prior, spot, KEY)


@pytest.fixture(scope="module")
def all_u(rough, model, spot):
    """The five values of theta of `default_loss`, as free vectors."""
    drawn, _ = eqx.filter_jit(propose)(
        DEFAULT, rough.posterior, rough.posterior.contexts(spot.x), model.prior, KEY, beside=True
    )
    return np.concatenate([spot.u, drawn[0]])


def huber_centre(values: np.ndarray, bound: float) -> float:
    centre = float(np.median(values))
    for _ in range(CENTRE_STEPS):
        centre += float(np.mean([min(max(v - centre, -bound), bound) for v in values]))
    return centre


def test_value_and_gradient_agree_with_a_slow_plain_reference(rough, spot, default_loss, all_u):
    """One theta at a time: prior and likelihood by SciPy, the rest in double precision."""
    posterior, x, bound = rough.posterior, np.asarray(spot.x[0], float), cs.Bounded().bound

    @eqx.filter_jit
    def log_q_and_gradient(networks, theta):
        def log_q(networks):
            own = Posterior(*networks, posterior.parameters, posterior.data)
            return own.log_prob(theta, spot.x[0])

        return eqx.filter_value_and_grad(log_q)(networks)

    values, gradients = [], []
    for u in all_u:
        theta = posterior.parameters.from_vector(jnp.asarray(u))
        log_q, gradient = log_q_and_gradient((posterior.summary, posterior.flow), theta)
        at = np.asarray(theta["theta"], float)
        log_joint = stats.norm.logpdf(at).sum() + stats.norm.logpdf(x, at).sum()
        values.append(log_joint - float(log_q))
        gradients.append(-flatten(gradient))

    centre = huber_centre(np.array(values), bound)
    total, pull = 0.0, []
    for value in values:
        d = abs(value - centre)
        total += d**2 if d <= bound else bound * (2 * d - bound)
        pull.append(2 * np.sign(value - centre) * min(d, bound))
    far = sum(abs(p) == 2 * bound for p in pull)
    assert 0 < far < 5, "the example must have deviations on either side of the bound"

    (loss, (usable, valid)), gradient = default_loss
    assert bool(usable)
    assert bool(valid)
    np.testing.assert_allclose(loss, total / 5, rtol=1e-4)
    expected = sum(p * g for p, g in zip(pull, gradients, strict=True)) / 5
    found = flatten(gradient)
    assert np.linalg.norm(expected) > 0.1
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)


def test_no_gradient_flows_through_the_proposal(rough, model, spot, default_loss, all_u):
    fixed = spot._replace(draws=jnp.asarray(all_u[1:])[None])
    (loss, _), gradient = loss_and_gradient(
        DEFAULT, rough.posterior, rough.joint, model.prior, fixed, KEY
    )
    (expected_loss, _), expected = default_loss
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    difference = flatten(gradient) - flatten(expected)
    assert np.linalg.norm(difference) < 1e-5 * np.linalg.norm(flatten(expected))


def test_the_training_theta_is_one_of_the_k(rough, model, spot, default_loss):
    def count(beside):
        contexts = rough.posterior.contexts(spot.x)
        return jax.eval_shape(
            lambda c: propose(DEFAULT, rough.posterior, c, model.prior, KEY, beside=beside)[0],
            contexts,
        ).shape

    assert count(True) == (1, 4, DIM)
    assert count(False) == (1, 5, DIM)
    far = spot._replace(u=spot.u + 50.0)
    (moved, _), _ = loss_and_gradient(DEFAULT, rough.posterior, rough.joint, model.prior, far, KEY)
    (loss, _), _ = default_loss
    assert float(moved) > float(loss) + 50


@pytest.fixture(scope="module")
def learned(model, rough):
    """The joint of a model without a likelihood of its own: a learned one, just built."""
    flow = TINY.build(jax.random.key(3), dim=DIM, condition=DIM)
    unknown = cs.Model(
        dist.Normal(0.0, 1.0).expand([DIM]).to_event(1), model.simulator, data=cs.Set()
    )
    likelihood = Likelihood(flow, rough.posterior.parameters, rough.posterior.data)
    return make_joint(unknown, None, likelihood)


def test_the_gradient_reaches_a_learned_likelihood_if_asked(rough, model, spot, learned):
    found = {
        name: loss_and_gradient(
            cs.SelfConsistency(5, gradient=name),
            rough.posterior,
            learned,
            model.prior,
            spot,
            KEY,
        )
        for name in ("posterior", "both")
    }
    (alone, _), (*own, likelihood) = found["posterior"]
    (both, _), (*own_of_both, likelihood_of_both) = found["both"]
    assert np.all(flatten(likelihood) == 0)
    assert np.linalg.norm(flatten(likelihood_of_both)) > 0.1
    np.testing.assert_allclose(alone, both, rtol=1e-5)
    np.testing.assert_allclose(flatten(own), flatten(own_of_both), rtol=1e-3, atol=1e-4)
    assert np.linalg.norm(flatten(own)) > 0.1


def half_line(level: float, beyond: float = -np.inf) -> cs.Model:
    """As the conjugate model, but calling theta impossible whose first entry is above a level."""

    def log_likelihood(theta, x):
        return jnp.where(theta[0] > level, beyond, jnp.sum(dist.Normal(theta, 1.0).log_prob(x)))

    return cs.Model(
        dist.Normal(0.0, 1.0).expand([DIM]).to_event(1),
        lambda key, theta: theta + jax.random.normal(key, (ROWS, DIM)),
        log_likelihood,
        data=cs.Set(),
    )


@pytest.fixture(scope="module")
def at_the_edge(model, sims):
    """The exact posterior, a joint that ends at zero, and a dataset with its mean just below."""
    exact = gaussian_fit(model, sims)
    joint = make_joint(half_line(0.0), None, None)
    x = jnp.asarray(sims.x[0])
    mean = jnp.array([-0.1, 0.3])
    x = x + (ROWS + 1) / ROWS * mean - x.mean(axis=0)
    return exact.posterior, joint, x, mean


def ask_at(theta, posterior, joint, x):
    draws = jax.vmap(lambda t: posterior.parameters.to_vector({"theta": t})[0])(theta)
    spot = Queries(x[None], None, draws[None])
    return loss_and_gradient(DEFAULT, posterior, joint, joint.prior, spot, KEY)


def test_an_impossible_theta_is_pushed_away_and_poisons_nothing(at_the_edge):
    posterior, joint, x, mean = at_the_edge
    # Five theta around the posterior's mean, the first of them impossible.
    theta = mean + 0.2 * jnp.array([[1.0, 0.0], [-1, 0], [0, 1], [0, -1], [0, 0]])
    (loss, (usable, valid)), (_, gradient, _) = ask_at(theta, posterior, joint, x)
    assert bool(usable)
    assert bool(valid), "impossible is a valid answer"
    assert np.isfinite(loss)
    assert np.all(np.isfinite(flatten(gradient)))

    def log_q(flow):
        own = Posterior(posterior.summary, flow, posterior.parameters, posterior.data)
        return np.array([float(own.log_prob({"theta": t}, x)) for t in theta[:2]])

    params, static = eqx.partition(posterior.flow, eqx.is_inexact_array)
    size = 1e-2 / np.linalg.norm(flatten(gradient))
    stepped = jax.tree.map(lambda p, g: p - size * g, params, eqx.filter(gradient, eqx.is_array))
    change = log_q(eqx.combine(stepped, static)) - log_q(posterior.flow)
    assert change[0] < -1e-3
    assert change[1] > 1e-3, "what is possible must gain on what is not"


def test_a_dataset_that_no_theta_explains_counts_nothing(at_the_edge):
    posterior, joint, x, _ = at_the_edge
    theta = jnp.array([0.5, 0.0]) + 0.1 * jnp.arange(10.0).reshape(5, 2)
    (loss, (usable, valid)), gradient = ask_at(theta, posterior, joint, x)
    assert float(loss) == 0
    assert not usable
    assert bool(valid)
    assert np.all(flatten(gradient) == 0)


def test_a_dataset_where_the_likelihood_fails_counts_nothing_and_is_not_valid(at_the_edge):
    posterior, _, x, mean = at_the_edge
    joint = make_joint(half_line(0.0, beyond=np.nan), None, None)
    theta = mean + 0.2 * jnp.array([[1.0, 0.0], [-1, 0], [0, 1], [0, -1], [0, 0]])
    (loss, (usable, valid)), gradient = ask_at(theta, posterior, joint, x)
    assert not valid
    assert not usable, "NaN is a mistake, not an impossible theta"
    assert float(loss) == 0
    assert np.all(flatten(gradient) == 0)


def test_schedules_at_the_start_the_middle_and_the_end():
    expected = {
        cs.Constant(0.7): (0.7, 0.7, 0.7),
        cs.Step(0.5): (0.0, 1.0, 1.0),
        cs.Step(0.6, before=1.0, after=0.1): (1.0, 1.0, 0.1),
        cs.Ramp(0.25, 0.75): (0.0, 0.5, 1.0),
        cs.Ramp(0.0, 0.8, before=2.0, after=1.0): (2.0, 1.375, 1.0),
        cs.Smooth(0.25, 0.75): (0.0, 0.5, 1.0),
        cs.Smooth(0.4, 0.8, after=3.0): (0.0, 3 * 0.5 * (1 - np.cos(np.pi / 4)), 3.0),
    }
    progress = jnp.array([0.0, 0.5, 1.0])
    for schedule, values in expected.items():
        np.testing.assert_allclose(jax.vmap(schedule)(progress), values, atol=1e-6)
    # Smooth has no slope at its ends, Ramp does.
    assert abs(jax.grad(cs.Smooth(0.25, 0.75))(0.2501)) < 0.01
    assert jax.grad(cs.Ramp(0.25, 0.75))(0.2501) == pytest.approx(2.0)


def test_self_consistency_is_off_at_the_start_by_default(model, sims):
    plan = default_plan(model, model.layout, DIM, len(sims))
    for settings in (cs.SelfConsistency(), plan.self_consistency):
        assert float(settings.schedules[0](jnp.array(0.0))) == 0
        assert float(settings.schedules[0](jnp.array(1.0))) == 1


def test_bounded_is_the_variance_where_values_agree():
    values = np.random.default_rng(0).normal(size=(20, 10))
    found = jax.vmap(cs.Bounded(10.0))(jnp.asarray(values))
    np.testing.assert_allclose(found, jax.vmap(cs.Variance())(jnp.asarray(values)), rtol=1e-5)
    np.testing.assert_allclose(found, values.var(axis=1), rtol=1e-5)


def test_bounded_grows_in_a_straight_line_with_one_far_value():
    near = np.array([0.3, -0.5, 0.1, 0.8, -0.2])
    far = [100.0, 200.0, 300.0]
    losses = [float(cs.Bounded(3.0)(jnp.append(near, value))) for value in far]
    # Huber's function has the slope 2 b, and the value is one of six.
    np.testing.assert_allclose(np.diff(losses), 100 * 2 * 3.0 / 6, rtol=1e-4)
    variances = [float(cs.Variance()(jnp.append(near, value))) for value in far]
    assert np.diff(variances)[1] > 1.5 * np.diff(variances)[0]


@pytest.mark.parametrize(("importance", "scale"), [(0.0, 0.9), (1.0, 1.0)])
def test_importance_makes_it_the_variance_under_the_true_posterior(importance, scale):
    """A posterior N(0, 1) learned as N(0, 0.9²): the variances under either in closed form."""
    narrow = 0.9
    theta = narrow * np.random.default_rng(0).normal(size=200_000)
    values = stats.norm.logpdf(theta) - stats.norm.logpdf(theta, scale=narrow)
    found = cs.Bounded(100.0, importance)(jnp.asarray(values))
    # The values are a constant plus a multiple of theta², whose variance is twice sd⁴.
    exact = 0.25 * (1 / narrow**2 - 1) ** 2 * 2 * scale**4
    assert float(found) == pytest.approx(exact, rel=0.03)


def test_importance_pulls_at_the_draws_that_the_posterior_lacks():
    values = jnp.array([0.0, 0.5, -0.5, 0.2, 4.0])
    alike, weighted = (
        np.asarray(jax.grad(cs.Bounded(importance=share))(values)) for share in (0.0, 1.0)
    )
    # A value is lowered by raising the posterior there: so is the largest, in either way.
    assert alike[-1] > 0
    assert weighted[-1] > 0
    assert np.abs(alike[:-1]).max() > 0.1 * alike[-1]
    middle = np.asarray(jax.grad(cs.Bounded(importance=0.5))(values))
    assert np.isfinite(middle).all()
    # Draws where the posterior has too much are left to its normalisation.
    low = jnp.array([0.0, 0.5, -0.5, 0.2, -40.0])
    assert jax.grad(cs.Bounded(importance=0.0))(low)[-1] == pytest.approx(-2 * 3.0 / 5)
    assert jax.grad(cs.Bounded(importance=1.0))(low)[-1] == pytest.approx(0.0, abs=1e-6)


def test_the_gradient_of_bounded_is_bounded_and_blind_to_a_common_shift():
    criterion, rng = cs.Bounded(3.0), np.random.default_rng(1)
    values = jnp.asarray(rng.normal(size=(50, 10)) * 10 ** rng.uniform(-1, 3, size=(50, 1)))
    gradients = np.asarray(jax.vmap(jax.grad(criterion))(values))
    assert np.all(np.abs(gradients) <= 2 * 3.0 / 10 * 1.0001)
    assert np.abs(gradients).max() > 0.59
    losses = jax.vmap(criterion)(values)
    np.testing.assert_allclose(jax.vmap(criterion)(values + 64.0), losses, rtol=1e-3)
    # The bounded deviations sum to zero around Huber's centre, so a shift has no gradient.
    moderate = jnp.asarray(rng.standard_t(3, size=(50, 10)))
    total = np.abs(np.asarray(jax.vmap(jax.grad(criterion))(moderate)).sum(axis=1))
    plain = np.asarray(moderate) - np.median(moderate, axis=1, keepdims=True)
    assert np.abs(2 * np.clip(plain, -3, 3).mean(axis=1)).max() > 0.5, "around the median, it has"
    assert total.max() < 0.05


def test_ratio_variance_is_half_the_relative_variance():
    values = np.random.default_rng(2).normal(-40.0, 1.0, size=12)
    ratios = np.exp(values + 40)
    expected = 0.5 * ratios.var() / ratios.mean() ** 2
    np.testing.assert_allclose(cs.RatioVariance()(jnp.asarray(values)), expected, rtol=1e-4)


def test_multipliers_of_the_relative_constraint_go_uphill():
    values = np.random.default_rng(3).normal(-40.0, 1.0, size=6)
    multipliers = np.array([0.5, -1.0, 2.0, 0.0, 1.0])
    ratios = np.exp(values) / np.exp(values).mean()
    gaps = ratios[:-1] - ratios[1:]
    call = lambda values, multipliers: Multipliers(multipliers)(values)  # noqa: E731
    arguments = jnp.asarray(values), jnp.asarray(multipliers)
    np.testing.assert_allclose(call(*arguments), multipliers @ gaps, rtol=1e-4)
    # Descent subtracts this, and so adds what raises the loss.
    np.testing.assert_allclose(jax.grad(call, 1)(*arguments), -gaps, rtol=1e-3, atol=1e-5)
    assert np.all(cs.RelativeConstraint().build(6).values == np.zeros(5))
    with pytest.raises(ValueError, match="one multiplier for each pair"):
        call(jnp.asarray(values), jnp.zeros(3))


def made_up(augmentation, x, kind, seed=0):
    """One dataset of several, augmented; and the spread of all of them."""
    space = data_space(x, kind)
    layout, spread = space.layout, data_spread(space, x)
    first = layout.named(jax.tree.map(lambda a: jnp.asarray(a[0]), x))
    return augmentation(first, jax.random.key(seed), layout, spread), spread


def sets_with_sides(n: int = 6):
    rng = np.random.default_rng(4)
    return {
        "y": rng.normal(size=(n, 7, 1)).astype(np.float32),
        "side": np.arange(n * 14, dtype=np.float32).reshape(n, 7, 2),
        "dose": rng.normal(size=n).astype(np.float32),
        "there": np.tile(np.arange(7) < 5, (n, 1)),
    }


WITH_SIDES = cs.Set(side=("side", "dose"), mask="there")


def test_the_bootstrap_draws_whole_rows():
    x = sets_with_sides()
    changed, _ = made_up(cs.Bootstrap(jitter=0.0), x, WITH_SIDES)
    rows = [int(np.flatnonzero(x["side"][0, :, 0] == s)[0]) for s in changed["side"][:, 0]]
    assert len(set(rows)) < 7, "drawn with replacement"
    for name in ("y", "side", "there"):
        np.testing.assert_array_equal(changed[name], x[name][0][rows])
    assert changed["dose"] == x["dose"][0]
    other, _ = made_up(cs.Bootstrap(jitter=0.0), x, WITH_SIDES, seed=1)
    assert not np.array_equal(other["y"], changed["y"])


def test_the_bootstrap_leaves_the_places_of_a_series_and_a_vector():
    for kind in (cs.Series(), cs.Vector()):
        x = np.random.default_rng(5).normal(size=(6, 9, 2)).astype(np.float32)
        changed, _ = made_up(cs.Bootstrap(jitter=0.0), x, kind)
        np.testing.assert_array_equal(changed["data"], x[0])


def test_jitter_moves_data_by_its_size_and_nothing_else():
    x = sets_with_sides(400)
    changed, spread = made_up(cs.Jitter(0.1), x, WITH_SIDES)
    for name in ("side", "dose", "there"):
        np.testing.assert_array_equal(changed[name], x[name][0])
        assert changed[name].dtype == x[name].dtype
    assert np.all(changed["y"] != x["y"][0])

    wide = np.random.default_rng(6).normal(size=(5, 20000)).astype(np.float32)
    spread = Spread({"data": jnp.asarray(2.0)}, {"data": -jnp.inf}, {"data": jnp.inf})
    layout = data_space(wide, cs.Vector()).layout
    moved = cs.Jitter(0.1)({"data": jnp.asarray(wide[0])}, KEY, layout, spread)["data"]
    np.testing.assert_allclose(np.std(moved - wide[0]), 0.1 * 2.0, rtol=0.02)


def test_jitter_stays_in_the_range_of_the_training_data():
    x = np.random.default_rng(7).uniform(size=(5, 300)).astype(np.float32)
    changed, _ = made_up(cs.Jitter(3.0), x, cs.Vector())
    assert np.all(changed["data"] >= x.min(axis=0))
    assert np.all(changed["data"] <= x.max(axis=0))
    assert np.mean(changed["data"] == x.max(axis=0)) > 0.1, "some must have met the bound"
    rows = np.random.default_rng(7).uniform(size=(5, 300, 1)).astype(np.float32)
    changed, _ = made_up(cs.Jitter(3.0), rows, cs.Set())
    assert rows.min() == changed["data"].min()
    assert rows.max() == changed["data"].max()


@pytest.mark.parametrize("augmentation", [cs.Jitter(1.0), cs.Bootstrap(1.0)])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_counts_stay_whole(augmentation, dtype):
    x = np.random.default_rng(8).poisson(4.0, size=(20, 50, 1)).astype(dtype)
    changed, _ = made_up(augmentation, x, cs.Set(counts=True))
    found = changed["data"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.round(found))
    assert not np.array_equal(np.sort(found, axis=0), np.sort(x[0], axis=0))
    assert found.min() >= 0


@pytest.mark.parametrize("augmentation", [cs.Jitter(), cs.Bootstrap()])
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (cs.Vector(), {"data": (3,)}),
        (cs.Vector(side=("b",)), {"a": (2, 2), "b": (3,), "c": ()}),
        (cs.Series(), {"data": (8, 2)}),
        (cs.Set(), {"data": (8, 1)}),
        (WITH_SIDES, None),
    ],
)
def test_augmentation_keeps_names_shapes_and_types(augmentation, kind, shapes):
    if shapes is None:
        x = sets_with_sides()
    else:
        rng = np.random.default_rng(9)
        x = {name: rng.normal(size=(6, *s)).astype(np.float32) for name, s in shapes.items()}
    changed, _ = made_up(augmentation, x.get("data", x), kind)
    assert set(changed) == set(x)
    for name, part in x.items():
        assert changed[name].shape == part.shape[1:]
        assert changed[name].dtype == part.dtype
        assert np.all(np.isfinite(changed[name]))


def consistent(model, sims, settings, **options):
    """A tiny self-consistent fit."""
    small = {"summary": Sum(), "batch_size": 16}
    return quick(model, sims, self_consistency=settings, **small | options)


def test_datasets_far_from_consistent_count_less_and_their_labels_more(rough, sims):
    """The draws are fixed, so that the loss of each dataset is known from a batch of one."""
    posterior, n = rough.posterior, 6
    u = to_examples(posterior.parameters, sims[:n]).u
    draws = u[:, None] + jnp.linspace(-0.3, 0.3, 4)[:, None] * jnp.arange(1, n + 1)[:, None, None]
    runs = Example(u, jnp.asarray(sims.x[:n]))
    every = Batch(runs, Queries(runs.x, u, draws), None)

    def terms(limit, batch):
        settings = cs.SelfConsistency(
            5,
            cs.Constant(1.0),
            maximum_likelihood=cs.Constant(0.2),
            limit=limit,
            augmentation=None,
        )
        objective = Objective(rough.model, posterior.parameters, posterior.data, settings, True)
        found, _ = eqx.filter_jit(objective)(
            rough.networks, batch, jax.random.split(KEY, 5), jnp.asarray(0.5)
        )
        return {name: float(value) for name, value in found.items()}

    one = lambda i: jax.tree.map(lambda a: a[i : i + 1], every)  # noqa: E731
    losses = np.array([terms(None, one(i))["consistency"] for i in range(n)])
    assert losses.max() > 20 * losses.min() > 0
    trust = 4.0 / (4.0 + losses)
    plain, limited = terms(None, every), terms(4.0, every)
    np.testing.assert_allclose(plain["consistency"], losses.mean(), rtol=1e-4)
    np.testing.assert_allclose(limited["consistency"], (losses * trust).mean(), rtol=1e-4)
    labels = 0.2 + 0.8 * (1 - trust.mean())
    np.testing.assert_allclose(limited["posterior"], labels / 0.2 * plain["posterior"], rtol=1e-4)


def always(samples: int, proposal, criterion, augmentation) -> cs.SelfConsistency:
    """Self-consistency with its full weight from the first step on."""
    return cs.SelfConsistency(
        samples,
        cs.Constant(1.0),
        proposal=proposal,
        criterion=criterion,
        augmentation=augmentation,
    )


# Each proposal, each criterion and each augmentation, together with `unlabeled_fit`.
COMBINED = {
    "prior": always(3, cs.FromPrior(), cs.Bounded(), cs.Jitter()),
    "mixture": always(4, cs.Mixture(0.5), cs.RatioVariance(), cs.Bootstrap()),
    "copy": always(4, cs.EpochCopy(), cs.RelativeConstraint(), None),
}


@pytest.mark.parametrize("name", COMBINED)
def test_every_proposal_criterion_and_augmentation_trains(model, sims, name):
    fit = consistent(model, sims, COMBINED[name])
    terms = fit.history.terms
    assert len(terms["consistency"]) == 2
    assert all(np.all(np.isfinite(values)) for values in terms.values()), terms
    assert np.all(terms["skipped"] == 0)
    assert np.all(terms["dropped"] == 0)
    # The constraint starts at zero, with its multipliers.
    assert terms["consistency"][1] != 0
    assert "unlabeled" not in terms


def test_a_second_consistent_fit_of_the_same_shapes_compiles_nothing(model, sims):
    compiled = []

    def listen(event, seconds, **details):
        if "backend_compile" in event:
            compiled.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    more = cs.simulate(model, 64, key=jax.random.key(9))
    consistent(model, sims, COMBINED["copy"])
    jax.jit(lambda x: x + 1)(0.0)
    assert compiled, "a compilation must have been seen"
    compiled.clear()
    equal = always(4, cs.EpochCopy(), cs.RelativeConstraint(), None)
    consistent(model, more, equal, epochs=3, learning_rate=3e-4, key=jax.random.key(8))
    assert compiled == []


def test_a_fit_goes_on_from_another_whatever_its_criterion(model, sims):
    first = consistent(model, sims, COMBINED["copy"])
    later = consistent(model, sims, COMBINED["copy"], start=first, posterior=None, summary=None)
    # It begins where the other ended, with multipliers of its own at zero.
    assert later.history.terms["posterior"][0] < first.history.terms["posterior"][0]
    assert later.history.terms["consistency"][1] != 0


@pytest.fixture(scope="module")
def unlabeled_fit(sims):
    """Theta above 1.5 are impossible; the loss begins half-way; nine datasets have no theta.

    With the paper's own proposal and criterion.
    """
    model = half_line(1.5)
    assert np.any(sims.theta["theta"][:, 0] > 1.5), "some runs must be called impossible"
    settings = cs.SelfConsistency(
        3,
        cs.Step(0.5),
        proposal=cs.CurrentPosterior(),
        criterion=cs.Variance(),
        augmentation=None,
    )
    x = cs.simulate(model, 9, key=jax.random.key(10)).x
    return consistent(model, sims, settings, unlabeled=x, epochs=2)


def test_terms_of_runs_and_of_unlabelled_data_are_zero_while_their_weight_is(unlabeled_fit):
    terms = unlabeled_fit.history.terms
    for name in ("consistency", "unlabeled"):
        assert terms[name][0] == 0
        assert terms[name][1] > 0


def test_minus_infinity_is_a_legal_likelihood(unlabeled_fit):
    terms = unlabeled_fit.history.terms
    assert all(np.all(np.isfinite(values)) for values in terms.values())
    assert np.all(terms["skipped"] == 0)
    weights = jax.tree.leaves(eqx.filter(unlabeled_fit.posterior, eqx.is_inexact_array))
    assert all(np.all(np.isfinite(leaf)) for leaf in weights)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 1}, "2 or more, got 1"),
        (
            {"weight": cs.Constant(-1.0)},
            "weight of self-consistency must not be negative.*gives -1",
        ),
        ({"weight": cs.Step(0.5, before=0.0, after=-0.1)}, "must not be negative.*gives -0.1"),
        ({"weight": cs.Ramp(0.1, 0.2, before=-0.5)}, "must not be negative.*gives -0.5"),
        ({"weight": cs.Constant(float("nan"))}, "must not be negative.*gives nan"),
        ({"maximum_likelihood": cs.Constant(-1.0)}, "weight of maximum likelihood"),
        ({"gradient": "neither"}, '"both" or "posterior", got \'neither\''),
        ({"limit": 0.0}, "limit must be positive, or None, got 0.0"),
        ({"unlabeled_weight": -1.0}, "unlabeled_weight must not be negative, got -1"),
        ({"unlabeled_batch": 0}, "unlabeled_batch must be at least 1, got 0"),
    ],
)
def test_bad_settings_of_self_consistency_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        cs.SelfConsistency(**settings)


def test_a_broken_number_of_samples_is_refused():
    settings = cs.SelfConsistency()
    # The type checks of these tests would refuse it before the library does.
    object.__setattr__(settings, "samples", 2.5)
    with pytest.raises(ValueError, match=r"whole number, 2 or more, got 2\.5"):
        settings.__post_init__()


def test_bad_settings_of_its_parts_are_refused():
    with pytest.raises(ValueError, match="bound must be positive, got 0"):
        cs.Bounded(0.0)
    with pytest.raises(ValueError, match=r"importance must be in \[0, 1\], or None, got 2"):
        cs.Bounded(importance=2.0)
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got 1.5"):
        cs.Mixture(1.5)
    with pytest.raises(ValueError, match=r"jitter must not be negative, got -0\.1"):
        cs.Jitter(-0.1)
    with pytest.raises(ValueError, match="needs start < stop"):
        cs.Ramp(0.5, 0.5)
    with pytest.raises(ValueError, match="needs start < stop"):
        cs.Smooth(0.5, 0.2)


def bring(log_likelihood) -> cs.Model:
    """A model whose runs come from elsewhere: its likelihood is first seen by `fit`."""
    prior = dist.Normal(0.0, 1.0).expand([DIM]).to_event(1)
    return cs.Model(prior, None, log_likelihood, data=cs.Set())


def gaussian(theta, x):
    return jnp.sum(dist.Normal(theta, 1.0).log_prob(x))


@pytest.mark.parametrize(
    ("log_likelihood", "message"),
    [
        (
            lambda t, x: jnp.sum(dist.Normal(t, 1.0).log_prob(x), axis=1),
            r"must return one number, got the shape \(10,\).*PerRow",
        ),
        (
            lambda t, x: jnp.where(t[0] > 1.0, jnp.nan, gaussian(t, x)),
            r"log_likelihood\(theta, x\) is nan for run \d+ at its own theta, \{'theta': \[",
        ),
        (
            lambda t, x: jnp.where(t[0] > 1.0, jnp.inf, gaussian(t, x)),
            r"log_likelihood\(theta, x\) is inf for run \d+ at its own theta",
        ),
        (
            lambda t, x: jnp.where(jnp.abs(x[:, 0].mean() - t[0]) > 1.5, jnp.nan, gaussian(t, x)),
            r"is nan for run \d+ at the theta of another run",
        ),
        (lambda t, x: jnp.full((), -jnp.inf), "minus infinity for every run at its own theta"),
    ],
)
def test_likelihoods_that_cannot_be_right_are_refused(sims, log_likelihood, message):
    with pytest.raises(ValueError, match=message):
        quick(bring(log_likelihood), sims, self_consistency=None)


def test_a_likelihood_of_many_numbers_is_refused_by_the_model():
    with pytest.raises(ValueError, match=r"must return one number, got \(10,\).*PerRow"):
        cs.Model(
            dist.Normal(0.0, 1.0),
            lambda key, t: t + jax.random.normal(key, (10,)),
            lambda t, x: dist.Normal(t, 1.0).log_prob(x),
        )


def test_unlabelled_data_that_do_not_fit_are_refused(model, sims):
    with pytest.raises(
        ValueError, match=r"unlabeled must have the shape \(10, 2\).*got \(64, 9, 2\)"
    ):
        quick(model, sims, self_consistency=None, unlabeled=sims.x[:, :9])
    with pytest.raises(ValueError, match=r"Unlabelled data have no theta.*need self-consistency"):
        quick(model, sims, self_consistency=False, unlabeled=sims.x)
    with pytest.raises(ValueError, match="unlabeled has NaN or infinite values"):
        quick(model, sims, self_consistency=None, unlabeled=np.full((ROWS, DIM), np.nan))


def test_the_evidence_needs_a_density_of_the_prior_and_a_likelihood(model, sims):
    prior = cs.ImplicitPrior(lambda key: {"theta": jax.random.normal(key, (DIM,))})
    implicit = cs.Model(prior, None, gaussian, data=cs.Set())
    fit = gaussian_fit(implicit, sims)
    assert fit.prior is None
    with pytest.raises(ValueError, match=r"needs the prior's density.*prior=cs.Coupling\(\)"):
        fit.log_evidence(sims.x[0], key=KEY)
    with pytest.raises(ValueError, match="needs the prior's density"):
        fit.sample(sims.x[0], 10, key=KEY, corrected=True)
    unknown = cs.Model(
        dist.Normal(0.0, 1.0).expand([DIM]).to_event(1), model.simulator, data=cs.Set()
    )
    with pytest.raises(ValueError, match=r"needs a likelihood.*likelihood=True"):
        make_joint(unknown, None, None)
    with pytest.raises(ValueError, match="no log-likelihood"):
        quick(unknown, sims, self_consistency=cs.SelfConsistency(exact=True))
    assert isinstance(make_joint(model, None, None), Joint)
