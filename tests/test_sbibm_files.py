"""The tasks of the SBI benchmark against its own files, in the folder that CONSILIENCE_SBIBM names.

Where it names none there is nothing to compare: conftest.py leaves this module out.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from consilience.metrics import c2st
from consilience.tasks.sbibm.registry import TASKS, sbibm_data
from tests.test_sbibm import log_posterior, near

FOLDER = os.environ["CONSILIENCE_SBIBM"]
KEY = jax.random.key(0)


@pytest.mark.parametrize("name", TASKS)
def test_references_have_the_marginals_of_the_benchmarks(name):
    """For all ten observations; by ranks, as slcp's tails leave deviations to chance."""
    problem = sbibm_data(FOLDER, name)
    ours = TASKS[name].reference(jnp.asarray(problem.observations), 10_000, key=KEY)
    for mine, theirs in zip(np.asarray(ours), problem.reference, strict=True):
        for a, b in zip(mine.T, theirs.T, strict=True):
            assert stats.ks_2samp(a, b).statistic < 0.035


@pytest.mark.parametrize("name", TASKS)
def test_references_cannot_be_told_from_the_benchmarks(name):
    problem = sbibm_data(FOLDER, name)
    ours = TASKS[name].reference(jnp.asarray(problem.observations[0]), 2000, key=KEY)
    assert abs(float(c2st(ours, problem.reference[0, :2000], key=KEY)) - 0.5) < 0.035


@pytest.mark.parametrize("name", TASKS)
def test_the_benchmarks_draws_are_as_likely_as_ours(name):
    """The mean of the log posterior density, which holds model and reference together."""
    problem = sbibm_data(FOLDER, name)
    x = jnp.asarray(problem.observations[0])
    ours = TASKS[name].reference(x, 2000, key=KEY)
    each = jax.vmap(functools.partial(log_posterior, TASKS[name], x))
    at_ours, at_theirs = (
        np.asarray(each(jnp.asarray(draws)), np.float64)
        for draws in (ours, problem.reference[0, :2000])
    )
    near(at_ours, at_theirs.mean(), np.sqrt(2) * at_theirs.std())
