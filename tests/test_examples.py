"""The examples: each opens as a notebook, and its quick form is run and held against the truth."""

import functools
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from consilience.metrics import moment_errors
from consilience.tasks import gmm, hes1
from consilience.training.defaults import default_plan
from tests.conftest import SMALL

ROOT = Path(__file__).parent.parent
NAMES = ("mixture", "numpyro_model", "hes1", "epidemics", "blackbox")


@pytest.fixture(autouse=True)
def small_networks(monkeypatch):
    """Networks that compile quickly, in place of the default ones."""

    def plan(model, *shapes, **said):
        said["posterior"] = said["posterior"] or SMALL
        if model.likelihood is None:
            said["likelihood"] = said["likelihood"] or SMALL
        return default_plan(model, *shapes, **said)

    monkeypatch.setattr("consilience.training.train.default_plan", plan)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an example in an empty folder; what it defines, and what it prints."""

    def run(name):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, "--quick"])
        names = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        figures = {path.stem for path in (tmp_path / "out").glob("*.png")}
        assert figures and all(figure.startswith(name) for figure in figures)
        return names, capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", NAMES)
def test_examples_open_as_notebooks_and_are_listed(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    head, *cells = text.split("\n# %%")
    header = yaml.safe_load("\n".join(line[1:] for line in head.splitlines() if "---" not in line))
    assert header["jupyter"]["jupytext"]["text_representation"]["format_name"] == "percent"
    for cell in cells:
        kind, _, body = cell.partition("\n")
        lines = [line for line in body.splitlines() if line]
        assert lines and kind in ("", " [markdown]")
        assert kind == "" or all(line.startswith("#") for line in lines)
        compile(body, name, "exec")
    assert f"examples/{name}.py" in (ROOT / "README.md").read_text()
    assert f"examples/{name}.py" in (ROOT / "Makefile").read_text()


@pytest.mark.slow
def test_mixture(run):
    names, out = run("mixture")
    scores = {name: float(values.mean()) for name, values in names["scores"].items()}
    assert scores["self-consistent, corrected"] < 0.7 * scores["self-consistent"], scores
    assert scores["a second exact sample"] < 0.03 < scores["NPE"], scores
    assert "4 new datasets" in out and "Standard deviation of the identity, NPE" in out
    # The model that is written out there is that of the exact posterior.
    x, theta = jnp.asarray(names["tests"].x[0]), jnp.array([0.3, -1.2])
    rows = [gmm.row_log_likelihood(theta, row) for row in x]
    np.testing.assert_allclose(names["model"].log_likelihood({"theta": theta}, x), sum(rows), 1e-5)


@pytest.mark.slow
def test_numpyro_model(run):
    names, out = run("numpyro_model")
    error = moment_errors(names["tables"]["corrected"], names["tables"]["NUTS"])
    assert np.abs(error.mean).max() < 0.35 and np.abs(error.sd).max() < 0.35, error
    assert 0.4 < names["told_apart"]["corrected"] < 0.65, names["told_apart"]
    assert "school H" in out and "Check: " in out


@pytest.mark.slow
def test_hes1(run):
    names, out = run("hes1")
    assert set(names["calibration"].table["quantity"].values) == {*hes1.NAMES, "joint density"}
    draws, report = names["draws"], names["report"]
    # The prior of k1 and nu has its mean at 0.04, that of h at 10.
    assert all(float(draws[name].min()) > 0 for name in hes1.NAMES)
    assert report.predictions.shape == (200, 8) and np.isfinite(report.predictions).all()
    np.testing.assert_array_equal(report.x, hes1.OBSERVED)
    assert f"Check: {report.verdict}" in out


@pytest.mark.slow
def test_epidemics(run):
    names, out = run("epidemics")
    assert names["won"].mean() > 0.6 and "10 outbreaks of SEIR" in out
    x = np.log1p(names["in_bed"])
    for name, prior in names["priors"].items():
        keys = jax.random.split(jax.random.key(0), len(prior))
        theta = {n: d.sample(k, (10_000,)) for (n, d), k in zip(prior.items(), keys, strict=True)}
        values = jax.jit(jax.vmap(functools.partial(names["log_likelihood"], x=x)))(theta)
        expected = jax.nn.logsumexp(values) - np.log(10_000)
        found = names["school"]["log_evidence"].sel(model=name)
        assert abs(float(found - expected)) < 0.6, (name, float(found), expected)


@pytest.mark.slow
def test_blackbox(run):
    names, out = run("blackbox")
    sims, before = names["sims"], names["before"]
    assert len(before) == 50 and len(sims) == names["train"] + names["held_out"]
    np.testing.assert_array_equal(sims.x[:50], before.x)
    assert 0.1 < len(sims.failures) / len(sims) < 0.4
    assert "the waiting room is full" in out and "50 runs were there" in out
    failed, load = sims.failures.mask, sims.theta["arrivals"] * sims.theta["service"]
    assert load[failed].mean() > load[~failed].mean() + load.std()
    assert names["fit"].likelihood.validity is not None
    for name, (low, high) in {
        "arrivals": (2, 12),
        "service": (2, 12),
        "variation": (0.2, 1),
    }.items():
        assert low < float(names["draws"][name].min()) < float(names["draws"][name].max()) < high
    assert f"Check: {names['report'].verdict}" in out
