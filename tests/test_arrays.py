"""Arrays on their way in: byte orders, types and masks that other programs write."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr

import consilience as cs
from consilience.cli.inputs import InputError, read_data
from consilience.core.arrays import as_count, as_numbers
from tests.conftest import quick

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(2)
SWAPPED = (">f4", ">f8", ">i4", ">i2", ">u2")


@pytest.fixture(scope="module")
def model():
    """Three numbers with a known likelihood."""
    return cs.Model(
        {"mu": dist.Normal(0.0, 3.0)},
        lambda key, t: t["mu"] + jax.random.normal(key, (3,)),
        lambda t, x: dist.Normal(t["mu"], 1.0).log_prob(x).sum(),
    )


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, 250, key=KEY)


@pytest.fixture(scope="module")
def fit(model, sims):
    return quick(model, sims)


X, THETA = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0, 5.0])

ENTRANCES = {
    "sample": lambda fit, x, theta: fit.sample(x, 5, key=KEY)["mu"],
    "corrected": lambda fit, x, theta: fit.sample(x, 5, key=KEY, corrected=True)["mu"],
    "log_prob": lambda fit, x, theta: fit.log_prob({"mu": theta}, x),
    "log_evidence": lambda fit, x, theta: fit.log_evidence(x, 50, key=KEY)["log_evidence"],
    "check": lambda fit, x, theta: fit.check(
        x, key=KEY, n=200, draws=50, predictive=20, statistics={"mean": jax.jit(jnp.mean)}
    ).table["predictive"],
    "compare": lambda fit, x, theta: cs.compare({"a": fit, "b": fit}, x, key=KEY)["log_evidence"],
    "simulate_at": lambda fit, x, theta: cs.simulate_at(fit.model, {"mu": theta}, key=KEY).x,
    "a prior": lambda fit, x, theta: (
        cs.simulate(cs.Model({"mu": dist.Normal(x, 1.0)}, lambda key, t: t["mu"]), 3, key=KEY).x
    ),
    "moment_errors": lambda fit, x, theta: cs.metrics.moment_errors(
        np.stack([theta, theta**2], 1).astype(theta.dtype), np.stack([theta, theta], 1)
    ),
    "mmd": lambda fit, x, theta: cs.metrics.mmd(theta[:, None], theta[:2, None]),
    "sliced_wasserstein": lambda fit, x, theta: cs.metrics.sliced_wasserstein(
        theta[:, None], theta[::-1, None] ** 2, key=KEY
    ),
    "to_arviz": lambda fit, x, theta: cs.to_arviz(
        fit.sample(X, 5, key=KEY), observed=x
    ).observed_data["x"],
}
SAMPLES = ("moment_errors", "mmd", "sliced_wasserstein")
"""Entrances whose arguments are declared as floating-point numbers."""

CASES = [
    pytest.param(name, kind, marks=[] if kind == SWAPPED[0] else pytest.mark.slow)
    for name in ENTRANCES
    for kind in SWAPPED
    if name not in SAMPLES or "f" in kind
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_big_endian_numbers_are_the_same_as_native_ones(name, kind, fit):
    """Compiled code that has seen a native array reads the bytes of another as they are."""
    native = np.dtype(kind).newbyteorder("=")
    expected, found = (
        ENTRANCES[name](fit, X.astype(dtype), THETA.astype(dtype)) for dtype in (native, kind)
    )
    np.testing.assert_array_equal(np.asarray(found, float), np.asarray(expected, float))


def test_big_endian_unlabelled_data_train_the_same_fit(model, sims):
    settings = {"self_consistency": True, "epochs": 1}
    fits = [
        quick(model, sims, unlabeled=np.stack([X, X + 1]).astype(kind), **settings)
        for kind in ("=f4", ">f4")
    ]
    expected, found = (one.sample(X, 5, key=KEY)["mu"].values for one in fits)
    np.testing.assert_array_equal(found, expected)


def test_big_endian_side_information_and_masks_are_read_right():
    model = cs.Model(
        {"mu": dist.Normal(0.0, 1.0)},
        lambda key, t: {
            "y": t["mu"] + jax.random.normal(key, (4, 1)),
            "width": jnp.ones(2),
            "there": jnp.ones(4),
        },
        data=cs.Set(side=("width",), mask="there"),
    )
    fit = quick(model, cs.simulate(model, 50, key=KEY))
    x = {"y": np.arange(4.0)[:, None], "width": np.array([2, 3]), "there": np.array([1, 1, 0, 1])}
    expected, found = (
        fit.sample({name: part.astype(kind) for name, part in x.items()}, 5, key=KEY)["mu"].values
        for kind in ("=f4", ">f4")
    )
    np.testing.assert_array_equal(found, expected)


def test_a_big_endian_constant_in_a_simulator_is_named():
    with pytest.raises(TypeError, match="in another byte order"):
        cs.Model({"mu": dist.Normal(0, 1)}, lambda key, t: t["mu"] + X.astype(">f4"))


@pytest.mark.parametrize("ending", [".npy", ".npz", ".nc"])
@pytest.mark.parametrize("kind", SWAPPED)
def test_big_endian_files_are_read_as_native_arrays(tmp_path, fit, ending, kind):
    path, x = tmp_path / f"x{ending}", X.astype(kind)
    if ending == ".npy":
        np.save(path, x)
    elif ending == ".npz":
        np.savez(path, x=x)
    else:
        xr.Dataset({"x": ("i", x)}).to_netcdf(path, engine="h5netcdf")
    found = read_data(path, fit.posterior.data.layout)
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, X)


def test_a_file_of_complex_numbers_is_refused(tmp_path, fit):
    np.save(tmp_path / "x.npy", X + 1j)
    with pytest.raises(InputError, match="must hold numbers, but x is of type complex128"):
        read_data(tmp_path / "x.npy", fit.posterior.data.layout)


def ways_in(fit):
    """The functions of an observation."""
    return {
        "sample": lambda x: fit.sample(x, 5, key=KEY),
        "log_prob": lambda x: fit.log_prob({"mu": 0.5}, x),
        "log_evidence": lambda x: fit.log_evidence(x, 50, key=KEY),
        "check": lambda x: fit.check(x, key=KEY),
        "nuts": lambda x: fit.sample(x, 8, key=KEY, method="nuts"),
        "unlabeled": lambda x: quick(
            fit.model, SIMS[0], self_consistency=True, unlabeled=np.stack([x] * 2)
        ),
    }


SIMS: list[cs.Simulations] = []

ODD = {
    "complex numbers": (X + 1j, TypeError, "is complex: pass its real and imaginary parts"),
    "text": (np.array(["1", "2", "3"]), TypeError, "holds text"),
    "bytes": (np.array([b"1", b"2", b"3"]), TypeError, "holds text"),
    "objects": (np.array([1, None, "a"], object), TypeError, "holds Python objects"),
    "dates": (np.array(["2020-01-01"] * 3, "M8[D]"), TypeError, "holds dates"),
    "time spans": (np.array([1, 2, 3], "m8[s]"), TypeError, "holds time spans"),
    "named fields": (np.zeros(3, [("a", float)]), TypeError, "has named fields"),
    "1e39": (np.array([1.0, 1e39, 2.0]), ValueError, "beyond 3.4e.38, the largest .* rescale"),
    "-1e300": (np.array([1.0, -1e300, 2.0]), ValueError, "beyond 3.4e.38"),
    "NaN": (np.array([1.0, np.nan, 2.0]), ValueError, "NaN or infinite"),
    "infinity": (np.array([1.0, np.inf, 2.0]), ValueError, "NaN or infinite"),
    "a batch of nothing": (np.zeros((0, 3)), ValueError, "a batch of no datasets"),
    "another shape": (np.zeros(4), ValueError, "must have the shape"),
    "rows of different lengths": ([[1.0], [1.0, 2.0]], ValueError, "must be an array of numbers"),
    "a masked array": (
        np.ma.masked_array(X, [False, True, False]),
        ValueError,
        "has masked entries",
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_observations_that_are_no_real_numbers_are_refused_everywhere(odd, fit, sims):
    SIMS[:] = [sims]
    x, error, said = ODD[odd]
    for name, enter in ways_in(fit).items():
        # `np.stack` drops masks itself, and makes batches of other shapes.
        if name != "unlabeled" or odd in ("complex numbers", "text", "1e39", "NaN"):
            with pytest.raises(error, match=said):
                enter(x)


@pytest.mark.usefixtures("unchecked")
def test_parameters_that_are_no_real_numbers_are_refused(fit):
    for theta in (1j, "a", np.ma.masked_array([1.0, 2.0], [True, False])):
        with pytest.raises((TypeError, ValueError), match=r"theta\['mu'\]"):
            fit.log_prob({"mu": theta}, X)


@pytest.mark.parametrize("sample", [np.ones((60, 1)) + 1j, jnp.ones((60, 1)) + 1j])
def test_complex_samples_are_refused_by_metrics(sample):
    with pytest.raises(Exception, match=r"complex|c128|c64"):
        cs.metrics.mmd(sample, np.ones((60, 1)))


def test_masks_of_nothing_long_floats_and_short_ones_are_taken(fit):
    expected = fit.sample(X, 5, key=KEY)["mu"].values
    for x in (
        np.ma.masked_array(X, False),
        X.astype(np.longdouble),
        X.astype(np.float16),
        X.astype(ml_dtypes.bfloat16),
        jnp.asarray(X, jnp.bfloat16),
        X.tolist(),
        X.astype(np.uint8),
    ):
        np.testing.assert_array_equal(fit.sample(x, 5, key=KEY)["mu"].values, expected)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3), jnp.asarray(3)])
def test_whole_numbers_of_any_type_are_counts(value, fit):
    assert as_count(value, "n") == 3
    assert fit.sample(X, value, key=KEY).sizes["draw"] == 3


@pytest.mark.parametrize("value", [3.0, np.float32(3), True, "3", None, [3], np.ones(3), 1j])
def test_other_counts_are_refused(value):
    with pytest.raises(TypeError, match="n must be a whole number, got"):
        as_count(value, "n")


def test_arguments_of_sample_in_the_wrong_order_are_pointed_out(fit):
    with pytest.raises((TypeError, ValueError), match=r"sample\(x, n|must have the shape"):
        fit.sample(5, X, key=KEY)


def test_native_arrays_are_not_copied():
    assert as_numbers(X, "x") is X
    assert as_numbers(X.astype(">f8"), "x").dtype.isnative


@pytest.mark.parametrize("name", ["chain", "draw"])
def test_data_called_as_a_dimension_of_draws_are_refused_by_to_arviz(name, fit):
    draws = fit.sample(X, 5, key=KEY)
    data = {name: np.zeros((4, 3))}
    with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
        cs.to_arviz(draws, predictions=data)
    assert cs.to_arviz(draws, predictions={"theta": np.zeros((4, 3))}, observed={"mu": X})
