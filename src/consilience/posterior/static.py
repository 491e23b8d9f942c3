"""What networks of the user's own hold beside arrays: noted in a file, compared when it is loaded.

A file holds arrays; everything else comes from `build`, which runs again at loading. What `build`
draws at random and does not keep in an array, such as a tuple with a permutation, is then another.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Set
from enum import Enum
from typing import Any

import equinox as eqx
import jax
import numpy as np

from consilience.identity.learned import Networks
from consilience.networks.density import Vectorized
from consilience.networks.recipe import Recipe
from consilience.posterior.descriptions import LIBRARY

LONGEST = 60
"""Longer texts are held as checksums."""

Notes = dict[str, dict[str, str]]
"""For each network of the user's own: where it holds something other than arrays, and what."""


def notes_of(recipe: Recipe, networks: Networks) -> Notes:
    """What the networks of the user's own hold beside arrays."""
    return {
        name: dict(notes(_own(getattr(networks, name))))
        for name in ("posterior", "likelihood", "prior", "summary")
        if (spec := getattr(recipe, name)) is not None and type(spec) not in LIBRARY
    }


def _own(network: Any) -> Any:
    return network.density if isinstance(network, Vectorized) else network


def differences(saved: Notes, built: Notes) -> list[str]:
    """What differs, in words; another version of a library may add fields or leave them out."""
    return [
        f"{name}{where} was {text} and is {built[name][where]}"
        for name, held in saved.items()
        for where, text in held.items()
        if built.get(name, {}).get(where, text) != text
    ]


def notes(tree: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Where a network holds something other than arrays, and what."""
    if eqx.is_array(tree) or _of_library(tree):
        return
    if isinstance(tree, eqx.Module):
        yield from _note(where, type(tree))
        for field in dataclasses.fields(tree):
            if field.metadata.get("static"):
                yield from _note(f"{where}.{field.name}", getattr(tree, field.name))
    elif not any(map(eqx.is_array, jax.tree.leaves(tree))):
        yield from _note(where, tree)
        return
    # The children of a node: the paths have the names that arrays have in files.
    below, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    for path, child in below:
        yield from notes(child, where + jax.tree_util.keystr(path))


def _of_library(value: Any) -> bool:
    """Whether its class is this library's, whose fields may change with versions."""
    return type(value).__module__.partition(".")[0] == __name__.partition(".")[0]


def _note(where: str, value: Any) -> Iterator[tuple[str, str]]:
    try:
        text = _text(value)
    except Exception:  # the `repr` of a class of the user's own may raise anything
        text = ""
    if len(text) > LONGEST:
        yield where, f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    elif text:
        yield where, text


def _text(value: Any) -> str:
    """The same in every process, on other machines and at 32 and 64 bits; else nothing."""
    if _of_library(value):
        return ""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None or isinstance(value, int | complex | str | bytes):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value).__name__ + _text(held)
    if isinstance(value, functools.partial):
        return f"partial{_text((value.func, value.args, value.keywords))}"
    return _text_of_several(value) or _name(value)


def _text_of_several(value: Any) -> str:
    if isinstance(value, Mapping):
        items = sorted((_text(key), _text(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    return f"({', '.join(map(_text, value))})" if isinstance(value, tuple | list) else ""


def _name(value: Any) -> str:
    """The name of a function or class, if it is public: other names change with versions."""
    if isinstance(value, np.dtype) or hasattr(value, "dtype"):
        return ""  # an array, or a type that depends on the number of bits
    name = getattr(value, "__name__", None)
    if isinstance(name, str):
        return name if name.isidentifier() and not name.startswith("_") else ""
    text = repr(value)
    return "" if "0x" in text else text
