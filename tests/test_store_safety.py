"""What stores refuse and survive: other priors, changed simulators, odd names, damage."""

import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import consilience as cs
from consilience.cli import main as cli
from consilience.model.priors import as_prior, describe_briefly
from consilience.model.run import Task, run_one
from consilience.simulation import arrays as store_arrays
from consilience.simulation import store
from tests.conftest import quick
from tests.test_campaigns import Here

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(5)
PRIOR = as_prior({"mu": dist.Normal(0.0, 1.0)})


def noisy(rng, mu):
    return mu + rng.normal(size=3)


def in_jax(key, theta):
    return theta["mu"] + jax.random.normal(key, (3,))


MODEL = cs.Model(PRIOR, in_jax)
"""For the command line."""


def run(function, path=None, n=6, prior=PRIOR, key=KEY, **settings):
    model = cs.Model(prior, cs.external(function))
    settings = {"executor": Here(), "chunk": 2, "progress": False} | settings
    return cs.simulate(model, n, key=key, store=path, **settings)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.zarr"


def edit(path, change):
    """Change what a store says of itself."""
    root = json.loads((path / "zarr.json").read_text())
    change(root)
    (path / "zarr.json").write_text(json.dumps(root))


def forget(path, *names):
    edit(path, lambda root: [root["attributes"].pop(name) for name in names])


# Priors.


def truncated(loc):
    return {"mu": dist.TruncatedNormal(loc, 1.0, low=-1.0)}


def test_a_store_is_not_extended_under_another_truncated_prior(path):
    prior = as_prior({"mu": dist.TruncatedNormal(0.0, 1.0, low=-1.0)})
    cs.simulate(cs.Model(prior, in_jax), 4, key=KEY, store=path)
    # As version 0.1.0 wrote it: texts that say less.
    forget(path, "fingerprint")

    def shorten(root):
        root["attributes"]["prior"] = {"mu": describe_briefly(truncated(0.0)["mu"])}

    edit(path, shorten)
    for loc in (0.5, 2.0):
        with pytest.raises(cs.StoreError, match=r"Its prior|at other parameters"):
            cs.simulate(cs.Model(truncated(loc), in_jax), 8, key=KEY, store=path)
    assert len(cs.simulate(cs.Model(prior, in_jax), 8, key=KEY, store=path)) == 8
    held = cs.Simulations.open(path)
    assert held.fingerprint == prior.fingerprint, "known from now on"


def test_drawn_parameters_are_compared_for_simulators_in_jax_too(path):
    prior = lambda scale: cs.ImplicitPrior(lambda key: {"mu": scale * jax.random.normal(key)})  # noqa: E731
    cs.simulate(cs.Model(prior(1.0), in_jax), 4, key=KEY, store=path)
    forget(path, "fingerprint")
    with pytest.raises(cs.StoreError, match="at other parameters than this prior draws"):
        cs.simulate(cs.Model(prior(2.0), in_jax), 8, key=KEY, store=path)


def test_small_parameters_are_compared_by_their_size(path):
    prior = lambda scale: cs.ImplicitPrior(lambda key: {"mu": scale * jax.random.normal(key)})  # noqa: E731
    run(noisy, path, prior=prior(1e-10))
    forget(path, "fingerprint")
    with pytest.raises(cs.StoreError, match="at other parameters than this prior draws"):
        run(noisy, path, prior=prior(2e-10))


def test_a_fit_refuses_runs_of_another_truncated_prior(path):
    model, other = (cs.Model(truncated(loc), in_jax) for loc in (0.0, 0.5))
    for kept in (None, path):
        sims = cs.simulate(model, 16, key=KEY, store=kept)
        for part in (sims, sims[2:], sims[2:].drop_invalid()):
            assert part.fingerprint == model.prior.fingerprint
            with pytest.raises(ValueError, match="were drawn from the prior"):
                quick(other, part)


def test_priors_that_look_alike_are_said_to_differ_in_what_is_not_shown():
    prior = lambda scale: cs.ImplicitPrior(lambda key: {"mu": scale * jax.random.normal(key)})  # noqa: E731
    sims = cs.simulate(cs.Model(prior(1.0), in_jax), 16, key=KEY)
    with pytest.raises(ValueError, match="differs in numbers that these lines leave out"):
        quick(cs.Model(prior(2.0), in_jax), sims)


def test_the_command_line_refuses_runs_of_another_prior(path, tmp_path, capsys, monkeypatch):
    cs.simulate(cs.Model(truncated(0.0), in_jax), 4, key=KEY, store=path)
    (tmp_path / "othermodel.py").write_text(
        "import consilience as cs, numpyro.distributions as dist\n"
        "model = cs.Model({'mu': dist.TruncatedNormal(0.5, 1.0, low=-1.0)})\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["fit", "othermodel:model", str(path), "--out", "fit.safetensors"]
    assert cli.main(words) == 2
    assert "name the model that the runs were made with" in capsys.readouterr().err
    (tmp_path / "alike.py").write_text(
        "import consilience as cs, numpyro.distributions as dist\n"
        "model = cs.Model({'mu': dist.TruncatedNormal(0.0, 1.000003, low=-1.0)})\n"
    )
    assert cli.main(["fit", "alike:model", *words[2:]]) == 2
    assert "differs in numbers that these lines leave out" in capsys.readouterr().err


@pytest.mark.parametrize("first", [True, False])
def test_a_store_begun_under_x64_is_not_extended_under_32_bit(path, first):
    model = lambda: cs.Model({"mu": dist.Normal(0.0, 1.0)}, in_jax)  # noqa: E731
    with jax.enable_x64(first):
        cs.simulate(model(), 4, key=jax.random.key(5), store=path)
    with (
        jax.enable_x64(not first),
        pytest.raises(cs.StoreError, match=rf"jax_enable_x64.*{first}\) first"),
    ):
        cs.simulate(model(), 8, key=jax.random.key(5), store=path)
    with jax.enable_x64(first):
        assert len(cs.simulate(model(), 8, key=jax.random.key(5), store=path)) == 8


# Sizes.


@pytest.mark.parametrize("n", [10**14, 10**10])
def test_a_number_of_runs_that_no_machine_can_hold_is_refused_before_anything_is_written(path, n):
    calls = []

    def counted(rng, mu):
        calls.append(mu)
        return np.zeros(3)

    for function in (lambda kept: run(counted, kept, n=n), jax_runs(n)):
        for kept in (path, None):
            with pytest.raises(ValueError, match="runs"):
                function(kept)
    assert not calls
    assert not path.exists()


def jax_runs(n):
    return lambda kept: cs.simulate(MODEL, n, key=KEY, store=kept)


def test_a_typo_on_the_command_line_is_refused_in_one_line(path, capsys):
    words = ["simulate", "tests.test_store_safety:MODEL", str(path), "--runs", "100000000000000"]
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "100000000000000 runs are too many" in shown.err
    assert not path.exists()


def test_runs_that_do_not_fit_on_the_disk_are_refused(path, monkeypatch):
    run(noisy, path)
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=300))
    with pytest.raises(cs.StoreError, match="its disk has 300 bytes left"):
        run(noisy, path, n=20)
    assert len(run(noisy, path)) == 6, "what is there is read"
    with pytest.raises(cs.StoreError, match=r"do not fit into .*300 bytes left"):
        cs.simulate(MODEL, 100, key=KEY, store=path.with_name("new.zarr"))
    assert not path.with_name("new.zarr").exists()


def test_a_first_run_that_is_too_large_for_all_to_fit_is_refused(path, monkeypatch):
    monkeypatch.setattr("consilience.simulation.limits.physical_memory", lambda: 10**6)
    with pytest.raises(ValueError, match=r"100 runs take at least 1.61 MB .* pass store="):
        run(lambda rng, mu: np.zeros(2000), n=100)


def test_a_store_whose_description_claims_absurdly_many_runs_opens_by_its_journal(path, capsys):
    whole = run(noisy, path)

    def claim(root):
        for name in ("x", "mu", "status"):
            root["consolidated_metadata"]["metadata"][name]["shape"][0] = 10**14

    edit(path, claim)
    held = cs.Simulations.open(path)
    np.testing.assert_array_equal(held.x, whole.x)
    assert cli.main(["status", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "done        6\n" in shown and "missing     99999999999994\n" in shown
    longer = run(noisy, path, n=9)
    np.testing.assert_array_equal(longer.x[:6], whole.x)
    assert cli.main(["status", str(path)]) == 0
    assert "missing     0\n" in capsys.readouterr().out


def test_a_bricked_store_without_a_run_opens(path):
    run(noisy, path)
    shutil.rmtree(path / "x")
    for name in ("mu/c", "status/c"):
        shutil.rmtree(path / name)
    (path / "journal.jsonl").unlink()

    def claim(root):
        root["consolidated_metadata"]["metadata"]["status"]["shape"][0] = 10**14

    edit(path, claim)
    assert len(cs.Simulations.open(path)) == 0
    assert len(run(noisy, path)) == 6


def test_a_number_of_runs_is_a_whole_number():
    assert len(cs.simulate(MODEL, np.int64(3), key=KEY)) == 3
    for n in (3.0, "3", True, None):
        with pytest.raises(Exception, match=r"(?s)whole number|SupportsIndex"):
            cs.simulate(MODEL, n, key=KEY)


# Where the store is.


def test_a_simulator_that_changes_the_folder_leaves_a_relative_store_in_its_place(
    tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def wandering(rng, mu):
        os.chdir(tmp_path / "elsewhere")
        return rng.normal(size=3)

    with ThreadPoolExecutor(2) as executor:
        sims = run(wandering, "runs.zarr", executor=executor)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["elsewhere", "runs.zarr"]
    assert not list((tmp_path / "elsewhere").iterdir())
    assert len(sims.x) == len(cs.Simulations.open(tmp_path / "runs.zarr")) == 6


NAMES = ["an absolute path", "a/b", "..", ".hidden", "", " ", "a\\b", "a\nb", "n" * 201]
FILES = ["zarr.json", "journal.jsonl", "lock", "Journal.JSONL", "lock.part"]


@pytest.mark.parametrize("name", [*NAMES, *FILES])
def test_names_that_are_no_safe_folder_in_a_store_are_refused(name, tmp_path, path):
    inner = str(tmp_path / "outside") if name == "an absolute path" else name
    prior, calls = {inner: dist.Normal(0.0, 1.0)}, []

    def simulator(rng, **theta):
        calls.append(theta)
        return rng.normal(size=3)

    compiled = lambda key, theta: jax.random.normal(key, (3,))  # noqa: E731
    named = lambda key, theta: {inner: jax.random.normal(key, (3,))}  # noqa: E731
    models = [cs.Model(PRIOR, named)]
    # A model refuses parameters with blank names or control characters itself.
    if name.strip() and name.isprintable():
        models.append(cs.Model(prior, compiled))
        with pytest.raises(cs.StoreError, match="cannot name parameters or data in a store"):
            run(simulator, path, prior=prior)
    for model in models:
        with pytest.raises(cs.StoreError, match="cannot name parameters or data in a store"):
            cs.simulate(model, 3, key=KEY, store=path)
    assert not calls and not list(tmp_path.iterdir())
    with pytest.raises(cs.StoreError, match="cannot name parameters or data in a store"):
        run(lambda rng, mu: {inner: np.zeros(3)}, path)
    assert [file.name for file in tmp_path.rglob("*")] == ["x.zarr", "lock"]


@pytest.mark.parametrize("name", ["c", "log sigma", "β", "x.y", "part", "__a"])
def test_other_names_are_kept(name, path):
    sims = run(
        lambda rng, **theta: {name: rng.normal(size=2)}, path, prior={name: dist.Normal(0.0, 1.0)}
    )
    read = cs.Simulations.open(path)
    np.testing.assert_array_equal(read.theta[name], sims.theta[name])
    np.testing.assert_array_equal(read.x[name], sims.x[name])


def test_names_that_differ_by_case_alone_are_refused_where_case_does_not_count(path):
    prior = {"A": dist.Normal(0.0, 1.0), "a": dist.Normal(0.0, 1.0)}
    both = lambda rng, **theta: np.array([*theta.values()])  # noqa: E731
    sims = run(both, path, prior=prior)
    np.testing.assert_array_equal(cs.Simulations.open(path).theta["a"], sims.theta["a"])
    folded = path.with_name("folded.zarr")
    folded.mkdir()
    for name in ("lock", "LOCK"):
        (folded / name).touch()  # as a file system shows it that folds case
    with pytest.raises(cs.StoreError, match="'A' and 'a' name the same folder"):
        run(both, folded, prior=prior)
    with pytest.raises(cs.StoreError, match="the same folder"):
        store_arrays.check_distinct(["\u00e9", "e\u0301"])


# Simulators that change.


def shifted(shift):
    def simulate_one(rng, mu):
        calls.append(mu)
        return mu + shift + rng.normal(size=3)

    calls = []
    simulate_one.calls = calls
    return simulate_one


def from_source(body):
    """A simulator as a script defines it."""
    scope = {"np": np}
    exec(compile(f"STEPS = 3\ndef simulator(rng, mu):\n{body}", "script.py", "exec"), scope)
    return scope["simulator"]


BODY = "    step = 0.5\n    return mu + step * rng.normal(size=STEPS)"


def test_a_changed_simulator_of_the_same_name_is_refused(path):
    whole = run(shifted(0.0), path)
    with pytest.raises(cs.StoreError, match=r"simulator has changed .* run 0 gives other data now"):
        run(shifted(1.0), path, n=9)
    with pytest.raises(cs.StoreError, match="simulator has changed"):
        run(shifted(1.0), path)
    np.testing.assert_array_equal(run(shifted(0.0), path, n=9).x[:6], whole.x)


def test_a_changed_body_is_refused_and_comments_and_names_are_not_looked_at(path, caplog):
    run(from_source(BODY), path)
    same = "    # Words.\n    h = 0.5\n\n    return mu + h * rng.normal(size=STEPS)"
    with pytest.raises(cs.StoreError, match="simulator has changed"):
        run(from_source(BODY.replace("0.5", "0.25")), path, n=9)
    with pytest.raises(cs.StoreError, match=r"fails now, raised: ValueError: no licence"):
        run(from_source("    raise ValueError('no licence')"), path, n=9)
    caplog.clear()
    run(from_source(same), path, n=9)
    assert not caplog.records


def test_a_simulator_written_anew_that_gives_the_same_goes_on(path, caplog):
    first, second = from_source(BODY), from_source(BODY.replace("step * rng", "2 * 0.25 * rng"))
    whole = run(first, path)
    longer = run(second, path, n=9)
    np.testing.assert_array_equal(longer.x[:6], whole.x)
    assert "Run 0 is made again" in caplog.text and "run 0 gives the same: going on" in caplog.text
    caplog.clear()
    run(second, path, n=10)
    assert not caplog.records, "the new program is remembered"


def test_constants_of_the_module_belong_to_the_program(path):
    simulator = from_source(BODY)
    run(simulator, path)
    simulator.__globals__["STEPS"] = 4
    with pytest.raises(cs.StoreError, match="simulator has changed"):
        run(simulator, path, n=9)


def test_a_simulator_with_random_numbers_of_its_own_cannot_be_compared(path, caplog):
    careless = lambda size: lambda rng, mu: np.random.default_rng().normal(size=3) + size  # noqa: E731
    run(careless(1.0), path)
    assert len(run(careless(2.0), path, n=9)) == 9
    assert "gives other data each time" in caplog.text


def test_a_changed_simulator_in_jax_is_refused(path):
    def model(scale):
        def simulator(key, theta):
            return theta["mu"] + scale * jax.random.normal(key, (3,))

        return cs.Model(PRIOR, simulator)

    whole = cs.simulate(model(1.0), 4, key=KEY, store=path)
    with pytest.raises(cs.StoreError, match="run 0 gives other data now"):
        cs.simulate(model(2.0), 8, key=KEY, store=path)
    longer = cs.simulate(model(1.0), 8, key=KEY, store=path)
    np.testing.assert_array_equal(longer.x[:4], whole.x)


def test_a_store_of_an_earlier_version_is_compared_when_it_goes_on(path):
    simulator = shifted(0.0)
    run(simulator, path)
    forget(path, "program", "fingerprint")
    simulator.calls.clear()
    assert len(run(simulator, path)) == 6 and not simulator.calls, "finished: nothing is run"
    with pytest.raises(cs.StoreError, match="simulator has changed"):
        run(shifted(1.0), path, n=9)
    simulator.calls.clear()
    assert len(run(simulator, path, n=9)) == 9
    assert len(simulator.calls) == 4, "three new runs, and one compared"


def test_a_changed_simulator_is_compared_by_a_run_that_gave_data(path):
    def moody(limit):
        def simulate_one(rng, mu):
            if mu > limit:
                raise ValueError("no")
            return mu + rng.normal(size=2)

        return simulate_one

    mu = run(noisy).theta["mu"]
    first = run(moody(float(np.median(mu))), path)
    assert 0 < len(first.failures) < 6
    assert len(run(moody(float(np.median(mu)) + 1e-9), path, n=9)) == 9


# Data that cannot be kept as they are.


def test_float64_values_too_large_for_the_float32_of_the_first_run_are_failures(path):
    calls = []

    def growing(rng, mu):
        calls.append(mu)
        return np.ones(2, np.float32) if len(calls) == 1 else np.array([1.0, 1e39])

    for kept in (None, path):
        calls.clear()
        sims = run(growing, kept)
        assert sims.failures.reasons == {"not finite": 5}
        assert "beyond 3.4e+38, the largest number of float32" in sims.failures[1].message


def test_what_a_simulator_returns_is_real_numbers():
    made = lambda x: run_one(Task(cs.external(lambda rng: x), (0,)), 0, {})  # noqa: E731
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    for x, message in [
        (np.array([1.0 + 2.0j]), "x must be real numbers, but it is complex"),
        ({"a": masked}, "x['a'] has masked entries"),
        ({1: np.zeros(2), "1": np.ones(2)}, "The names in x must differ as text"),
        ([["a"]], "holds text"),
    ]:
        failure = made(x).failure
        assert failure.reason == "wrong shape" and message in failure.message
    swapped = made(np.array([1.5, 2.0], ">f4")).x
    assert swapped.dtype == np.float32 and swapped.dtype.isnative
    assert swapped.tolist() == [1.5, 2.0]
    assert made(np.array([1.5], np.longdouble)).x.dtype == np.float64
    assert made(np.array([1e4000], np.longdouble)).failure.reason == "not finite"


@pytest.mark.usefixtures("unchecked")
def test_runs_brought_along_are_real_numbers_in_native_byte_order():
    theta = {"mu": np.arange(3.0).astype(">f4")}
    sims = cs.Simulations(theta, np.arange(6.0).reshape(3, 2).astype(">f8"))
    assert sims.theta["mu"].dtype == np.float32 and sims.theta["mu"].dtype.isnative
    assert sims.x.dtype == np.float64 and sims.x.dtype.isnative
    assert sims.x.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert cs.Simulations(theta, np.zeros(3, np.longdouble)).x.dtype == np.float64
    masked = np.ma.array(np.zeros((3, 2)), mask=np.eye(3, 2))
    for bad, error, message in [
        (np.zeros(3) + 1j, TypeError, "x must be real numbers, but it is complex"),
        (masked, ValueError, "x has masked entries"),
        (["a", "b", "c"], TypeError, "x must be real numbers, but it holds text"),
        ({"y": ["a", "b", "c"]}, TypeError, r"x\['y'\] must be real numbers"),
        ({1: np.zeros(3), "1": np.ones(3)}, ValueError, "names in x must differ as text"),
        ({}, ValueError, "x is an empty dictionary"),
    ]:
        with pytest.raises(error, match=message):
            cs.Simulations(theta, bad)
    with pytest.raises(ValueError, match="theta is an empty dictionary"):
        cs.Simulations({}, np.zeros(3))
    # The type checker of the tests refuses such names first.
    with pytest.raises(Exception, match=r"names in theta must differ as text|Mapping\[str"):
        cs.Simulations({1: np.zeros(3), "1": np.ones(3)}, np.zeros(3))


# Damage.


def line(entry):
    text = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def entry(runs=(1,), crc=(1,), failed=()):
    return {"runs": list(runs), "crc": list(crc), "failed": list(failed)}


ODD = [
    b"not JSON",
    b"[" * 10_000,
    b"\xff\xfe",
    [],
    3,
    "text",
    None,
    {},
    {"runs": [1]},
    {"runs": {}, "crc": {}, "failed": []},
    entry([-1]),
    entry([1.5]),
    entry([True]),
    entry(["1"]),
    entry([10**30]),
    entry([2**32 + 1]),
    entry([3 * 10**9]),
    entry([1], [-1]),
    entry([1], [2**40]),
    entry([1], []),
    entry([1], [1], [[5, 1, "raised", "m"]]),
    entry([1], [1], [[0, 1, "raised"]]),
    entry([1], [1], [[0, "1", "raised", "m"]]),
    entry([1], [1], [[0, 1, 2, 3]]),
    entry([1], [1], [7]),
]


def test_odd_lines_in_a_journal_cost_no_run(path, caplog):
    whole = run(noisy, path)
    with open(path / "journal.jsonl", "ab") as journal:
        journal.write(b"".join(map(line, ODD)))
    held = cs.Simulations.open(path)
    np.testing.assert_array_equal(held.x, whole.x)
    assert f"{len(ODD) - 1} lines are damaged" in caplog.text
    assert "1 runs with odd numbers are left out" in caplog.text
    np.testing.assert_array_equal(run(noisy, path, n=9).x[:6], whole.x)


def test_a_folder_in_the_place_of_a_chunk_is_said(path, monkeypatch):
    monkeypatch.setattr(store, "CHUNK_RUNS", 3)
    run(noisy, path)
    chunk = path / "mu" / "c" / "1"
    chunk.unlink()
    chunk.mkdir()
    assert len(cs.Simulations.open(path)) == 3
    with pytest.raises(cs.StoreError, match=r"a folder is where the file .*mu/c/1 should be"):
        run(noisy, path)
    chunk.rmdir()
    assert len(run(noisy, path)) == 6


def test_a_deleted_journal_beside_whole_data_is_said(path, caplog):
    run(noisy, path)
    content = (path / "journal.jsonl").read_bytes()
    (path / "journal.jsonl").unlink()
    assert len(cs.Simulations.open(path)) == 0
    assert "has data of 6 runs, but its journal (journal.jsonl) is gone or empty" in caplog.text
    (path / "journal.jsonl").write_bytes(content)
    caplog.clear()
    assert len(cs.Simulations.open(path)) == 6
    assert not caplog.records


def test_an_opened_store_without_runs_shows_itself(path):
    run(noisy, path)
    (path / "journal.jsonl").unlink()
    empty = cs.Simulations.open(path)
    assert repr(empty) == "Simulations: 0 runs, theta: mu (); x: (3,)"
    assert empty.x.shape == (0, 3)
    assert len(empty.drop_invalid()) == 0
    with pytest.raises(ValueError, match="got 0 runs"):
        quick(cs.Model(PRIOR), empty)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: root["attributes"].update(theta=[["mu"]]),
        lambda root: root["attributes"].update(data=[]),
        lambda root: root.update(attributes="text"),
        lambda root: root["consolidated_metadata"]["metadata"]["status"].update(shape=["6"]),
        lambda root: root["consolidated_metadata"]["metadata"]["status"].update(shape=[]),
    ],
)
def test_an_odd_description_is_reported(path, change):
    run(noisy, path)
    edit(path, change)
    with pytest.raises(cs.StoreError, match=r"description of .*zarr\.json\) is damaged"):
        cs.Simulations.open(path)


def test_runs_beyond_what_the_description_claims_are_kept(path, monkeypatch):
    """A copy of a store may be made while it grows."""
    monkeypatch.setattr(store, "CHUNK_RUNS", 3)
    whole = run(noisy, path, n=4)
    before = (path / "zarr.json").read_text()
    longer = run(noisy, path, n=12)
    Path(path / "zarr.json").write_text(before)
    held = cs.Simulations.open(path)
    np.testing.assert_array_equal(held.x, longer.x)
    np.testing.assert_array_equal(run(noisy, path, n=4).x, whole.x)


def test_simulators_in_jax_with_masks_keep_their_types(path):
    def simulator(key, theta):
        return {"y": theta["mu"] + jnp.zeros(2), "here": theta["mu"] > jnp.zeros(2)}

    model = cs.Model(PRIOR, simulator)
    cs.simulate(model, 4, key=KEY, store=path)
    longer = cs.simulate(model, 8, key=KEY, store=path)
    assert longer.x["here"].dtype == bool


@pytest.mark.parametrize(
    ("old", "new"), [('"<f8"', '"<i8"'), ('"bare": true', '"bare": false'), ('"mu"', '"nu"')]
)
def test_a_changed_description_of_arrays_is_refused(old, new, path):
    run(lambda rng, mu: rng.normal(size=3) + mu, path)
    root = path / "zarr.json"
    text = json.dumps(json.loads(root.read_text()))
    assert old in text
    root.write_text(text.replace(old, new))
    with pytest.raises(cs.StoreError):
        cs.Simulations.open(path)
