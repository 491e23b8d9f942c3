"""Saving and loading: bit for bit, or a clear error."""

import dataclasses
import errno
import json
import os
import pickle
import random
import resource
import threading
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import consilience as cs
from consilience.posterior import storage
from tests.conftest import Moments, quick

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def saved(named_fit, tmp_path):
    return named_fit.save(tmp_path / "deep" / "fit.safetensors")


def _metadata(path):
    with safe_open(path, framework="numpy") as file:
        return json.loads(file.metadata()["consilience"])


def _rewrite(path, change, sealed=True):
    meta = _metadata(path)
    change(meta)
    text, tensors = json.dumps(meta), load_file(path)
    digest = {storage.DIGEST: storage._digest(text, tensors)} if sealed else {}
    save_file(tensors, path, metadata={storage.META: text, **digest})


def test_a_loaded_fit_is_bit_identical(named_fit, named_model, named_sims, saved):
    loaded = cs.load(saved, named_model)
    draws = named_fit.sample(named_sims.x[:7], 30, key=jax.random.key(0))
    again = loaded.sample(named_sims.x[:7], 30, key=jax.random.key(0))
    np.testing.assert_array_equal(draws["sigma"], again["sigma"])
    np.testing.assert_array_equal(
        named_fit.log_prob(draws, named_sims.x[:7]), loaded.log_prob(draws, named_sims.x[:7])
    )
    theta = {name: values[0] for name, values in named_sims.theta.items()}
    density = eqx.filter_jit(lambda likelihood: likelihood.log_prob(theta, named_sims.x[0]))
    assert density(named_fit.likelihood) == density(loaded.likelihood)
    np.testing.assert_array_equal(loaded.history.terms["loss"], named_fit.history.terms["loss"])
    assert loaded.recipe == named_fit.recipe


def test_keys_settings_and_versions_come_along(named_fit, named_model, saved):
    origin, loaded = named_fit.origin, cs.load(saved, named_model).origin
    assert origin.key == ("threefry2x32", 0, 1)
    assert origin.runs_key == ("threefry2x32", 0, 0)
    assert (origin.tried, origin.settings["epochs"]) == (256, 3)
    assert origin.versions["consilience"] == cs.__version__
    assert dataclasses.asdict(loaded) == dataclasses.asdict(origin)
    _rewrite(saved, lambda meta: meta.pop("origin"))
    assert cs.load(saved, named_model).origin is None, "an older file does not say"


def test_the_description_is_readable(saved):
    meta = _metadata(saved)
    assert meta["recipe"]["posterior"]["layers"] == 1
    assert meta["model"]["prior"]["mu"] == "Normal(loc=0, scale=1)"


def test_a_fit_of_another_model_is_refused(saved, named_model):
    other = cs.Model(
        {"mu": dist.Normal(0, 1)}, named_model.simulator and (lambda key, t: jnp.zeros((10, 1)))
    )
    with pytest.raises(cs.LoadError, match="a different model"):
        cs.load(saved, other)
    wider = cs.Model(
        {"mu": dist.Normal(0.0, 3.0), "sigma": dist.LogNormal(0.0, 0.5)}, named_model.simulator
    )
    with pytest.raises(cs.LoadError, match=r"Its prior: .*scale=1.*scale=3"):
        cs.load(saved, wider)


def test_another_format_is_refused(saved, named_model):
    _rewrite(saved, lambda meta: meta.update(format=99))
    with pytest.raises(cs.LoadError, match="has the format 99; this version reads format 1"):
        cs.load(saved, named_model)


@pytest.mark.parametrize("damage", ["truncate", "flip", "header", "text", "empty"])
def test_damaged_files_are_refused(saved, named_model, damage):
    content = bytearray(saved.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[-100] ^= 0xFF
    elif damage == "header":
        content[:8] = b"\xff" * 8
    else:
        content = b"not a fit" if damage == "text" else b""
    saved.write_bytes(bytes(content))
    with pytest.raises(cs.LoadError, match="damaged"):
        cs.load(saved, named_model)


def test_a_foreign_safetensors_file_is_refused(tmp_path, named_model):
    path = tmp_path / "other.safetensors"
    save_file({"a": np.zeros(3)}, path)
    with pytest.raises(cs.LoadError, match="not a saved fit"):
        cs.load(path, named_model)


def test_a_pickle_is_not_run(tmp_path, named_model):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code from a file was run",))

    path = tmp_path / "bomb.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(cs.LoadError, match="damaged"):
        cs.load(path, named_model)


def test_a_missing_file_is_told(tmp_path, named_model):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        cs.load(tmp_path / "nothing", named_model)


def test_a_description_unknown_to_this_version_is_refused(saved, named_model):
    _rewrite(saved, lambda meta: meta["recipe"]["summary"].update(type="Oracle"))
    with pytest.raises(cs.LoadError, match="describes a 'Oracle', unknown"):
        cs.load(saved, named_model)


def test_a_summary_of_the_users_own_is_asked_for(moments_fit, named_model, named_sims, tmp_path):
    path = moments_fit.save(tmp_path / "own.safetensors")
    with pytest.raises(cs.LoadError, match="pass an instance of it"):
        cs.load(path, named_model)
    loaded = cs.load(path, named_model, summary=Moments(jnp.zeros(2)))
    theta = {"mu": 0.3, "sigma": 1.2}
    assert moments_fit.log_prob(theta, named_sims.x[0]) == loaded.log_prob(theta, named_sims.x[0])


# Which model a fit belongs to.


PRIOR = {
    "cut": dist.TruncatedNormal(0.5, 2.0, low=0.0),
    "mixed": dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.array([0.3, 0.7])), dist.Normal(jnp.array([-1.0, 1.0]), 0.5)
    ),
    "long": dist.Normal(jnp.arange(6.0), 1.0).to_event(1),
}
OTHERS = {
    "another truncated prior": {"cut": dist.TruncatedNormal(0.0, 1.0, low=0.0)},
    "another mixture": {
        "mixed": dist.MixtureSameFamily(
            dist.Categorical(probs=jnp.array([0.6, 0.4])), dist.Normal(jnp.array([-1.0, 1.0]), 0.5)
        )
    },
    # As long, and with the same sum.
    "another vector": {"long": dist.Normal(jnp.arange(6.0)[::-1], 1.0).to_event(1)},
}


def _model(change=()):
    return cs.Model(
        PRIOR | dict(change), lambda key, t: t["cut"] + t["mixed"] + jax.random.normal(key, (4,))
    )


@pytest.fixture(scope="module")
def intricate(tmp_path_factory):
    """The file of a fit under a truncated prior, a mixture and a long vector."""
    model = _model()
    fit = quick(model, cs.simulate(model, 64, key=jax.random.key(0)))
    return fit.save(tmp_path_factory.mktemp("intricate") / "fit.safetensors")


@pytest.mark.parametrize("other", OTHERS)
def test_a_fit_under_a_prior_of_other_numbers_is_refused(intricate, other):
    cs.load(intricate, _model())
    with pytest.raises(cs.LoadError, match=r"a different model. Its prior: "):
        cs.load(intricate, _model(OTHERS[other]))


def test_a_fit_of_the_version_before_loads_without_fingerprint_and_checksum(intricate, tmp_path):
    path, model = tmp_path / "old.safetensors", _model()
    path.write_bytes(intricate.read_bytes())
    x, key = np.zeros(4), jax.random.key(3)

    def age(meta):
        del meta["model"]["fingerprint"]
        meta["model"]["prior"] = dict(zip(model.prior.names, model.prior._earlier, strict=True))

    _rewrite(path, age, sealed=False)
    assert _metadata(path)["model"]["prior"]["mixed"] == "MixtureSameFamily()"
    old, new = (cs.load(each, model).sample(x, 5, key=key) for each in (path, intricate))
    np.testing.assert_array_equal(old["cut"], new["cut"])


# Damage.


@pytest.fixture(scope="module")
def small_model():
    return cs.Model(dist.Normal(0.0, 1.0), lambda key, t: t + jax.random.normal(key, (3,)))


@pytest.fixture(scope="module")
def small(small_model, tmp_path_factory):
    """The file of a tiny fit, and its bytes."""
    fit = quick(small_model, cs.simulate(small_model, 64, key=jax.random.key(0)))
    path = fit.save(tmp_path_factory.mktemp("small") / "fit.safetensors")
    return path, path.read_bytes()


def _density(path, model):
    return cs.load(path, model).log_prob(np.linspace(-1, 1, 4), np.zeros(3))


def _outcome(path, model):
    """The density of a fit, or None where it is refused as damaged."""
    try:
        return _density(path, model)
    except cs.LoadError:
        return None


def _number(head: dict, choose: random.Random):
    """Change a number of the JSON description of a fit, at any depth."""
    places = []

    def walk(node):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, dict | list):
                walk(value)
            else:
                places.append((node, name, value))

    walk(head)
    node, name, value = choose.choice(places)
    odd = [None, "", -1, 0, 3, 1e300, 10**9, 10**30, [], {}, True, float("nan"), [[1]], "relu"]
    node[name] = choose.choice([each for each in odd if each != value])


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_or_a_cut_gives_an_error_or_the_same_draws(
    small, small_model, tmp_path, seed
):
    path, whole = small
    expected, choose = _density(path, small_model), random.Random(seed)
    header = 8 + int.from_bytes(whole[:8], "little")
    refused = 0
    for case in range(100):
        content = bytearray(whole)
        if case < 80:
            # Most of the damage to the header: the weights have a checksum of their own.
            place = choose.randrange(header if case % 4 else len(whole))
            content[place] ^= 1 << choose.randrange(8)
        elif case < 90:
            del content[choose.randrange(len(whole)) :]
        else:
            at = choose.randrange(header)
            content[at : at + choose.randrange(1, 9)] = choose.randbytes(choose.randrange(9))
        hurt = tmp_path / "hurt.safetensors"
        hurt.write_bytes(bytes(content))
        got = _outcome(hurt, small_model)
        refused += got is None
        if got is not None:
            np.testing.assert_array_equal(got, expected)
    assert refused > 90


@pytest.mark.parametrize("sealed", ["as it was", "as it should be", "none"])
def test_a_changed_description_is_refused_or_at_least_understood(
    small, small_model, tmp_path, sealed
):
    path, _ = small
    expected, tensors = _density(path, small_model), load_file(path)
    with safe_open(path, framework="numpy") as file:
        held = file.metadata()
    choose, loaded = random.Random(7), 0
    for _ in range(100):
        meta = json.loads(held[storage.META])
        _number(meta, choose)
        text = json.dumps(meta)
        seals = {
            "as it was": {storage.DIGEST: held[storage.DIGEST]},
            "as it should be": {storage.DIGEST: storage._digest(text, tensors)},
            "none": {},
        }
        hurt = tmp_path / "hurt.safetensors"
        save_file(tensors, hurt, metadata={storage.META: text, **seals[sealed]})
        got = _outcome(hurt, small_model)
        loaded += got is not None
        if sealed != "as it should be":
            assert got is None
        elif got is not None:
            assert got.shape == expected.shape
    assert loaded < 60


@pytest.mark.parametrize(
    "change",
    [
        {"width": 60_000},
        {"width": 10**12},
        {"layers": 10**9},
        {"depth": 10**9},
        {"frame": 10**12},
        {"transform": {"type": "Spline", "bins": 10**9, "bound": 5.0}},
        {"width": 700, "depth": 700, "layers": 700},
    ],
)
def test_a_small_file_cannot_ask_for_much_memory(small, small_model, tmp_path, change):
    path = tmp_path / "huge.safetensors"
    path.write_bytes(small[1])
    _rewrite(path, lambda meta: meta["recipe"]["posterior"].update(change))
    tracemalloc.start()
    try:
        with pytest.raises(cs.LoadError, match=r"numbers in all|larger than the file"):
            cs.load(path, small_model)
        assert tracemalloc.get_traced_memory()[1] < 2e7
    finally:
        tracemalloc.stop()


def test_a_deeply_nested_description_is_refused(small, small_model, tmp_path):
    path = tmp_path / "deep.safetensors"
    text = "[" * 100_000 + "]" * 100_000
    save_file(load_file(small[0]), path, metadata={"consilience": text})
    with pytest.raises(cs.LoadError, match="RecursionError"):
        cs.load(path, small_model)


@pytest.mark.parametrize("name", ["[1][0]", "[2].loc['data']", "[0].posterior.frame.bias"])
def test_arrays_of_another_shape_are_refused(small, small_model, tmp_path, name):
    tensors = load_file(small[0])
    tensors[name] = np.zeros((2, *tensors[name].shape), np.float32)
    path = tmp_path / "other.safetensors"
    text = json.dumps({**_metadata(small[0]), "checksum": storage._checksum(tensors)})
    digest = storage._digest(text, tensors)
    save_file(tensors, path, metadata={storage.META: text, storage.DIGEST: digest})
    with pytest.raises(cs.LoadError, match="does not hold the weights that it describes"):
        cs.load(path, small_model)


# Saving where there is no room, and by several at a time.


def test_a_full_disk_leaves_the_older_file_and_the_fit(small, small_model, tmp_path, monkeypatch):
    path = tmp_path / "fit.safetensors"
    path.write_bytes(small[1])
    fit = cs.load(path, small_model)

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(cs.SaveError, match=r"its disk is full. The fit is still in memory"):
            fit.save(path)
    assert path.read_bytes() == small[1]
    assert os.listdir(tmp_path) == [path.name]
    assert fit.save(tmp_path / "another").exists()


def test_a_write_that_is_cut_short_leaves_nothing(small, small_model, tmp_path):
    fit = cs.load(small[0], small_model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(cs.SaveError, match=r"cannot be written: File too large"):
            fit.save(tmp_path / "deep" / "fit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.listdir(tmp_path / "deep")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (".", "Is a directory"),
        ("taken/fit", "Not a directory|File exists"),
        ("x" * 300, "name too long"),
        ("nu\0l", "null byte"),
    ],
)
def test_a_path_that_cannot_be_written_is_told(small, small_model, tmp_path, path, why):
    fit = cs.load(small[0], small_model)
    (tmp_path / "taken").write_text("")
    with pytest.raises(cs.SaveError, match=f"cannot be written: .*({why})"):
        fit.save(f"{tmp_path}/{path}")
    assert os.listdir(tmp_path) == ["taken"]


def test_fits_saved_to_one_path_at_a_time_leave_a_whole_file(small, small_model, tmp_path):
    fit, path = cs.load(small[0], small_model), tmp_path / "fit.safetensors"
    errors = []

    def save_often():
        try:
            for _ in range(10):
                fit.save(path)
                cs.load(path, small_model)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert os.listdir(tmp_path) == [path.name]
    np.testing.assert_array_equal(_density(path, small_model), _density(small[0], small_model))


def test_numbers_of_numpy_in_settings_are_saved(small, small_model, tmp_path):
    fit = cs.load(small[0], small_model)
    origin = dataclasses.replace(fit.origin, settings={"patience": np.int64(3)})
    path = dataclasses.replace(fit, origin=origin).save(tmp_path / "fit")
    assert cs.load(path, small_model).origin.settings == {"patience": 3}
