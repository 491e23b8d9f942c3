"""Simulators outside JAX: what they get, what they may give, and what is refused."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

import consilience as cs
from consilience.model.priors import as_prior
from consilience.model.run import Spec, Task, run_one, stream
from consilience.simulation.simulate import find_layout
from consilience.training.prepare import check_likelihood
from tests import simulators
from tests.conftest import TINY, quick

KEY = jax.random.key(3)
# Priors that several models share: their draws are compiled once.
PRIOR = as_prior({"mu": dist.Normal(0.0, 1.0), "sigma": dist.Uniform(0.0, 2.0)})
MU = as_prior({"mu": dist.Normal(0.0, 1.0)})
VECTOR = as_prior({"beta": dist.Uniform(0.0, 1.0).expand([2])})


def run(simulator, n=4, prior=None, **settings):
    """Runs in one thread, in order."""
    model = cs.Model(PRIOR if prior is None else prior, simulator)
    with ThreadPoolExecutor(1) as executor:
        return cs.simulate(model, n, key=KEY, executor=executor, progress=False, **settings)


def test_a_function_gets_its_parameters_by_name_as_floats_or_arrays():
    got = []

    def simulate(rng, mu, beta):
        got.append((type(mu), beta.shape))
        return np.array([mu, *beta])

    prior = {"mu": dist.Normal(0.0, 1.0), "beta": dist.Uniform(0.0, 1.0).expand([2])}
    sims = run(cs.external(simulate), prior=prior)
    assert set(got) == {(float, (2,))}
    np.testing.assert_array_equal(sims.x[:, 0], sims.theta["mu"])
    np.testing.assert_array_equal(sims.x[:, 1:], sims.theta["beta"])


def test_a_prior_without_names_gives_theta():
    sims = run(cs.external(lambda rng, theta: np.array([theta])), prior=dist.Normal(0.0, 1.0))
    np.testing.assert_array_equal(sims.x[:, 0], sims.theta["theta"])


def test_parameters_are_those_that_a_simulator_in_jax_would_get():
    inside = cs.simulate(cs.Model(PRIOR, lambda key, t: t["mu"]), 40, key=KEY)
    outside = run(cs.external(simulators.noisy), 40)
    np.testing.assert_allclose(inside.theta["sigma"], outside.theta["sigma"], rtol=1e-6)


def test_random_streams_depend_on_key_and_number_and_differ_between_them():
    first = [stream((1, 2), i).random() for i in range(1000)]
    assert first == [stream((1, 2), i).random() for i in range(1000)]
    assert len({*first, *(stream((2, 1), i).random() for i in range(1000))}) == 2000
    assert stats.kstest(first, "uniform").pvalue > 1e-3


def test_the_shape_is_found_by_a_run_that_is_not_repeated():
    calls = []

    def simulate(rng, mu, sigma):
        calls.append(mu)
        return rng.normal(size=(5, 2))

    model = cs.Model(PRIOR, cs.external(simulate))
    assert model.layout is None and not calls
    assert "shape known after its first run" in repr(model)
    with ThreadPoolExecutor(2) as executor:
        sims = cs.simulate(model, 20, key=KEY, executor=executor, progress=False)
    assert sims.x.shape == (20, 5, 2)
    assert len(calls) == 20 == len(set(calls))
    known = model.with_spec(Spec.of(sims.x[0]))
    assert find_layout(known).shapes == {"data": (5, 2)}
    assert len(calls) == 20


def test_a_trial_run_finds_the_layout_where_nothing_else_has():
    calls = []

    def simulate(rng, mu, sigma):
        calls.append(mu)
        if len(calls) < 3:
            raise ValueError("not yet")
        return rng.normal(size=2)

    model = cs.Model(PRIOR, cs.external(simulate), data=cs.Vector(counts=True))
    layout = find_layout(model)
    assert layout.kind == cs.Vector(counts=True)
    assert layout.shapes == {"data": (2,)}
    assert len(calls) == 3


def test_whole_numbers_become_floats_and_masks_stay():
    def simulate(rng, mu, sigma):
        return {"y": rng.integers(5, size=3), "here": np.array([True, False, mu > 0])}

    sims = run(cs.external(simulate), 8)
    assert sims.x["y"].dtype == np.float64
    assert sims.x["here"].dtype == bool
    np.testing.assert_array_equal(sims.x["here"][:, 2], sims.theta["mu"] > 0)


def test_data_that_do_not_match_the_first_run_say_how():
    spec = Spec.of({"a": np.zeros(2), "m": np.zeros(3, bool)})
    cases = [
        (np.zeros(2), r"must be a dictionary with \['a', 'm'\], got an array"),
        ({"a": np.zeros(2)}, r"got a dictionary with \['a'\]"),
        ({"a": np.zeros(3), "m": np.zeros(3, bool)}, r"x\['a'\] must have the shape \(2,\)"),
        ({"a": np.zeros(2), "m": np.zeros(3)}, r"x\['m'\] must hold bool, got float64"),
    ]
    for x, message in cases:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(spec.match(x).message)


def test_odd_results_are_failures_not_data():
    run_of = lambda x: run_one(Task(cs.external(lambda rng: x), (0,)), 0, {})  # noqa: E731
    assert run_of("text").failure.reason == "wrong shape"
    assert run_of(None).failure.reason == "wrong shape"
    assert run_of(np.array([1.0, np.nan])).failure.reason == "not finite"
    assert run_of([1.0, 2.0]).failure is None


ODD = {
    "None": (None, r"The simulator returned nothing \(None\): end it with `return x`"),
    "an empty dictionary": ({}, "x is an empty dictionary: name at least one array"),
    "complex numbers": (1j * np.ones(2), "x must be real numbers, but it is complex: .*imaginary"),
    "a random key": (jax.random.key(0), "x must be real numbers, but it is a random key"),
    "an empty array": (np.zeros(0), r"x has the shape \(0,\): return at least one number"),
    "an empty array by name": ({"y": np.zeros((0, 2))}, r"x\['y'\] has the shape \(0, 2\)"),
    "1 and '1'": ({1: 2.0, "1": 2.0}, r"names in x must differ as text, got \[1, '1'\]"),
    "a generator": (np.random.default_rng(0), "x must be real numbers, got one Generator"),
    "None by name": ({"y": None}, r"x\['y'\] must be real numbers, got nothing"),
}


@pytest.mark.parametrize(("x", "message"), ODD.values(), ids=ODD)
def test_what_a_simulator_outside_jax_returned_is_named_with_what_to_do(x, message):
    failure = run_one(Task(cs.external(lambda rng: x), (0,)), 0, {}).failure
    assert failure.reason == "wrong shape"
    assert re.search(message, failure.message)


def test_a_simulator_may_catch_all_exceptions_and_still_be_stopped():
    def stubborn(rng):
        try:
            time.sleep(30)
        except Exception:
            return np.zeros(1)

    assert run_one(Task(cs.external(stubborn), (0,), 0.05), 0, {}).failure.reason == "timed out"


def test_bad_external_simulators_are_refused():
    with pytest.raises(ValueError, match=r"function\(rng, mu=..., sigma=...\).*\(rng, mu\)"):
        cs.Model(PRIOR, cs.external(lambda rng, mu: mu))
    with pytest.raises(TypeError, match=r"got str.*cs\.command"):
        cs.external("simulate {mu}")
    with pytest.raises(ValueError, match=r"fields \['beta'\].*prior names \['mu', 'sigma'\]"):
        cs.Model(PRIOR, cs.command("simulate {mu} {beta}"))
    with pytest.raises(ValueError, match="'seed' and 'output' have a meaning of their own"):
        cs.Model({"seed": dist.Normal(0.0, 1.0)}, cs.command("simulate {seed}"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("echo 'half {mu}", "quote that is not closed"),
        ("echo {mu} \\", "ends in a backslash"),
        ("  ", "empty"),
        ("echo {}", r"field {} .* has no name: .*as in {mu}"),
        ("echo {0} {mu}", r"field {0} .* has no name"),
        ("echo {mu:zz}", r"field {mu:zz} .* cannot be written: "),
        ("echo {mu:{width}}", r"cannot be written: a field within a field"),
        ("echo {output:.3f}", r"field {output:.3f} .* cannot be written"),
        ("echo {mu", r"'{mu' .*cannot be filled.*Double a brace"),
        ("awk {print} {mu: >9}", r"'{mu:' .*cannot be filled.*quote a word with a space"),
        ("echo {mu!x}", r"field {mu!x} .*Unknown conversion specifier"),
    ],
)
def test_a_command_line_that_cannot_be_filled_is_refused_at_once(line, message):
    with pytest.raises(ValueError, match=message):
        cs.command(line)


def test_a_command_that_leaves_out_parameters_is_refused():
    with pytest.raises(ValueError, match=r"does not use the parameters \['sigma'\].*{sigma}"):
        cs.Model(PRIOR, cs.command("simulate {mu} {seed}"))
    with pytest.warns(UserWarning, match="uses 1 of the 2 values of the parameter 'beta'"):
        cs.Model(VECTOR, cs.command("simulate {beta[1]}"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("simulate {beta[2]}", r"{beta\[2\]} .* 'beta', which is 2 numbers: .*index out of range"),
        ("simulate {beta[-1]}", "which is 2 numbers: tuple indices must be integers"),
        ("simulate {beta:d}", r"{beta:d} .* which is 2 numbers: .*'d'"),
        ("simulate {beta.size}", "no attribute 'size'"),
    ],
)
def test_formats_that_do_not_suit_a_parameter_are_refused(line, message):
    with pytest.raises(ValueError, match=message):
        cs.Model(VECTOR, cs.command(line))
    with pytest.raises(ValueError, match=r"{mu\[0\]} .* 'mu', which is one number"):
        cs.Model(MU, cs.command("simulate {mu[0]}"))


def test_formats_that_python_has_may_be_written():
    line = "echo {mu!r:>30} '{mu: 8.3f}' {mu:+e} {mu.real} {seed:05d} '{{mu}}'"
    words = cs.command(line)._words({"mu": 0.5, "seed": 7})
    assert words[1:] == [" " * 27 + "0.5", "   0.500", "+5.000000e-01", "0.5", "00007", "{mu}"]


def test_a_command_gets_parameters_in_full_precision_and_a_seed():
    sims = run(cs.command("echo {mu} {mu:.2f} {seed}"), prior=MU)
    np.testing.assert_array_equal(sims.x[:, 0], sims.theta["mu"])
    np.testing.assert_allclose(sims.x[:, 1], np.round(sims.theta["mu"], 2), atol=1e-6)
    seeds = sims.x[:, 2]
    assert len(set(seeds)) == 4 and seeds.max() < 2**31
    again = run(cs.command("echo {mu} {mu:.2f} {seed}"), prior=MU)
    np.testing.assert_array_equal(seeds, again.x[:, 2])


def test_a_command_gets_arrays_whole_or_by_index():
    sims = run(cs.command("echo {beta} {beta[1]}"), prior=VECTOR)
    np.testing.assert_array_equal(sims.x[:, :2], sims.theta["beta"])
    np.testing.assert_array_equal(sims.x[:, 2], sims.theta["beta"][:, 1])


def test_a_command_writes_rows_or_a_column():
    assert run(cs.command("printf '1 2\\n3 4\\n5 6\\n' {mu}"), prior=MU).x.shape == (4, 3, 2)
    assert run(cs.command("printf '1\\n2\\n3\\n' {mu}"), prior=MU).x.shape == (4, 3)


def test_a_command_may_write_a_file_of_its_own():
    line = "sh -c 'echo {mu} > {output}; echo chatter'"
    plain = run(cs.command(line), prior=MU)
    np.testing.assert_array_equal(plain.x[:, 0], plain.theta["mu"])
    paths = []

    def read(path):
        paths.append(path)
        return {"y": np.array([float(path.read_text())])}

    named = run(cs.command(line, read=read), prior=MU)
    np.testing.assert_array_equal(named.x["y"], plain.x)
    assert len(set(paths)) == 4 and not any(path.exists() for path in paths)


def test_commands_that_fail_say_why():
    reasons = {
        "sh -c 'echo {mu}; echo no licence >&2; exit 3'": "exit code 3: no licence",
        "echo {mu} done": "must be numbers.*done.*Pass read=",
        "true {mu}": "must be numbers",
        "true {output} {mu}": r"wrote no file {output}",
        "no-such-program {mu}": "No such file",
    }
    for line, message in reasons.items():
        with pytest.raises(ValueError, match=f"(?s)shape of the data.*{message}"):
            run(cs.command(line), 2, prior=MU)


def test_a_command_that_takes_too_long_ends_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    line = f"sh -c 'sleep 60 & echo $! >> {pids}; if test {{mu}} = 7; then echo; fi; wait'"
    with pytest.raises(ValueError, match=r"timed out: The run took longer than 0\.3 s"):
        run(cs.command(line), 1, timeout=0.3, prior=MU)
    (pid,) = pids.read_text().split()
    for _ in range(100):
        if not _running(int(pid)):
            return
        time.sleep(0.02)
    raise AssertionError("the command's child outlived it")


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")")[-1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_external_models_are_fitted_and_calibrated_like_others():
    model = cs.Model(
        PRIOR,
        cs.external(simulators.noisy),
        cs.OnHost(lambda t, x: stats.norm.logpdf(x, t["mu"], t["sigma"]).sum()),
    )
    sims = run(model.simulator, 64)
    check_likelihood(model, sims)
    fit = quick(model, sims, posterior=TINY)
    calibration = cs.calibrate(fit, n=32, key=KEY, draws=19)
    assert calibration.invalid == 0
    at = cs.simulate_at(model, {"mu": np.full(9, 50.0), "sigma": np.ones(9)}, key=KEY)
    assert at.x.shape == (9, 3) and at.x.min() > 40.0
