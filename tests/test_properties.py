"""Any input to a public entrance gets a right answer, or a refusal in the library's own words.

`make test` runs a few dozen examples, always the same; `make test-all` more than two thousand.
CONSILIENCE_EXAMPLES=20 multiplies them and draws new ones each time, for a search of an hour.
"""

import contextlib
import dataclasses
import dis
import functools
import io
import os
import tempfile
from concurrent.futures import Executor, Future
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import consilience as cs
from consilience import plots
from consilience.cli import main as cli
from consilience.cli.inputs import write_netcdf
from consilience.posterior.datasets import draws_to_dataset
from consilience.simulation.lock import StoreError
from consilience.training.epochs import TrainingError
from tests.conftest import TINY

pytestmark = pytest.mark.usefixtures("quick_compilation", "unchecked")

KEY = jax.random.key(5)
FACTOR = int(os.environ.get("CONSILIENCE_EXAMPLES", "0"))
HOME = str(Path(cs.__file__).parent) + os.sep
REFUSALS = (ValueError, TypeError, StoreError, FileNotFoundError, TrainingError)


EXAMPLES: list[int] = []


def property_of(few: int, many: int, **inputs):
    """Two tests of one property: `few` examples for `make test`, `many` for `make test-all`."""

    def decorate(function):
        def sized(n: int):
            return settings(
                max_examples=n * max(1, FACTOR),
                derandomize=not FACTOR,
                deadline=None,
                database=None,
                print_blob=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            )(given(**inputs)(function))

        EXAMPLES.append(many)
        name = f"{function.__name__}_of_many"
        often = sized(many)
        often.__name__ = often.__qualname__ = name
        globals()[name] = pytest.mark.slow(often)
        return sized(few)

    return decorate


REFUSED = object()


def answer(call):
    """What a call gives; `REFUSED` where the library itself raised an error with a message."""
    try:
        return call()
    except REFUSALS as error:
        if not _raised_by_the_library(error) or not str(error):
            raise AssertionError(f"not a refusal of the library's own: {error!r}") from error
        return REFUSED


def _raised_by_the_library(error: BaseException) -> bool:
    """Whether a `raise` statement of the library made the error."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    here = {i.offset: i.opname for i in dis.get_instructions(code)}
    return code.co_filename.startswith(HOME) and here.get(trace.tb_lasti) == "RAISE_VARARGS"


# What users pass.

NUMBERS = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
OTHERS = ["c8", "c16", "S3", "U3", "M8[s]", "m8[s]", "O"]
NAMES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            *("", "theta", "mu", "draw", "chain", "observation", "ess", "pareto_k", "a_dim_0"),
            *("r_hat_mu", "x", "data", "status", "lock", "zarr.json", "journal.jsonl", "index"),
            *("/etc/passwd", "../up", "a/b", ".", "..", "~", "c", "c/0", "con", "a\\b", "a:b"),
            *("$", "$x$", r"$\frac{a$", "_$^", "$$", r"$\theta_1$", "a[0]", "a[0, 1]", "[", "%s"),
            *("{}", "{0}", "<b>&", "\n", "a\nb", "\x00", "\ud800", "é", "\u0065\u0301", "变量"),
            *("joint density", "self", "key", "rng", "lambda", "None", "0", "-1", " ", "a b"),
            *("__class__", "posterior", "validation", "a" * 300),
        ]
    ),
)
SCALES = st.integers(-30, 30).map(lambda k: 10.0**k)


def typed(shape) -> st.SearchStrategy:
    """Arrays of any type, byte order and value."""
    orders = st.sampled_from("<>")
    numbers = st.tuples(orders, st.sampled_from([*NUMBERS, "?"])).map("".join)
    others = st.tuples(orders, st.sampled_from(OTHERS[:-1])).map("".join)
    return st.one_of(
        numbers.flatmap(lambda dtype: hnp.arrays(dtype, shape)),
        numbers.flatmap(lambda dtype: hnp.arrays(dtype, shape)),
        others.flatmap(lambda dtype: hnp.arrays(dtype, shape)),
        hnp.arrays("O", shape, elements=st.one_of(st.none(), st.floats(), st.text(max_size=2))),
        st.just(np.zeros(shape, [("a", "f4")])),
        st.just(np.zeros(shape, "g")),
    )


def ordinary(shape, dtypes=("<f4", ">f4", "<f8", ">f8", "<i2", ">i8", "f2")) -> st.SearchStrategy:
    """Arrays of moderate numbers, which must be accepted."""
    values = hnp.arrays("f8", shape, elements=st.floats(-3, 3, width=32))
    return st.builds(lambda a, dtype: a.astype(dtype), values, st.sampled_from(dtypes))


def _as_series(a):
    return xr.DataArray(a)


def _as_masked(a):
    return np.ma.MaskedArray(a, np.arange(a.size).reshape(a.shape) % 2 == 0)


FORMS = st.sampled_from(
    [
        *(np.asarray, np.asarray, np.ndarray.tolist, np.asfortranarray, _as_series, np.ma.asarray),
        *(lambda a: np.stack([a, a], -1)[..., 0], _as_masked),
    ]
)
SHAPES = st.sampled_from([(3,), (3,), (1, 3), (2, 3), (), (0,), (4,), (0, 3), (2, 4), (1, 2, 3)])


@st.composite
def datasets(draw, shapes=SHAPES):
    """Something that may pass for data of shape (3,), or for a batch."""
    shape = draw(shapes)
    array = draw(st.one_of(ordinary(shape), typed(shape)))
    if draw(st.booleans()) and array.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            array = array * array.dtype.type(draw(SCALES))
    return draw(FORMS)(np.asarray(array))


def plain(value) -> np.ndarray | None:
    """An array as the library must understand it; None where it must refuse it."""
    if np.ma.is_masked(value):
        return None
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    if array.dtype.kind not in "biuf":
        return None
    with np.errstate(over="ignore"):
        array = array.astype(array.dtype.newbyteorder("=")).astype(np.float32)
    return array if np.isfinite(array).all() else None


# The model and the fit that all share.


def _draw(key, t):
    return t["mu"] + t["sigma"] * jax.random.normal(key, (3,)) * t["w"]


PRIOR = {
    "mu": dist.Normal(0.0, 1.0),
    "sigma": dist.Uniform(0.0, 2.0),
    "w": dist.Dirichlet(jnp.ones(3)),
}
MODEL = cs.Model(PRIOR, _draw)
HERE = "tests.test_properties:MODEL"
SMALL = {"posterior": TINY, "self_consistency": False, "epochs": 2, "progress": False}


# No fixtures: Hypothesis prints those with an example, all their weights included.
@functools.cache
def some_runs() -> cs.Simulations:
    return cs.simulate(MODEL, 64, key=KEY)


@functools.cache
def shared_fit() -> cs.Fit:
    return cs.fit(MODEL, some_runs(), key=KEY, **SMALL)


@functools.cache
def saved_fit() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return shared_fit().save(Path(folder) / "fit.safetensors").read_bytes()


def check_draws(draws: xr.Dataset, lead: tuple[int, ...]):
    """Draws of the shared model are whole and inside the prior's support."""
    assert list(draws.data_vars) == ["mu", "sigma", "w"]
    mu, sigma, w = (draws[name].values for name in draws.data_vars)
    assert mu.shape == sigma.shape == lead and w.shape == (*lead, 3)
    assert np.isfinite(mu).all()
    assert ((sigma >= 0) & (sigma <= 2)).all()
    assert (w >= 0).all()
    np.testing.assert_allclose(w.sum(axis=-1), 1.0, atol=1e-5)


@property_of(15, 500, x=datasets(), n=st.sampled_from([1, 3, np.int64(3), 0, -1, 2.5, True, "3"]))
def test_draws_for_data_of_any_type_and_form(x, n):
    draws = answer(lambda: shared_fit().sample(x, n, key=KEY))
    known = plain(x)
    shaped = known is not None and known.shape in ((3,), (1, 3), (2, 3))
    if not shaped or isinstance(n, float | bool | str) or n < 1:
        assert draws is REFUSED
        return
    assert draws is not REFUSED
    check_draws(draws, (*known.shape[:-1], 1, n))
    xr.testing.assert_equal(draws, shared_fit().sample(known, int(n), key=KEY))


@st.composite
def parameters(draw):
    """Named parameters with leading axes; some may be missing, strange or of other shapes."""
    lead = draw(st.sampled_from([(), (2,), (2, 2)]))
    theta = {
        "mu": draw(ordinary(lead)),
        "sigma": draw(ordinary(lead)),
        "w": draw(st.sampled_from([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.5, 0.6, 0.7]]))
        * np.ones((*lead, 1)),
    }
    change = draw(st.sampled_from([None, None, *theta]))
    if change is not None:
        shape = draw(st.sampled_from([np.shape(theta[change])] * 3 + [(3,), (2, 2, 2)]))
        theta[change] = draw(FORMS)(np.asarray(draw(typed(shape))))
    if draw(st.integers(0, 9)) == 0:
        theta[draw(NAMES)] = theta.pop(draw(st.sampled_from(list(theta))))
    return theta


@property_of(12, 400, theta=parameters(), x=ordinary((3,)), batch=st.booleans())
def test_densities_at_parameters_of_any_type_and_form(theta, x, batch):
    x = np.stack([x, x + 1]) if batch else x
    found = answer(lambda: shared_fit().log_prob(theta, x))
    known = {name: plain_theta(theta.get(name)) for name in PRIOR}
    if found is REFUSED:
        # What is in order is not refused.
        in_order = set(theta) == set(PRIOR) and all(a is not None for a in known.values())
        lead = {known["mu"].shape, known["sigma"].shape, known["w"].shape[:-1]} if in_order else {}
        assert not (len(lead) == 1 and known["w"].shape[-1:] == (3,) and not batch)
        return
    lead = known["mu"].shape
    assert found.shape == lead and not np.isnan(found).any()
    assert (found < np.inf).all()
    mu, sigma, w = known.values()
    outside = (sigma < 0) | (sigma > 2) | (np.abs(w.sum(-1) - 1) > 1e-4) | (w < 0).any(-1)
    outside = outside | ~np.isfinite(mu)
    assert (found[outside] == -np.inf).all()
    same = shared_fit().log_prob(known, x)
    np.testing.assert_array_equal(found, same)


def plain_theta(value) -> np.ndarray | None:
    """Parameters as the library must understand them: NaN and infinite ones have no density."""
    if value is None or np.ma.is_masked(value):
        return None
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        return None
    with np.errstate(over="ignore"):
        return array.astype(array.dtype.newbyteorder("=")).astype(np.float32)


@property_of(3, 60, x=ordinary((2, 3)), n=st.integers(1, 20))
def test_draws_and_their_densities_agree_in_shape(x, n):
    draws = shared_fit().sample(x, n, key=KEY)
    density = shared_fit().log_prob(draws, x)
    assert density.shape == (2, 1, n)
    assert not np.isnan(density).any()


# Simulations and training.


@st.composite
def runs(draw):
    """Parameters and data of 64 runs, some of them strange."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    theta = {"mu": rng.normal(size=64), "sigma": rng.uniform(0, 2, 64)}
    theta["w"] = rng.dirichlet(np.ones(3), 64)
    theta = {name: a.astype(np.float32) for name, a in theta.items()}
    x = theta["mu"][:, None] + rng.normal(size=(64, 3))
    where = draw(st.sampled_from(["x", "x", "mu", "sigma", "w"]))
    array = x if where == "x" else theta[where]
    kind = draw(st.sampled_from(["type", "scale", "typed", "shape", "constant", "nan", "few"]))
    if kind == "type":
        array = array.astype(draw(st.sampled_from(["<f4", ">f4", ">f8", "f2", "<i2", ">i8", "?"])))
    elif kind == "scale":
        array = array * draw(SCALES) + draw(st.sampled_from([0.0, 1e-30, -7.0, 1e30]))
    elif kind == "typed":
        array = draw(typed(array.shape))
    elif kind == "shape":
        array = draw(st.sampled_from([array[:, None], array[:63], array[0], array[:0]]))
    elif kind == "constant":
        array = np.full_like(array, draw(st.floats(width=32)))
    elif kind == "nan":
        array = array.astype(float)
        array[draw(st.integers(0, 63))] = draw(st.sampled_from([np.nan, np.inf, 1e39, -1e308]))
    else:
        n = draw(st.integers(0, 3))
        theta, x, array = {name: a[:n] for name, a in theta.items()}, x[:n], array[:n]
    if where == "x":
        return theta, draw(FORMS)(np.asarray(array))
    return {**theta, where: draw(FORMS)(np.asarray(array))}, x


@property_of(4, 150, made=runs(), drop=st.booleans())
def test_a_fit_of_any_runs_draws_inside_the_support(made, drop):
    theta, x = made
    brought = answer(lambda: cs.Simulations(theta, x))
    if brought is REFUSED:
        return
    assert repr(brought).startswith("Simulations: ")
    brought = brought.drop_invalid() if drop else brought
    result = answer(lambda: cs.fit(MODEL, brought, key=KEY, **SMALL))
    if result is REFUSED:
        return
    assert all(plain(a) is not None for a in (brought.x, *brought.theta.values()))
    x = np.asarray(brought.x)
    if x[0].shape == (3,):
        draws = result.sample(x[0], 5, key=KEY)
        check_draws(draws, (1, 5))
        if all(a.dtype.itemsize <= 4 for a in (x, *brought.theta.values())):
            known = cs.Simulations({n: plain(a) for n, a in brought.theta.items()}, plain(x))
            same = cs.fit(MODEL, known, key=KEY, **SMALL)
            xr.testing.assert_equal(draws, same.sample(plain(x[0]), 5, key=KEY))


@property_of(2, 30, k=st.integers(-90, 90))
def test_a_fit_does_not_depend_on_units(k):
    """Data in other units give the same fit; for powers of two, up to the rounding of moments."""
    unit = np.float32(2.0**k)
    scaled = cs.Simulations(some_runs().theta, some_runs().x * unit)
    bare = cs.Model(PRIOR)
    other = cs.fit(bare, scaled, key=KEY, **SMALL)
    x = some_runs().x[:3]
    draws, same = other.sample(x * unit, 4, key=KEY), shared_fit().sample(x, 4, key=KEY)
    for name in PRIOR:
        np.testing.assert_allclose(draws[name], same[name], rtol=2e-3, atol=2e-3)


@property_of(
    10,
    200,
    n=st.sampled_from([1, 5, np.int64(5), 0, -3, 2.0, 2.5, True, "5", None, np.array([5])]),
    key=st.sampled_from([KEY, jax.random.PRNGKey(5)]),
)
def test_simulate_takes_whole_numbers_and_keys(n, key):
    made = answer(lambda: cs.simulate(MODEL, n, key=key))
    if isinstance(n, float | bool | str | None) or np.ndim(n) or n < 1:
        assert made is REFUSED
        return
    assert len(made) == n
    assert np.isfinite(made.x).all()


WRONG_KEYS = st.sampled_from([5, None, "a", jax.random.split(KEY), np.ones(2), np.zeros(3, "u4")])


@property_of(3, 20, key=WRONG_KEYS)
def test_what_is_no_random_key_is_refused(key):
    x = np.zeros(3)
    assert answer(lambda: shared_fit().sample(x, 3, key=key)) is REFUSED
    assert answer(lambda: shared_fit().log_evidence(x, 100, key=key)) is REFUSED
    assert answer(lambda: shared_fit().check(x, key=key)) is REFUSED
    assert answer(lambda: cs.fit(MODEL, some_runs(), key=key, **SMALL)) is REFUSED


# Names.


@property_of(12, 300, names=st.lists(NAMES, min_size=1, max_size=3))
def test_any_names_of_parameters(names):
    model = answer(lambda: cs.Model({name: dist.Normal(0.0, 1.0).expand([2]) for name in names}))
    if model is REFUSED:
        return
    assert model.prior.names == tuple(dict.fromkeys(names))
    for name in names:
        assert repr(name)[1:-1] in repr(model) or name in repr(model)
    draws = draws_to_dataset(
        {name: np.full((1, 1, 4, 2), i, np.float32) for i, name in enumerate(model.prior.names)},
        batched=False,
    )
    for i, name in enumerate(model.prior.names):
        assert draws[name].shape == (1, 4, 2) and (draws[name] == i).all()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "draws.nc"
        if answer(lambda: write_netcdf(draws, path)) is not REFUSED:
            xr.testing.assert_equal(xr.load_dataset(path), draws)


@property_of(2, 40, name=NAMES)
def test_any_name_is_drawn(name):
    if answer(lambda: cs.Model({name: dist.Normal(0.0, 1.0)})) is REFUSED:
        return
    draws = draws_to_dataset({name: np.arange(4.0).reshape(1, 1, 4)}, batched=False)
    axes = plots.pairs(draws, truth={name: 1.0})
    drawn = io.BytesIO()
    axes.ravel()[0].figure.savefig(drawn, format="svg")
    assert drawn.getvalue().rstrip().endswith(b"</svg>")


# Models.

THINGS = st.sampled_from(
    [None, 3, 2.5, "text", [1.0, 2.0], {"a": 1.0}, {}, (), object(), len, np.ones(3), {1: 2.0}]
)
RETURNS = st.sampled_from(
    [
        *(None, 3.0, "text", [1.0, 2.0], {}, {"a": {"b": 1.0}}, {"a": "b"}, (1.0, 2.0), object()),
        *(np.ones(3), np.ones(3, complex), np.ones((0,)), {1: np.ones(2)}),
        *({"a": np.ones(2), "b": np.ones((2, 3))}, {"a": None}, np.array(["a"]), np.array([None])),
    ]
)
KINDS = st.sampled_from(
    [None, cs.Vector(), cs.Series(), cs.Set(), cs.Set(mask="b"), cs.Vector(side=("b",)), "set", 3]
)


SAID = RETURNS.filter(lambda value: not isinstance(value, dict))


@property_of(8, 250, prior=THINGS, returned=RETURNS, said=SAID, kind=KINDS)
def test_models_of_anything(prior, returned, said, kind):
    some = answer(lambda: cs.Model(prior))
    assert some is REFUSED
    answer(lambda: cs.Model({"mu": prior}))
    model = answer(
        lambda: cs.Model({"mu": dist.Normal(0.0, 1.0)}, lambda key, t: returned, data=kind)
    )
    if model is not REFUSED:
        assert "mu" in repr(model)
        made = answer(lambda: cs.simulate(model, 2, key=KEY))
        assert made is REFUSED or len(made) == 2
    answer(
        lambda: cs.Model(
            {"mu": dist.Normal(0.0, 1.0)}, lambda key, t: jnp.ones(3) * t["mu"], lambda t, x: said
        )
    )
    answer(lambda: cs.Model({"mu": dist.Normal(0.0, 1.0)}, prior))


# Saved fits.


@st.composite
def damage(draw, text: bool = True):
    """A change of the bytes of a file."""
    kind = draw(st.sampled_from(["flip", "flip", "cut", "zero", "insert", "drop", "swap"]))
    at, byte = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 255))
    size = draw(st.sampled_from([1, 8, 100]))

    def change(content: bytes) -> bytes:
        i = int(at * len(content))
        if not content:
            return bytes([byte])
        if kind == "flip":
            return content[:i] + bytes([content[i] ^ byte]) + content[i + 1 :]
        if kind == "cut":
            return content[:i]
        if kind == "zero":
            return content[:i] + b"\0" * len(content[i : i + size]) + content[i + size :]
        if kind == "insert":
            return content[:i] + bytes([byte]) * size + content[i:]
        if kind == "swap":
            return content[i:] + content[:i]
        return content[:i] + content[i + size :]

    return change


@property_of(10, 300, change=damage())
def test_a_damaged_fit_is_refused_or_gives_the_same_draws(change):
    content = change(saved_fit())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.safetensors"
        path.write_bytes(content)
        loaded = answer(lambda: cs.load(path, MODEL))
        if loaded is not REFUSED:
            x = np.zeros(3)
            xr.testing.assert_equal(
                loaded.sample(x, 3, key=KEY), shared_fit().sample(x, 3, key=KEY)
            )


# Stores.


class Here(Executor):
    """Runs what it gets at once, in this process."""

    size = 1

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


@dataclasses.dataclass
class Fixed:
    """A simulator outside JAX that returns what it is told to, by its random numbers."""

    values: list

    def __call__(self, rng, **theta):
        return self.values[rng.integers(len(self.values))]


def campaign(model, path, n=6, **settings):
    return cs.simulate(model, n, key=KEY, store=path, executor=Here(), progress=False, **settings)


@st.composite
def outputs(draw):
    """What the runs of one campaign return: two things, mostly alike."""
    shape = draw(st.sampled_from([(), (2,), (2, 2), (0,)]))
    first = draw(st.one_of(ordinary(shape), typed(shape)))
    second = draw(st.one_of(ordinary(shape), typed(draw(st.sampled_from([shape, shape, (3,)])))))
    if not draw(st.booleans()):
        return [first, second]
    name = draw(NAMES)
    return [{name: first, "b": first}, {name: second, "b": first}]


@property_of(10, 250, values=outputs(), name=NAMES)
def test_a_store_gives_back_what_runs_returned(values, name):
    prior = answer(lambda: cs.Model({name: dist.Normal(0.0, 1.0)}).prior)
    if prior is REFUSED:
        return
    model = answer(lambda: cs.Model(prior, cs.external(Fixed(values))))
    if model is REFUSED:
        return  # the simulator's generator is called rng
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inside" / "runs.zarr"
        made = answer(lambda: campaign(model, path))
        assert sorted(os.listdir(folder)) in ([], ["inside"])
        if made is REFUSED:
            return
        again = cs.Simulations.open(path)
        assert list(again.theta) == [name] and np.isfinite(again.theta[name]).all()
        for i, row in enumerate(rows_of(again.x)):
            if i not in again.failures.positions:
                assert any(same_data(row, value) for value in values)


def rows_of(x) -> list:
    if isinstance(x, dict):
        return [
            {name: array[i] for name, array in x.items()}
            for i in range(len(next(iter(x.values()))))
        ]
    return list(x)


def same_data(row, value) -> bool:
    """Whether stored data are what a simulator returned, as far as their type can tell."""
    if isinstance(value, dict):
        return set(row) == set(value) and all(same_data(row[name], value[name]) for name in row)
    value = np.asarray(value)
    if value.dtype.kind not in "biuf" or row.shape != value.shape or not np.isfinite(value).all():
        return False
    return np.allclose(
        row.astype(float), value.astype(float), rtol=1e-3 if row.itemsize == 2 else 1e-6
    )


@functools.cache
def some_store():
    """The files of a store with failures, and its runs."""
    values = [np.arange(2.0), np.array([5.0, 7.0]), np.array([np.nan, 0.0])]
    model = cs.Model({"a": dist.Normal(0.0, 1.0)}, cs.external(Fixed(values)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.zarr"
        campaign(model, path, 20)
        files = {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}
        runs = cs.Simulations.open(path)
        return model, files, cs.Simulations(runs.theta, runs.x, runs.failures.failed)


@property_of(10, 250, change=damage(), which=st.integers(0, 99), gone=st.booleans())
def test_a_damaged_store_gives_right_runs_and_runs_the_rest_again(change, which, gone):
    model, files, whole = some_store()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.zarr"
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        hurt = path / sorted(files)[which % len(files)]
        hurt.unlink() if gone else hurt.write_bytes(change(hurt.read_bytes()))
        found = answer(lambda: cs.Simulations.open(path))
        if found is not REFUSED:
            known = {float(a): i for i, a in enumerate(whole.theta["a"])}
            for i, a in enumerate(found.theta["a"]):
                j = known[float(a)]
                assert (i in found.failures.positions) == (j in whole.failures.positions)
                np.testing.assert_array_equal(found.x[i], whole.x[j])
        with contextlib.suppress(StopIteration):
            again = answer(lambda: campaign(model, path, 20))
            if again is not REFUSED:
                np.testing.assert_array_equal(again.theta["a"], whole.theta["a"])
                np.testing.assert_array_equal(again.x, whole.x)


# The command line.

WORDS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        [
            *("simulate", "status", "fit", "sample", "check", "report", "reproduce", "--help"),
            *(
                "--out",
                "--runs",
                "--draws",
                "--seed",
                "--model",
                "--quiet",
                "--corrected",
                "--",
                "-",
            ),
            *("--held-out", "--predictive", "--observation", "--epochs", "0", "-1", "nan", "1e9"),
            *("x.npy", "fit.safetensors", "draws.nc", "runs.zarr", ".", "/", HERE, "no:no", ":"),
            *("os:path", "math:pi", "tests.test_properties:KEY", "--version", "--workers", "2"),
        ]
    ),
)


def command(*words) -> tuple[int, str]:
    """The exit code of a command, and its standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    return code, errors.getvalue()


@contextlib.contextmanager
def folder_with_fit():
    """A folder of its own to work in, with a saved fit."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("fit.safetensors").write_bytes(saved_fit())
        np.save("x.npy", np.zeros(3))
        yield Path(folder)


@property_of(10, 250, words=st.lists(WORDS, max_size=6))
def test_any_words_on_the_command_line(words):
    with folder_with_fit():
        code, errors = command(*words)
    assert code in (0, 1, 2)
    assert "Traceback" not in errors
    assert code == 0 or errors


@property_of(
    10,
    250,
    data=st.one_of(datasets(), st.dictionaries(NAMES, ordinary((3,)), max_size=2), st.binary()),
    ending=st.sampled_from(["npy", "npz", "csv", "txt", "nc", "xls", ""]),
)
def test_any_file_of_data_on_the_command_line(data, ending):
    with folder_with_fit():
        path = Path(f"data.{ending}")
        try:
            write(path, data, ending)
        except Exception:
            return  # NumPy cannot write it
        words = ("sample", "fit.safetensors", path, "--model", HERE, "--out", "draws.nc")
        code, errors = command(*words, "--draws", 3)
        assert code in (0, 2), errors
        if code == 2:
            assert errors.startswith("consilience: ") and "Traceback" not in errors
            return
        draws = xr.load_dataset("draws.nc")
        lead = () if "observation" not in draws.dims else (draws.sizes["observation"],)
        check_draws(draws, (*lead, 1, 3))
        if ending == "npy" and not isinstance(data, dict | bytes):
            key = jax.random.key(0)
            same = shared_fit().sample(plain(data), 3, key=key)
            for name in PRIOR:
                np.testing.assert_array_equal(draws[name], same[name])


def write(path: Path, data, ending: str):
    if isinstance(data, bytes):
        path.write_bytes(data)
    elif ending == "npz":
        np.savez(path, **(data if isinstance(data, dict) else {"x": np.asarray(data)}))
    elif ending == "nc":
        parts = data if isinstance(data, dict) else {"x": np.asarray(data)}
        xr.Dataset(
            {n: ([f"{n}{i}" for i in range(a.ndim)], a) for n, a in parts.items()}
        ).to_netcdf(path, engine="h5netcdf")
    elif ending in ("csv", "txt"):
        np.savetxt(path, np.atleast_1d(np.asarray(data)), delimiter="," if ending == "csv" else " ")
    else:
        with open(path, "wb") as file:
            np.save(file, data, allow_pickle=True)


def test_the_suite_has_two_thousand_examples():
    assert sum(EXAMPLES) >= 2000
