"""Descriptions of networks and data to and from JSON, and networks built from them alone.

What is read may be damaged: the types of all fields are checked, and networks that would take
more numbers than the file holds are refused before they are made. Of classes of the user's own,
only those that the user passed are built.
"""

import dataclasses
import json
import math
import types
import typing
from typing import Any

import equinox as eqx
import jax
import numpy as np

from consilience.core.compiling import on_device
from consilience.model import data
from consilience.model.data import DataSpace, Layout, Set, make_layout
from consilience.model.tails import Tails
from consilience.networks import ensemble, flow, summary, transforms
from consilience.networks.density import ConditionalDensity
from consilience.networks.recipe import Recipe
from consilience.networks.summary import Summary
from consilience.posterior.parts import PLAIN, Parts, has_plain_fields
from consilience.posterior.room import Room

CUSTOM = "a module of the user's own"
"""A summary network of the user's own, in files of version 0.1.0."""
OWN = "the user's own"
"""The type of a part of the user's own; its class and its fields are beside it."""

_DESCRIPTIONS = {
    cls.__name__: cls
    for cls in (
        *(flow.Coupling, transforms.Spline, transforms.Affine, Recipe, Layout),
        *(data.Vector, data.Series, data.Set),
        *(summary.Identity, summary.Dense, summary.Convolutions),
        *(summary.DeepSet, summary.SetTransformer),
        *(ensemble.Ensemble, ensemble.Stacked),
        *(ensemble.EnsembleSummary, ensemble.StackedSummary),
    )
}
LIBRARY = tuple(_DESCRIPTIONS.values())
"""The classes that a file may name by themselves."""


def encode(value: Any) -> Any:
    """A description as JSON takes it; a part of the user's own by the name of its class."""
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, (*PLAIN, list, dict, np.ndarray, jax.Array)):
        return value
    cls = type(value)
    if cls in LIBRARY:
        return {"type": cls.__name__, **_fields(value)}
    held = {"type": OWN, "class": cls.__name__, "module": cls.__module__, "fields": None}
    if has_plain_fields(value):
        described = held | {"fields": _fields(value)}
        return described if _comes_back(value, described) else held
    return held


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}


def plain(value: Any) -> Any:
    """Settings may be numbers of NumPy, which JSON does not know."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray | jax.Array) else repr(value)


def _comes_back(value: Any, held: dict[str, Any]) -> bool:
    """Whether a description of the user's own is read as it was written."""
    try:
        read = json.loads(json.dumps(held, default=plain))
        return _same(value, decode(read, Parts([value], LIBRARY)))
    except Exception:  # the class is the user's, and may raise anything
        return False


def _same(first: Any, second: Any) -> bool:
    """Whether values agree in their types too; numbers of NumPy come back as Python's."""
    first = first.tolist() if isinstance(first, np.generic) else first
    if type(first) is not type(second):
        return False
    if isinstance(first, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    if has_plain_fields(first):
        names = [field.name for field in dataclasses.fields(first)]
        return all(_same(getattr(first, name), getattr(second, name)) for name in names)
    return first is second or repr(first) == repr(second)


def decode(value: Any, parts: Parts, most: int | None = None) -> Any:
    """The description that `encode` wrote.

    `most`: the largest whole number in a description of the library's. Fields of the user's own
    may hold any, such as a seed.
    """
    if isinstance(value, list):
        return tuple(decode(item, parts, most) for item in value)
    if not isinstance(value, dict):
        return parts.module() if value == CUSTOM else value
    if value.get("type") == OWN:
        name, module, held = (value[part] for part in ("class", "module", "fields"))
        if held is None:
            return parts.instance(str(name), str(module))
        built = _build(parts.described(str(name), str(module)), held, parts, most)
        parts.drop(type(built), lambda part: _same(part, built))
        return built
    name = str(value.get("type"))
    # Version 0.1.0 named transforms of the user's own as if they were the library's.
    cls = _DESCRIPTIONS.get(name) or parts.find(name)
    if cls is None:
        raise ValueError(f"the file describes a {value.get('type')!r}, unknown to this version.")
    return _build(cls, {n: item for n, item in value.items() if n != "type"}, parts, most)


def _build(cls: type, held: dict[str, Any], parts: Parts, most: int | None) -> Any:
    fields = {name: decode(item, parts, most) for name, item in held.items()}
    if most is not None and cls in LIBRARY:
        _check_sizes(tuple(fields.values()), most)
    check_fields(cls, fields)
    return cls(**fields)


def _check_sizes(value: Any, most: int):
    if isinstance(value, tuple):
        for item in value:
            _check_sizes(item, most)
    elif isinstance(value, int) and value > most:
        raise ValueError(f"it asks for {value}, but the file holds {most} numbers in all.")


def check_fields(cls: type, fields: dict[str, Any]):
    """Refuse values that do not have the types of a dataclass's fields."""
    hints = _hints(cls)
    for name, value in fields.items():
        if name not in hints or not _is(value, hints[name]):
            shown = f"{value!r}"[:80]
            raise ValueError(f"the description of a {cls.__name__} is off: {name} is {shown}.")


def _hints(cls: type) -> dict[str, Any]:
    """The types of the fields; anything goes where a user's annotations cannot be resolved."""
    names = [field.name for field in dataclasses.fields(cls)]
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError):
        if cls in LIBRARY:
            raise
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def _is(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return value in parts
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and _are(value, parts)
    if origin is dict:
        key, held = parts
        return isinstance(value, dict) and all(
            _is(name, key) and _is(item, held) for name, item in value.items()
        )
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    try:
        return isinstance(value, origin or hint)
    except TypeError:
        return True  # a user's annotation that is no class


def _are(values: tuple, hints: tuple) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(_is(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(_is, values, hints))


LONGEST = 2**40
"""The largest dataset that a layout may describe."""


def empty_space(layout: Layout, room: Room, bent: tuple[str, ...] = ()) -> DataSpace:
    """A space of data whose scales are still to be filled in."""
    if make_layout(layout.shapes, layout.kind, layout.bare) != layout:
        raise ValueError("the description of its data contradicts itself.")
    if any(min(s, default=0) < 0 or math.prod(s) > LONGEST for s in layout.array_shapes):
        raise ValueError(f"it describes data of the impossible shapes {layout.array_shapes}.")
    arrays = {}
    for name in layout.names:
        if name != layout.mask_name:
            pooled = isinstance(layout.kind, Set) and layout.by_row(name)
            arrays[name] = on_device(room.zeros(layout.shapes[name][pooled:]))
    tails = {name: Tails(arrays[name], arrays[name]) for name in bent}
    return DataSpace(arrays, arrays, layout, tails)


@dataclasses.dataclass(frozen=True)
class _Density:
    """A description of the user's own, whose network is measured before it takes memory."""

    spec: ConditionalDensity
    room: Room

    def build(self, rng: np.random.Generator, /, *, dim: int, condition: int) -> Any:
        return self.room.measure(lambda: self.spec.build(rng, dim=dim, condition=condition))


@dataclasses.dataclass(frozen=True)
class _Summary:
    """A description of a summary network, likewise."""

    spec: Summary
    room: Room

    def build(self, rng: np.random.Generator, layout: Layout, dim: int, /) -> Any:
        return self.room.measure(lambda: self.spec.build(rng, layout, dim))


def measured(recipe: Recipe, room: Room) -> Recipe:
    """A recipe whose networks of the user's own are measured when they are built."""
    own: dict[str, Any] = {
        name: _Density(spec, room)
        for name in ("posterior", "likelihood", "prior")
        if (spec := getattr(recipe, name)) is not None and type(spec) not in LIBRARY
    }
    summary: Any = recipe.summary
    if not isinstance(summary, (eqx.Module, *LIBRARY)):
        own["summary"] = _Summary(summary, room)
    return dataclasses.replace(recipe, **own)
