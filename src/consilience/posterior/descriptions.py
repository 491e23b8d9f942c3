"""Descriptions of networks and data to and from JSON, and networks built from them alone.

What is read may be damaged: the types of all fields are checked, and networks that would take
more numbers than the file holds are refused before they are made.
"""

import dataclasses
import math
import types
import typing
from typing import Any

import equinox as eqx
import numpy as np

from consilience.core.compiling import on_device
from consilience.model import data
from consilience.model.data import DataSpace, Layout, Set, make_layout
from consilience.networks import flow, summary, transforms
from consilience.networks.recipe import Recipe

CUSTOM = "a module of the user's own"

_DESCRIPTIONS = {
    cls.__name__: cls
    for cls in (
        *(flow.Coupling, transforms.Spline, transforms.Affine, Recipe, Layout),
        *(data.Vector, data.Series, data.Set),
        *(summary.Identity, summary.Dense, summary.Convolutions),
        *(summary.DeepSet, summary.SetTransformer),
    )
}


def encode(value: Any) -> Any:
    """A description as JSON takes it."""
    if isinstance(value, eqx.Module):
        return CUSTOM
    if dataclasses.is_dataclass(value):
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    return [encode(item) for item in value] if isinstance(value, tuple) else value


def decode(value: Any, most: int | None = None) -> Any:
    """The description that `encode` wrote; no whole number in it may be larger than `most`."""
    if isinstance(value, list):
        return tuple(decode(item, most) for item in value)
    if most is not None and isinstance(value, int) and value > most:
        raise ValueError(f"it asks for {value}, but the file holds {most} numbers in all.")
    if not isinstance(value, dict):
        return value  # a number, a word, or a module of the user's own
    cls = _DESCRIPTIONS.get(str(value.get("type")))
    if cls is None:
        raise ValueError(f"the file describes a {value.get('type')!r}, unknown to this version.")
    fields = {name: decode(item, most) for name, item in value.items() if name != "type"}
    check_fields(cls, fields)
    return cls(**fields)


def check_fields(cls: type, fields: dict[str, Any]):
    """Refuse values that do not have the types of a dataclass's fields."""
    hints = typing.get_type_hints(cls)
    for name, value in fields.items():
        if name not in hints or not _is(value, hints[name]):
            shown = f"{value!r}"[:80]
            raise ValueError(f"the description of a {cls.__name__} is off: {name} is {shown}.")


def _is(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, part) for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is(item, parts[0]) for item in value)
    if origin is dict:
        key, held = parts
        return isinstance(value, dict) and all(
            _is(name, key) and _is(item, held) for name, item in value.items()
        )
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, hint)


class Room(np.random.Generator):
    """In place of random first weights: zeros, and no more numbers than there is room for."""

    def __init__(self, numbers: int):
        super().__init__(np.random.PCG64(0))
        self.left = numbers

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        # An empty matrix has a bias as long as its first axis.
        self.left -= math.prod(max(1, n) for n in shape)
        if self.left < 0:
            raise ValueError("the networks that it describes are larger than the file.")
        return np.zeros(shape)

    def standard_normal(self, size, *_: Any) -> np.ndarray:  # type: ignore[override]
        return self.zeros(size)

    def spawn(self, n_children: int) -> list[np.random.Generator]:
        return [self] * n_children


LONGEST = 2**40
"""The largest dataset that a layout may describe."""


def empty_space(layout: Layout, room: Room) -> DataSpace:
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
    return DataSpace(arrays, arrays, layout)
