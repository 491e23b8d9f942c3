"""Parts of the loss, each built-in one and one of a user's, under the laws of their kind.

A new proposal, criterion, augmentation, schedule or loss term gets a line in the dictionary of
its kind.
"""

import copy
import dataclasses
import inspect
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special, stats

import consilience as cs
from consilience.identity.augmentation import Augmentation
from consilience.identity.batches import Batch, Example
from consilience.identity.consistency import Queries, consistency, propose
from consilience.identity.criteria import Criterion, trained
from consilience.identity.objective import Objective
from consilience.identity.proposals import Proposal
from consilience.identity.schedules import Schedule
from consilience.identity.setting import Setting, resolved
from consilience.identity.terms import (
    AtomicTerm,
    ConsistencyTerm,
    LikelihoodTerm,
    LossTerm,
    PosteriorTerm,
    PriorTerm,
    Problem,
    View,
    evaluate,
)
from consilience.model.data import data_space
from consilience.training.prepare import data_spread, to_examples
from tests.conftest import ROWS, TINY, conjugate_model, quick
from tests.gaussian import DIM, Sum, gaussian_fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY, N, K = jax.random.key(3), 6, 8


@dataclasses.dataclass(frozen=True)
class Spread:
    """A user's proposal: posterior draws with noise on them."""

    noise: float = 0.1

    def __call__(self, key, n, posterior, contexts, prior):
        k_draw, k_noise = jax.random.split(key)
        u, _ = posterior.flow.sample(k_draw, contexts, (n,))
        u = u + self.noise * jax.random.normal(k_noise, u.shape)
        return u, posterior.flow.log_prob(u, contexts)


@dataclasses.dataclass(frozen=True)
class Absolute:
    """A user's criterion."""

    def __call__(self, values):
        return jnp.mean(jnp.abs(values - jnp.median(values)))


class Weighted(eqx.Module):
    """What `Trained` builds: a variance with a factor that is trained."""

    log_factor: jax.Array

    def __call__(self, values):
        return jnp.exp(self.log_factor) * jnp.var(values)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A user's criterion with a parameter of its own."""

    def build(self, samples):
        return Weighted(jnp.asarray(0.1 * samples))

    def __call__(self, values):
        return self.build(len(values))(values)


def flip(x, key, layout, spread):
    """A user's augmentation: a function."""
    return {name: jnp.flip(part, axis=0) for name, part in x.items()}


@dataclasses.dataclass(frozen=True)
class Square:
    """A user's schedule."""

    def __call__(self, progress):
        return progress**2


@dataclasses.dataclass(frozen=True)
class Wall:
    """A user's loss term: posterior draws beyond a wall cost."""

    weight: float = 0.1
    name: str = "wall"

    def __call__(self, view, key):
        contexts = view.posterior.contexts(view.batch.runs.x)
        z = jax.random.normal(key, (len(view.batch.runs.u), 4, view.problem.parameters.dim))
        u, _ = view.posterior.flow.from_base(z, contexts)
        return self.weight * jnp.mean(jnp.maximum(u + 5.0, 0.0) ** 2)


PROPOSALS = {
    "current": cs.CurrentPosterior(),
    "prior": cs.FromPrior(),
    "mixture": cs.Mixture(0.5),
    "epoch copy": cs.EpochCopy(),
    "user's": Spread(),
}
CRITERIA = {
    "variance": cs.Variance(),
    "bounded": cs.Bounded(),
    "bounded, weighted": cs.Bounded(importance=1.0),
    "ratio": cs.RatioVariance(),
    "constraint": cs.RelativeConstraint(),
    "user's": Absolute(),
    "user's, trained": Trained(),
}
AUGMENTATIONS = {
    "jitter": cs.Jitter(),
    "bootstrap": cs.Bootstrap(),
    "user's": flip,
}
SCHEDULES = {
    "constant": cs.Constant(0.5),
    "step": cs.Step(0.5),
    "ramp": cs.Ramp(0.2, 0.6),
    "smooth": cs.Smooth(0.2, 0.6),
    "cosine": cs.Cosine(),
    "user's": Square(),
}


def at_runs(criterion, limit=10.0):
    return cs.SelfConsistency(4, cs.Constant(), criterion=criterion, augmentation=None, limit=limit)


PRIOR = conjugate_model(DIM).prior
TERMS = {
    "posterior": PosteriorTerm(),
    "likelihood": LikelihoodTerm(),
    "prior": PriorTerm(),
    "atomic": AtomicTerm(PRIOR, 3),
    "atomic, all runs": AtomicTerm(PRIOR, N),
    "consistency": ConsistencyTerm(at_runs(cs.Bounded()), PRIOR),
    "consistency, variance": ConsistencyTerm(at_runs(cs.Variance(), limit=None), PRIOR),
    "unlabelled": ConsistencyTerm(at_runs(cs.Bounded()), PRIOR, "unlabeled"),
    "user's": Wall(),
}


KINDS = (PROPOSALS, CRITERIA, AUGMENTATIONS, SCHEDULES)
"""What a fit holds as static; a term may be a module."""


def by_name(parts):
    return pytest.mark.parametrize("part", parts.values(), ids=parts.keys())


@pytest.fixture(scope="module")
def model():
    return conjugate_model(DIM)


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, 64, key=jax.random.key(0))


@pytest.fixture(scope="module")
def exact(model, sims):
    return gaussian_fit(model, sims)


@pytest.mark.parametrize(
    ("parts", "protocol"),
    [
        (PROPOSALS, Proposal),
        (CRITERIA, Criterion),
        (AUGMENTATIONS, Augmentation),
        (SCHEDULES, Schedule),
        (TERMS, LossTerm),
    ],
)
def test_every_part_keeps_its_protocol(parts, protocol):
    assert all(isinstance(part, protocol) for part in parts.values())


@pytest.mark.parametrize(
    "part",
    [
        part
        for kind in (*KINDS, TERMS)
        for part in kind.values()
        if not isinstance(part, eqx.Module)
    ],
)
def test_an_equal_part_does_not_trigger_recompilation(part):
    again = copy.deepcopy(part)
    assert hash(again) == hash(part) and again == part
    assert again is not part or inspect.isfunction(part)


@by_name(PROPOSALS)
def test_a_proposal_gives_theta_and_their_density_under_the_posterior(part, exact, sims):
    posterior, x = exact.posterior, jnp.asarray(sims.x[:N])

    @eqx.filter_jit
    def run(posterior):
        contexts = posterior.contexts(x)
        u, log_q = part(KEY, K, posterior, contexts, exact.model.prior)
        return u, log_q, posterior.flow.log_prob(u, contexts)

    u, log_q, expected = run(posterior)
    assert u.shape == (N, K, DIM) and log_q.shape == (N, K)
    np.testing.assert_allclose(log_q, expected, atol=1e-3)
    assert len(np.unique(u.reshape(-1, DIM), axis=0)) == N * K, "theta differ"


@by_name(PROPOSALS)
def test_the_loss_is_zero_at_the_exact_posterior_whatever_the_proposal(part, exact, sims):
    posterior, prior = exact.posterior, exact.model.prior
    settings = cs.SelfConsistency(K, proposal=part)
    queries = Queries(jnp.asarray(sims.x[:N]))

    @eqx.filter_jit
    def run(posterior, joint):
        runs = Example(jnp.zeros((1, DIM)), queries.x[:1])
        cached = evaluate(posterior, Batch(runs, None, queries)).unlabeled
        u, _ = propose(settings, posterior, cached.contexts, prior, KEY, beside=False)
        moved = jnp.max(jnp.abs(u - u.mean(axis=1, keepdims=True)))
        return consistency(settings, posterior, joint, prior, queries, cached, KEY).loss, moved

    loss, moved = run(posterior, exact.joint)
    assert np.all(np.abs(loss) < 1e-6) and moved > 0.1


@by_name(CRITERIA)
def test_a_criterion_is_zero_for_equal_values_and_sees_differences_alone(part):
    values = jnp.asarray(np.random.default_rng(0).normal(-40.0, 2.0, K))
    module = trained(part, K)
    call = part if module is None else eqx.tree_at(_first, module, _first(module) + 0.3)
    np.testing.assert_allclose(call(jnp.full(K, -40.0)), 0.0, atol=1e-6)
    assert abs(float(call(values))) > 1e-3
    np.testing.assert_allclose(call(values + 100.0), call(values), rtol=1e-3, atol=1e-5)
    far = jax.grad(call)(jnp.asarray([0.0, 1.0, -1.0, 500.0]) if module is None else values)
    assert np.all(np.isfinite(far)) and np.any(far != 0)


def _first(module):
    return jax.tree.leaves(module)[0]


@by_name(AUGMENTATIONS)
def test_an_augmentation_keeps_names_shapes_and_types(part, sims):
    space = data_space(sims.x, cs.Set())
    part = resolved(part, Setting(cs.Set(), exact=True))
    x = {"data": jnp.asarray(sims.x[0])}
    new = jax.jit(lambda key: part(x, key, space.layout, data_spread(space, sims.x)))(KEY)
    assert set(new) == {"data"} and new["data"].shape == x["data"].shape
    assert new["data"].dtype == x["data"].dtype and np.all(np.isfinite(new["data"]))
    assert np.any(new["data"] != x["data"])


@by_name(SCHEDULES)
def test_a_schedule_gives_a_factor_at_every_progress(part):
    values = jax.jit(jax.vmap(part))(jnp.linspace(0.0, 1.0, 101))
    assert values.shape == (101,) and np.all(np.isfinite(values))
    assert np.all((values >= 0) & (values <= 1))
    assert hash(part) == hash(dataclasses.replace(part)), "an equal one compiles once"


@pytest.fixture(scope="module")
def learned(model, sims):
    """Posterior, likelihood and prior as they are built."""
    return quick(model, sims, likelihood=TINY, prior=TINY, summary=Sum(), epochs=1)


class Step(NamedTuple):
    """A step of training: what its terms see, and the fit and the runs behind it."""

    fit: cs.Fit
    problem: Problem
    batch: Batch
    theta: np.ndarray
    x: np.ndarray

    def view(self, networks):
        evaluated = evaluate(self.problem.posterior(networks), self.batch, augmented=False)
        return View(self.problem, networks, self.batch, evaluated, jnp.asarray(0.5))

    def log_joint(self, theta):
        """Prior times likelihood of the conjugate model, at several theta of each run."""
        log_prior = stats.norm.logpdf(theta).sum(axis=-1)
        rows = stats.norm.logpdf(self.x[:, None], theta[:, :, None])
        return log_prior + rows.sum(axis=(-2, -1))


@pytest.fixture(scope="module")
def step(learned, sims):
    posterior = learned.posterior
    problem = Objective(learned.model, posterior.parameters, posterior.data, None, True).problem
    runs = to_examples(posterior.parameters, sims[:N])
    batch = Batch(runs, Queries(runs.x, runs.u), Queries(runs.x))
    return Step(learned, problem, batch, sims.theta["theta"][:N], np.asarray(sims.x[:N], float))


# The loss by the public densities of a fit. Networks see standardised numbers: a density of theta
# or x is theirs over the product of the scales.


def posterior_by_hand(step, part):
    log_q = step.fit.log_prob({"theta": step.theta}, step.x)
    return -np.mean(log_q) - np.sum(np.log(step.fit.posterior.parameters.scale))


def likelihood_by_hand(step, part):
    log_p = jax.vmap(step.fit.likelihood.log_prob)({"theta": step.theta}, step.x)
    return -np.mean(log_p) - ROWS * np.sum(np.log(step.fit.posterior.data.scale["data"]))


def prior_by_hand(step, part):
    log_p = jax.vmap(step.fit.prior.log_prob)({"theta": step.theta})
    return -np.mean(log_p) - np.sum(np.log(step.fit.posterior.parameters.scale))


def atomic_by_hand(step, part):
    """Among all runs of the batch; among some of them it is less."""
    every = np.broadcast_to(step.theta, (N, N, DIM))
    log_p = stats.norm.logpdf(every).sum(axis=-1)
    odds = step.fit.log_prob({"theta": every}, step.x) - log_p
    return np.mean(special.logsumexp(odds, axis=1) - np.diag(odds))


def consistency_by_hand(step, part):
    """The spread of the identity at the draws that the term makes, beside the runs' own theta."""
    posterior, labelled = step.fit.posterior, part.at == "queries"
    contexts = posterior.contexts(step.batch.runs.x)
    u, _ = propose(part.settings, posterior, contexts, PRIOR, KEY, beside=labelled)
    theta = np.asarray(jax.vmap(jax.vmap(posterior.parameters.from_vector))(u)["theta"])
    if labelled:
        theta = np.concatenate([step.theta[:, None], theta], axis=1)
    values = step.log_joint(theta) - step.fit.log_prob({"theta": theta}, step.x)
    assert values.shape == (N, 4)
    losses = np.array([spread_by_hand(part.settings.criterion, one) for one in values])
    limit = part.settings.limit
    return np.mean(losses if limit is None else losses * limit / (limit + losses))


def spread_by_hand(criterion, values):
    if criterion == cs.Variance():
        return np.var(values)
    far = lambda centre: np.abs(values - centre)  # noqa: E731
    huber = lambda c: np.mean(  # noqa: E731
        np.where(far(c) < 3.0, far(c) ** 2, 3.0 * (2 * far(c) - 3.0))
    )
    return optimize.minimize_scalar(huber, bounds=(values.min(), values.max())).fun


BY_HAND = {
    PosteriorTerm: posterior_by_hand,
    LikelihoodTerm: likelihood_by_hand,
    PriorTerm: prior_by_hand,
    AtomicTerm: atomic_by_hand,
    ConsistencyTerm: consistency_by_hand,
}


@by_name({name: part for name, part in TERMS.items() if type(part) in BY_HAND})
def test_a_term_is_that_of_the_public_densities(part, step):
    value = float(
        eqx.filter_jit(lambda step, key: part(step.view(step.fit.networks), key))(step, KEY)
    )
    expected = BY_HAND[type(part)](step, part)
    if isinstance(part, AtomicTerm) and part.atoms < N:
        assert 0.0 < value < expected
    else:
        np.testing.assert_allclose(value, expected, rtol=1e-4)


@by_name(TERMS)
def test_a_term_gives_a_number_with_a_finite_gradient(part, step):
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def run(networks, step):
        return part(step.view(networks), KEY)

    value, gradient = run(step.fit.networks, step)
    assert value.shape == () and np.isfinite(value) and value != 0
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(gradient)]
    assert np.all(np.isfinite(np.concatenate(leaves))) and any(np.any(leaf) for leaf in leaves)


@pytest.fixture(scope="module")
def own_parts():
    return cs.SelfConsistency(
        4,
        Square(),
        maximum_likelihood=cs.Constant(0.5),
        proposal=Spread(),
        criterion=Trained(),
        augmentation=flip,
    )


def test_a_fit_with_all_parts_of_a_users_own_trains_saves_and_loads(
    model, sims, own_parts, tmp_path
):
    options = {"self_consistency": own_parts, "summary": Sum(), "epochs": 3}
    fit = quick(model, sims, terms=[Wall()], **options)
    history = fit.history.terms
    assert {"wall", "consistency", "posterior"} <= set(history)
    assert all(np.all(np.isfinite(values)) for values in history.values())
    assert history["consistency"][-1] > 0 and np.all(history["wall"] > 0)
    assert fit.origin.settings["terms"] == ["wall"]
    back = cs.load(fit.save(tmp_path / "own.fit"), model, summary=Sum())
    draws = [f.sample(sims.x[0], 50, key=KEY)["theta"].values for f in (fit, back)]
    np.testing.assert_array_equal(*draws)


def test_a_term_of_a_users_own_moves_the_posterior(model, sims):
    """Draws are drawn below -5 in standard units, where labels alone would not take them."""
    options = {"summary": Sum(), "epochs": 20, "learning_rate": 0.02}
    plain, walled = (quick(model, sims, terms=terms, **options) for terms in ([], [Wall(10.0)]))
    means = [float(fit.sample(sims.x[:N], 200, key=KEY)["theta"].mean()) for fit in (plain, walled)]
    assert means[1] < means[0] - 0.05


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        ([Wall], TypeError, "Each of terms must be an object with a name"),
        ([lambda view, key: 0.0], TypeError, "Each of terms must be an object with a name"),
        ([Wall(name="prior")], ValueError, "needs a name of its own"),
        ([Wall(), Wall()], ValueError, "needs a name of its own"),
    ],
)
def test_terms_that_cannot_be_told_apart_are_refused(model, sims, terms, error, message, unchecked):
    with pytest.raises(error, match=message):
        quick(model, sims, terms=terms)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"criterion": cs.Variance}, r"must be a callable object, such as cs\.Bounded\(\)"),
        ({"proposal": None}, r"must be a callable object, such as cs\.CurrentPosterior\(\)"),
        ({"augmentation": 0.1}, r"must be a callable object, such as cs\.Jitter\(\)"),
        ({"weight": 1.0}, r"must be a callable object, such as cs\.Step\(0\.5\)"),
    ],
)
def test_what_is_no_part_is_refused_with_one_to_pass(settings, message, unchecked):
    with pytest.raises(TypeError, match=message):
        cs.SelfConsistency(**settings)


def test_parts_that_would_recompile_each_fit_are_refused(unchecked):
    @dataclasses.dataclass
    class Loose:
        def __call__(self, values):
            return jnp.var(values)

    with pytest.raises(TypeError, match="make Loose a frozen dataclass"):
        cs.SelfConsistency(criterion=Loose())
