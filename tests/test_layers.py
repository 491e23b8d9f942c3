"""The order of the package's folders: a module imports only from its own folder and those above."""

import ast
import functools
import graphlib
from pathlib import Path
from typing import NamedTuple

import pytest

import consilience

PACKAGE = Path(consilience.__file__).parent

ORDER = (
    *("core", "model", "simulation", "networks", "identity", "posterior", "training", "plots"),
    *("diagnostics", "report", "metrics", "tasks", "experiments", "cli"),
)
"""Folders, and the modules beside them, from the top of the package to its end."""

UPWARD = {
    ("posterior/fit.py", "consilience.diagnostics.check"): "Fit.check",
    ("posterior/fit.py", "consilience.report.report"): "Fit.report",
}
"""Imports against the order: methods of a fit, which import what they need when called."""


class Import(NamedTuple):
    file: str
    module: str
    line: int
    lazy: bool
    """Whether it runs, or is read by a type checker, when the module is imported or later."""

    @property
    def folders(self) -> tuple[str, str]:
        """The folder of the file, and the last one that it imports from."""
        words = self.module.split(".")
        # The package itself gives any public name, so it counts as an import of everything.
        return _folder(self.file), words[1] if len(words) > 1 else ORDER[-1]

    @property
    def relative(self) -> bool:
        return self.module.startswith(".")


def _folder(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


@functools.cache
def imports_of(source: str, file: str, modules: frozenset[str]) -> list[Import]:
    """The imports of this package in a module, `if TYPE_CHECKING` and functions included."""
    tree = ast.parse(source)
    later = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    return [
        Import(file, name, node.lineno, node in later)
        for node in ast.walk(tree)
        for name in _imported(node, modules)
        if name.split(".")[0] in ("", consilience.__name__)
    ]


def _imported(node: ast.AST, modules: frozenset[str]) -> list[str]:
    """The modules that a statement or a call imports; relative ones begin with a dot."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level:
        return ["." * node.level + (node.module or "")]
    if isinstance(node, ast.ImportFrom):
        # `from consilience.model import data` names a module, or something in one.
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        return list(dict.fromkeys(name if name in modules else str(node.module) for name in full))
    if isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
        given = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")]
        # The literal start of an f-string counts: `f"consilience.{name}"` imports anything.
        texts = [(one.values if isinstance(one, ast.JoinedStr) else [one])[0] for one in given]
        literals = [text.value for text in texts if isinstance(text, ast.Constant)]
        return [text.rstrip(".") for text in literals if isinstance(text, str)]
    return []


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _sources() -> dict[str, str]:
    files = sorted(PACKAGE.rglob("*.py"))
    return {
        file.relative_to(PACKAGE).as_posix(): file.read_text()
        for file in files
        if file != PACKAGE / "__init__.py"
    }


def _dotted(file: str) -> str:
    return "consilience." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _all_imports(sources: dict[str, str]) -> list[Import]:
    modules = frozenset(_dotted(file) for file in sources)
    return [one for file, text in sources.items() for one in imports_of(text, file, modules)]


def against_order(imports: list[Import]) -> list[Import]:
    """Relative imports, and those from a folder further down that `UPWARD` does not name."""
    rank = {folder: i for i, folder in enumerate(ORDER)}
    return [
        one
        for one in imports
        if one.relative
        or (rank[one.folders[1]] > rank[one.folders[0]] and (one.file, one.module) not in UPWARD)
    ]


def test_folders_import_only_from_folders_above_them():
    found = against_order(_all_imports(_sources()))
    assert not found, "\n".join(f"{one.file}:{one.line} imports {one.module}" for one in found)


def test_every_folder_has_its_place_in_the_order():
    assert {_folder(file) for file in _sources()} == set(ORDER)


def test_exceptions_are_still_needed_and_run_only_when_called():
    upward = {(one.file, one.module): one for one in _all_imports(_sources())}
    for exception in UPWARD:
        assert upward[exception].lazy


def test_modules_have_no_import_cycles():
    graph: dict[str, set[str]] = {}
    for one in _all_imports(_sources()):
        if not one.lazy:
            graph.setdefault(_dotted(one.file), set()).add(one.module)
    # Raises CycleError, which names the cycle.
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) > 50


def with_line(line: str) -> list[Import]:
    sources = _sources()
    sources["core/types.py"] += f"\n{line}\n"
    return against_order(_all_imports(sources))


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("from consilience.cli.main import main", "consilience.cli.main"),
        ("import consilience.training.train", "consilience.training.train"),
        ("import consilience.training.train as t", "consilience.training.train"),
        ("def late():\n    from consilience.posterior.fit import Fit", "consilience.posterior.fit"),
        ("if TYPE_CHECKING:\n    from consilience import plots", "consilience.plots"),
        ("from ..training import train", "..training"),
        ("from .arrays import finite_rows", ".arrays"),
        ("from . import arrays", "."),
        ("import consilience as cs", "consilience"),
        ("def late():\n    import consilience as cs", "consilience"),
        ("from consilience import fit", "consilience"),
        ("from consilience import Fit, fit", "consilience"),
        ("from consilience import *", "consilience"),
        ('importlib.import_module("consilience.training.train")', "consilience.training.train"),
        ('import_module(name="consilience.cli")', "consilience.cli"),
        ('import_module(f"consilience.{name}")', "consilience"),
        ('import_module(".train", "consilience.training")', ".train"),
        ('__import__("consilience.cli.main")', "consilience.cli.main"),
    ],
)
def test_an_upward_import_is_found(line, module):
    (found,) = with_line(line)
    assert (found.file, found.module) == ("core/types.py", module)
    assert found.relative or found.folders[1] != "core"


@pytest.mark.parametrize(
    "line",
    [
        "from consilience.core import arrays",
        "import consilience_of_another",
        'importlib.import_module("jax.experimental")',
        'importlib.import_module(f"{name}.train")',
        'NAME = "consilience.training.train"',
        'def f():\n    """Doctests are no code.\n\n    >>> import consilience as cs\n    """',
    ],
)
def test_what_imports_nothing_from_below_is_left_alone(line):
    assert not with_line(line)


def test_init_files_of_folders_hold_one_paragraph_and_no_code():
    for file, text in _sources().items():
        if file.endswith("__init__.py"):
            (only,) = ast.parse(text).body
            assert isinstance(only, ast.Expr) and len(ast.get_docstring(ast.parse(text))) > 60
