"""A fit that a command saves: refused before training where it cannot be, never lost after it."""

import io
import resource
import sys

import jax
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.cli import main as cli
from consilience.cli import saving
from tests.conftest import quick

pytestmark = pytest.mark.usefixtures("quick_compilation")

HERE = "tests.test_saving"
MODEL = cs.Model(dist.Normal(0.0, 1.0), lambda key, t: t + jax.random.normal(key, (3,)))
X, AT = np.zeros(3), np.array(0.5)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "runs.zarr"
    cs.simulate(MODEL, 64, key=jax.random.key(0), store=path)
    return path


@pytest.fixture(scope="module")
def fitted(store):
    return quick(MODEL, cs.Simulations.open(store))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_files():
    """After a call of it, files of this process cannot grow beyond 1,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run(store) -> int:
    words = ("fit", f"{HERE}:MODEL", str(store), "--out", "out/fit.safetensors", "--quiet")
    return cli.main(words)


def train(monkeypatch, fitted, meanwhile=lambda: None):
    """Training that is over at once; something else happens while it goes on."""

    def fit(*_, **__):
        meanwhile()
        return fitted

    monkeypatch.setattr("consilience.training.train.fit", fit)


def test_a_disk_without_room_is_seen_before_training(
    store, folder, fitted, small_files, monkeypatch, capsys
):
    train(monkeypatch, fitted, lambda: pytest.fail("there was training"))
    small_files()
    assert run(store) == 2
    shown = capsys.readouterr().err
    assert "out/fit.safetensors cannot be written: File too large. Make room" in shown
    assert shown.count("\n") == 1
    assert not list((folder / "out").iterdir())


def test_a_fit_that_cannot_be_saved_after_training_goes_elsewhere(
    store, folder, fitted, monkeypatch, capsys
):
    train(monkeypatch, fitted, (folder / "out" / "fit.safetensors").mkdir)
    (folder / "out").mkdir()
    assert run(store) == 2
    shown = capsys.readouterr().err
    (kept,) = folder.glob("consilience-fit-*.safetensors")
    assert f"cannot be written: Is a directory. The fit is in {kept}: move it." in shown
    assert shown.count("\n") == 1
    assert cs.load(kept, MODEL).log_prob(AT, X) == fitted.log_prob(AT, X)
    assert [path.name for path in (folder / "out").iterdir()] == ["fit.safetensors"]


def test_where_nothing_can_be_written_one_line_says_so(
    store, folder, fitted, small_files, monkeypatch, capsys
):
    train(monkeypatch, fitted, small_files)
    assert run(store) == 2
    shown = capsys.readouterr().err
    assert "File too large. Nor can the current folder or" in shown
    assert "the fit is lost" in shown
    assert shown.count("\n") == 1
    assert [path.name for path in folder.rglob("*")] == ["out"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_at_the_terminal_is_asked_for_another_path(
    store, folder, fitted, monkeypatch, capsys
):
    (folder / "out").mkdir()
    (folder / "taken").mkdir()
    train(monkeypatch, fitted, (folder / "out" / "fit.safetensors").mkdir)
    monkeypatch.setattr(sys, "stdin", Terminal("taken\nother/fit.safetensors\n"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert run(store) == 0
    shown = sys.stderr.getvalue()
    assert shown.count("Another path for the fit") == 2
    assert "taken cannot be written." in shown
    assert "Saved to other/fit.safetensors." in capsys.readouterr().out
    assert cs.load("other/fit.safetensors", MODEL).log_prob(AT, X) == fitted.log_prob(AT, X)


def test_a_terminal_where_nobody_answers_still_keeps_the_fit(folder, fitted, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    monkeypatch.setattr(sys, "stderr", Terminal())
    (folder / "fit").mkdir()
    with pytest.raises(cs.SaveError, match=f"The fit is in {folder}/consilience-fit-"):
        saving.save_somewhere(fitted, folder / "fit")
