"""Saving and loading: bit for bit, or a clear error."""

import dataclasses
import json
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import consilience as cs
from tests.conftest import Moments

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def saved(named_fit, tmp_path):
    return named_fit.save(tmp_path / "deep" / "fit.safetensors")


def _metadata(path):
    with safe_open(path, framework="numpy") as file:
        return json.loads(file.metadata()["consilience"])


def _rewrite(path, change):
    meta = _metadata(path)
    change(meta)
    save_file(load_file(path), path, metadata={"consilience": json.dumps(meta)})


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
