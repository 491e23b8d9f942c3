"""Shape checks at run time for the whole package, and the fits that several tests share."""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

from jaxtyping import install_import_hook

install_import_hook("consilience", "beartype.beartype")

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jaxtyping  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
import pytest  # noqa: E402

import consilience as cs  # noqa: E402
from consilience.core import compiling  # noqa: E402

ROWS = 10

collect_ignore = [] if os.environ.get("CONSILIENCE_SBIBM") else ["test_sbibm_files.py"]
"""What compares with the SBI benchmark's own files needs the folder that has them."""

LONG_OPTIONS, SHORT_OPTIONS = dict(compiling.CPU_OPTIONS), dict(compiling.QUICK_OPTIONS)
"""The options of the library for long fits and for short ones."""

BARE_OPTIONS = {**SHORT_OPTIONS, "xla_backend_optimization_level": 0}
"""Those of tests: they mostly compile."""

RUN_LONG = {"accuracy", "evidence", "experiments", "mcmc", "metrics", "rounds", "validity"}
"""The modules that run for longer than they compile: for them, the options of short fits."""


def take_options(options: dict[str, Any]):
    if options != compiling.CPU_OPTIONS:
        compiling.CPU_OPTIONS.update(options)
        compiling.QUICK_OPTIONS.update(options)
        # What is compiled already was compiled with others.
        compiling._options.cache_clear()
        compiling._jitted.cache_clear()


take_options(BARE_OPTIONS)

if run := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
    # What one worker has compiled the other need not compile again.
    shared = Path(tempfile.gettempdir()) / f"consilience-tests-{run}"
    jax.config.update("jax_compilation_cache_dir", str(shared))


@functools.cache
def conjugate_model(dim: int) -> cs.Model:
    """Rows N(theta, I) under theta ~ N(0, I): the posterior is N(n mean / (n + 1), I / (n + 1))."""
    return cs.Model(
        prior=dist.Normal(0.0, 1.0).expand([dim]).to_event(1),
        simulator=lambda key, theta: theta + jax.random.normal(key, (ROWS, dim)),
        log_likelihood=cs.PerRow(lambda theta, row: jnp.sum(dist.Normal(theta, 1.0).log_prob(row))),
        data=cs.Set(),
    )


SMALL = cs.Coupling(transform=cs.Spline(bins=4), layers=1, width=16)
TINY = cs.Coupling(transform=cs.Affine(), layers=1, width=16, depth=1)
"""Compiles in half the time of `SMALL`: for tests of the training loop itself."""


def quick(model, sims, **settings) -> cs.Fit:
    """A tiny fit by maximum likelihood. Equal shapes of one model compile once a process."""
    options = {
        "key": jax.random.key(1),
        "posterior": TINY,
        "self_consistency": False,
        "epochs": 2,
        "progress": False,
    }
    return cs.fit(model, sims, **options | settings)


@pytest.fixture(autouse=True, scope="module")
def options(request):
    # Each compiled program holds memory maps, and a process may have 65,530 of them.
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > 20_000:
        jax.clear_caches()
    name = request.module.__name__.rpartition("test_")[2]
    take_options(SHORT_OPTIONS if name in RUN_LONG else BARE_OPTIONS)


@pytest.fixture
def unchecked():
    """No shape checks at run time: the library's own checks see what a user passes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def named_model() -> cs.Model:
    """Two named parameters, one positive, and ten numbers a dataset."""
    return cs.Model(
        prior={"mu": dist.Normal(0.0, 1.0), "sigma": dist.LogNormal(0.0, 0.5)},
        simulator=lambda key, t: t["mu"] + t["sigma"] * jax.random.normal(key, (ROWS, 1)),
        data=cs.Set(),
    )


@pytest.fixture(scope="session")
def named_sims(named_model):
    return cs.simulate(named_model, 256, key=jax.random.key(0))


@pytest.fixture(scope="session")
def named_fit(named_model, named_sims):
    """Posterior and likelihood, small and quick: for what does not need a good fit."""
    return quick(named_model, named_sims, posterior=SMALL, likelihood=SMALL, epochs=3)


class Moments(eqx.Module):
    """A summary network of a user's own."""

    weight: jax.Array

    def __call__(self, x):
        rows = x["data"]
        return self.weight * jnp.concatenate([rows.mean(axis=0), rows.std(axis=0)])


@pytest.fixture(scope="session")
def moments_fit(named_model, named_sims):
    return quick(named_model, named_sims, summary=Moments(jnp.ones(2)), epochs=5)


@pytest.fixture(scope="module")
def quick_compilation():
    """Compile without optimizing: for modules that compile much and run little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
