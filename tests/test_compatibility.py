"""Files that released versions wrote: later versions read them, and give the same numbers."""

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import consilience as cs
from tests.fixtures import problems
from tests.fixtures.problems import DRAWS, KEY

FOLDER = Path(problems.__file__).parent
VERSIONS = sorted(path.parent.name for path in FOLDER.glob("*/numbers.npz"))
FITS = sorted((path.parent.name, path.stem) for path in FOLDER.glob("*/*.fit"))
STORES = sorted((path.parent.name, path.stem) for path in FOLDER.glob("*/*.zarr"))
MODELS = {"inside": problems.plain, "outside": problems.outside}
"""The models of the stores."""

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""What other processors and versions of XLA may make of the same numbers in float32."""

OBSERVED = np.array([1.0, 1.4], np.float32)


@functools.cache
def numbers(version: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / version / "numbers.npz") as held:
        return dict(held)


def held(version: str, name: str) -> dict[str, np.ndarray]:
    """The numbers that a version wrote down for one of its files."""
    found = {
        what.removeprefix(f"{name}."): part
        for what, part in numbers(version).items()
        if what.startswith(f"{name}.")
    }
    assert found
    return found


@functools.cache
def runs(name: str) -> cs.Simulations:
    return problems.runs_of(problems.fits()[name][0])


def load(version: str, name: str) -> cs.Fit:
    model, _ = problems.fits()[name]
    own: dict[str, Any] = {"summary": problems.Range(jnp.zeros(3))} if name == "own" else {}
    return cs.load(FOLDER / version / f"{name}.fit", model, **own)


def data(runs: cs.Simulations) -> dict[str, np.ndarray]:
    return runs.x if isinstance(runs.x, dict) else {"x": runs.x}


def test_there_are_files_of_every_kind_of_the_first_version():
    names = ("exact", "joint", "series", "padded", "failing", "own", "default")
    assert {name for version, name in FITS if version == "0.1.0"} == set(names)
    assert {name for version, name in STORES if version == "0.1.0"} == set(MODELS)
    assert VERSIONS[0] == "0.1.0"


@pytest.mark.parametrize(("version", "name"), FITS)
def test_a_fit_gives_the_same_draws_densities_and_evidence(version, name):
    fit = load(version, name)
    found, known = problems.numbers_of(fit, runs(name)), held(version, name)
    assert set(found) == set(known)
    for what, part in known.items():
        np.testing.assert_allclose(found[what], part, **CLOSE, err_msg=what)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_fit_is_saved_again_as_it_was(version, tmp_path):
    fit = load(version, "joint")
    again = cs.load(fit.save(tmp_path / "again.fit"), fit.model)
    for what, part in problems.numbers_of(fit, runs("joint")).items():
        np.testing.assert_array_equal(problems.numbers_of(again, runs("joint"))[what], part)
    assert again.history.best_epochs == fit.history.best_epochs


@pytest.mark.parametrize(("version", "name"), STORES)
def test_a_store_has_the_same_runs_and_failures(version, name):
    found, known = cs.Simulations.open(FOLDER / version / f"{name}.zarr"), held(version, name)
    parts = {
        **{f"theta.{label}": part for label, part in found.theta.items()},
        **{f"x.{label}": part for label, part in data(found).items()},
        "failed": found.failures.mask,
    }
    assert set(parts) == set(known)
    for what, part in known.items():
        assert parts[what].dtype == part.dtype
        np.testing.assert_array_equal(parts[what], part, err_msg=what)
    if name == "outside":
        assert 0 < len(found.failures) < len(found)
        assert {failure.reason for failure in found.failures.failed.values()} == {"raised"}


@pytest.mark.parametrize(("version", "name"), STORES)
def test_a_store_grows_by_the_same_key(version, name, tmp_path):
    store = shutil.copytree(FOLDER / version / f"{name}.zarr", tmp_path / "runs.zarr")
    # Threads: the simulator is quick, and processes take long to start.
    threads = {"executor": ThreadPoolExecutor(2)} if name == "outside" else {}
    known, settings = held(version, name), {"key": KEY, "progress": False, **threads}
    n = len(known["failed"])
    grown = cs.simulate(MODELS[name](), n + 8, store=store, **settings)
    fresh = cs.simulate(MODELS[name](), n + 8, **settings)
    assert len(grown) == n + 8
    np.testing.assert_array_equal(grown.failures.mask[:n], known["failed"])
    np.testing.assert_array_equal(grown.failures.mask, fresh.failures.mask)
    for what, part in known.items():
        kind, _, label = what.partition(".")
        if label:
            ours, anew = ((run.theta if kind == "theta" else data(run)) for run in (grown, fresh))
            np.testing.assert_array_equal(ours[label][:n], part, err_msg=what)
            np.testing.assert_allclose(ours[label], anew[label], **CLOSE, err_msg=what)


@pytest.mark.parametrize("version", VERSIONS)
def test_rounds_are_read_and_go_on(version, tmp_path):
    folder = shutil.copytree(FOLDER / version / "rounds", tmp_path / "rounds")
    kept = {path.name: path.read_bytes() for path in folder.glob("round-*")}
    done = problems.rounds_in(folder, 3)
    draws = done[1].fit.sample(OBSERVED, DRAWS, key=KEY)["theta"].values
    np.testing.assert_allclose(draws, held(version, "rounds")["draws"], **CLOSE)
    assert [len(each.simulations) for each in done] == [64, 64, 64]
    # The rounds of the version before are read, not made again.
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert len(kept) == 4 and (folder / "round-2.fit").exists()
