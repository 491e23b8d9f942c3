"""The components of a parameter have the same names wherever they are shown."""

import jax
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.core.arrays import warn_if_coarse
from consilience.core.labels import components, labels
from consilience.diagnostics.calibration import calibrate_draws
from consilience.model.priors import check_names
from consilience.model.run import Failure
from consilience.posterior.datasets import draws_to_dataset
from tests.conftest import quick

EXPECTED = ["mu", "a[0, 0]", "a[0, 1]", "a[1, 0]", "a[1, 1]", "b[0]", "b[1]"]
SHAPES = {"mu": (), "a": (2, 2), "b": (2,)}


def theta(n: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(n, *shape)) for name, shape in SHAPES.items()}


def test_components_are_the_entries_of_the_arrays():
    found = components(theta(3), 1)
    assert list(found) == EXPECTED
    np.testing.assert_array_equal(found["a[1, 0]"], theta(3)["a"][:, 1, 0])
    assert labels("mu", ()) == {"mu": ()} and labels("a", (0,)) == {}


def test_failures_name_them():
    places = cs.Failures({1: Failure("raised", "x")}, theta(5)).places()
    assert [place.name for place in places] == EXPECTED
    at = {place.name: place for place in places}
    assert at["a[1, 0]"].low == at["a[1, 0]"].high == theta(5)["a"][1, 1, 0]
    assert at["mu"].rank == np.sum(theta(5)["mu"] < theta(5)["mu"][1]) / 4


def test_figures_name_them():
    draws = {name: array[None, None] for name, array in theta(50).items()}
    axes = cs.plots.pairs(draws_to_dataset(draws, batched=False))
    assert {axis.get_xlabel() for axis in axes.ravel() if axis is not None} - {""} == set(EXPECTED)


def test_calibration_names_them():
    model = cs.Model(
        {
            name: dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))
            for name, shape in SHAPES.items()
        },
        lambda key, t: t["mu"] + jax.random.normal(key, (2,)),
    )
    runs = cs.simulate(model, 64, key=jax.random.key(0), progress=False)
    fit = quick(model, runs, epochs=1)
    drawn = fit.sample(runs.x, 9, key=jax.random.key(1))
    found = calibrate_draws(fit, runs, drawn, {}, key=jax.random.key(2), invalid=0)
    names = [str(name) for name in found.table["quantity"].values]
    assert names[:-1] == list(components(runs.theta, 1)) and set(names[:-1]) == set(EXPECTED)
    below = drawn["a"].values[:, 0, :, 1, 0] < runs.theta["a"][:, None, 1, 0]
    ranks = found.table["ranks"].sel(quantity="a[1, 0]").values
    np.testing.assert_array_equal(ranks, below.sum(axis=1))


def test_warnings_name_them():
    values = np.random.default_rng(0).normal(size=(20, 2, 2))
    values[:, 1, 0] += 1e9
    with pytest.warns(UserWarning, match=r"^The parameter 'a'\[1, 0\] is about 1e\+09"):
        warn_if_coarse(values, "The parameter 'a'")


@pytest.mark.parametrize("name", EXPECTED[1:])
def test_parameters_cannot_take_their_names(name):
    with pytest.raises(ValueError, match="the draws of"):
        check_names({**SHAPES, name: ()})
