"""Parts of a user's own in files of fits: named there, passed to `cs.load`, and built only then."""

import dataclasses
import enum
import functools
import json
from typing import Any, Literal, NamedTuple

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
from consilience.posterior.descriptions import CUSTOM, LIBRARY, OWN, decode, encode, plain
from consilience.posterior.parts import MissingPartError, Parts
from consilience.posterior.room import DRAWS, Room
from consilience.posterior.static import differences, notes
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
    change(meta)
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
    other.__module__ = Mixture.__module__
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
    path = changed(
        own[1], tmp_path / "hurt", lambda meta: meta["recipe"]["posterior"].update(change)
    )
    with pytest.raises(cs.LoadError):
        cs.load(path, model, parts=[Mixture, Extremes(jnp.zeros(3))])


def test_a_part_that_asks_for_too_much_is_refused_before_it_is_made(own, model, tmp_path):
    size = {"components": 500, "width": 1000}
    path = changed(
        own[1], tmp_path / "huge", lambda meta: meta["recipe"]["posterior"]["fields"].update(size)
    )
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
    held = json.loads(json.dumps(encode(counted), default=plain))
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


# Fields of any size and type.


@dataclasses.dataclass(frozen=True)
class Seeded:
    """A description whose network has an order, from a seed of its own or from `rng`."""

    seed: int | None = 20240101
    array: bool = False

    def build(self, rng, *, dim, condition):
        rng = rng if self.seed is None else np.random.default_rng(self.seed)
        order = rng.permutation(9)
        return Ordered(jnp.ones(dim), jnp.asarray(order) if self.array else tuple(order.tolist()))


class Ordered(eqx.Module):
    scale: jax.Array
    order: Any

    def log_prob(self, value, condition):
        first = self.order[0] + jnp.exp(self.scale)
        return jnp.sum(jax.scipy.stats.norm.logpdf(value / first) - jnp.log(first))

    def sample(self, key, condition):
        return self.order[0] + jax.random.normal(key, self.scale.shape)


@dataclasses.dataclass(frozen=True)
class Around:
    inner: Any
    size: int = 10**9


def test_a_seed_may_be_larger_than_the_file(model, sims, tmp_path):
    fit = quick(model, sims, posterior=Seeded())
    loaded = cs.load(fit.save(tmp_path / "fit"), model, parts=[Seeded])
    assert loaded.recipe.posterior == Seeded()
    theta = {"theta": np.array([0.0, 1.0])}
    np.testing.assert_array_equal(loaded.log_prob(theta, X), fit.log_prob(theta, X))


def test_descriptions_of_the_library_are_limited_inside_those_of_a_user_too():
    parts = Parts([Around], LIBRARY)
    assert decode(encode(Around(cs.Coupling(width=9))), parts, 1000) == Around(cs.Coupling(width=9))
    with pytest.raises(ValueError, match="asks for 5000, but the file holds 1000 numbers"):
        decode(encode(Around(cs.Coupling(width=5000))), parts, 1000)


class Shape(enum.StrEnum):
    ROUND = "round"


class Pair(NamedTuple):
    first: int
    second: int


@dataclasses.dataclass(frozen=True)
class Doubling:
    size: int

    def __post_init__(self):
        object.__setattr__(self, "size", 2 * self.size)


@pytest.mark.parametrize(
    "value",
    [
        Around(Shape.ROUND),
        Around((1, Pair(1, 2))),
        Around(None, size=0.5),
        Typed(sizes=(1.5, 1.0)),
        Doubling(2),
        Around(np.complex64(1j)),
    ],
    ids=str,
)
def test_a_value_that_would_not_come_back_is_passed_as_an_instance(value):
    assert encode(value)["fields"] is None
    with pytest.raises(MissingPartError, match="pass an instance of it"):
        round_trip(value, type(value))
    assert round_trip(value, value) is value


def test_an_enumeration_in_a_field_is_saved_and_loaded(model, sims, tmp_path):
    wrapped = dataclasses.replace(Mixture(), width=Width.SMALL)
    path = quick(model, sims, posterior=wrapped).save(tmp_path / "fit")
    assert cs.load(path, model, parts=[wrapped]).recipe.posterior is wrapped


class Width(enum.IntEnum):
    SMALL = 4


def test_only_what_cannot_be_described_needs_an_instance():
    outer = Around(Typed(sizes=(1.5, 1.0)))
    held = encode(outer)
    assert held["fields"]["inner"]["fields"] is None
    assert round_trip(outer, outer) == outer
    assert encode(Around(float("nan")))["fields"] is not None


def test_an_instance_that_the_file_describes_does_not_stand_for_another():
    described, odd = Around(1), Around(Shape.ROUND)
    recipe = (described, odd)
    assert round_trip(recipe, described, odd)[1] is odd
    with pytest.raises(MissingPartError, match="pass an instance of it"):
        round_trip(recipe, described)


# What networks hold beside arrays.


def test_what_build_draws_and_keeps_outside_arrays_is_refused(model, sims, tmp_path):
    fit = quick(model, sims, posterior=Seeded(seed=None))
    path = fit.save(tmp_path / "fit")
    with pytest.raises(cs.LoadError, match=r"posterior.order was \(.*fields that are arrays, or"):
        cs.load(path, model, parts=[Seeded])

    def forget(meta):
        del meta["static"]

    loaded = cs.load(changed(path, tmp_path / "old", forget), model, parts=[Seeded])
    assert loaded.recipe == fit.recipe, "files of versions before have no notes"


def test_what_build_draws_and_keeps_in_arrays_is_loaded(model, sims, tmp_path):
    fit = quick(model, sims, posterior=Seeded(seed=None, array=True))
    loaded = cs.load(fit.save(tmp_path / "fit"), model, parts=[Seeded])
    theta = {"theta": np.array([0.0, 1.0])}
    np.testing.assert_array_equal(loaded.log_prob(theta, X), fit.log_prob(theta, X))


class Holder(eqx.Module):
    """A module with a value of any kind, as a leaf and as a static field."""

    weight: jax.Array
    leaf: Any
    static: Any = eqx.field(static=True)


class Thing:
    def __init__(self, *held):
        self.held = held

    def __repr__(self):
        return f"Thing{self.held}"


def _private(value):
    return value


def noted(leaf, static=None):
    return {"summary": dict(notes(Holder(jnp.ones(2), leaf, static)))}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((1, 2), (2, 1)),
        (1, None),
        (0.25, 0.26),
        (frozenset({"a", "b"}), frozenset({"a", "c"})),
        (Pair(1, 2), Pair(1, 3)),
        (Around(1), Around(2)),
        (Shape.ROUND, "round"),
        (jnp.sin, jnp.cos),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (tuple(range(100)), tuple(range(1, 101))),
        ({"a": 1}, {"a": 2}),
        (Thing(1), Thing(2)),
    ],
)
def test_what_differs_beside_arrays_is_seen(first, second):
    for each in (noted, lambda value: noted(0, value)):
        assert differences(each(first), each(second))
        assert not differences(each(first), each(first))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (object(), object()),
        (Thing(object()), Thing(object())),
        (lambda x: x, _private),
        (cs.Coupling(layers=1), cs.Coupling(layers=2)),
        (np.float32, np.float64),
        (np.dtype("float32"), np.dtype("float64")),
        (1 / 3, float(np.float32(1 / 3))),
        (Around(np.int64(3)), Around(3)),
        (frozenset("abcdef"), frozenset("fedcba")),
        (jax.tree_util.Partial(max, jnp.ones(2)), jax.tree_util.Partial(max, jnp.zeros(2))),
    ],
)
def test_what_is_no_other_network_is_not_noted(first, second):
    assert not differences(noted(first), noted(second))
    if not isinstance(first, jax.tree_util.Partial):
        assert not differences(noted(0, first), noted(0, second))


def test_a_module_of_other_settings_does_not_stand_for_a_summary():
    class Failing:
        def __repr__(self):
            raise RuntimeError("no words")

    saved, other = noted((1, Failing()), "mean"), {"summary": dict(notes(Extremes(jnp.ones(3))))}
    assert differences(saved, noted((1, Failing()), "max")) == [
        "summary.static was 'mean' and is 'max'"
    ]
    assert differences(saved, other) == ["summary was Holder and is Extremes"]


def test_parts_of_the_library_are_not_noted(own):
    with safe_open(own[1], framework="numpy") as file:
        held = json.loads(file.metadata()[storage.META])["static"]
    assert set(held) == {"posterior", "summary"}
    assert "0x" not in json.dumps(held)
    assert held["posterior"][".dim"] == "1"


# Names of classes.


def named_twice():
    """Two classes of one name, as of two modules."""
    first, second = (dataclasses.make_dataclass("Twin", [("size", int)]) for _ in range(2))
    first.__module__, second.__module__ = "here", "there"
    return first, second


def test_classes_of_one_name_are_told_apart_by_their_modules():
    first, second = named_twice()
    assert round_trip((first(1), second(2)), second, first) == (first(1), second(2))
    odd = (first(0.5), second(0.5))
    assert round_trip(odd, *reversed(odd)) == odd


def test_a_class_of_another_module_is_taken_where_it_is_the_only_one():
    first, second = named_twice()
    held = encode(first(1))
    assert decode(held, Parts([second], LIBRARY)) == second(1)
    third = dataclasses.make_dataclass("Twin", [("size", int)])
    third.__module__ = "elsewhere"
    with pytest.raises(MissingPartError, match="of this name of elsewhere, there: pass one"):
        decode(held, Parts([second, third], LIBRARY))


# Draws of networks that are being loaded.


def test_draws_have_the_shapes_of_a_generator():
    calls = {
        "normal": [{}, {"size": 3}, {"loc": np.ones(4)}, {"scale": np.ones((2, 1)), "loc": [1, 2]}],
        "uniform": [{}, {"size": (2, 3)}, {"low": np.zeros(3)}],
        "random": [{}, {"size": (2, 3)}, {"size": 2, "dtype": np.float32}],
        "integers": [{"low": 5}, {"low": 1, "high": [3, 4]}, {"low": 9, "size": (4,)}],
        "choice": [
            {"a": 5},
            {"a": np.ones((3, 2)), "size": 4},
            {"a": 5, "size": 5, "p": [0.2] * 5},
        ],
        "permutation": [{"x": 5}, {"x": np.ones((3, 2))}, {"x": [1, 2]}],
    }
    room, generator = Room(1000), np.random.default_rng(0)
    for name, each in calls.items():
        for given in each:
            got, expected = (getattr(rng, name)(**given) for rng in (room, generator))
            assert np.shape(got) == np.shape(expected), (name, given)
            assert np.asarray(got).dtype.kind == np.asarray(expected).dtype.kind
    assert sorted(room.permutation(9)) == list(range(9))
    assert set(room.choice([4, 7], 50)) == {4, 7}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("random", {"size": 10**12}),
        ("integers", {"low": 5, "size": (10**6, 10**6)}),
        ("choice", {"a": 5, "size": 10**12}),
        ("permutation", {"x": 10**12}),
        ("permutation", {"x": DRAWS + 1001}),
    ],
)
def test_draws_are_limited(name, given):
    with pytest.raises(ValueError, match="larger than the file"):
        getattr(Room(1000), name)(**given)
