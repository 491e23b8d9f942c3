"""Parts of a user's own in files of fits: named, asked for, and never built unasked."""

import dataclasses
import json
from typing import Any, Literal

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
from consilience.posterior.descriptions import CUSTOM, LIBRARY, OWN, decode, encode
from consilience.posterior.parts import Parts
from tests.conftest import quick
from tests.own_parts import Activated, Extremes, Mixture, Sinh

pytestmark = pytest.mark.usefixtures("quick_compilation")

X = np.array([0.3, -0.2, 1.0], np.float32)


@pytest.fixture(scope="module")
def model():
    return cs.Model(dist.Normal(0.0, 1.0), lambda key, t: t + jax.random.normal(key, (3,)))


@pytest.fixture(scope="module")
def sims(model):
    return cs.simulate(model, 64, key=jax.random.key(0))


@pytest.fixture(scope="module")
def own(model, sims, tmp_path_factory):
    """A fit with a density and a summary of a user's own, and its file."""
    fit = quick(model, sims, posterior=Mixture(), summary=Extremes(jnp.ones(3)))
    return fit, fit.save(tmp_path_factory.mktemp("own") / "fit.safetensors")


def changed(path, to, change):
    """A copy of a file whose description is another, with the checksums that belong to it."""
    with safe_open(path, framework="numpy") as file:
        meta = json.loads(file.metadata()[storage.META])
    change(meta["recipe"])
    text, tensors = json.dumps(meta), load_file(path)
    digest = storage._digest(text, tensors)
    save_file(tensors, to, metadata={storage.META: text, storage.DIGEST: digest})
    return to


def round_trip(value, *parts):
    return decode(json.loads(json.dumps(encode(value))), Parts(parts, LIBRARY))


def test_an_error_names_the_class_that_is_missing(own, model):
    _, path = own
    with pytest.raises(cs.LoadError, match=r"Mixture \(of tests.own_parts\): pass the class, .*"):
        cs.load(path, model)
    with pytest.raises(cs.LoadError, match=r"Extremes \(of tests.own_parts\): pass an instance"):
        cs.load(path, model, parts=[Mixture, Extremes])
    with pytest.raises(cs.LoadError, match="was made with a part of your own"):
        cs.load(path, model, parts=[Sinh])


def test_a_summary_may_come_as_a_part_or_by_its_name(own, model):
    fit, path = own
    theta = {"theta": np.array([0.0, 1.0])}
    blank = Extremes(jnp.zeros(3))
    for loaded in (
        cs.load(path, model, parts=[Mixture, blank]),
        cs.load(path, model, parts=[Mixture(components=9)], summary=blank),
    ):
        assert loaded.recipe.posterior == Mixture()
        np.testing.assert_array_equal(loaded.log_prob(theta, X), fit.log_prob(theta, X))


def test_parts_that_are_no_parts_are_refused(own, model):
    _, path = own
    with pytest.raises(TypeError, match="parts is a list of classes and instances, got"):
        cs.load(path, model, parts="Mixture")

    other = dataclasses.make_dataclass("Mixture", [])
    with pytest.raises(ValueError, match="two different classes called Mixture"):
        cs.load(path, model, parts=[Mixture, other])
    with pytest.raises(cs.LoadError, match="Mixture is off: components"):
        cs.load(path, model, parts=[other, Extremes(jnp.zeros(3))])


def test_a_description_that_a_file_cannot_hold_is_passed_as_an_instance(model, sims, tmp_path):
    fit = quick(model, sims, posterior=Activated())
    path = fit.save(tmp_path / "fit")
    with pytest.raises(cs.LoadError, match=r"pass an instance of it.*parts=\[Activated\(...\)\]"):
        cs.load(path, model, parts=[Activated])
    loaded = cs.load(path, model, parts=[Activated(jnp.sin)])
    assert loaded.recipe.posterior == Activated(jnp.sin)
    theta = {"theta": np.array([0.0, 1.0])}
    np.testing.assert_array_equal(loaded.log_prob(theta, X), fit.log_prob(theta, X))


@pytest.mark.parametrize(
    "change",
    [
        {"class": "Extremes", "fields": {}},
        {"class": "Coupling"},
        {"class": "Popen", "module": "subprocess", "fields": {"args": "true"}},
        {"fields": {"components": "many"}},
        {"fields": {"components": 2.5}},
        {"fields": {"components": 10**12}},
        {"fields": {"components": 1500, "width": 1500}},
        {"fields": {"oracle": 1}},
        {"fields": {"components": 3}},
        {"fields": [1, 2]},
        {"fields": {"width": {"type": OWN}}},
        {"type": OWN + "!"},
    ],
)
def test_a_damaged_description_builds_nothing_else(own, model, tmp_path, change):
    path = changed(own[1], tmp_path / "hurt", lambda recipe: recipe["posterior"].update(change))
    with pytest.raises(cs.LoadError):
        cs.load(path, model, parts=[Mixture, Extremes(jnp.zeros(3))])


def test_a_part_that_asks_for_too_much_is_refused_before_it_is_made(own, model, tmp_path):
    size = {"components": 500, "width": 1000}
    path = changed(own[1], tmp_path / "huge", lambda r: r["posterior"]["fields"].update(size))
    with pytest.raises(cs.LoadError, match="larger than the file"):
        cs.load(path, model, parts=[Mixture, Extremes(jnp.zeros(3))])


class Peeking(eqx.Module):
    """A density whose description looks at values."""

    scale: jax.Array

    def log_prob(self, value, condition):
        return jnp.sum(jax.scipy.stats.norm.logpdf(value / self.scale) - jnp.log(self.scale))

    def sample(self, key, condition):
        return self.scale * jax.random.normal(key, self.scale.shape)


@dataclasses.dataclass(frozen=True)
class Peek:
    def build(self, rng, *, dim, condition):
        more = rng.uniform(size=dim) + rng.standard_normal(dim, dtype=np.float32) ** 2
        scale = jnp.asarray(1.0 + more + rng.normal(0.0, 0.1, (dim,)) ** 2, float)
        return Peeking(scale if float(scale.sum()) > 0 else -scale)


def test_a_description_that_looks_at_values_is_loaded_too(model, sims, tmp_path):
    fit = quick(model, sims, posterior=Peek())
    loaded = cs.load(fit.save(tmp_path / "fit"), model, parts=[Peek])
    theta = {"theta": np.array([0.0, 1.0])}
    np.testing.assert_array_equal(loaded.log_prob(theta, X), fit.log_prob(theta, X))


def test_instances_are_taken_in_the_order_of_the_recipe():
    first, second = Activated(jnp.sin), Activated(jnp.cos)
    recipe = cs.Recipe(first, second, None, cs.Identity())
    assert round_trip(recipe, first, second) == recipe
    shared = cs.Recipe(first, first, None, cs.Identity())
    assert round_trip(shared, first) == shared


def test_a_description_brings_along_the_parts_in_its_fields():
    coupling = cs.Coupling(Sinh(0.25), layers=1)
    assert round_trip(coupling, coupling) == coupling
    assert round_trip(coupling, Sinh) == coupling
    assert encode(coupling)["transform"]["fields"] == {"strength": 0.25}


def test_transforms_and_modules_in_files_of_the_first_version_are_found():
    old = {**encode(cs.Coupling(Sinh())), "transform": {"type": "Sinh", "strength": 0.5}}
    assert decode(old, Parts([Sinh], LIBRARY)) == cs.Coupling(Sinh())
    module = Extremes(jnp.ones(3))
    assert decode(CUSTOM, Parts([Sinh, module], LIBRARY)) is module


@dataclasses.dataclass(frozen=True)
class Annotated:
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, float] = (1, 2.0)
    inner: "Sinh | None" = None
    anything: Any = None
    unknown: "NotImported" = 3


def test_fields_of_all_plain_kinds_come_back():
    value = Annotated("b", (3, 0.5), Sinh(0.1), ("x", (True, None)), 4.5)
    assert round_trip(value, Annotated, Sinh) == value
    counted = Mixture(components=np.int64(3))
    held = json.loads(json.dumps(encode(counted), default=storage._plain))
    assert decode(held, Parts([Mixture], LIBRARY)) == Mixture(components=3)


@dataclasses.dataclass(frozen=True)
class Typed:
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, float] = (1, 2.0)


@pytest.mark.parametrize("off", [{"kind": "c"}, {"sizes": [1]}, {"sizes": [0.5, 1.0]}])
def test_fields_of_other_types_are_refused(off):
    held = encode(Typed())
    held["fields"] |= off
    with pytest.raises(ValueError, match="description of a Typed is off"):
        decode(held, Parts([Typed], LIBRARY))


def test_what_is_no_density_is_refused(model, sims, unchecked):
    with pytest.raises(TypeError, match=r"method build\(rng, \*, dim, condition\).*got Mixture"):
        quick(model, sims, posterior=Mixture)
    with pytest.raises(TypeError, match=r"n_raw and __call__\(value, raw, \*, inverse\)"):
        cs.Coupling(Sinh)
    with pytest.raises(TypeError, match=r"build\(rng, layout, dim\), such as cs.DeepSet\(\)"):
        quick(model, sims, summary=cs.DeepSet)

    class Flat(Peeking):
        def log_prob(self, value, condition):
            return value

    class Describes:
        def __init__(self, built):
            self.built = built

        def build(self, rng, *, dim, condition):
            return self.built

    with pytest.raises(ValueError, match=r"log_prob\(value, condition\) of what Describes.build"):
        quick(model, sims, posterior=Describes(Flat(jnp.ones(1))))
    with pytest.raises(
        TypeError, match=r"Describes.build must return an Equinox module .* got int"
    ):
        quick(model, sims, posterior=Describes(3))


def test_rounds_in_a_folder_find_the_parts_that_they_were_made_with(model, tmp_path):
    made = [
        cs.sequential(
            *(model, X),
            rounds=1,
            simulations=64,
            key=jax.random.key(0),
            posterior=cs.Coupling(Sinh(), layers=1, width=8),
            summary=Extremes(jnp.ones(3)),
            self_consistency=False,
            epochs=1,
            directory=tmp_path / "rounds",
            progress=False,
        )[0]
        for _ in range(2)
    ]
    theta = {"theta": np.array([0.0, 1.0])}
    first, again = (each.fit.log_prob(theta, X) for each in made)
    np.testing.assert_array_equal(first, again)
