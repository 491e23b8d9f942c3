"""The commands around a model of one's own: numbers of the library, exit codes, clear refusals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr

import consilience as cs
from consilience.cli import main as cli
from consilience.cli.codes import CODES, NO_MEMORY
from consilience.cli.inputs import InputError, check_netcdf, check_out, read_data, write_netcdf
from consilience.diagnostics import check
from consilience.experiments import registry
from consilience.model.data import Layout, Vector
from consilience.simulation import simulations
from tests.conftest import quick
from tests.own_parts import Mixture

pytestmark = pytest.mark.usefixtures("quick_compilation")

PRIOR = {"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)}
HERE = "tests.test_cli"
N = 250


def _draw(key, theta):
    return theta["mu"] + theta["sigma"] * jax.random.normal(key, (3,))


def _draw_strictly(key, theta):
    return jnp.where(theta["sigma"] > 1.5, jnp.nan, _draw(key, theta))


def _log_likelihood(theta, x):
    return jnp.sum(dist.Normal(theta["mu"], theta["sigma"]).log_prob(x))


MODEL = cs.Model(PRIOR, _draw, _log_likelihood)
STRICT = cs.Model(PRIOR, _draw_strictly)
WIDER = cs.Model({**PRIOR, "mu": dist.Normal(0.0, 3.0)}, _draw)
NO_SIMULATOR = cs.Model(PRIOR)
NUMBER = 3


def make_model():
    return MODEL


def takes_arguments(sigma):
    return MODEL


def returns_number():
    return NUMBER


def raises():
    raise RuntimeError("no licence\nfor this")


def run(*words) -> int:
    return cli.main([str(word) for word in words])


def refused(capsys, *words) -> str:
    """The one line with which bad input is refused."""
    capsys.readouterr()
    assert run(*words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("consilience: ")
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "runs.zarr"
    assert run("simulate", f"{HERE}:MODEL", path, "--runs", N, "--seed", 7) == 0
    return path


@pytest.fixture(scope="module")
def strict_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "strict.zarr"
    assert run("simulate", f"{HERE}:STRICT", path, "--runs", N) == 0
    return path


@pytest.fixture(scope="module")
def fitted(store):
    return quick(MODEL, cs.Simulations.open(store), epochs=5)


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory):
    return fitted.save(tmp_path_factory.mktemp("fit") / "fit.safetensors")


@pytest.fixture
def x(store):
    return cs.Simulations.open(store).x[:2]


# The parser.


@pytest.mark.parametrize("command", ["simulate", "status", "fit", "sample", "check", "report"])
def test_the_help_of_a_command_has_an_example_and_its_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as end:
        run(command, "--help")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert f"example:\n  consilience {command} " in shown
    assert "exit codes:\n  0 " in shown


def test_the_experiments_are_those_of_the_paper():
    assert set(cli.EXPERIMENTS) == set(registry.EXPERIMENTS)


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--runs", "0"], ["--runs", "many"], ["--seed", "-1"], ["--seed", str(2**32)]),
        *(["--timeout", "0"], ["--timeout", "nan"], ["--retry", "-1"], ["--workers", "0"]),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run("simulate", f"{HERE}:MODEL", tmp_path / "runs", "--runs", 5, *wrong)
    assert end.value.code == 2
    assert f"argument {wrong[0]}: must be" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# Models.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model", "'model' names no model: write MODULE:OBJECT"),
        (f"{HERE}:", "names no model"),
        ("nowhere:model", "There is no module 'nowhere' in /"),
        ("nowhere.deep:model", "There is no module 'nowhere.deep'"),
        ("mymodel.py:model", "leave out .py and write mymodel:"),
        (f"{HERE}:nothing", "has no 'nothing': its models are MODEL, STRICT, WIDER"),
        (
            f"{HERE}:NUMBER",
            "is of type int: it must be a cs.Model, or a function without arguments",
        ),
        (f"{HERE}:takes_arguments", "missing a required argument: 'sigma'"),
        (f"{HERE}:returns_number", "must return a cs.Model, got int"),
        (f"{HERE}:raises", "failed: RuntimeError: no licence"),
        (f"{HERE}:NO_SIMULATOR", "has no simulator: pass one to cs.Model"),
    ],
)
def test_what_is_no_model_is_refused(text, message, tmp_path, capsys):
    assert message in refused(capsys, "simulate", text, tmp_path / "runs", "--runs", 5)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import not_there", "failed: ModuleNotFoundError: No module named 'not_there' ("),
        ("a = 1\nb = a / 0", "broken.py, line 2)"),
        ("def f(:", "failed: SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", "failed: SystemExit: 3"),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(
    content, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken.py").write_text(content)
    shown = refused(capsys, "simulate", "broken:model", "runs", "--runs", 5)
    assert "Importing broken failed" in shown
    assert message in shown


# Campaigns.


def test_a_campaign_is_extended_and_is_that_of_the_library(tmp_path, capsys):
    path = tmp_path / "runs.zarr"
    assert run("simulate", f"{HERE}:make_model", path, "--runs", 20, "--seed", 7) == 0
    assert f"20 runs in {path}: 20 with data, 0 failed." in capsys.readouterr().out
    assert run("simulate", f"{HERE}:make_model", path, "--runs", 50, "--seed", 7) == 0
    sims = cs.Simulations.open(path)
    same = cs.simulate(MODEL, 50, key=jax.random.key(7), store=tmp_path / "same.zarr")
    np.testing.assert_array_equal(sims.x, same.x)
    np.testing.assert_array_equal(sims.theta["mu"], same.theta["mu"])
    shown = refused(capsys, "simulate", f"{HERE}:make_model", path, "--runs", 50, "--seed", 8)
    assert "holds runs of another campaign" in shown


def test_an_interrupted_campaign_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    path, put = tmp_path / "runs.zarr", simulations.Store.put

    def stops_half_way(self, numbers, theta, x, failed):
        half = len(numbers) // 2
        first = [{name: a[:half] for name, a in part.items()} for part in (theta, x)]
        put(self, numbers[:half], *first, failed)
        raise KeyboardInterrupt

    command = ("simulate", f"{HERE}:MODEL", path, "--runs", 30)
    with monkeypatch.context() as patch:
        patch.setattr(simulations.Store, "put", stops_half_way)
        assert run(*command) == 130
    shown = capsys.readouterr().err
    assert f"stopped. 15 of 30 runs are in {path}: run the same command" in shown
    assert run("status", path) == 1
    assert "missing     15" in capsys.readouterr().out
    assert run(*command) == 0
    assert run("status", path) == 0
    assert len(cs.Simulations.open(path)) == 30


@pytest.mark.parametrize("option", ["--timeout", "--retry", "--workers"])
def test_options_of_processes_are_refused_for_a_compiled_simulator(option, tmp_path, capsys):
    words = ("simulate", f"{HERE}:MODEL", tmp_path / "runs", "--runs", 5, option, 2)
    assert f"{option}: for simulators outside JAX alone" in refused(capsys, *words)


# The status of a store.


def test_a_status_shows_failures_and_where_runs_come_from(strict_store, capsys):
    before = {path: path.stat().st_mtime_ns for path in strict_store.rglob("*")}
    failed = len(cs.Simulations.open(strict_store).failures)
    assert 30 < failed < 100
    assert run("status", strict_store) == 0
    shown = capsys.readouterr().out
    assert f"done        {N - failed}\nfailed      {failed}\nmissing     0\n" in shown
    assert f"{failed} not finite." in shown
    assert "sigma: failed runs in 1.5" in shown
    assert "mu ~ Normal(loc=0, scale=1)\n            sigma ~ Uniform(low=0, high=2)\n" in shown
    assert "simulator   _draw_strictly\n" in shown
    assert "key         threefry2x32 [0, 0] (--seed 0)\n" in shown
    assert f"made by     consilience {cs.__version__}" in shown
    assert before == {path: path.stat().st_mtime_ns for path in strict_store.rglob("*")}


def test_damaged_runs_count_as_missing(tmp_path, capsys):
    path = tmp_path / "runs.zarr"
    assert run("simulate", f"{HERE}:MODEL", path, "--runs", 10) == 0
    (path / "mu" / "c" / "0").write_bytes(b"")
    assert run("status", path) == 1
    assert "missing     10" in capsys.readouterr().out


def test_what_is_no_store_has_no_status(tmp_path, capsys):
    assert "There is no store" in refused(capsys, "status", tmp_path / "nothing")
    (tmp_path / "zarr.json").write_text(json.dumps({"attributes": {}}))
    assert "not one of simulations" in refused(capsys, "status", tmp_path)


def a_dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("pid", "host", "age", "works"),
    [
        (os.getppid, socket.gethostname(), 10_000, True),
        (a_dead_process, socket.gethostname(), 0, False),
        (lambda: 1, "node-17", 100, True),
        (lambda: 1, "node-17", 1_000, False),
    ],
)
def test_a_status_tells_whether_a_process_is_at_work(pid, host, age, works, store, capsys):
    number, lock = pid(), store / "lock"
    lock.write_text(json.dumps({"pid": number, "host": host}))
    os.utime(lock, (time.time() - age,) * 2)
    try:
        assert run("status", store) == 0
    finally:
        lock.write_text("")
    expected = f"process {number} on {host}" if works else "no process"
    assert f"at work     {expected}\n" in capsys.readouterr().out


def test_a_store_can_be_asked_before_its_first_run_and_by_its_own_process(tmp_path, capsys):
    with simulations.Store(tmp_path / "runs", {"key": []}):
        assert run("status", tmp_path / "runs") == 1
        shown = capsys.readouterr().out
        with pytest.raises(cs.StoreInUseError):
            simulations.Store(tmp_path / "runs", {"key": []})
    assert "no run has ended yet" in shown
    assert f"at work     process {os.getpid()} on" in shown


# Fits.


def test_a_fit_without_failed_runs_is_that_of_the_library(strict_store, tmp_path, capsys):
    out = tmp_path / "deep" / "fit.safetensors"
    command = ("fit", f"{HERE}:STRICT", strict_store, "--out", out, "--seed", 3, "--epochs", 2)
    command = (*command, "--no-self-consistency", "--quiet")
    shown = refused(capsys, *command)
    assert "pass --drop-invalid" in shown
    assert f"`consilience status {strict_store}`" in shown
    assert not out.exists()
    assert run(*command, "--drop-invalid") == 0
    shown = capsys.readouterr().out
    assert "Fit: posterior of mu, sigma\n" in shown
    assert f"Saved to {out}." in shown
    sims = cs.Simulations.open(strict_store).drop_invalid()
    settings = {"self_consistency": False, "epochs": 2, "progress": False}
    same = cs.fit(STRICT, sims, key=jax.random.key(3), **settings)
    loaded = cs.load(out, STRICT)
    assert loaded.history.simulations == len(sims) < N
    np.testing.assert_array_equal(loaded.history.terms["loss"], same.history.terms["loss"])


def test_a_fit_of_an_unfinished_store_says_so(tmp_path, capsys, monkeypatch):
    path = tmp_path / "runs.zarr"
    assert run("simulate", f"{HERE}:MODEL", path, "--runs", 10) == 0
    with simulations.Store(path, {}) as runs:
        runs.grow(12)
    trained = []

    def stop(model, sims, **settings):
        trained.append(len(sims))
        raise KeyboardInterrupt

    monkeypatch.setattr("consilience.training.train.fit", stop)
    assert run("fit", f"{HERE}:MODEL", path, "--out", tmp_path / "fit") == 130
    shown = capsys.readouterr().err
    assert f"2 of the 12 runs in {path} are missing." in shown
    assert "stopped. Nothing was written." in shown
    assert trained == [10]


def test_an_interrupted_fit_is_kept(store, saved, fitted, tmp_path, monkeypatch):
    class Interrupted:
        history = cs.History({}, {}, "interrupted", 0.0, 0)
        save = staticmethod(lambda path: path.write_bytes(saved.read_bytes()))

    monkeypatch.setattr("consilience.training.train.fit", lambda *_, **__: Interrupted())
    assert run("fit", f"{HERE}:MODEL", store, "--out", tmp_path / "fit") == 130
    assert cs.load(tmp_path / "fit", MODEL).history.seconds == fitted.history.seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: f"{HERE}:WIDER"}, "name the model that the runs were made with"),
        ({2: "nothing.zarr"}, "There is no store of simulations at nothing.zarr"),
        ({4: "."}, "is a folder: name a file to write"),
        ({4: "/dev/null/fit"}, "cannot be written"),
    ],
)
def test_a_fit_that_cannot_be_is_refused_before_training(change, message, store, capsys):
    words = ["fit", f"{HERE}:MODEL", store, "--out", "fit.safetensors"]
    for place, word in change.items():
        words[place] = word
    assert message in refused(capsys, *words)


def test_training_that_fails_is_told_in_a_line(store, tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise cs.TrainingError("The loss was not finite.")

    monkeypatch.setattr("consilience.training.train.fit", fail)
    words = ("fit", f"{HERE}:MODEL", store, "--out", tmp_path / "fit")
    assert refused(capsys, *words) == "consilience: The loss was not finite.\n"


# Draws.


def test_draws_are_those_of_the_library(saved, fitted, x, tmp_path, capsys):
    data, out = tmp_path / "x.npy", tmp_path / "new" / "draws.nc"
    np.save(data, x[0])
    words = ("sample", saved, data, "--model", f"{HERE}:MODEL", "--out", out)
    assert run(*words, "--draws", 40, "--seed", 5) == 0
    assert f"40 draws of mu, sigma for 1 observation in {out}." in capsys.readouterr().out
    draws = xr.load_dataset(out, engine="h5netcdf")
    same = fitted.sample(x[0], 40, key=jax.random.key(5))
    xr.testing.assert_equal(draws, same)
    assert draws["mu"].dims == ("chain", "draw")
    assert (draws.attrs["seed"], draws.attrs["model"]) == (5, f"{HERE}:MODEL")
    assert [path.name for path in out.parent.iterdir()] == ["draws.nc"]


def test_names_that_netcdf_does_not_take_are_refused_before_drawing(tmp_path):
    for name in ("a/b", "/"):
        with pytest.raises(InputError, match="netCDF takes no slash in a name"):
            check_netcdf(["mu", name], tmp_path / "draws.nc")
    check_netcdf(["mu", "a.b", "变量", "a b"], tmp_path / "draws.nc")


def test_a_fit_with_parts_of_a_user_is_left_to_python(store, x, tmp_path, capsys):
    fit = quick(MODEL, cs.Simulations.open(store), posterior=Mixture(), epochs=1)
    path, data = fit.save(tmp_path / "own.fit"), tmp_path / "x.npy"
    np.save(data, x[0])
    for words in (
        ("sample", path, data, "--out", tmp_path / "draws.nc"),
        ("check", path, data),
        ("report", path, "--out", tmp_path / "page.html"),
    ):
        said = refused(capsys, *words, "--model", f"{HERE}:MODEL")
        assert "the command line cannot load: use cs.load(path, model, parts=...) in Python" in said


def test_corrected_draws_of_a_batch(saved, fitted, x, tmp_path, capsys):
    data, out = tmp_path / "x.csv", tmp_path / "draws.nc"
    np.savetxt(data, x, delimiter=",", fmt="%.9g")
    words = ("sample", saved, data, "--model", f"{HERE}:MODEL", "--out", out)
    assert run(*words, "--draws", 30, "--corrected") == 0
    assert "Pareto k at most" in capsys.readouterr().out
    same = fitted.sample(x, 30, key=jax.random.key(0), corrected=True)
    xr.testing.assert_equal(xr.load_dataset(out), same)
    assert same["pareto_k"].dims == ("observation",)


WRONG_DATA = {
    "missing.npy": (None, "There is no file"),
    "x.dat": ("1 2 3", "a file ends in .npy, .npz, .csv, .txt, .nc"),
    "header.csv": ("a,b,c\n1,2,3", "could not convert string 'a' to float64"),
    "ragged.csv": ("1,2,3\n1,2", "cannot be read as .csv: the number of columns changed"),
    "empty.txt": ("", "cannot be read as .txt: it holds no numbers"),
    "four.csv": ("1,2,3,4\n5,6,7,8", "of shape (3,), or one on each line of 3 numbers; it has 2"),
    "nan.csv": ("1,2,nan", "has NaN or infinite values"),
    "text.npy": ("1 2 3", "cannot be read as .npy"),
    "text.npz": ("1 2 3", "cannot be read as .npz: File is not a zip file"),
    "text.nc": ("1 2 3", "cannot be read as .nc"),
    "wide.npy": (np.zeros((2, 4)), "must have the shape (3,), or that behind one axis"),
    "words.npy": (np.array(["a", "b", "c"]), "must hold numbers, but x is of type <U1"),
    "none.npy": (np.zeros((0, 3)), "must hold an observation, but x is empty"),
    "two.npz": ({"a": np.zeros(3), "b": np.zeros(3)}, "one array, but"),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_data_that_do_not_fit_are_refused(name, saved, tmp_path, capsys):
    content, message = WRONG_DATA[name]
    path, out = tmp_path / name, tmp_path / "draws.nc"
    if isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    elif content is not None:
        np.save(path, content)
    shown = refused(capsys, "sample", saved, path, "--model", f"{HERE}:MODEL", "--out", out)
    assert message in shown
    assert name in shown
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: "nothing"}, "There is no file nothing"),
        ({1: __file__}, "is damaged, or not a saved fit"),
        ({4: f"{HERE}:WIDER"}, "is a fit of a different model"),
        ({6: "draws.csv"}, "draws.csv must end in .nc"),
    ],
)
def test_fits_and_results_that_cannot_be_are_refused(change, message, saved, x, tmp_path, capsys):
    np.save(tmp_path / "x.npy", x)
    words = ["sample", saved, tmp_path / "x.npy", "--model", f"{HERE}:MODEL", "--out", "draws.nc"]
    for place, word in change.items():
        words[place] = word
    assert message in refused(capsys, *words)


VECTOR = Layout(Vector(), ("data",), ((3,),), bare=True)
ROWS = Layout(Vector(), ("data",), ((2, 3),), bare=True)
NAMED = Layout(Vector(side=("b",)), ("a", "b"), ((3,), ()), bare=False)
A, B = np.arange(6.0).reshape(2, 3), np.array([1.0, 2.0])


@pytest.mark.parametrize(
    ("layout", "text", "expected"),
    [
        (VECTOR, "0 1 2", A[0]),
        (VECTOR, "# cm\n0\n1\n2\n", A[0]),
        (VECTOR, "0, 1, 2\n3, 4, 5\n", A),
        (ROWS, "0,1,2\n3,4,5", A),
        (ROWS, "0,1,2,3,4,5", A),
        (ROWS, "0,1,2,3,4,5\n0,1,2,3,4,5\n", np.stack([A, A])),
    ],
)
def test_text_holds_one_observation_or_one_on_each_line(layout, text, expected, tmp_path):
    for ending in (".csv", ".txt"):
        path = tmp_path / f"x{ending}"
        path.write_text(text)
        np.testing.assert_array_equal(read_data(path, layout), expected)


@pytest.mark.parametrize("ending", [".npz", ".nc"])
def test_several_arrays_are_read_by_name(ending, tmp_path):
    path = tmp_path / f"x{ending}"
    if ending == ".npz":
        np.savez(path, a=A, b=B)
    else:
        write_netcdf(xr.Dataset({"a": (("n", "i"), A), "b": ("n", B)}), path)
    found = read_data(path, NAMED)
    np.testing.assert_array_equal(found["a"], A)
    np.testing.assert_array_equal(found["b"], B)
    with pytest.raises(InputError, match=r"one array, but .* holds 2 \(a, b\): keep one of them"):
        read_data(path, VECTOR)
    np.save(tmp_path / "a.npy", A)
    with pytest.raises(InputError, match=r"several arrays \(a, b\), but .* holds one"):
        read_data(tmp_path / "a.npy", NAMED)


def test_one_of_several_arrays_is_taken_by_its_name(tmp_path):
    np.savez(tmp_path / "x.npz", x=A, weights=B)
    np.testing.assert_array_equal(read_data(tmp_path / "x.npz", VECTOR), A)
    np.savez(tmp_path / "y.npz", y=A[0])
    np.testing.assert_array_equal(read_data(tmp_path / "y.npz", VECTOR), A[0])


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "draws.nc"
    check_out(path, ".nc")
    write_netcdf(xr.Dataset({"a": ("n", B)}), path)
    with pytest.raises(TypeError):
        write_netcdf(xr.Dataset({"a": ("n", B)}, attrs={"bad": object()}), path)
    np.testing.assert_array_equal(xr.load_dataset(path)["a"], B)
    assert list(tmp_path.iterdir()) == [path]


# Checks.


def test_a_check_ends_with_the_code_of_its_verdict(store, saved, x, tmp_path, capsys, monkeypatch):
    asked = []

    def judged(fit, x, **settings):
        asked.append(settings)
        verdicts = next(found)
        table = xr.Dataset(
            {name: ("observation", list(verdicts)) for name in ("verdict", "reason")}
        )
        return check.Check(table)

    monkeypatch.setattr(check, "check", judged)
    np.save(tmp_path / "x.npy", x)
    words = ("check", saved, tmp_path / "x.npy", "--model", f"{HERE}:MODEL")
    cases = {
        (check.AS_IS, check.AS_IS): 0,
        (check.CORRECTED, check.AS_IS): 3,
        (check.CORRECTED, check.MCMC): 4,
        (check.MODEL, check.MCMC): 5,
    }
    found = iter(cases)
    for code in cases.values():
        assert run(*words, "--held-out", store, "--predictive", 0) == code
    assert "1  do not use: revise the model" in capsys.readouterr().out
    assert all(len(settings["simulations"]) == N for settings in asked)
    assert all(settings["predictive"] == 0 for settings in asked)


@pytest.fixture
def closed_pipe(monkeypatch):
    """Standard output to a reader that has left, as `head` does; what is written now is lost."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield stream


def test_a_check_into_head_ends_with_the_code_of_its_verdict(
    saved, x, tmp_path, capsys, monkeypatch, closed_pipe
):
    table = xr.Dataset({name: ("observation", [check.MCMC] * 2) for name in ("verdict", "reason")})
    monkeypatch.setattr(check, "check", lambda *args, **settings: check.Check(table))
    np.save(tmp_path / "x.npy", x)
    words = ("check", saved, tmp_path / "x.npy", "--model", f"{HERE}:MODEL", "--predictive", 0)
    assert run(*words) == 4
    assert capsys.readouterr().err == ""


def test_every_command_into_head_ends_quietly(store, saved, tmp_path, capsys, closed_pipe):
    assert run("status", store) == 0
    assert run("simulate", f"{HERE}:MODEL", tmp_path / "runs", "--runs", 3) == 0
    with pytest.raises(SystemExit) as end:
        run("--help")
    assert end.value.code == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_the_shell_has_closed_is_no_error(name, store, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, name, None)
    assert run("status", store) == 0
    assert run("status", tmp_path / "nothing") == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_to_a_full_disk_is_told_in_a_line(store, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run("status", store) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_out_of_memory_is_told_in_a_line_with_its_own_code(saved, x, tmp_path, capsys):
    np.save(tmp_path / "x.npy", x)
    words = ("sample", saved, tmp_path / "x.npy", "--model", f"{HERE}:MODEL")
    assert run(*words, "--out", tmp_path / "draws.nc", "--draws", 10**14) == NO_MEMORY == 6
    shown = capsys.readouterr()
    assert shown.err.startswith("consilience: out of memory (200000000000000 draws take")
    assert shown.err.endswith("Pass fewer --draws, or a smaller batch of observations.\n")
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_device_out_of_memory_is_told_in_a_line(store, tmp_path, capsys, monkeypatch):
    def exhausted(*args, **settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr("consilience.training.train.fit", exhausted)
    words = ("fit", f"{HERE}:MODEL", store, "--out", tmp_path / "fit.safetensors")
    assert run(*words) == NO_MEMORY
    assert "Train on fewer runs" in capsys.readouterr().err


def test_a_check_is_that_of_the_library(store, saved, fitted, x, tmp_path, capsys):
    odd = np.stack([x[0], x[0] + 1000.0])
    np.save(tmp_path / "x.npy", odd)
    words = ("check", saved, tmp_path / "x.npy", "--model", f"{HERE}:MODEL", "--seed", 2)
    words = (*words, "--held-out", store, "--predictive", 0)
    sims = cs.Simulations.open(store)
    same = fitted.check(odd, key=jax.random.key(2), simulations=sims, predictive=0)
    assert same.verdict[1] == check.MCMC
    assert run(*words, "--out", tmp_path / "report.nc") == 4
    assert "Check of 2 observations" in capsys.readouterr().out
    xr.testing.assert_equal(xr.load_dataset(tmp_path / "report.nc"), same.table)
    assert run(*words, "--out", tmp_path / "report.txt") == 4
    lines = (tmp_path / "report.txt").read_text().splitlines()
    assert lines[-1] == f"1: {check.MCMC}. {same.table['reason'].values[1]}"


# Reports.


def test_a_report_is_asked_of_the_library(store, saved, x, tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        cs.Fit, "report", lambda fit, *args, **settings: asked.append((args, settings))
    )
    page = tmp_path / "deep" / "page.html"
    words = ("report", saved, "--model", f"{HERE}:MODEL", "--out", page, "--quiet")
    assert run(*words) == 0
    assert capsys.readouterr().out == f"Written to {page}.\n"
    np.savetxt(tmp_path / "x.csv", x[:1], delimiter=",")
    more = ("--observation", tmp_path / "x.csv", "--held-out", store, "--seed", 3, "--runs", 40)
    assert run(*words, *more, "--predictive", 7) == 0
    (plain, settings), (given, chosen) = asked
    assert plain == (page, None)
    assert settings["simulations"] is None and settings["n"] == 500
    assert given[0] == page
    np.testing.assert_allclose(given[1], x[0], rtol=1e-6)
    assert len(chosen["simulations"]) == N and chosen["simulations"].key[-1] == 7
    assert (chosen["n"], chosen["predictive"], chosen["progress"]) == (40, 7, False)
    assert chosen["key"] == jax.random.key(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: "nothing"}, "There is no file or folder nothing."),
        ({1: "x.csv"}, "x.csv is damaged, or not a saved fit"),
        ({1: "."}, "--model and --observation: for the file of a fit alone, but . is a folder"),
        ({2: None, 3: None}, "name the model of fit.safetensors with --model MODULE:OBJECT"),
        ({3: f"{HERE}:WIDER"}, "is a fit of a different model"),
        ({5: "two.csv"}, "A report shows one observation, but two.csv holds 2"),
        ({5: "none.csv"}, "There is no file none.csv"),
        ({6: None, 7: None}, "Name the page to write with --out report.html."),
        ({7: "page.pdf"}, "page.pdf must end in .html or .htm."),
        ({7: "."}, "is a folder: name a file to write"),
        ({8: "--held-out", 9: "none.zarr"}, "There is no store of simulations at none.zarr"),
    ],
)
def test_reports_that_cannot_be_are_refused(
    change, message, saved, x, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fit.safetensors").write_bytes(saved.read_bytes())
    np.savetxt("x.csv", x[:1], delimiter=",")
    np.savetxt("two.csv", x[:2], delimiter=",")
    words = ["report", "fit.safetensors", "--model", f"{HERE}:MODEL", "--observation", "x.csv"]
    words = dict(enumerate([*words, "--out", "page.html"])) | change
    assert message in refused(capsys, *(word for word in words.values() if word is not None))
    assert not (tmp_path / "page.html").exists()


# All of it, in processes of their own.

MODULE = """
import time
import consilience as cs
import numpyro.distributions as dist

def noisy(rng, mu):
    time.sleep(0.02)
    if mu > 1.5:
        raise ValueError("mu is too large")
    return mu + rng.normal(size=2)

model = cs.Model({"mu": dist.Normal(0, 1)}, cs.external(noisy))
"""


def started(folder, *words) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "consilience.cli", *map(str, words)],
        cwd=folder,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(folder, *words) -> tuple[int, str, str]:
    process = started(folder, *words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_from_a_shell(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mymodel.py").write_text(MODULE)
    store, journal = tmp_path / "runs.zarr", tmp_path / "runs.zarr" / "journal.jsonl"
    simulate = ("simulate", "mymodel:model", store, "--runs", 250, "--workers", 2)
    process = started(tmp_path, *simulate)
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 2):
        assert process.poll() is None
        time.sleep(0.02)
    assert run("status", store) == 1
    assert f"at work     process {process.pid} on" in capsys.readouterr().out
    # As a batch system ends a job.
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "of 250 runs are in" in err
    assert "Simulations: " in err
    assert run("status", store) == 1
    assert "at work     no process" in capsys.readouterr().out

    assert run(*simulate, "--quiet") == 0
    assert "raised: ValueError: mu is too large" in capsys.readouterr().out
    sims = cs.Simulations.open(store)
    assert len(sims) == 250
    np.testing.assert_array_equal(sims.failures.mask, sims.theta["mu"] > 1.5)

    trained = ("fit", "mymodel:model", store, "--out", "fit.safetensors", "--no-self-consistency")
    code, out, err = ended(tmp_path, *trained, "--epochs", 2, "--drop-invalid", "--quiet")
    assert (code, err) == (0, "")
    assert f"{250 - len(sims.failures)} simulations, 2 epochs" in out

    (tmp_path / "x.csv").write_text("0.5,-0.2\n1.0,0.3\n")
    about = ("fit.safetensors", "x.csv", "--model", "mymodel:model")
    code, out, err = ended(tmp_path, "sample", *about, "--draws", 50, "--out", "draws.nc")
    assert (code, err) == (0, "")
    draws = xr.load_dataset(tmp_path / "draws.nc")
    assert dict(draws.sizes) == {"observation": 2, "chain": 1, "draw": 50}
    assert np.isfinite(draws["mu"]).all()

    code, out, err = ended(
        tmp_path, "check", *about, "--held-out", store, "--predictive", 0, "--out", "report.nc"
    )
    verdicts = xr.load_dataset(tmp_path / "report.nc")["verdict"].values.tolist()
    assert code == max(CODES[verdict] for verdict in verdicts)
    assert "Check of 2 observations" in out
