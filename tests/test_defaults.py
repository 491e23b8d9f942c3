"""The default recipe: what is chosen when nothing is said."""

import jax.numpy as jnp
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.training.defaults import default_plan

ROWS = cs.PerRow(lambda theta, row: dist.Normal(theta, 1.0).log_prob(row).sum())


def plan(n=1024, *, numbers=10, rows=0, series=False, likelihood=True, dim=1, learned=None, **said):
    """The plan for data of so many numbers, or of rows of so many, and `dim` parameters.

    `learned`: a likelihood to learn.
    """
    shape = (rows, numbers) if rows else (numbers,)
    whole = lambda theta, x: dist.Normal(theta, 1.0).log_prob(x).sum()  # noqa: E731
    model = cs.Model(
        dist.Normal(0.0, 1.0),
        lambda key, theta: jnp.zeros(shape),
        (ROWS if rows else whole) if likelihood else None,
        data=cs.Set() if rows else cs.Series() if series else cs.Vector(),
    )
    return default_plan(model, model.layout, dim, n, likelihood=learned, **said)


@pytest.mark.parametrize(
    ("n", "said", "steps"),
    [
        # Maximum likelihood alone: 2,000 steps on nine tenths of the runs.
        (1024, {"self_consistency": False, "numbers": 33}, 2000),
        # Of a series 100 epochs, between 2,000 and 6,000 steps.
        (512, {"self_consistency": False, "numbers": 160, "series": True}, 2000),
        (2048, {"self_consistency": False, "numbers": 160, "series": True}, 5700),
        (4096, {"self_consistency": False, "numbers": 160, "series": True}, 6000),
        # Of few numbers 20,000, unless nothing is held out.
        (1024, {"self_consistency": False, "numbers": 1}, 20_000),
        (1024, {"self_consistency": False, "numbers": 1, "validation": 0.0}, 2000),
        # With dropout: 35 epochs of all runs, between 500 and 4,500 steps.
        (64, {"self_consistency": False}, 500),
        (1024, {"self_consistency": False}, 1120),
        (8192, {"self_consistency": False}, 4480),
        (15_000, {"self_consistency": False}, 4500),
        # Self-consistency: 100 epochs, between 2,000 and 6,000 steps.
        (64, {}, 2000),
        (1024, {}, 3200),
        (2048, {}, 6000),
        (4096, {}, 6000),
        # Two networks.
        (256, {"likelihood": False, "dim": 10}, 12_000),
        (4096, {"likelihood": False, "dim": 10}, 12_000),
        # The likelihood a curve plus noise: 200 epochs within 2,000 and 12,000 steps.
        (256, {"likelihood": False}, 2000),
        (512, {"likelihood": False}, 3200),
        (4096, {"likelihood": False}, 12_000),
        # One of more than 20 numbers, or of rows: 60 epochs.
        (2048, {"likelihood": False, "numbers": 160}, 3840),
        (2048, {"likelihood": False, "rows": 5}, 3840),
        # Large budgets: at least so many epochs.
        (1_000_000, {}, 15 * 15_625),
        (100_000, {"likelihood": False}, 150 * 1562),
    ],
)
def test_the_number_of_steps(n, said, steps):
    chosen = plan(n, **said)
    train = n - round(chosen.validation * n)
    taken = chosen.epochs * (train // chosen.batch_size)
    assert taken == pytest.approx(steps, rel=0.02)


@pytest.mark.parametrize(
    ("said", "dropout", "validation"),
    [
        ({"numbers": 8, "dim": 4}, 0.2, 0.0),
        ({"numbers": 2, "rows": 5, "dim": 4}, 0.2, 0.0),
        # A little where they are few: 25 / n, at most 0.05.
        ({"numbers": 7, "dim": 4}, 25 / 1024, 0.1),
        ({"numbers": 7, "dim": 4, "n": 64}, 0.05, 0.1),
        ({"numbers": 7, "dim": 4, "validation": 0.0}, 0.0, 0.0),
        ({"numbers": 33, "dim": 4}, 0.0, 0.1),
        # With a likelihood beside it, or a posterior of one's own.
        ({"numbers": 8, "dim": 4, "learned": cs.Coupling()}, 0.2, 0.0),
        ({"numbers": 8, "dim": 4, "posterior": cs.Coupling(dropout=0.1)}, 0.1, 0.1),
    ],
)
def test_labels_alone_are_learned_with_dropout_where_data_are_neither_few_nor_many(
    said, dropout, validation
):
    chosen = plan(self_consistency=False, **said)
    assert (chosen.recipe.posterior.dropout, chosen.validation) == (dropout, validation)


@pytest.mark.parametrize(
    ("said", "jitter"),
    [
        ({}, 0.5),
        ({"likelihood": False}, 0.1),
        ({"rows": 5}, 0.1),
        ({"self_consistency": cs.SelfConsistency(exact=False)}, 0.1),
        ({"self_consistency": cs.SelfConsistency(augmentation=cs.Bootstrap(0.3))}, 0.3),
    ],
)
def test_data_are_moved_far_where_the_likelihood_is_exact_and_rows_cannot_be_redrawn(said, jitter):
    assert plan(**said).self_consistency.augmentation == cs.Bootstrap(jitter)


@pytest.mark.parametrize(
    ("numbers", "said", "schedules"),
    [
        (20, {}, (cs.Step(0.15), cs.Step(0.15, 1.0, 0.1))),
        (21, {}, (cs.Step(0.5, after=0.1), cs.Constant())),
        (21, {"weight": cs.Constant()}, (cs.Constant(), cs.Constant())),
    ],
)
def test_labels_keep_their_weight_beside_a_learned_likelihood_of_many_numbers(
    numbers, said, schedules
):
    settings = cs.SelfConsistency(**said)
    chosen = plan(likelihood=False, numbers=numbers, self_consistency=settings)
    assert chosen.self_consistency.schedules == schedules
    exact = plan(numbers=numbers, self_consistency=settings)
    assert exact.self_consistency.schedules == settings.schedules


@pytest.mark.parametrize("augmentation", [None, cs.Jitter(0.2)])
def test_what_is_said_stays(augmentation):
    settings = cs.SelfConsistency(augmentation=augmentation)
    chosen = plan(self_consistency=settings, epochs=7, batch_size=9, validation=0.2)
    assert (chosen.epochs, chosen.batch_size, chosen.validation) == (7, 9, 0.2)
    assert chosen.self_consistency.augmentation == augmentation


SPLINES = cs.Coupling(layers=6, depth=3, l2=1.5 / 1024)
FEW = cs.Coupling(cs.Affine(), layers=1, frame=3, df=5.0, l2=5 / 1024)
MANY = cs.Coupling(cs.Affine(), layers=2, frame=3, l2=1.5 / 1024)


@pytest.mark.parametrize(
    ("data", "likelihood"),
    [
        # A curve plus noise: twice as many numbers as parameters, or more than 20.
        ({"numbers": 8, "dim": 4}, FEW),
        ({"numbers": 7, "dim": 4}, SPLINES),
        ({"numbers": 21, "dim": 4}, MANY),
        ({"numbers": 21, "dim": 20}, MANY),
        ({"numbers": 20, "dim": 20}, SPLINES),
        # Rows of a set: more than 20.
        ({"numbers": 8, "dim": 4, "rows": 5}, SPLINES),
        ({"numbers": 21, "dim": 4, "rows": 5}, MANY),
    ],
)
def test_the_likelihood_of_many_numbers_is_a_curve_plus_noise(data, likelihood):
    assert plan(likelihood=False, **data).recipe.likelihood == likelihood
    alone = plan(likelihood=False, self_consistency=False, learned=True, **data)
    assert alone.recipe.likelihood == likelihood
    assert plan(self_consistency=False, **data).recipe.likelihood is None


def test_draws_are_weighted_where_the_likelihood_is_exact_and_data_are_no_set():
    chosen = lambda **said: plan(**said).self_consistency.criterion.importance  # noqa: E731
    assert chosen() == 1.0
    assert chosen(rows=5) == 0.0
    assert chosen(atomic=True) == 0.0
    assert chosen(self_consistency=cs.SelfConsistency(exact=False)) == 0.0
    said = cs.SelfConsistency(criterion=cs.Bounded(importance=0.3))
    assert chosen(self_consistency=said) == 0.3
    other = cs.SelfConsistency(criterion=cs.Variance())
    assert plan(self_consistency=other).self_consistency.criterion == cs.Variance()
