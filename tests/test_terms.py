"""Loss terms of a user's own: what they see, their random keys, and how epochs are picked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.identity.terms import own_key
from tests.conftest import TINY, conjugate_model, quick
from tests.gaussian import DIM, Sum

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model():
    return conjugate_model(DIM)


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, 64, key=jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class MeanJoint:
    """The mean log joint density of the runs, times a small number: only looked at."""

    name: str = "mean_joint"

    def __call__(self, view, key):
        u, x = view.batch.runs.u[:, None], view.batch.runs.x
        theta = jax.vmap(jax.vmap(view.posterior.parameters.from_vector))(u)
        return jax.lax.stop_gradient(jnp.mean(view.joint.log_probs(theta, x)))


def test_a_term_sees_the_models_joint_density_beside_maximum_likelihood_alone(model, sims):
    fit = quick(model, sims, terms=[MeanJoint()], summary=Sum(), validation=0.0, batch_size=64)
    theta, x = sims.theta["theta"], sims.x
    expected = dist.Normal(0, 1).log_prob(theta).sum(-1)
    expected += dist.Normal(theta[:, None], 1).log_prob(x).sum((1, 2))
    np.testing.assert_allclose(fit.history.terms["mean_joint"], expected.mean(), rtol=1e-4)


def test_the_joint_density_has_the_factor_of_runs_that_failed():
    """Without it the learned likelihood would be that of runs that give data."""

    def simulate(key, theta):
        x = theta + jax.random.normal(key, (3,))
        return jnp.where(theta > 0.5, jnp.nan, x)

    model = cs.Model(dist.Normal(0.0, 1.0), simulate)
    sims = cs.simulate(model, 200, key=jax.random.key(0)).drop_invalid()
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Look:
        name: str = "look"

        def __call__(self, view, key):
            seen.append(view.joint.likelihood.validity)
            return jnp.zeros(())

    quick(model, sims, likelihood=TINY, terms=[Look()])
    assert seen and all(factor is not None for factor in seen)


@dataclasses.dataclass(frozen=True)
class Chance:
    """A random number, at no cost to training."""

    name: str

    def __call__(self, view, key):
        return jax.random.normal(key)


def test_a_terms_random_numbers_go_by_its_name_not_its_place(model, sims):
    run = lambda *names: (  # noqa: E731
        quick(model, sims, terms=[Chance(name) for name in names], summary=Sum()).history.terms
    )
    first, second = run("a", "b"), run("b", "a")
    np.testing.assert_array_equal(first["a"], second["a"])
    assert not np.any(first["a"] == first["b"])


def test_a_terms_key_is_none_that_the_atomic_loss_takes():
    key = jax.random.key(3)
    taken = {tuple(jax.random.key_data(k).tolist()) for k in jax.random.split(key, 4096)}
    taken |= {tuple(jax.random.key_data(jax.random.fold_in(key, i)).tolist()) for i in range(4096)}
    for name in ("a", "wall", "near_mean"):
        assert tuple(jax.random.key_data(own_key(key, name)).tolist()) not in taken


def test_densities_that_a_term_may_tie_keep_one_epoch(model, sims):
    options = {"likelihood": TINY, "summary": Sum(), "epochs": 12, "validation": 0.3}
    options["learning_rate"] = 0.05
    apart, tied = (
        quick(model, sims, terms=terms, **options).history.best_epochs
        for terms in ([], [Chance("a")])
    )
    assert set(tied) == {"posterior", "likelihood"} and len(set(tied.values())) == 1
    assert len(set(apart.values())) == 2, apart


def test_a_term_that_would_recompile_each_fit_is_refused(model, sims, unchecked):
    @dataclasses.dataclass
    class Loose:
        name: str = "loose"

        def __call__(self, view, key):
            return jnp.zeros(())

    with pytest.raises(TypeError, match="make Loose a frozen dataclass"):
        quick(model, sims, terms=[Loose()])
