"""The examples: each opens as a notebook, and its quick form is run and held against the truth."""

import runpy
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parent.parent
NAMES = ("mixture", "numpyro_model", "hes1", "epidemics", "blackbox")


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


def test_mixture(run):
    names, out = run("mixture")
    scores = {name: float(values.mean()) for name, values in names["scores"].items()}
    print(scores, out)
    assert scores["a second exact sample"] < 0.03


def test_numpyro_model(run):
    names, out = run("numpyro_model")
    print(names["told_apart"], out)


def test_hes1(run):
    names, out = run("hes1")
    print(out)


def test_epidemics(run):
    names, out = run("epidemics")
    print(out)


def test_blackbox(run):
    names, out = run("blackbox")
    print(out)
