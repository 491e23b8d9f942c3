"""Parts of a fit that users wrote themselves: how a file names them, and where loading finds them.

A file names the class of such a part and holds the fields of a description. It never holds
code: loading takes the class, or an instance, from what the user passed to `cs.load`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import numpy as np

PLAIN = (type(None), bool, int, float, str, np.generic)
"""Values that JSON holds."""


class MissingPartError(LookupError):
    """A file names a part of the user's own that was not passed."""


def has_plain_fields(value: Any) -> bool:
    """Whether a description can be made again from fields that JSON holds."""
    if not dataclasses.is_dataclass(value) or isinstance(value, eqx.Module):
        return False
    fields = dataclasses.fields(value)
    return all(f.init and _is_plain(getattr(value, f.name)) for f in fields)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or has_plain_fields(value)


class Parts:
    """What the user passed to `cs.load`: classes, and instances by their class.

    An instance brings its class along, and so do the descriptions in its fields.
    """

    def __init__(self, parts: Sequence[Any], library: Sequence[type]):
        self._library = library
        self._classes: dict[tuple[str, str], type] = {}
        self._instances: dict[type, list[Any]] = {}
        if not isinstance(parts, Sequence) or isinstance(parts, str):
            raise TypeError(f"parts is a list of classes and instances, got {parts!r}.")
        for part in parts:
            self._add(part)

    def _add(self, part: Any):
        if isinstance(part, (*PLAIN, tuple)):
            for item in part if isinstance(part, tuple) else ():
                self._add(item)
            return
        cls = part if isinstance(part, type) else type(part)
        if cls not in self._library:
            if self._classes.setdefault((cls.__name__, cls.__module__), cls) is not cls:
                raise ValueError(
                    f"parts holds two different classes called {cls.__name__} of {cls.__module__}."
                )
            if part is not cls:
                self._instances.setdefault(cls, []).append(part)
        if part is not cls and dataclasses.is_dataclass(part) and not isinstance(part, eqx.Module):
            for field in dataclasses.fields(part):
                self._add(getattr(part, field.name))

    def find(self, name: str, module: str = "") -> type | None:
        """The class of this name and module, or the only one of this name, if it was passed."""
        named = {where: cls for (other, where), cls in self._classes.items() if other == name}
        if len(named) > 1 and module not in named:
            raise MissingPartError(
                f"was made with a part of your own, {name}{f' (of {module})' * bool(module)}, but "
                f"parts holds classes of this name of {', '.join(sorted(named))}: pass one of them."
            )
        return named.get(module) or next(iter(named.values()), None)

    def described(self, name: str, module: str) -> type:
        """The class of a description."""
        cls = self.find(name, module)
        if cls is None:
            raise MissingPartError(
                f"was made with a part of your own, {name} (of {module}): pass the class, "
                f"cs.load(path, model, parts=[{name}])."
            )
        if not dataclasses.is_dataclass(cls):
            raise ValueError(f"it describes a {name}, which is not a dataclass.")
        return cls

    def instance(self, name: str, module: str) -> Any:
        """The next instance of a class that a file cannot describe; the last serves for all."""
        cls = self.find(name, module)
        held = [] if cls is None else self._instances.get(cls, [])
        if not held:
            raise MissingPartError(
                f"was made with a part of your own, {name} (of {module}): pass an instance of it, "
                f"cs.load(path, model, parts=[{name}(...)])."
            )
        return held.pop(0) if len(held) > 1 else held[0]

    def drop(self, cls: type, is_it: Callable[[Any], bool]):
        """Leave out an instance that a file describes: it stands for no other one."""
        held = self._instances.get(cls, [])
        found = next((i for i, part in enumerate(held) if is_it(part)), None)
        if found is not None:
            del held[found]

    def module(self) -> eqx.Module:
        """The module that stands for a summary network, in a file that does not name its class."""
        for held in self._instances.values():
            for part in held:
                if isinstance(part, eqx.Module):
                    return part
        raise MissingPartError(
            "was made with a summary network of your own: pass an instance of it, "
            "cs.load(path, model, parts=[...])."
        )
