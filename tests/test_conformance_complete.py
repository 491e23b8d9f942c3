"""Every built-in part of a kind is in the dictionary through which the laws of its kind run."""

import importlib
import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple

import pytest

import consilience as cs
from consilience.identity.criteria import trained
from consilience.model.external import MEMBERS
from consilience.simulation.workers import Workers
from tests import test_conformance as densities
from tests import test_conformance_loss as loss
from tests import test_conformance_simulation as simulation


class Kind(NamedTuple):
    """Where the built-in parts of a kind are, what each of them has, and which are tested."""

    modules: tuple[str, ...]
    members: tuple[str, ...]
    tested: list[object]


def _made(makers: Iterable) -> list[object]:
    return [make() for make in makers]


def _executors() -> list[object]:
    contexts = _made(simulation.EXECUTORS.values())
    given = [getattr(context, "enter_result", context) for context in contexts]
    return [Workers.__new__(Workers) if one is None else one for one in given]


CRITERIA = list(loss.CRITERIA.values())
KINDS = {
    "transform": Kind(
        ("networks.transforms", "networks.spline"),
        ("n_raw", "__call__"),
        list(densities.TRANSFORMS.values()),
    ),
    "density": Kind(
        ("networks.flow", "networks.density"), ("build",), list(densities.DENSITIES.values())
    ),
    "summary": Kind(("networks.summary",), ("build",), list(densities.SUMMARIES.values())),
    "proposal": Kind(("identity.proposals",), ("__call__",), list(loss.PROPOSALS.values())),
    "criterion": Kind(
        ("identity.criteria",),
        ("__call__",),
        # A criterion with parameters is called through the module that it builds.
        CRITERIA + [trained(part, loss.K) for part in CRITERIA],
    ),
    "augmentation": Kind(
        ("identity.augmentation",), ("__call__",), list(loss.AUGMENTATIONS.values())
    ),
    "schedule": Kind(("identity.schedules",), ("__call__",), list(loss.SCHEDULES.values())),
    "term": Kind(("identity.terms",), ("name", "__call__"), list(loss.TERMS.values())),
    "simulator": Kind(
        ("model.external", "model.command"), MEMBERS, _made(simulation.SIMULATORS.values())
    ),
    "executor": Kind(("simulation.workers",), ("submit",), _executors()),
}


def built_in(module: ModuleType, members: Iterable[str]) -> set[type]:
    """The public classes that a module defines and whose objects have these members."""
    classes = [found for found in vars(module).values() if inspect.isclass(found)]
    return {
        cls
        for cls in classes
        if cls.__module__ == module.__name__
        and cls.__name__[0] != "_"
        and not getattr(cls, "_is_protocol", False)
        and set(members) <= _members(cls)
    }


def _members(cls: type) -> set[str]:
    """What objects of a class have; every class can be called itself."""
    bases = [base for base in cls.__mro__ if base is not object]
    return {
        name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))
    }


def untested(kind: Kind) -> set[str]:
    modules = [importlib.import_module(f"consilience.{name}") for name in kind.modules]
    found = set().union(*(built_in(module, kind.members) for module in modules))
    return {cls.__name__ for cls in found - {type(part) for part in kind.tested}}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_built_in_part_is_tested(kind):
    assert untested(kind) == set()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_part_that_is_in_no_dictionary_is_found(kind, monkeypatch):
    assert untested(kind._replace(tested=[]))
    module = importlib.import_module(f"consilience.{kind.modules[0]}")
    namespace = {"__module__": module.__name__} | dict.fromkeys(kind.members, lambda self: None)
    monkeypatch.setattr(module, "Another", type("Another", (), namespace), raising=False)
    assert untested(kind) == {"Another"}


def test_every_public_class_that_is_called_or_builds_is_of_a_kind():
    """So that a part in a module of its own is not left out."""
    classes = {cls for cls in (getattr(cs, name) for name in cs.__all__) if inspect.isclass(cls)}
    tested = {type(part) for kind in KINDS.values() for part in kind.tested}
    parts = {cls for cls in classes if not getattr(cls, "_is_protocol", False)}
    parts = {cls for cls in parts if _members(cls) & {"__call__", "build", "submit", "run"}}
    assert len(parts) > 15
    # The wrapper of a log-likelihood is called, but is the only one of its kind.
    assert parts - tested == {cs.OnHost}
