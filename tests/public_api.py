"""The public names with their signatures, and the command line, as lines of text.

`python -m tests.public_api` writes them to `fixtures/public_api.txt`, which a test compares with
the library. Annotations are left out: Python's versions show them differently.
"""

import argparse
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import consilience as cs
from consilience import metrics, plots, tasks
from consilience.cli.main import _parser

FILE = Path(__file__).parent / "fixtures" / "public_api.txt"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
PACKAGE = cs.__name__


def lines() -> list[str]:
    """Everything that users may rely on, one line each."""
    return [*_names(), *_modules(), *_commands()]


def differences(held: list[str], found: list[str]) -> list[str]:
    """What one list has and the other has not, removed lines before added ones."""
    removed = [f"- {line}" for line in held if line not in set(found)]
    return removed + [f"+ {line}" for line in found if line not in set(held)]


def _names() -> Iterator[str]:
    for name in cs.__all__:
        yield from _described(f"cs.{name}", getattr(cs, name))


def _modules() -> Iterator[str]:
    names = [found.name for found in pkgutil.iter_modules(tasks.__path__, f"{tasks.__name__}.")]
    for module in (metrics, plots, *map(importlib.import_module, names)):
        short = module.__name__.removeprefix(f"{PACKAGE}.")
        for name, found in _own(module):
            yield from _described(f"cs.{short}.{name}", found)


def _own(module: ModuleType) -> list[tuple[str, Any]]:
    """The public functions and classes that a module defines, by name."""
    return sorted(
        (name, found)
        for name, found in vars(module).items()
        if name[0] != "_"
        and getattr(found, "__module__", "") == module.__name__
        and callable(found)
    )


def _described(name: str, found: Any) -> Iterator[str]:
    if not inspect.isclass(found):
        yield f"{name}{_signature(found)}"
        return
    # Nobody makes a protocol, and Python's versions give it different constructors.
    made_here = not getattr(found, "_is_protocol", False) and (
        _is_ours(found, "__init__") or _is_ours(found, "__new__")
    )
    yield f"class {name}{_signature(found) if made_here else ''}"
    for member in sorted(dir(found)):
        if (member[0] != "_" or member == "__call__") and _is_ours(found, member):
            yield from _member(f"{name}.{member}", found, member)


def _is_ours(cls: type, member: str) -> bool:
    """Whether a class of this package defines a member, and not one that it inherits from."""
    owner = next((base for base in cls.__mro__ if member in vars(base)), object)
    return owner.__module__.startswith(PACKAGE)


def _member(name: str, cls: type, member: str) -> Iterator[str]:
    held = inspect.getattr_static(cls, member)
    if isinstance(held, property | functools.cached_property):
        yield f"{name} (property)"
    elif inspect.isroutine(found := getattr(cls, member)):
        kind = {classmethod: "classmethod ", staticmethod: "staticmethod "}.get(type(held), "")
        yield f"{kind}{name}{_signature(found)}"


def _signature(function: Any) -> str:
    """The parameters: their names, kinds and defaults."""
    bare = inspect.Signature(
        [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    )
    return ADDRESS.sub("", str(bare))


def _commands() -> Iterator[str]:
    (commands,) = [
        action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction):
                continue
            words = " ".join(action.option_strings) or action.dest
            shown = {
                "nargs": action.nargs,
                "default": action.default,
                "choices": None if action.choices is None else list(action.choices),
                "required": action.required,
            }
            told = ", ".join(f"{what}={value!r}" for what, value in shown.items())
            yield f"consilience {name} {words}: {told}"


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n")
